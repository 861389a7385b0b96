"""memopt's functions and classes put in the place of torch's by hand: what memopt leaves to torch's reaches torch's."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
import memopt.amp
import memopt.optim

ROOT = Path(__file__).resolve().parents[3]
UNSCALE, UPDATE = "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"


def gradients() -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(3)]
    for p in parameters:
        p.grad = torch.randn(5, generator=made, dtype=torch.float64)
    return parameters


def clipped(function: Callable) -> list[torch.Tensor]:
    parameters = gradients()  # of fp64, which memopt leaves to torch
    norm = function(parameters, 0.5)
    return [norm, *(p.grad for p in parameters)]


def unscaled(function: Callable) -> list[torch.Tensor]:
    found, grads = torch.zeros(1), [torch.arange(6.0)[::2]]  # with gaps, which are torch's too
    function(grads, found, torch.tensor(0.5))
    return [*grads, found]


def updated(function: Callable) -> list[torch.Tensor]:
    scale, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    function(scale, tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
    return [scale, tracker]


@pytest.mark.parametrize(
    ("owner", "name", "ours", "results"),
    [
        (torch.nn.utils.clip_grad, "clip_grad_norm_", memopt.amp.clip_grad_norm_, clipped),
        (torch.nn.utils, "clip_grad_norm_", memopt.amp.clip_grad_norm_, clipped),
        (torch, UNSCALE, memopt.amp.foreach_unscale_, unscaled),
        (torch, UPDATE, memopt.amp.update_scale_, updated),
    ],
    ids=["clip", "clip by its package", "unscale", "update"],
)
def test_a_function_of_torchs_may_be_memopts(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, ours: Callable, results: Callable
) -> None:
    expected = results(getattr(owner, name))
    monkeypatch.setattr(owner, name, ours)
    for found, value in zip(results(getattr(owner, name)), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize(
    "name", ["checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"]
)
def test_a_traced_checkpoint_may_be_memopts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """While something traces, memopt's are torch's."""
    assert getattr(memopt, name) is not getattr(torchs, name)
    monkeypatch.setattr(torchs, name, getattr(memopt, name))

    def kept() -> tuple:
        return torchs.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def function(x: torch.Tensor) -> torch.Tensor:
        once = torchs.checkpoint(lambda a: a.sin().cos(), x, use_reentrant=False, context_fn=kept)
        return torchs.checkpoint_sequential([torch.tan, torch.exp], 2, once, use_reentrant=False)

    x = torch.randn(3)
    assert torch.equal(make_fx(function)(x)(x), x.sin().cos().tan().exp())


def test_patching_beside_names_set_by_hand_and_disabling_give_torchs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torchs.checkpoint
    importer = types.ModuleType("somebody_elses_module")
    importer.remember = before
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    monkeypatch.setattr(torchs, "checkpoint", memopt.checkpoint)
    memopt.patch()
    try:
        assert importer.remember is memopt.checkpoint  # who had torch's from before
    finally:
        memopt.disable()
    assert importer.remember is torchs.checkpoint is before is not memopt.checkpoint


def trained(scaler: type, optimizer: type) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).double()  # whose gradients memopt leaves to torch
    made = optimizer(model.parameters(), lr=0.1)
    scaling = scaler("cpu", init_scale=8.0)
    for step in range(3):
        made.zero_grad()
        scaling.scale(model(torch.full((2, 4), float(step), dtype=torch.float64)).square().sum()).backward()
        scaling.unscale_(made)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaling.step(made)
        scaling.update(None if step else 4.0)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_training_in_which_all_of_torchs_are_memopts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = trained(torch.amp.GradScaler, getattr(torch.optim, name))
    monkeypatch.setattr(torch.amp, "GradScaler", memopt.amp.GradScaler)
    monkeypatch.setattr(torch.optim, name, getattr(memopt.optim, name))
    monkeypatch.setattr(torch.nn.utils.clip_grad, "clip_grad_norm_", memopt.amp.clip_grad_norm_)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", memopt.amp.clip_grad_norm_)
    monkeypatch.setattr(torch, UNSCALE, memopt.amp.foreach_unscale_)
    monkeypatch.setattr(torch, UPDATE, memopt.amp.update_scale_)
    for found, value in zip(trained(torch.amp.GradScaler, getattr(torch.optim, name)), expected, strict=True):
        assert torch.allclose(found, value, rtol=1e-12)


def test_modules_that_are_imported_again_hold_torchs() -> None:
    """Both ways: reloaded, and from nothing. In a process of its own, for classes are others then."""
    code = f"""
import importlib, sys
import torch, torch.utils.checkpoint as torchs
from torch.fx.experimental.proxy_tensor import make_fx
sys.path.insert(0, {str(ROOT)!r})
torchs_own = torch.optim.AdamW, torch.amp.GradScaler

def put():
    import memopt, memopt.amp, memopt.optim
    torch.nn.utils.clip_grad.clip_grad_norm_ = memopt.amp.clip_grad_norm_
    torch.{UNSCALE} = memopt.amp.foreach_unscale_
    torch.{UPDATE} = memopt.amp.update_scale_
    torchs.checkpoint = memopt.checkpoint
    torch.optim.AdamW, torch.amp.GradScaler = memopt.optim.AdamW, memopt.amp.GradScaler

def check():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    assert torch.nn.utils.clip_grad.clip_grad_norm_([p], 1.0) == 3**0.5
    found = torch.zeros(1)
    torch.{UNSCALE}([torch.ones(3).to_sparse()._values()], found, torch.ones(()))
    torch.{UPDATE}(torch.ones(()), torch.zeros((), dtype=torch.int32), found, 2.0, 0.5, 10)
    make_fx(lambda x: torchs.checkpoint(torch.sin, x, use_reentrant=False))(torch.ones(3))
    for ours, theirs in zip((torch.optim.AdamW, torch.amp.GradScaler), torchs_own):
        above = [c for c in ours.__mro__ if c.__name__ == ours.__name__]
        assert above == [ours, theirs], above

put()
check()
for name in [n for n in sys.modules if n.startswith(("memopt.amp.", "memopt.optim.", "memopt._checkpoint."))]:
    importlib.reload(sys.modules[name])
for package in ("memopt", "memopt.amp", "memopt.optim", "memopt._checkpoint"):
    for name in sys.modules[package].__all__:
        vars(sys.modules[package]).pop(name, None)
put()
check()
for name in [n for n in sys.modules if n.partition(".")[0] == "memopt" and n != "memopt._C"]:
    del sys.modules[name]
put()
check()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
