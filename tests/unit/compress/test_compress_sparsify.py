"""memopt.compress.sparsify_(): converted only where that saves, the break-even said, all or nothing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from compress_state import FailsAt, differences, kept, perceptron
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memopt
from memopt.compress import _sparsifying, prune_, sparsify_
from memopt.compress._sparsifying import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*invariant checks")


def sparse_tensor(rows: int, columns: int, nnz: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.zeros(rows * columns, dtype=dtype)
    values[torch.randperm(rows * columns)[:nnz]] = (1 + torch.rand(nnz)).to(dtype)
    return values.view(rows, columns)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]


def pruned(*widths: int, amount: float = 0.9, bias: bool = True) -> nn.Sequential:
    model = perceptron(*widths, bias=bias)
    prune_(model, amount, "l1_unstructured")
    return model


@pytest.mark.parametrize(("layout", "index"), [("csr", torch.int32), ("csr", torch.int64), ("coo", None)])
def test_values_and_results_are_the_librarys(layout, index):
    torch.manual_seed(0)
    model = pruned(64, 32, 16)
    dense = copy.deepcopy(model)
    report = sparsify_(model, layout, index_dtype=index)
    x = torch.randn(4, 64)
    plain = dense[0].weight.detach()
    expected = plain.to_sparse_coo() if layout == "coo" else plain.to_sparse_csr()
    weight = model[0].weight
    assert weight.layout is expected.layout and torch.equal(weight.to_dense(), plain)
    assert all(
        torch.equal(ours.long() if ours.dtype == torch.int32 else ours, theirs)
        for ours, theirs in zip(parts(weight), parts(expected), strict=True)
    )
    for shape in ((4, 64), (2, 3, 64), (64,)):
        x = torch.randn(shape)
        assert torch.allclose(model(x), dense(x), atol=1e-5)
    assert report.changed == ("0.weight", "2.weight") and report.saved_bytes > 0
    assert isinstance(model[0], nn.Linear) and (type(model[0]) is SparseLinear) is (layout == "coo")


@pytest.mark.parametrize(("layout", "index"), [("csr", torch.int32), ("csr", torch.int64), ("coo", None)])
def test_bytes_are_those_of_indices_and_values_and_not_of_elements(layout, index):
    model = pruned(64, 32, bias=False)
    by_elements = model[0].weight.numel() * 4
    report = sparsify_(model, layout, index_dtype=index)
    by_hand = sum(part.untyped_storage().nbytes() for part in parts(model[0].weight))
    assert report.before.memory_bytes == by_elements
    assert report.after.memory_bytes == by_hand == report.choices[0].sparse_bytes < by_elements
    assert model[0].weight.numel() * 4 == by_elements
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert report.after.disk_bytes == len(file.getvalue())


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    share=st.floats(0, 1),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
    ),
    layout=st.sampled_from(["csr", "coo"]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_it_converts_just_where_that_takes_less_and_below_the_break_even(
    rows, columns, share, dtype, layout, index
):
    nnz = round(share * rows * columns)
    tensor = sparse_tensor(rows, columns, nnz, dtype)
    report = sparsify_(tensor, layout, index_dtype=index if layout == "csr" else None)
    choice = report.choices[0]
    as_sparse = tensor.to_sparse_coo() if layout == "coo" else tensor.to_sparse_csr()
    by_hand = sum(
        part.numel() * (index.itemsize if layout == "csr" and part.dtype == torch.int64 and number < 2
                        else part.element_size())
        for number, part in enumerate(parts(as_sparse))
    )  # fmt: skip
    dense = tensor.untyped_storage().nbytes()
    assert (choice.sparse_bytes, choice.dense_bytes) == (by_hand, dense)
    assert choice.converted is (by_hand < dense) is (report.tensor is not tensor)
    assert torch.equal(report.tensor.to_dense() if choice.converted else report.tensor, tensor)
    assert report.saved_bytes == (dense - by_hand if choice.converted else 0)
    if choice.density < choice.break_even * (1 - 1e-9):
        assert choice.converted
    if choice.density > choice.break_even * (1 + 1e-9):
        assert not choice.converted


def test_the_break_evens_that_are_promised():
    shape = torch.Size([1000, 1000])
    found = {
        (layout, index): _sparsifying.break_even(shape, 4 * 10**6, 4, layout, index)
        for layout, index in [("csr", 4), ("csr", 8), ("coo", 8)]
    }
    assert found["coo", 8] == pytest.approx(0.2)
    assert found["csr", 4] == pytest.approx(0.5, abs=1e-3) and found["csr", 8] == pytest.approx(
        1 / 3, abs=1e-3
    )


def test_a_dense_model_stays_and_the_report_says_why():
    model = perceptron(32, 32)
    before = kept(model)
    report = sparsify_(model, "csr")
    assert not differences(before, model) and report.changed == () and report.saved_bytes == 0
    assert "breaks even at 0.48" in report.skipped["0.weight"] and "saving -" in report.skipped["0.weight"]
    assert not report.choices[0].converted and "nothing changed" in str(report)


def test_a_storage_that_others_hold_is_not_given_up():
    model = pruned(32, 32, 32, bias=False)
    flat = torch.zeros(5000)
    flat[:1024] = model[0].weight.detach().flatten()
    model[0].weight = nn.Parameter(flat[:1024].view(32, 32))
    model.register_buffer("rest", flat[2000:])
    report = sparsify_(model)
    assert report.changed == ("2.weight",) and "other tensors" in report.skipped["0.weight"]
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    prune_(model, 0.9, "l1_unstructured")
    assert "0.weight" in sparsify_(model).skipped["1.weight"] and model[1].weight is model[0].weight
    flat = torch.zeros(5000)
    flat[:1024] = 1.0  # its dense bytes are the storage's, whole
    assert sparsify_(flat[:1024].view(32, 32), "csr").saved_bytes == 20_000 - 33 * 4 - 1024 * 8


def test_a_tensor_that_only_looks_sparse_is_not_converted():
    """The rows that are looked at are zero; the others are not."""
    tensor = torch.ones(1280, 16)
    tensor[::20] = 0.0
    report = sparsify_(tensor, "csr")
    assert (
        report.tensor is tensor
        and report.saved_bytes == 0
        and report.choices[0].density == pytest.approx(0.95)
    )


def test_tied_layers_stay_tied():
    model = pruned(32, 32, 32)
    model[2].weight = model[0].weight
    report = sparsify_(model)
    assert model[2].weight is model[0].weight and model[0].weight.layout is torch.sparse_csr
    assert report.changed == ("0.weight", "2.weight")


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_it_is_saved_pickled_copied_and_loaded(layout):
    model = pruned(64, 32, 16)
    sparsify_(model, layout)
    x = torch.randn(4, 64)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    twin = pickle.loads(pickle.dumps(model))
    twin.load_state_dict(state)
    others = [
        twin,
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        copy.deepcopy(copy.deepcopy(model)),
    ]
    if layout == "csr":
        plain = perceptron(64, 32, 16)
        plain.load_state_dict(state, assign=True)
        others.append(plain)
    for other in others:
        assert torch.equal(other(x), expected)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_gradients_pass_to_the_input_and_none_to_the_weight(layout):
    model = pruned(64, 32, 16)
    dense = copy.deepcopy(model)
    sparsify_(model, layout, layers="2")
    x = torch.randn(4, 64)
    model(x).sum().backward()
    dense(x).sum().backward()
    assert torch.allclose(model[0].weight.grad, dense[0].weight.grad, atol=1e-5)
    assert not model[2].weight.requires_grad and model[2].bias.grad is not None
    memopt.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.allclose(model[0].weight.grad, 2 * dense[0].weight.grad, atol=1e-5)


# ---- all or nothing, and bad input


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_a_conversion_that_fails_at_the_nth_layer_leaves_all_as_it_was(layout, monkeypatch):
    import memopt.compress._sparsifying as sparsifying

    for nth in range(10):
        model = pruned(32, 32, 32, 32)
        before = kept(model)
        with monkeypatch.context() as patched:
            failing = FailsAt(sparsifying.convert, nth)
            patched.setattr(sparsifying, "convert", failing)
            try:
                sparsify_(model, layout)
            except (RuntimeError, NotImplementedError) as error:
                assert "the library failed" in str(error) and not differences(before, model)
            else:
                assert nth == failing.calls == 6 and differences(before, model)  # three are tried first
                return
    raise AssertionError("it never succeeded")


def test_an_evaluation_that_fails_afterwards_takes_it_back():
    for layout in ("csr", "coo"):
        model = pruned(32, 32, 32)
        before, layouts = kept(model), []

        def evaluate(m: nn.Module, layouts: list[torch.layout] = layouts) -> float:
            layouts.append(m[0].weight.layout)
            return 1.0 / (2 - len(layouts))

        with pytest.raises(ZeroDivisionError):
            sparsify_(model, layout, evaluate=evaluate)
        assert len(set(layouts)) == 2 and not differences(before, model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have the kernels")
def test_two_of_four_without_kernels_is_refused_before_anything_changes():
    model = perceptron(64, 64)
    prune_(model, method="2:4")
    before = kept(model)
    with pytest.raises(NotImplementedError, match="which has no kernels for 2:4"):
        sparsify_(model, "2:4")
    with pytest.raises(NotImplementedError, match="which has no kernels for 2:4"):
        sparsify_(model[0].weight.detach(), "2:4")
    assert not differences(before, model)


def test_a_type_without_kernels_is_refused_before_anything_changes():
    model = perceptron(32, 32, dtype=torch.float16)
    prune_(model, 0.95, "l1_unstructured")
    with torch.no_grad():
        model[0].weight[:2] = 0  # what would be tried, if it were these rows
    before = kept(model)
    with pytest.raises(NotImplementedError, match="cpu has no kernels for csr in float16"):
        sparsify_(model, "csr")
    assert not differences(before, model)


def test_models_that_cannot_be_sparse_are_refused_and_unchanged(tmp_path):
    sparse = pruned(32, 32)
    sparsify_(sparse)
    masked = perceptron(32, 32)
    nn.utils.prune.l1_unstructured(masked[0], "weight", 0.9)
    offloaded = pruned(32, 32)
    handle = memopt.offload_layers(offloaded, to=str(tmp_path))
    cases = [
        (sparse, {}, "SparseWeight|sparse"),
        (masked, {}, "prune.remove"),
        (offloaded, {}, "remove"),
        (perceptron(32, 32).to("meta"), {}, "meta"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), {}, "has no linear layer"),
        (perceptron(32, 32), {"layers": "4"}, "no module '4'"),
        (perceptron(32, 32), {"layout": "csc"}, "csc"),
        (perceptron(32, 32), {"index_dtype": torch.int16}, "index_dtype"),
        (perceptron(32, 32), {"layout": "coo", "index_dtype": torch.int32}, "always int64"),
    ]
    for model, arguments, words in cases:
        before = kept(model)
        with pytest.raises(ValueError, match=words):
            sparsify_(model, **arguments)
        assert not differences(before, model)
    handle.remove()
    with pytest.raises(TypeError, match="Module"):
        sparsify_([torch.ones(3)])


def test_tensors_that_cannot_be_sparse_are_refused():
    leaf = torch.zeros(8, 8, requires_grad=True)
    cases = [
        (leaf, {}, "requires a gradient"),
        (leaf * 2, {}, "requires a gradient"),
        (torch.zeros(8, 8).to_sparse_csr(), {}, "sparse already"),
        (torch.zeros(8, 8, device="meta"), {}, "meta"),
        (torch.zeros(8), {}, "1 dimensions: csr takes two"),
        (torch.zeros(()), {"layout": "coo"}, "0 dimensions: coo takes at least one"),
        (torch.zeros(2, 2, 2), {}, "3 dimensions"),
        (torch.zeros(8, 8), {"layers": "0"}, "apply to models"),
        (torch.zeros(8, 8), {"evaluate": lambda m: 0.0}, "apply to models"),
    ]
    for tensor, arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            sparsify_(tensor, **arguments)
    report = sparsify_(torch.zeros(4, 5, 6), "coo")
    assert report.tensor.layout is torch.sparse_coo and report.saved_bytes == 480
    assert sparsify_(torch.zeros(0, 5), "csr").changed == ()
