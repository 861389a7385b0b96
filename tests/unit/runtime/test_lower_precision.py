"""memopt.to_dtype_: in place, each storage once, and nothing changed where it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.last = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("part", self.last.weight.detach()[:4])  # a view of a parameter
        self.register_buffer("table", torch.linspace(0, 1, 6))


def values(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {name: (id(t), t.dtype, t.data_ptr(), t.detach().clone()) for name, t in [
        *model.named_parameters(), *model.named_buffers()]}  # fmt: skip


def same(before: dict, after: dict) -> bool:
    return all(before[n][:3] == after[n][:3] and torch.equal(before[n][3], after[n][3]) for n in before)


def test_a_module_is_converted_in_place_and_stays_whole():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {name: t.detach().clone() for name, t in model.state_dict().items()}
    model.last.bias.grad = torch.full((8,), 3.0)
    report = memopt.to_dtype_(model, torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert model.part.data_ptr() == model.last.weight.data_ptr()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for name, tensor in model.state_dict().items():
        if name.startswith("batch") or not expected[name].is_floating_point():
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name].bfloat16())
    assert model.last.bias.grad.dtype == torch.bfloat16 and float(model.last.bias.grad[0]) == 3.0
    # Halved: embed and head 320, last 256 + 32 and its gradient 32, table 24, norm 64. The rest is as it was.
    assert report.freed_bytes == (320 + 256 + 32 + 32 + 24 + 64) // 2
    assert report.before_bytes == 664 + 2 * 32 + 4 * 32 + 8 + 4
    assert sorted(report.converted) == [
        "embed.weight", "last.bias", "last.weight", "norm.bias", "norm.weight", "part", "table",
    ]  # fmt: skip
    assert "mask" in report.untouched and "batch.weight" in report.kept
    assert "7 tensors to bfloat16" in str(report) and "<pre>" in report._repr_html_()
    model.last(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    again = memopt.to_dtype_(model, torch.bfloat16)
    assert again.freed_bytes == 0 and not again.converted


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, set()),
        ("last", {"last.weight", "last.bias"}),
        (["norm", "table"], {"norm.weight", "norm.bias", "table"}),
        (lambda name, t: t.dim() == 1, {"norm.weight", "norm.bias", "batch.weight", "batch.bias", "last.bias", "table",
                                        "batch.running_mean", "batch.running_var", "mask", "part"}),
    ],
)  # fmt: skip
def test_what_is_kept(keep: object, kept: set[str]):
    model = Model()
    model.part = torch.zeros(1)  # no view of what may be kept
    report = memopt.to_dtype_(model, torch.float16, keep=keep)
    assert set(report.kept) == kept
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            assert tensor.dtype == (torch.float32 if name in kept else torch.float16)


def test_tensors_and_modules_can_be_kept_by_themselves():
    model = Model()
    report = memopt.to_dtype_(model, torch.float16, keep=[model.norm, model.table])
    assert set(report.kept) == {"norm.weight", "norm.bias", "table"}


def test_lists_and_dicts_views_and_expanded_shapes():
    base = torch.arange(12.0).reshape(3, 4)
    views = {"rows": base[1:], "turned": base.t(), "other": [torch.ones(2, dtype=torch.int64), 3]}
    report = memopt.to_dtype_([base, views], torch.float64)
    assert base.dtype == views["rows"].dtype == views["turned"].dtype == torch.float64
    assert views["turned"].stride() == (1, 4) and views["rows"].storage_offset() == 4
    base[2, 1] = 77
    assert views["turned"][1, 2] == views["rows"][1, 1] == 77
    assert report.before_bytes == 48 + 16 and report.after_bytes == 96 + 16
    one = torch.ones(3)
    memopt.to_dtype_(one, torch.bfloat16)
    assert one.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_overflow_is_refused_and_counted_where_it_is_allowed(dtype: torch.dtype):
    model = Model()
    with torch.no_grad():
        model.last.weight[0, :3] = 1e6
        model.last.weight[1, 0] = float("inf")
    before = values(model)
    with pytest.raises(ValueError, match=r"last.weight: 3 values are beyond .*'s largest.*1e\+06"):
        memopt.to_dtype_(model, dtype)
    assert same(before, values(model))
    report = memopt.to_dtype_(model, dtype, allow_overflow=True)
    assert report.not_finite["last.weight"] == 3 and model.last.weight.float()[0, 0] != 1e6


def test_what_cannot_be_converted_is_refused_before_anything_changed():
    model = Model()
    before = values(model)
    for wrong in (torch.int8, torch.complex64, "float16"):
        with pytest.raises(TypeError, match="not a floating-point type"):
            memopt.to_dtype_(model, wrong)
    with pytest.raises(TypeError, match="not str"):
        memopt.to_dtype_("model", torch.float16)
    with pytest.raises(ValueError, match="not part of the first argument"):
        memopt.to_dtype_(model, torch.float16, keep="haed")
    with pytest.raises(ValueError, match=r"share memory, but part is to remain|but last.weight is to remain"):
        memopt.to_dtype_(model, torch.float16, keep=["part"])
    model.table = model.last.weight * 2
    with pytest.raises(ValueError, match="table has an autograd graph"):
        memopt.to_dtype_(model, torch.float16)
    model.table = torch.ones(1).expand(6)
    with pytest.raises(ValueError, match="table is expanded"):
        memopt.to_dtype_(model, torch.float16)
    model.table = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="only plain tensors"):
        memopt.to_dtype_(model, torch.float16)
    del before["table"], model.table
    assert same(before, values(model))
