"""Offload inside a schedule, to pinned host memory, on the simulated device: the order of copies and computation, what
is on the device meanwhile, and the plain run's gradients."""

from __future__ import annotations

import copy
import gc
import os
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from memopt import sim
from memopt.checkpointing import auto_checkpoint as automatic
from memopt.checkpointing import offload
from memopt.checkpointing.bandwidth import Bandwidth, bandwidth
from memopt.checkpointing.chain_offload import ChainOffload, Pinned
from memopt.checkpointing.chain_runner import ChainRunner
from memopt.checkpointing.stage_costs import Meter, bytes_of
from memopt.checkpointing.workspaces import workspace_bytes
from tests.residual import Residual

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
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


AHEAD = {
    # The computation overtakes the copies, or they it: each as far as it may without waiting for the other.
    "computation": lambda choose: sim.progress(-1, 1),
    "copies": lambda choose: sim.progress(-1, offload.stream_of(torch.device("cuda", 0)).cuda_stream),
    "neither": lambda choose: None,
    "either": lambda choose: sim.progress(
        choose.randrange(4), choose.choice([1, offload.stream_of(torch.device("cuda", 0)).cuda_stream])
    ),
}


def wrong_after(steps: int, ahead: str, later: str, seed: int = 0) -> int:
    """How many tensors came back as something else than they were."""
    choose = random.Random(seed)
    stages = [Stage(k, lambda: AHEAD[ahead](choose)) for k in range(5)]
    where = ChainOffload("cpu", dict.fromkeys(range(5), MIB))
    runner = ChainRunner(stages, everything(5, later), offload=where)
    sim.lazy(True)
    for _ in range(steps):
        x = torch.empty(4, device="cuda", requires_grad=True)
        out = runner(x).sum()
        if ahead == "computation":
            torch.cuda.synchronize()  # else it could not begin the backward pass without the copies
        out.backward()
    torch.cuda.synchronize()
    sim.lazy(False)
    assert where.made == 1
    return sum(not torch.equal(source, seen) for stage in stages for source, seen in stage.pairs)


@pytest.mark.parametrize("later", ["", "both"])
@pytest.mark.parametrize("ahead", AHEAD)
def test_what_comes_back_is_what_went_whoever_is_ahead(ahead: str, later: str) -> None:
    for n in range((100 if SOAK else 4) if ahead == "either" else 1):
        assert wrong_after(3, ahead, later, SEED + n) == 0, f"seed {SEED + n}"


def without_wait_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """That function no longer makes a stream wait."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            patch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
            return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name", "ahead"),
    [
        (offload.Offload, "keep", "copies"),
        (offload.Offload, "finish", "computation"),
        (offload.Arrival, "__init__", "copies"),
        (offload.Arrival, "tensor", "computation"),
    ],
)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, ahead: str) -> None:
    """The test above fails without any one of them."""
    without_wait_in(monkeypatch, owner, name)
    assert wrong_after(3, ahead, "") > 0


def test_a_tensor_that_was_fetched_and_is_not_wanted_keeps_its_memory_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fault in (False, True):
        if fault:
            without_wait_in(monkeypatch, offload.Arrival, "__del__")
        host = torch.full((COUNT,), 1).pin_memory()
        source, seen = torch.full((COUNT,), 2).pin_memory(), torch.full((COUNT,), -1).pin_memory()
        sim.lazy(True)
        fetched = offload.OnHost(host, torch.device("cuda", 0))
        fetched.fetch()
        del fetched
        other = torch.empty(COUNT, dtype=torch.int64, device="cuda")  # in the same memory
        other.copy_(source, non_blocking=True)
        sim.progress(-1, 1)
        sim.progress()
        seen.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert torch.equal(seen, source) != fault


def test_memory_is_free_for_the_next_stage_while_the_device_has_not_done_anything() -> None:
    """The order is by streams: nobody waits, and nothing is kept back for a copy that is yet to be made."""
    count = 12
    choose = random.Random(0)
    stages = [Stage(k, lambda: AHEAD["neither"](choose)) for k in range(count)]
    taken = {}
    for later in ("", "both"):
        runner = ChainRunner(
            stages, everything(count, later), offload=ChainOffload("cpu", dict.fromkeys(range(count), MIB))
        )
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


def test_a_step_that_repeats_takes_no_more_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = Pinned.exactly
    monkeypatch.setattr(Pinned, "exactly", lambda nbytes: made.append(nbytes) or build(nbytes))
    monkeypatch.delattr(Pinned, "__init__")  # nothing finds no room in its slot
    assert wrong_after(4, "neither", "both") == 0
    assert made == [5 * MIB]


def test_a_plans_host_memory_is_not_rounded_up_to_a_power_of_two() -> None:
    def pinned_by_torch() -> int:
        return torch.cuda.host_memory_stats()["allocated_bytes.current"]

    before, where = pinned_by_torch(), ChainOffload("cpu", {0: 32 * MIB, 1: MIB})
    slot = where.slot(0)
    assert pinned_by_torch() == before
    assert slot.place.memory.is_pinned()
    assert slot.place.memory.nbytes == slot.place.memory.untyped_storage().nbytes() == 33 * MIB
    larger = torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")
    place, _ = slot.take(larger.nbytes)  # of a larger batch: taken each time, so from torch's cache
    assert pinned_by_torch() == before + 64 * MIB
    assert place.memory.is_pinned()


def test_all_goes_when_the_pass_does() -> None:
    stages = [Stage(k, lambda: None) for k in range(3)]
    where = ChainOffload("cpu", dict.fromkeys(range(3), MIB))
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
        assert all(len(free) == where.made == 1 for free in where._free.values())


def test_a_stage_that_fails_leaves_no_copy_that_nobody_waits_for() -> None:
    stages = [Stage(k, lambda: None) for k in range(2)]
    stages[1].run_ahead = lambda: 1 / 0
    runner = ChainRunner(stages, everything(2), offload=ChainOffload("cpu", dict.fromkeys(range(2), MIB)))
    sim.lazy(True)
    with pytest.raises(ZeroDivisionError):
        runner(torch.empty(4, device="cuda", requires_grad=True))
    torch.cuda.current_stream().synchronize()
    assert offload.stream_of(torch.device("cuda", 0)).query()


@pytest.mark.parametrize("finishing", [False, True])
def test_a_copy_comes_before_what_the_tensors_stream_and_the_finishing_one_do(finishing: bool) -> None:
    source, others = torch.full((COUNT,), 1).pin_memory(), torch.full((COUNT,), 2).pin_memory()
    tensor = source.to("cuda")
    torch.cuda.synchronize()
    sim.lazy(True)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    copies = offload.Offload()
    with torch.cuda.stream(one):
        kept = copies.keep(tensor, held=True)
    with torch.cuda.stream(other):
        copies.finish()
    with torch.cuda.stream(other if finishing else one):
        tensor.copy_(others, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert torch.equal(kept.host, source)
    assert torch.equal(tensor.cpu(), others)


# ---- values ----------------------------------------------------------------------------------------------------------


class DeviceMeter(Meter):
    def see(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cuda":
            super().see(storage)


def test_auto_checkpoint_on_a_device_offloads_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "bandwidth", lambda *_: Bandwidth(1e13, 1e13, True))
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
    overlapped = 0
    for share in (0.75, 0.9):
        budget = int(most * share) + workspaces
        memopt.auto_checkpoint(model, sample, memory_budget=budget, offload="cpu")
        assert model.plan.offloaded, str(model.plan)
        assert "offloaded to pinned memory of the host" in str(model.plan)
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


def test_the_speed_of_a_device_is_measured_once() -> None:
    device = torch.device("cuda", 0)
    first = bandwidth("cpu", device)
    assert first.beside and min(first.out, first.back) > 0
    assert bandwidth("cpu", device) is first


@pytest.mark.parametrize("later", ["", "both"])
def test_all_that_a_stage_saved_is_on_its_way_back_before_any_of_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    events = []
    fetch, back = offload.OnHost.fetch, offload.OnHost.back

    def noted_fetch(self: offload.OnHost) -> None:
        if self._arrival is None:
            events.append(("fetch", self.host.data_ptr()))
        fetch(self)

    def noted_back(self: offload.OnHost) -> torch.Tensor:
        events.append(("back", self.host.data_ptr()))
        return back(self)

    monkeypatch.setattr(offload.OnHost, "fetch", noted_fetch)
    monkeypatch.setattr(offload.OnHost, "back", noted_back)
    stages = [nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    where = ChainOffload("cpu", dict.fromkeys(range(3), 4 * MIB))
    x = torch.empty(512, 512, device="cuda", requires_grad=True)
    ChainRunner(stages, everything(3, later), offload=where)(x).sum().backward()
    kinds = [kind for kind, _ in events]
    each = kinds.count("fetch") // 3
    assert each > 2
    first = 2 * each if later else each  # the next stage's with the last one's
    assert kinds[: first + 1] == ["fetch"] * first + ["back"]
    # What was saved last is wanted first.
    assert events[first][1] == events[0][1]
