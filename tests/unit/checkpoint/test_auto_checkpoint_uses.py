"""auto_checkpoint in what a model is used in: DistributedDataParallel, torch.compile of a stage, long training."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from benchmarks import checkpoint_models
from benchmarks.checkpoint_models import Work
from memopt.chain import InfeasibleBudget
from tests.unit.checkpoint.test_auto_checkpoint import make

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[3]
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


def tight(work: Work) -> Work:
    """In the least memory there is for it."""
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(work.model, work.sample, memory_budget=1, loss=work.loss)
    memopt.auto_checkpoint(work.model, work.sample, memory_budget=error.value.least_budget, loss=work.loss)
    assert vars(work.model)["plan"].runner is not None
    return work


@pytest.mark.sampled("several processes")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_in_distributed_data_parallel(tmp_path: Path) -> None:
    script = str(ROOT / "tests/isolated/checkpoint_ranks.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (out, err) in enumerate(said):
        assert out.splitlines() == ["ok"], f"rank {rank}: {out}{err[-3000:]}"


def test_a_stage_that_is_compiled() -> None:
    """A module that torch.compile has compiled keeps its graph: the backend is the one that needs no compiler."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)]
    plain = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in blocks))
    model = copy.deepcopy(plain)
    sample = torch.randn(256, 32)
    tight(Work(model, sample, lambda out: out.square().mean()))
    for _ in range(2):
        for module in (model, plain):
            module.zero_grad()
            module(sample).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_a_model_that_is_compiled_before_is_refused_by_name() -> None:
    model, sample = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8)
    compiled = torch.compile(model, backend="aot_eager")
    in_place = copy.deepcopy(model)
    in_place.compile(backend="aot_eager")
    for one in (compiled, in_place):
        with pytest.raises(ValueError, match=r"torch\.compile\(\).*compile its blocks"):
            memopt.auto_checkpoint(one, sample, memory_budget="1GiB")


def test_a_model_that_is_compiled_afterwards_is_right() -> None:
    """Its stages are not: the compiler does not take the runner apart."""
    model, sample, loss = make("vision")
    plain = copy.deepcopy(model)
    tight(Work(model, sample, loss))
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(2):
        for module in (compiled, plain):
            module.zero_grad()
            torch.manual_seed(seed)
            loss(module(sample)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["conv chain", "GPT", "encoder"])
def test_no_step_leaves_anything(family: str) -> None:
    """Tensors, objects, blocks of the interpreter; in the long form resident memory too."""
    work = tight(checkpoint_models.make(family, small=True))

    def steps(count: int) -> None:
        for _ in range(count):
            work.step()
        work.model.zero_grad()
        gc.collect()

    def grown(count: int) -> list[int]:
        """Objects, tensors and blocks of the interpreter that are there after so many steps and were not before."""

        def standing() -> list[int]:
            objects = gc.get_objects()
            tensors = sum(type(o) is torch.Tensor for o in objects)
            return [len(objects), tensors, sys.getallocatedblocks()]

        before = standing()
        steps(count)
        return [after - start for after, start in zip(standing(), before, strict=True)]

    steps(60)  # tables of CPython 3.14's are still growing after five
    few, many = 4, 1000 if SOAK else 28
    found = []
    # Looking leaves some blocks itself, and the interpreter's and torch's own tables grow, less and less, in a plain
    # run too; what leaks, leaks every step.
    for _ in range(5):
        found.append([more - less for less, more in zip(grown(few), grown(many), strict=True)])
        if all(more < (many - few) / 2 for more in found[-1]) and found[-1][1] == 0:
            break
    else:
        pytest.fail(f"objects, tensors and blocks left by {many - few} steps: {found}")
    if SOAK:
        before_bytes = resident()
        steps(1000)
        assert resident() - before_bytes < 8 << 20


class Planned(Exception):
    pass


class FailsAt(TorchDispatchMode):
    """Raises at the n-th operation, of the forward or the backward pass."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise Planned
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["conv chain", "GPT"])
def test_an_exception_in_any_operation_leaves_nothing(family: str) -> None:
    work = tight(checkpoint_models.make(family, small=True))
    buffers = copy.deepcopy(work.model.state_dict())
    with FailsAt(-1) as mode:
        work.step()

    def restore() -> int:
        work.model.zero_grad()
        work.model.load_state_dict(buffers)
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    alive = restore()
    torch.manual_seed(1)
    expected = work.step()
    for at in range(1, mode.count + 1, 1 if SOAK else mode.count // 12):
        failed = False
        try:
            with FailsAt(at):
                work.step()
        except Planned:
            failed = True
        assert failed
        assert torch.is_grad_enabled()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch._C._len_torch_dispatch_stack() == 0
        work.step()  # what was ready to run when the engine failed, torch itself keeps until its next pass
        assert restore() <= alive + 1, at  # `expected` is there by now
    torch.manual_seed(1)
    assert torch.equal(work.step(), expected)
