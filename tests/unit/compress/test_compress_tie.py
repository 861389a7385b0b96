"""memopt.compress.tie_() and duplicates(): one memory instead of two, and what is found of either."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from compress_state import differences, kept, perceptron
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memopt
from memopt.compress import duplicates, tie_


class Language(nn.Module):
    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def test_a_head_becomes_the_embedding_and_its_memory_goes():
    model = Language()
    bias = model.layers[0].bias
    expected = copy.deepcopy(model)
    expected.head.weight = expected.embed.weight  # the plain way
    report = tie_(model, [("embed.weight", "head.weight")])
    assert model.head.weight is model.embed.weight and model.layers[0].bias is bias
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(x), expected(x))
    assert report.saved_bytes == 50 * 32 * 4 and report.changed == ("head.weight",)
    assert report.saved_on_disk_bytes > 0 and "other values" in str(report)
    assert duplicates(model).tied == (("embed.weight", "head.weight"),)
    model(x).sum().backward()
    assert len(list(model.parameters())) == 7


def test_bytes_are_storages_and_not_elements():
    """The head's storage is larger than the head, and something else stays in it."""
    model = Language()
    storage = torch.randn(10_000)
    model.head.weight = nn.Parameter(storage[:1600].view(50, 32))
    report = tie_(model, [("embed.weight", "head.weight")])
    assert report.saved_bytes == 40_000
    model = Language()
    model.head.weight = nn.Parameter(storage[:1600].view(50, 32))
    model.register_buffer("rest", storage[5000:])
    assert tie_(model, [("embed.weight", "head.weight")]).saved_bytes == 0


def test_whole_layers_are_tied_parameter_by_parameter():
    model = Language()
    report = tie_(model, [("layers.0", "layers.1"), ("layers.0", "layers.2")])
    assert all(model.layers[i].weight is model.layers[0].weight for i in (1, 2))
    assert all(model.layers[i].bias is model.layers[0].bias for i in (1, 2))
    assert report.saved_bytes == 2 * (32 * 32 + 32) * 4


def test_a_parameter_with_several_names_is_replaced_under_all_of_them():
    model = Language()
    model.layers[1].weight = model.layers[2].weight
    tie_(model, [("layers.0.weight", "layers.2.weight")])
    assert model.layers[1].weight is model.layers[2].weight is model.layers[0].weight


def test_what_an_rnn_holds_beside_its_parameters_is_tied_too():
    model = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
    gone = weakref.ref(model[1].weight_ih_l0)
    tie_(model, [("0", "1")])
    gc.collect()
    assert gone() is None
    assert model[1]._flat_weights[0] is model[0].weight_ih_l0


def test_without_pairs_what_is_trained_and_what_is_frozen_is_tied_apart():
    model = Language()
    for layer in model.layers:
        layer.load_state_dict(model.layers[0].state_dict())
    model.layers[0].requires_grad_(False)
    assert tie_(model).changed == ("layers.2.weight",)
    assert model.layers[2].weight is model.layers[1].weight is not model.layers[0].weight
    assert [layer.weight.requires_grad for layer in model.layers] == [False, True, True]


def test_without_pairs_what_is_equal_is_tied():
    model = Language()
    model.layers[2].load_state_dict(model.layers[0].state_dict())
    found = duplicates(model)
    assert found.equal == (("layers.0.weight", "layers.2.weight"), ("layers.0.bias", "layers.2.bias"))
    assert found.could_save_bytes == (32 * 32 + 32) * 4
    report = tie_(model)
    assert report.saved_bytes == 32 * 32 * 4 and "other values" not in str(report)
    with pytest.raises(ValueError, match=r"no two matrices .* left out: layers.0.bias, layers.2.bias \(2\)"):
        tie_(model)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.02, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_pairs_fresh_norms_biases_and_constants_train_on_apart(value, dtype):
    model = Language()
    model.layers.extend([nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)])
    for layer in model.layers[5:]:
        nn.init.zeros_(layer.bias)
        nn.init.constant_(layer.weight, value)
    model.embed.load_state_dict(model.head.state_dict())
    report = tie_(model.to(dtype))
    assert report.changed == ("head.weight",) and model.head.weight is model.embed.weight
    left = {f"layers.{n}.{name}" for n in (3, 4, 5, 6) for name in ("weight", "bias")}
    assert set(report.skipped) == left
    parameters = [model.get_parameter(name) for name in left]
    assert len({id(parameter) for parameter in parameters}) == len(left)
    assert (
        "layers.5.weight, layers.6.weight (2) unchanged: it equals another, but all its values are the same"
        in str(report)
    )
    tie_(model, [("layers.3.weight", "layers.4.weight")])
    assert model.layers[4].weight is model.layers[3].weight


def test_it_is_saved_pickled_copied_and_loaded():
    model, fresh = Language(), Language()
    tie_(model, [("embed.weight", "head.weight")])
    tie_(fresh, [("embed.weight", "head.weight")])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    x = torch.tensor([[1, 2]])
    for other in (fresh, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert other.head.weight is other.embed.weight and torch.equal(other(x), model(x))


# ---- duplicates


def test_what_shares_a_storage_and_what_is_equal_are_told_apart():
    model = Language()
    model.register_buffer("view", model.layers[0].weight.detach()[:4])
    model.register_buffer("copy", model.layers[0].weight.detach().clone())
    model.layers[1].bias = model.layers[0].bias
    found = duplicates(model)
    assert ("layers.0.weight", "view") in found.tied
    assert ("layers.0.bias", "layers.1.bias") in found.tied
    assert found.equal == (("layers.0.weight", "copy"),) and found.could_save_bytes == 32 * 32 * 4
    assert "would save 4.00 KiB" in str(found)


def test_equality_is_of_bytes():
    model = nn.Module()
    nan = torch.tensor([float("nan"), 1.0])
    model.register_buffer("nan", nan)
    model.register_buffer("same_nan", nan.clone())
    model.register_buffer("zero", torch.tensor([0.0, 1.0]))
    model.register_buffer("negative_zero", torch.tensor([-0.0, 1.0]))
    model.register_buffer("as_int", nan.view(torch.int32).clone())
    model.register_buffer("as_column", nan.view(2, 1).clone())
    for kind in (torch.complex64, torch.complex128, torch.bool, torch.float64, torch.bfloat16):
        for name in ("first", "second"):
            model.register_buffer(f"{name}_{kind}".replace(".", "_"), torch.ones(3, dtype=kind))
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("empty_too", torch.empty(0))
    model.register_buffer("number", torch.tensor(3.0))
    model.register_buffer("number_too", torch.tensor(3.0))
    groups = set(duplicates(model).equal)
    assert ("nan", "same_nan") in groups and ("number", "number_too") in groups and len(groups) == 7


def test_non_contiguous_ones_are_compared_by_value_of_each_element():
    model = nn.Module()
    base = torch.randn(3, 5)
    model.register_buffer("one", base.t())
    model.register_buffer("two", base.t().contiguous())
    assert duplicates(model).equal == (("one", "two"),)


def test_on_meta_ties_are_found_and_values_are_not_compared():
    model = Language().to("meta")
    model.head.weight = model.embed.weight
    found = duplicates(model)
    assert (
        found.tied == (("embed.weight", "head.weight"),) and found.equal == () and found.could_save_bytes == 0
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=8))
def test_groups_are_those_of_a_comparison_of_all_pairs(tensors):
    """Of (value, length): equal are those of the same value and length."""
    model = nn.Module()
    for number, (value, length) in enumerate(tensors):
        model.register_buffer(f"b{number}", torch.full((length,), float(value)))
    groups: dict[tuple[int, int], list[str]] = {}
    for number, kind in enumerate(tensors):
        groups.setdefault(kind, []).append(f"b{number}")
    found = duplicates(model)
    assert sorted(found.equal) == sorted(tuple(group) for group in groups.values() if len(group) > 1)
    assert found.could_save_bytes == sum(4 * kind[1] * (len(group) - 1) for kind, group in groups.items())


def test_what_is_no_model_has_no_duplicates():
    with pytest.raises(TypeError, match="Module"):
        duplicates([torch.ones(3)])


# ---- bad input


@pytest.mark.parametrize(
    ("pairs", "kind", "words"),
    [
        ([("embed.weight", "head.wieght")], ValueError, "no parameter or module 'head.wieght'"),
        ([("embed.weight", "layers.0.weight")], ValueError, "differ in shape"),
        ([("embed.weight", "embed.weight")], ValueError, "already one parameter"),
        ([("embed", "head.weight")], ValueError, "is a parameter and the other a module"),
        ([("embed", "layers.0")], ValueError, "not have the same parameters"),
        ([("layers.0.weight", "layers.1.weight"), ("layers.2.weight", "layers.1.weight")], ValueError, "tied twice"),
        ([("layers.0.weight", "layers.1.weight"), ("layers.1.weight", "layers.2.weight")], ValueError, "name that one"),
        ([], ValueError, "pairs is empty"),
        ("embed.weight", TypeError, "expected a list"),
        (3, TypeError, "expected a list"),
        (["embed.weight"], TypeError, "not a pair"),
        ([("embed.weight", 3)], TypeError, "not a pair"),
        ([("embed.weight",)], TypeError, "not a pair"),
        ([3], TypeError, "not a pair"),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_tied_are_refused_and_nothing_changes(pairs, kind, words):
    model = Language()
    before = kept(model)
    with pytest.raises(kind, match=words):
        tie_(model, pairs)
    assert not differences(before, model)


def test_a_pair_that_fails_after_others_leaves_those_alone():
    pairs = [("layers.0.weight", "layers.1.weight"), ("layers.0.bias", "layers.1.bias")]
    for nth in range(3):
        model = Language()
        before = kept(model)
        wanted = [*pairs[:nth], ("embed.weight", "layers.2.weight"), *pairs[nth:]]
        with pytest.raises(ValueError, match="differ in shape"):
            tie_(model, wanted)
        assert not differences(before, model)


def test_an_evaluation_that_fails_afterwards_unties_them_again():
    model = Language()
    before, calls = kept(model), []

    def evaluate(m: Language) -> float:
        calls.append(m.head.weight is m.embed.weight)
        return 1.0 / (2 - len(calls))

    with pytest.raises(ZeroDivisionError):
        tie_(model, [("embed.weight", "head.weight")], evaluate=evaluate)
    assert calls == [False, True] and not differences(before, model)


def test_parameters_that_cannot_be_one_are_refused(tmp_path):
    def language(change: object) -> Language:
        model = Language()
        change(model)
        return model

    pair = [("embed.weight", "head.weight")]
    cases = [
        (language(lambda m: m.head.double()), "differ in dtype"),
        (language(lambda m: m.head.to("meta")), "differ in device"),
        (language(lambda m: m.to("meta")), "meta"),
        (language(lambda m: m.head.weight.requires_grad_(False)), "differ in requires_grad"),
    ]
    for model, words in cases:
        before = kept(model)
        with pytest.raises(ValueError, match=words):
            tie_(model, pair)
        assert not differences(before, model)
    model = Language()
    handle = memopt.offload_layers(model, to=str(tmp_path))
    with pytest.raises(ValueError, match="remove"):
        tie_(model, pair)
    handle.remove()
    tie_(model, pair)
    with pytest.raises(TypeError, match="Module"):
        tie_(3, pair)
    with pytest.raises(TypeError, match="evaluate"):
        tie_(perceptron(4, 4, 4), [("0.bias", "2.bias")], evaluate=1)
