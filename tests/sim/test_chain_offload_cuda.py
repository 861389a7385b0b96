"""Offload inside a schedule, to pinned host memory and through it to a disk, on the simulated device: the order of
copies and computation, what is on the device meanwhile, and the plain run's gradients."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt import _C, sim
from memopt._checkpoint import shape_plans
from memopt._checkpoint.runner import ChainRunner
from memopt._checkpoint.stages.costs import Meter, bytes_of, workspace_bytes
from memopt._offload import pinned_memory, transfers
from memopt._offload.pinned_memory import PinnedPool, host_memory
from memopt._offload.schedule_sets import Bandwidth, ScheduleOffload, bandwidth
from tests.helpers.residual import Residual

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
CUDA = torch.device("cuda", 0)
MIB = 1 << 20
COUNT = MIB // 8  # elements of what a stage saves


def everything(count: int, later: str = "") -> list[tuple]:
    """All stages offload, and nothing runs again. later: which copies overlap the neighbour's run."""
    ops: list[tuple] = []
    for k in range(count):
        ops.append(("fall", k, "offload"))
        ops += [("sent", k - 1)] * (k > 0 and later == "both")
    ops.append(("fall", count))
    for k in reversed(range(count + 1)):
        ops += [("fetch", k - 1)] * (k > 0 and later == "both")
        ops.append(("bwd", k, "offload") if k < count else ("bwd", k))
    return ops


class Moves(torch.autograd.Function):
    """Saves what a copy from the host brings, and gives it back to the host in its backward: copies are what the
    simulated device does at its own time."""

    @staticmethod
    def forward(ctx, x, source, seen):
        kept = torch.empty(COUNT, dtype=torch.int64, device="cuda")
        kept.copy_(source, non_blocking=True)
        ctx.save_for_backward(kept)
        ctx.seen = seen
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        ctx.seen.copy_(kept, non_blocking=True)
        del kept
        ctx.run_ahead()
        return torch.empty_like(grad), None, None


class Stage(nn.Module):
    def __init__(self, number: int, run_ahead: Callable[[], object]) -> None:
        super().__init__()
        self.number, self.step = number, 0
        self.run_ahead = run_ahead
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        source = torch.full((COUNT,), 100 * self.step + self.number).pin_memory()
        seen = torch.full((COUNT,), -1).pin_memory()
        self.pairs.append((source, seen))
        out = Moves.apply(x, source, seen)
        out.grad_fn.run_ahead = self.run_ahead
        self.run_ahead()
        return out


def ahead_by(which: str, choose: random.Random) -> Callable[[], object]:
    """The computation overtakes the copies, or they it: each as far as it may without waiting for the other."""
    streams = _C.copy_counts(0)
    computation, out, back = 1, streams["stream_out"], streams["stream_in"]
    return {
        "computation": lambda: sim.progress(-1, computation),
        "out": lambda: sim.progress(-1, out),
        "in": lambda: sim.progress(-1, back),
        "neither": lambda: None,
        "either": lambda: sim.progress(choose.randrange(4), choose.choice([computation, out, back])),
    }[which]


def in_use(where: ScheduleOffload) -> int:
    rings = [ring for memory in where._memory.values() for _, ring in memory._pieces]
    return sum(ring.held()[0] for ring in rings)


def wrong_after(steps: int, ahead: str, later: str, seed: int = 0, to: str | Path = "cpu") -> int:
    """The number of tensors that came back changed."""
    run_ahead = ahead_by(ahead, random.Random(seed))
    stages = [Stage(k, run_ahead) for k in range(5)]
    where = ScheduleOffload(str(to), dict.fromkeys(range(5), MIB))
    runner = ChainRunner(stages, everything(5, later), offload=where)
    sim.lazy(True)
    for _ in range(steps):
        x = torch.empty(4, device="cuda", requires_grad=True)
        out = runner(x).sum()
        if ahead in ("computation", "in"):
            torch.cuda.synchronize()  # else it could not begin the backward pass without the copies
        out.backward()
    torch.cuda.synchronize()
    sim.lazy(False)
    assert [memory.nbytes for memory in where._memory.values()] == [5 * MIB] * (to == "cpu")
    return sum(not torch.equal(source, seen) for stage in stages for source, seen in stage.pairs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("later", ["", "both"])
@pytest.mark.parametrize("ahead", ["computation", "out", "in", "neither", "either"])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_what_comes_back_is_what_went_whoever_is_ahead(
    tmp_path: Path, to: str, ahead: str, later: str
) -> None:
    place = "cpu" if to == "cpu" else tmp_path
    for n in range((100 if SOAK else 4) if ahead == "either" else 1):
        assert wrong_after(3, ahead, later, SEED + n, place) == 0, f"seed {SEED + n}"
    assert list(tmp_path.iterdir()) == []


class Relays(torch.autograd.Function):
    """Gives on what a copy from the host brings."""

    @staticmethod
    def forward(ctx, x, source, dirt):
        out = torch.empty(COUNT, dtype=torch.float64, device="cuda")
        out.copy_(source, non_blocking=True)
        ctx.save_for_backward(x)
        ctx.dirt = dirt
        return out

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # for which the stage runs again
        return torch.empty_like(grad).copy_(ctx.dirt, non_blocking=True), None, None


class Relay(nn.Module):
    """Copies its input to the host whenever it runs, into memory that is pinned before: that waits for the device."""

    def __init__(self, number: int, run_ahead: Callable[[], object]) -> None:
        super().__init__()
        self.run_ahead = run_ahead
        self.expected, self.dirt = pinned(number - 1.0), pinned(-7.0)
        self.source = pinned(float(number))
        self.unused = [pinned(-1.0) for _ in range(20)]
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.unused.pop())
        self.seen[-1].copy_(x.detach(), non_blocking=True)
        out = Relays.apply(x, self.source, self.dirt)
        self.run_ahead()
        return out


def pinned(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value, dtype=torch.float64).pin_memory()


def boundaries(count: int, later: str = "") -> list[tuple]:
    """Inputs are away between a stage's two runs. later: which copies overlap the neighbour's run."""
    ops: list[tuple] = []
    for k in range(count):
        ops += [("fck", k), *[("put_input", k)] * (k > 0 and not later)]
        ops += [("put_input", k - 1)] * (k > 1 and bool(later))
    ops += [*[("put_input", count - 1)] * bool(later), ("fall", count)]
    for k in reversed(range(count + 1)):
        ops += [*[("get_input", k)] * (0 < k < count), ("fall", k)] if k < count else []
        ops += [*[("fetch_input", k - 1)] * (k > 1 and bool(later)), ("bwd", k)]
    return ops


def wrong_inputs_after(steps: int, ahead: str, later: str, seed: int = 0, to: str | Path = "cpu") -> int:
    """The number of inputs that were others when a stage ran again."""
    run_ahead = ahead_by(ahead, random.Random(seed))
    stages = [Relay(k, run_ahead) for k in range(5)]
    where = ScheduleOffload(str(to), {~k: MIB for k in range(1, 5)})
    runner = ChainRunner(stages, boundaries(5, later), offload=where)
    first = pinned(-1.0).to("cuda")
    sim.lazy(True)
    for _ in range(steps):
        x = first.detach().requires_grad_()
        out = runner(x)
        if ahead in ("computation", "in"):
            torch.cuda.synchronize()
        out.backward(torch.empty_like(out))
    torch.cuda.synchronize()
    sim.lazy(False)
    assert [memory.nbytes for memory in where._memory.values()] == [4 * MIB] * (to == "cpu")
    assert [len(stage.seen) for stage in stages] == [2 * steps] * 5
    return sum(not torch.equal(seen, stage.expected) for stage in stages for seen in stage.seen)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("later", ["", "both"])
@pytest.mark.parametrize("ahead", ["computation", "out", "in", "neither", "either"])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_an_input_that_comes_back_is_what_went_whoever_is_ahead(
    tmp_path: Path, to: str, ahead: str, later: str
) -> None:
    place = "cpu" if to == "cpu" else tmp_path
    for n in range((100 if SOAK else 4) if ahead == "either" else 1):
        assert wrong_inputs_after(3, ahead, later, SEED + n, place) == 0, f"seed {SEED + n}"


@pytest.mark.parametrize(
    ("owner", "name"), [(transfers.PinnedTransfer, "settle"), (pinned_memory.IncomingBytes, "tensor")]
)
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_each_wait_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, owner: type, name: str
) -> None:
    """The test above fails without any one of them. (Those in C: tests/c/test_copies.c.)"""
    if to == "disk" and owner is transfers.PinnedTransfer:
        owner = transfers.StagedDiskTransfer
    function = getattr(owner, name)

    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C, "copy_await", lambda *_: None)
            return function(*args)

    monkeypatch.setattr(owner, name, call)
    place = "cpu" if to == "cpu" else tmp_path
    assert wrong_after(3, "computation", "", to=place) > 0
    assert wrong_inputs_after(3, "computation", "", to=place) > 0


def test_memory_is_free_for_the_next_stage_while_the_device_has_not_done_anything() -> None:
    """The order is by streams: nobody waits, and nothing is kept back for a copy that is yet to be made."""
    count = 12
    stages = [Stage(k, ahead_by("neither", random.Random(0))) for k in range(count)]
    taken = {}
    for later in ("", "both"):
        where = ScheduleOffload("cpu", dict.fromkeys(range(count), MIB))
        runner = ChainRunner(stages, everything(count, later), offload=where)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        sim.lazy(True)
        x = torch.empty(4, device="cuda", requires_grad=True)
        out = runner(x).sum()
        assert torch.cuda.memory_allocated() < (3 if later else 2) * MIB
        out.backward()
        taken[later] = torch.cuda.memory_stats()["active_bytes.all.peak"] / MIB
        torch.cuda.synchronize()
        sim.lazy(False)
    assert 1 <= taken[""] < 1.1
    assert 2 <= taken["both"] < 2.1


def test_a_plans_host_memory_is_what_its_sets_take_and_not_rounded_up() -> None:
    where = ScheduleOffload("cpu", {0: 32 * MIB, 1: MIB})
    small, larger = (torch.zeros(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 40))
    sets = [where.transfer(small) for _ in range(33)]
    assert where._memory[0].nbytes == 33 * MIB
    of_a_larger_batch = where.transfer(larger)
    assert where._memory[0].nbytes == 73 * MIB
    del sets, of_a_larger_batch
    assert in_use(where) == 0


def test_a_host_that_can_lock_no_more_is_an_error_that_says_what_to_do() -> None:
    flat = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    sim.fail("cuMemHostAlloc", count=9)
    try:
        with pytest.raises(MemoryError, match="ulimit -l"):
            ScheduleOffload("cpu", {0: MIB}).transfer(flat)
    finally:
        sim.fail_clear()


def test_little_pinned_memory_is_used_again_and_again_on_the_way_to_a_disk(tmp_path: Path) -> None:
    host_memory(CUDA).trim()
    before = host_memory(CUDA).peak
    stages = [Stage(k, lambda: None) for k in range(40)]
    where = ScheduleOffload(str(tmp_path), dict.fromkeys(range(40), MIB))
    runner = ChainRunner(stages, everything(40, "both"), offload=where)
    runner(torch.empty(4, device="cuda", requires_grad=True)).sum().backward()
    assert host_memory(CUDA).peak <= max(before, 6 * MIB)
    assert where._space.disk.counts()[:2] == (40 * MIB, 40 * MIB)


def test_all_goes_when_the_pass_does() -> None:
    stages = [Stage(k, lambda: None) for k in range(3)]
    where = ScheduleOffload("cpu", dict.fromkeys(range(3), MIB))
    runner = ChainRunner(stages, everything(3, "both"), offload=where)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for fails in (True, False):
        x = torch.empty(4, device="cuda", requires_grad=True)
        stages[2].run_ahead = (lambda: 1 / 0) if fails else (lambda: None)
        try:
            out = runner(x)
            there = weakref.ref(out.untyped_storage())
            del out
        except ZeroDivisionError:
            there = None
        del x
        gc.collect()
        assert there is None or there() is None
        assert torch.cuda.memory_allocated() == before
        assert in_use(where) == 0


def test_a_stage_that_fails_leaves_no_copy_that_nobody_waits_for() -> None:
    stages = [Stage(k, lambda: None) for k in range(2)]
    stages[1].run_ahead = lambda: 1 / 0
    runner = ChainRunner(stages, everything(2), offload=ScheduleOffload("cpu", dict.fromkeys(range(2), MIB)))
    sim.lazy(True)
    with pytest.raises(ZeroDivisionError):
        runner(torch.empty(4, device="cuda", requires_grad=True))
    torch.cuda.current_stream().synchronize()
    assert torch.cuda.ExternalStream(_C.copy_counts(0)["stream_out"]).query()


@pytest.mark.parametrize("finishing", [False, True])
def test_a_copy_comes_before_what_the_tensors_stream_and_the_finishing_one_do(finishing: bool) -> None:
    source, others = (torch.full((8 * COUNT,), n, dtype=torch.uint8).pin_memory() for n in (1, 2))
    tensor, memory = source.to("cuda"), PinnedPool(CUDA)
    room = memory.take(MIB)
    torch.cuda.synchronize()
    sim.lazy(True)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        transfer = transfers.PinnedTransfer(tensor, room, one.cuda_stream)
    with torch.cuda.stream(other):
        transfer.settle()
    with torch.cuda.stream(other if finishing else one):
        tensor.copy_(others, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert torch.equal(room.memory, source)
    assert torch.equal(tensor.cpu(), others)


# ---- values ----------------------------------------------------------------------------------------------------------


class DeviceMeter(Meter):
    def see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cuda":
            super().see(storage)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_auto_checkpoint_on_a_device_offloads_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    place = "cpu" if to == "cpu" else tmp_path
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: Bandwidth(1e13, 1e13))
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual(64, 0.1) for _ in range(5))).cuda()
    sample = torch.randn(512, 64, device="cuda")
    model = copy.deepcopy(plain)

    def peak(of: nn.Module) -> int:
        of.zero_grad()
        standing = [*of.parameters(), sample]
        meter = DeviceMeter()
        meter.ignore(standing)
        with meter:
            of(sample).sum().backward()
        return bytes_of(standing) + meter.peak

    most = peak(plain)
    workspaces = workspace_bytes(sample.device)  # cuBLAS's, which the meter of storages does not see
    assert workspaces and workspace_bytes(sample.device) == 0
    overlapped, inputs = 0, set()
    for share in (0.45, 0.75, 0.9):
        budget = int(most * share) + workspaces
        memopt.auto_checkpoint(model, sample, memory_budget=budget, to=place)
        assert model.plan.offloaded | model.plan.inputs_offloaded, str(model.plan)
        inputs |= model.plan.inputs_offloaded
        where = "pinned memory of the host" if to == "cpu" else str(tmp_path)
        assert f"offloaded to {where}" in str(model.plan)
        overlapped += sum(op in ("sent", "fetch") for op, *_ in model.plan.operations)
        for _ in range(2):
            assert peak(model) + workspaces <= model.plan.peak_bytes <= budget
        for lazy in (False, True):
            sim.lazy(lazy)
            grads = []
            with sim.Compute():
                for module in (plain, model):
                    module.zero_grad()
                    torch.manual_seed(1)
                    module(sample).sum().backward()
                    grads.append([p.grad.cpu() for p in module.parameters()])
            sim.lazy(False)
            assert all(map(torch.equal, *grads))
    assert overlapped
    assert inputs


def test_where_the_host_has_no_room_for_what_would_be_offloaded_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: Bandwidth(1e13, 1e13))
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(64, 0.1) for _ in range(5))).cuda()
    sample = torch.randn(512, 64, device="cuda")
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB")
    budget = (model.plan.peak_bytes + model.plan.fixed_bytes) // 2
    memopt.auto_checkpoint(model, sample, memory_budget=budget, to="cpu")
    needed = sum(model.plan.offload_slots.values())
    assert model.plan.offloaded and needed
    memopt.auto_checkpoint(model, sample, memory_budget=budget, to="cpu", host_memory=needed)
    assert sum(model.plan.offload_slots.values()) <= needed and model.plan.offloaded
    memopt.auto_checkpoint(model, sample, memory_budget=budget, to="cpu", host_memory=needed // 8)
    assert not model.plan.offloaded and not model.plan.offload_slots and not model.plan.keeps_all
    assert model.plan.peak_bytes <= budget


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_the_speed_of_a_place_is_measured_once(tmp_path: Path, to: str) -> None:
    place = "cpu" if to == "cpu" else str(tmp_path)
    first = bandwidth(place, CUDA)
    assert min(first) > 0
    assert bandwidth(place, CUDA) is first


@pytest.mark.parametrize("later", ["", "both"])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_all_that_a_stage_saved_is_on_its_way_back_before_any_of_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, later: str
) -> None:
    events, begun = [], set()
    kind = transfers.PinnedTransfer if to == "cpu" else transfers.StagedDiskTransfer
    fetch, back = kind.fetch, kind.back

    def noted_fetch(self: transfers.StorageTransfer) -> None:
        if self not in begun:
            begun.add(self)
            events.append(("fetch", self))
        fetch(self)

    def noted_back(self: transfers.StorageTransfer) -> torch.Tensor:
        events.append(("back", self))
        return back(self)

    monkeypatch.setattr(kind, "fetch", noted_fetch)
    monkeypatch.setattr(kind, "back", noted_back)
    stages = [nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    where = ScheduleOffload("cpu" if to == "cpu" else str(tmp_path), dict.fromkeys(range(3), 4 * MIB))
    x = torch.empty(512, 512, device="cuda", requires_grad=True)
    ChainRunner(stages, everything(3, later), offload=where)(x).sum().backward()
    kinds = [kind for kind, _ in events]
    each = kinds.count("fetch") // 3
    assert each > 2
    first = 2 * each if later else each  # the next stage's with the last one's
    assert kinds[: first + 1] == ["fetch"] * first + ["back"]
    # What was saved last is wanted first.
    assert events[first][1] is events[0][1]


def test_what_was_read_is_copied_to_the_device_before_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the stage behind runs backward, the disk has read all of this one's set."""
    begun = []
    wanted_first: list[bool] = []
    copy_back, back = transfers.StagedDiskTransfer._copy_back, transfers.StagedDiskTransfer.back

    def noted(self: transfers.StagedDiskTransfer, *args: object) -> None:
        begun.append(self)
        copy_back(self, *args)

    def noted_back(self: transfers.StagedDiskTransfer) -> torch.Tensor:
        wanted_first.append(self not in begun)
        return back(self)

    def wait_for_the_disk(*_: object) -> None:
        while any(one._read is not None and not one._read.over() for one in reading):
            time.sleep(1e-3)

    reading: list[transfers.StagedDiskTransfer] = []
    fetch = transfers.StagedDiskTransfer.fetch

    def noted_fetch(self: transfers.StagedDiskTransfer) -> None:
        fetch(self)
        if self._read is not None:
            reading.append(self)

    monkeypatch.setattr(transfers.StagedDiskTransfer, "_copy_back", noted)
    monkeypatch.setattr(transfers.StagedDiskTransfer, "back", noted_back)
    monkeypatch.setattr(transfers.StagedDiskTransfer, "fetch", noted_fetch)

    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.tanh()
            return z.sin() * y.cos()

    where = ScheduleOffload(str(tmp_path), dict.fromkeys(range(2), 4 * MIB))
    x = torch.empty(512, 512, device="cuda", requires_grad=True)
    first, second = Two(), Two()
    first.register_full_backward_pre_hook(wait_for_the_disk)
    ChainRunner([first, second], everything(2, "both"), offload=where)(x).sum().backward()
    of_each = len(wanted_first) // 2
    assert of_each >= 2
    assert not any(wanted_first[of_each:])
