"""memopt.compress.prune_(), with masks made permanent: the library's values, zero bytes saved, all or nothing."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from fractions import Fraction

import pytest
import torch
from compress_state import FailsAt, Residual, differences, kept, perceptron
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import memopt
from memopt.compress import prune_


def by_library(model: nn.Module, amount: float) -> nn.Module:
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            prune.l1_unstructured(module, "weight", amount)
            prune.remove(module, "weight")
    return other


def equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return sorted(first) == sorted(second) and all(torch.equal(first[name], second[name]) for name in first)


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.integers(1, 24), min_size=2, max_size=4),
    amount=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_values_are_the_librarys_for_any_small_model(widths, amount, seed):
    torch.manual_seed(seed)
    model = perceptron(*widths)
    expected = by_library(model, amount)
    report = prune_(model, amount, "l1_unstructured")
    assert equal(model, expected)
    assert report.saved_bytes == 0 and report.saved_on_disk_bytes == 0


def test_convolutions_attention_and_channels_last_too():
    model = Residual().to(memory_format=torch.channels_last)
    expected = by_library(copy.deepcopy(model).to(memory_format=torch.contiguous_format), 0.3)
    prune_(model, 0.3, "l1_unstructured")
    assert equal(model, expected)
    assert model.first.weight.is_contiguous(memory_format=torch.channels_last)
    attention = nn.MultiheadAttention(8, 2)
    report = prune_(attention, 0.5, "l1_unstructured")
    assert sorted(report.changed) == ["in_proj_weight", "out_proj.weight"]
    assert int((attention.in_proj_weight == 0).sum()) == attention.in_proj_weight.numel() // 2


def test_it_is_in_place_and_says_that_nothing_is_saved():
    model = perceptron(16, 32, 4)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = [(p, p.data_ptr(), p.grad) for p in model.parameters()]
    report = prune_(model, 0.5, "l1_unstructured", evaluate=lambda m: float((m[0].weight == 0).sum()))
    assert all(
        p is q and p.data_ptr() == address and p.grad is grad
        for (p, address, grad), q in zip(before, model.parameters(), strict=True)
    )
    assert not prune.is_pruned(model) and all("mask" not in name for name in model.state_dict())
    assert (
        report.saved_bytes,
        report.saved_on_disk_bytes,
        report.accuracy_before,
        report.accuracy_after,
    ) == (
        0,
        0,
        0,
        256,
    )
    assert report.accuracy_change == 256 and "saved 0 B" in str(report) and "zeros take" in str(report)
    assert "<pre>" in report._repr_html_()


def test_two_of_each_four_are_the_smallest_as_torch_ao_finds_them():
    from torch.ao.pruning import WeightNormSparsifier

    torch.manual_seed(0)
    model = perceptron(32, 64, 8, bias=False)
    expected = copy.deepcopy(model)
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(expected, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    report = prune_(model, method="2:4")
    assert torch.equal(model[0].weight, expected[0].weight) and torch.equal(
        model[2].weight, expected[2].weight
    )
    assert bool(((model[0].weight.reshape(-1, 4) != 0).sum(1) == 2).all())
    assert report.saved_bytes == 0


def test_rows_that_are_no_multiple_of_four_are_named():
    model = perceptron(8, 6, 4)
    report = prune_(model, method="2:4")
    assert list(report.changed) == ["0.weight"] and "not a multiple of four" in report.skipped["2.weight"]
    model = perceptron(6, 6)
    before = kept(model)
    with pytest.raises(ValueError, match="not a multiple of four"):
        prune_(model, method="2:4")
    assert not differences(before, model)


def test_bytes_are_storages_and_not_elements():
    """Two weights lie in one large storage, of which they show a part."""
    flat = torch.randn(1000)
    model = perceptron(8, 8, 8, bias=False)
    model[0].weight = nn.Parameter(flat[:64].view(8, 8))
    model[2].weight = nn.Parameter(flat[64:128].view(8, 8))
    by_elements = sum(p.numel() * p.element_size() for p in model.parameters())
    report = prune_(model, 0.5, "l1_unstructured")
    assert (
        report.before.memory_bytes
        == report.after.memory_bytes
        == flat.untyped_storage().nbytes()
        == 4000
        != by_elements
    )
    assert model[0].weight.data_ptr() == flat.data_ptr() and int((flat[:128] == 0).sum()) == 64


def test_tied_weights_are_pruned_once_and_counted_once():
    model = perceptron(8, 8, 8, bias=False)
    model[2].weight = model[0].weight
    report = prune_(model, 0.25, "l1_unstructured")
    assert report.changed == ("0.weight",) and report.before.memory_bytes == 256
    assert int((model[2].weight == 0).sum()) == 16


def test_disk_is_the_length_of_the_file():
    model = Residual()
    report = prune_(model, 0.5, "l1_unstructured")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert report.after.disk_bytes == len(file.getvalue())


def test_it_is_saved_pickled_copied_and_loaded():
    model = perceptron(16, 8, 4)
    prune_(model, 0.5, "l1_unstructured")
    fresh = perceptron(16, 8, 4)
    fresh.load_state_dict(model.state_dict())
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), fresh):
        assert equal(model, other)


def test_a_model_that_cannot_be_saved_is_pruned_and_said_so():
    class Unsaved(nn.Linear):
        def get_extra_state(self) -> object:
            return lambda: None

    model = Unsaved(8, 4)
    report = prune_(model, 0.5, "l1_unstructured")
    assert (
        report.before.disk_bytes is None and report.saved_on_disk_bytes is None and "on disk" in str(report)
    )


# ---- all or nothing


@pytest.mark.parametrize("method", ["l1_unstructured", "2:4"])
def test_a_library_that_fails_at_the_nth_layer_leaves_all_as_it_was(method, monkeypatch):
    from memopt.compress._pruning import TwoOfFour

    kind = TwoOfFour if method == "2:4" else prune.L1Unstructured
    for nth in range(10):
        model = perceptron(8, 8, 8, 8)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = kept(model)
        with monkeypatch.context() as patched:
            failing = FailsAt(kind.compute_mask, nth)
            patched.setattr(kind, "compute_mask", failing)
            try:
                prune_(model, 0.5, method)
            except RuntimeError as error:
                assert "the library failed" in str(error)
                assert not differences(before, model)
            else:
                assert nth == failing.calls == 3 and differences(before, model)
                return
    raise AssertionError("it never succeeded")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_evaluation_that_fails_afterwards_brings_the_values_back(error):
    model = perceptron(8, 8, 8)
    model[2].weight = nn.Parameter(model[0].weight.detach()[:8])  # two that overlap are brought back in order
    before = kept(model)
    calls = []

    def evaluate(m: nn.Module) -> float:
        calls.append(m.training)
        if len(calls) == 2:
            raise error("stop")
        return 0.0

    with pytest.raises(error, match="stop"):
        prune_(model, 0.7, "l1_unstructured", evaluate=evaluate)
    assert calls == [False, False] and not differences(before, model)


@pytest.mark.parametrize("value", [None, "good", [1, 2]])
def test_an_evaluation_that_returns_no_number_is_refused(value):
    model = perceptron(8, 8)
    before = kept(model)
    with pytest.raises(TypeError, match="not a number"):
        prune_(model, 0.5, "l1_unstructured", evaluate=lambda m: value)
    assert not differences(before, model)


# ---- bad input


@pytest.mark.parametrize("amount", [-0.1, 1.0001, math.nan, math.inf, -math.inf, 7.0])
def test_an_amount_outside_of_0_to_1_is_a_value_error(amount):
    with pytest.raises(ValueError, match="amount"):
        prune_(perceptron(4, 4), amount, "l1_unstructured")


@pytest.mark.parametrize("amount", [True, False, 0, 1, 5, "0.5", None, torch.tensor(0.5), 0.5j])
def test_an_amount_of_another_type_is_a_type_error(amount):
    with pytest.raises(TypeError, match="amount"):
        prune_(perceptron(4, 4), amount, "l1_unstructured")


@pytest.mark.parametrize(
    "amount",
    [50, 50.0, 2, 100, 0, 1, 7, 1.5, -3, 101, 10**400, Fraction(10**400)],
    ids=lambda value: f"{value!r:.9}",
)
def test_the_share_that_a_refusal_proposes_is_taken(amount):
    with pytest.raises((TypeError, ValueError), match="amount=") as raised:
        prune_(perceptron(4, 4), amount, "l1_unstructured")
    proposed = re.findall(r"\(amount=(.*)\)", str(raised.value))
    assert len(proposed) == (amount in (50, 2, 100, 0, 1, 7))
    for share in map(float, proposed):
        assert share == (amount if amount <= 1 else amount / 100)
        prune_(perceptron(4, 4), share, "l1_unstructured")


def masked() -> nn.Module:
    model = perceptron(8, 8, 8)
    prune.l1_unstructured(model[2], "weight", 0.5)
    return model


def parametrized() -> nn.Module:
    model = perceptron(8, 8, 8)
    parametrizations.spectral_norm(model[2])
    return model


def weight_normed() -> nn.Module:
    model = perceptron(8, 8, 8)
    nn.utils.weight_norm(model[2])
    return model


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(perceptron(8, 8, 8), {nn.Linear}, dtype=torch.qint8)


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return perceptron(8, 8, 8)


REFUSED = {
    "masked": (masked, "prune.remove"),
    "parametrized": (parametrized, "remove_parametrizations"),
    "weight_normed": (weight_normed, "remove_weight_norm"),
    "quantised": (quantised, "already quantised"),
    "on meta": (lambda: perceptron(8, 8, 8).to("meta"), "meta"),
    "one layer on meta": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta")), "meta"),
    "lazy": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8)), "no shape yet"),
    "inference": (in_inference_mode, "inference mode"),
    "no layers": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), "has no layer"),
    "script": (lambda: torch.jit.script(perceptron(8, 8)), "TorchScript"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", ["l1_unstructured", "2:4"])
def test_models_that_cannot_be_pruned_are_refused_and_unchanged(case, method):
    make, words = REFUSED[case]
    model = make()
    before = kept(model) if case not in ("quantised", "lazy", "script") else None
    with pytest.raises(ValueError, match=words):
        prune_(model, 0.5, method)
    if before:
        assert not differences(before, model)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("1.weight", "no module '1.weight'"),
        (["0", "third"], "no module 'third'"),
        (nn.Linear(4, 4), "not a module of the model"),
        ("1", "not a layer"),
        ([], "selects no layer"),
        (lambda name, module: False, "selects no layer"),
    ],
)
def test_unknown_layers_and_empty_choices_are_named(layers, words):
    model = perceptron(8, 8, 8)
    before = kept(model)
    with pytest.raises(ValueError, match=words):
        prune_(model, 0.5, "l1_unstructured", layers=layers)
    assert not differences(before, model)


@pytest.mark.parametrize("layers", [3, [3], [None]])
def test_layers_of_another_type_are_a_type_error(layers):
    with pytest.raises(TypeError, match="layers"):
        prune_(perceptron(8, 8), 0.5, "l1_unstructured", layers=layers)


def test_a_near_name_is_suggested():
    with pytest.raises(ValueError, match="is it 'second'"):
        prune_(Residual(), 0.5, "l1_unstructured", layers="secnd")


@pytest.mark.parametrize("layers", ["2", ["2"], lambda name, module: name == "2"])
def test_layers_are_names_modules_or_a_function(layers):
    model = perceptron(8, 8, 8)
    assert prune_(model, 0.5, "l1_unstructured", layers=layers).changed == ("2.weight",)
    assert int((model[0].weight == 0).sum()) == 0
    assert prune_(model, 0.5, "l1_unstructured", layers=model[0]).changed == ("0.weight",)
    assert prune_(Residual(), 0.5, "l1_unstructured", layers=["head", "third"]).changed == (
        "third.weight",
        "head.weight",
    )


def test_what_does_not_belong_together_is_refused():
    model = perceptron(8, 8)
    with pytest.raises(ValueError, match=r"method='l2'"):
        prune_(model, 0.5, "l2")
    with pytest.raises(ValueError, match=r"2:4 prunes two of each four"):
        prune_(model, 0.25, "2:4")
    with pytest.raises(ValueError, match="sample= is for"):
        prune_(model, 0.5, "l1_unstructured", sample=torch.ones(1, 8))
    with pytest.raises(ValueError, match="give it a sample"):
        prune_(model, 0.5, "structured")
    with pytest.raises(ValueError, match="at least one channel"):
        prune_(model, 1.0, "structured", sample=torch.ones(1, 8))
    with pytest.raises(TypeError, match="evaluate"):
        prune_(model, 0.5, "l1_unstructured", evaluate=3)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        prune_(torch.ones(3), 0.5, "l1_unstructured")


def test_without_torch_pruning_it_says_how_to_get_it():
    pytest.importorskip("torch")
    try:
        import torch_pruning  # noqa: F401
    except ImportError:
        model = perceptron(8, 8, 8)
        before = kept(model)
        with pytest.raises(ImportError, match=r"pip install 'memopt\[compress\]'"):
            prune_(model, 0.5, "structured", sample=torch.ones(1, 8))
        assert not differences(before, model)


# ---- beside memopt's own wrappers


def test_offloaded_and_checkpointed_models_are_pruned_where_they_are(tmp_path):
    torch.manual_seed(0)
    model = perceptron(16, 16, 16, 16)
    expected = by_library(model, 0.5)
    handle = memopt.offload_layers(model, to=str(tmp_path))
    prune_(model, 0.5, "l1_unstructured")
    x = torch.randn(4, 16)
    assert torch.equal(model(x), expected(x))
    handle.remove()
    assert equal(model, expected)

    model = perceptron(64, 64, 64, 64, 64)
    expected = by_library(model, 0.5)
    memopt.auto_checkpoint(model, torch.randn(256, 64), memory_budget="1GiB")
    prune_(model, 0.5, "l1_unstructured")
    x = torch.randn(256, 64, requires_grad=True)
    assert torch.equal(model(x), expected(x))


def test_a_call_without_a_method_is_the_earlier_default_and_says_so():
    model, other = (perceptron(4, 4) for _ in range(2))
    other.load_state_dict(model.state_dict())
    prune_(other, 0.5, "l1_unstructured")
    with pytest.warns(DeprecationWarning, match="name 'structured', which saves memory"):
        prune_(model, 0.5)
    assert all(
        torch.equal(mine, others) for mine, others in zip(model.parameters(), other.parameters(), strict=True)
    )
