"""Refusals of memopt.deploy.export, which change nothing: neither the model nor the old file."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.deploy import _formats, export
from memopt.deploy._output_check import OutputsDiffer, compare, largest_difference

X = torch.ones(2, 4)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4)).eval()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    (tmp_path / "model.pt").write_text("old")
    return tmp_path / "model.pt"


def refused(old: Path, error: type[Exception], match: str, given, *args, **kwargs) -> Exception:
    modes = [m.training for m in given.modules()] if isinstance(given, nn.Module) else None
    random = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=match) as raised:
            export(given, *args, **({"measure": False} | kwargs))
    assert old.read_text() == "old" and [file.name for file in old.parent.iterdir()] == ["model.pt"]
    assert modes is None or modes == [m.training for m in given.modules()]
    assert torch.equal(random, torch.get_rng_state())
    return raised.value


def test_training_mode(old):
    trained = model().train()
    refused(
        old, ValueError, r"in training mode 1 \(Dropout\), 2 \(BatchNorm1d\) would behave", trained, X, old
    )
    refused(old, ValueError, "MultiheadAttention", nn.MultiheadAttention(4, 1, dropout=0.5), (X, X, X), old)
    refused(old, ValueError, "LSTM", nn.LSTM(4, 4, 2, dropout=0.5), X, old)


def test_what_is_no_model(old):
    refused(old, TypeError, "is a function, expected", lambda x: x, X, old)
    scripted = torch.jit.trace(nn.Linear(4, 4), X)
    refused(old, ValueError, "is already TorchScript", scripted, X, old)
    refused(old, ValueError, "has no shape yet", nn.LazyLinear(3), X, old)
    with torch.device("meta"):
        bare = nn.Linear(4, 4)
    refused(old, ValueError, "'weight' is on the meta device and has no values", bare, X, old)


def test_a_model_that_cannot_be_copied(old):
    held = model()
    held.lock = threading.Lock()
    error = refused(old, ValueError, "Sequential cannot be copied", held, X, old)
    assert "lock" in str(error)


def test_samples(old):
    refused(old, ValueError, r"does not run on the sample, \[2, 5\]", model(), torch.ones(2, 5), old)
    refused(old, ValueError, r"does not run on \[3, 5\]", model(), X, old, samples=[torch.ones(3, 5)])
    refused(old, ValueError, "sample is on meta", model(), X.to("meta"), old)
    refused(old, ValueError, "needs a tensor with a first", nn.Identity(), 3, old, dynamic_batch=True)


def test_formats_and_paths(old, monkeypatch):
    refused(
        old,
        ValueError,
        "format='tflite' is not one of 'pt2', 'onnx', 'torchscript'",
        model(),
        X,
        old,
        "tflite",
    )
    refused(old, ValueError, "does not imply a format", model(), X, old.with_suffix(".bin"))
    refused(old, FileNotFoundError, "there is no folder", model(), X, old.parent / "none" / "model.pt")
    refused(old, IsADirectoryError, "is a folder", model(), X, old.parent, "pt2")
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
    refused(old, ValueError, "a trace has no dynamic shapes", model(), X, old, **shapes)
    refused(old, ValueError, "leave dynamic_batch out", model(), X, old, "pt2", dynamic_batch=True, **shapes)


def test_packages_that_are_missing(old, monkeypatch):
    found = importlib.util.find_spec
    for missing in ("onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *more, missing=missing: (
                None if name == missing else (found(name, *more) or object())
            ),
        )
        refused(
            old, ImportError, rf"needs {missing}: pip install 'memopt\[deploy\]'", model(), X, old, "onnx"
        )


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


class Counting(nn.Module):
    """A trace keeps the batch of its sample."""

    def forward(self, x):
        return x / len(x)


def test_what_the_exporter_cannot_do(old):
    error = refused(old, RuntimeError, "pt2 cannot be made from a Branching", Branching(), X, old, "pt2")
    assert error.__cause__ is not None


@pytest.mark.filterwarnings("ignore")
def test_outputs_that_are_not_the_models(old):
    refused(old, OutputsDiffer, "torchscript, .*output 0 .* differs by", Branching(), X, old, samples=[-X])
    refused(old, OutputsDiffer, r"\[3, 4\]: output 0", Counting(), X, old, dynamic_batch=True)


def test_what_the_exporter_warned_of_is_said_where_it_fails(old):
    with pytest.warns(torch.jit.TracerWarning, match="to a Python boolean"), pytest.raises(OutputsDiffer):
        export(Branching(), X, old, samples=[-X], measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OutputsDiffer) as raised:
            export(Branching(), X, old, samples=[-X], measure=False)
    notes = raised.value.__notes__
    assert len(notes) > 1 and any(note.startswith("TracerWarning: Converting a tensor") for note in notes)


class Large(nn.Module):
    def forward(self, x):
        return x + torch.empty(1 << 50).sum()


def test_an_out_of_memory_stays_one(old, monkeypatch):
    refused(old, RuntimeError, r"^\[enforce fail.*DefaultCPUAllocator: can't allocate", Large(), X, old)

    def fails(*_):
        raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")

    for name, failing in (("load", lambda path: fails), ("write", fails)):
        monkeypatch.setattr(_formats.FORMATS["torchscript"], name, failing)
        refused(old, RuntimeError, "^CUDNN_STATUS_ALLOC_FAILED", model(), X, old)


def test_an_exporter_that_dies_in_the_middle(old, monkeypatch):
    def half(module, call, path, asked):
        path.write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(_formats.FORMATS["torchscript"], "write", half)
    refused(old, OSError, "the disk is full", model(), X, old)


@pytest.mark.parametrize("failing", range(2))
def test_a_rename_that_fails_leaves_the_old_files(old, failing, monkeypatch):
    """Weights in a file of their own go first: they do not stay where the model does not come."""
    made = old.parent / "made"
    made.mkdir()
    (made / "model.pt").write_text("new")
    (made / "model.pt.0123abcd.data").write_text("weights")
    count, replace = 0, os.replace

    def rename(*names):
        nonlocal count
        count += 1
        if count == failing + 1:
            raise OSError("no")
        replace(*names)

    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(OSError, match="no"):
        _formats.put_beside(made / "model.pt", old)
    assert sorted(f.name for f in old.parent.iterdir()) == ["made", "model.pt"] and old.read_text() == "old"


def test_new_weights_take_the_place_of_old_ones(old):
    (old.parent / "model.pt.deadbeef.data").write_text("old weights")
    (old.parent / "model.pt.mine.data").write_text("somebody's")
    old.chmod(0o640)
    with _formats.folder_beside(old) as made:
        (made / "model.pt").write_text("new")
        (made / "model.pt.0123abcd.data").write_text("new weights")
        files = _formats.put_beside(made / "model.pt", old)
    assert [file.name for file in files] == ["model.pt", "model.pt.0123abcd.data"]
    there = sorted(file.name for file in old.parent.iterdir())
    assert there == ["model.pt", "model.pt.0123abcd.data", "model.pt.mine.data"]
    assert old.read_text() == "new" and old.stat().st_mode & 0o777 == 0o640


def test_differences():
    a = torch.tensor([1.0, -4.0])
    assert largest_difference(a, a.clone()) == 0
    assert largest_difference(a, a + torch.tensor([0.0, 1.0])) == 0.25
    nan = torch.tensor([float("nan"), 1.0])
    assert largest_difference(nan, nan.clone()) == 0 and largest_difference(nan, a) == float("inf")
    assert largest_difference(a, nan) == float("inf")
    infinite = torch.tensor([float("inf"), 1.0])
    assert largest_difference(infinite, infinite * 1.0) == 0
    assert largest_difference(infinite, -infinite) == float("inf")
    assert largest_difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5
    assert largest_difference(torch.zeros(2), torch.full((2,), 0.5)) == 0.5
    assert largest_difference(torch.ones(0), torch.ones(0)) == 0


def test_forms_are_compared():
    with pytest.raises(OutputsDiffer, match="2 outputs, but the live model gives 1"):
        compare("it", [X], [X, X], None)
    with pytest.raises(OutputsDiffer, match=r"is float64\[2, 4\], but the live model gives float32\[2, 4\]"):
        compare("it", [X], [X.double()], None)
    with pytest.raises(OutputsDiffer, match="tolerance="):
        compare("it", [X], [X * 1.01], None)
    assert compare("it", [X], [X * 1.01], 0.1).tolerance == 0.1
    assert compare("it", [X], [X * 1.01], {torch.float32: 0.1}).difference == pytest.approx(0.01, rel=1e-4)
    assert compare("it", [X.half()], [X.half() * 1.005], None).dtype is torch.float16
    with pytest.raises(OutputsDiffer):
        compare("it", [X.long()], [X.long() + 1], 0.5)
    wave = X.to(torch.complex64)
    assert compare("it", [wave], [wave * 1.01], {torch.float32: 0.1}).tolerance == 0.1
    assert compare("it", [wave], [wave * 1.01], {torch.complex64: 0.2, torch.float32: 0}).tolerance == 0.2
    assert compare("it", [wave], [wave * 1.00001], {torch.float64: 0.0}).tolerance == 1e-4
