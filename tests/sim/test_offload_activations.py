"""memopt.offload_activations on the simulated device: gradients, what is copied and when, what is on the device
meanwhile, and that the order holds whoever is ahead."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
from memopt import _C, sim
from memopt._offload import pinned_memory, transfers
from memopt._offload.activations import offload_activations
from memopt._offload.pinned_memory import PinnedPool, host_memory

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
CUDA = torch.device("cuda", 0)
MIB = 1 << 20
COUNT = MIB // 8
values = itertools.count(1)  # none twice: what is left in memory is not what is looked for


# ---- order ----------------------------------------------------------------------------------------------------------


class Moves(torch.autograd.Function):
    """Saves what a copy from the host brings, and gives it back to the host in its backward: copies are what the
    simulated device does at its own time."""

    @staticmethod
    def forward(ctx, x, source, seen, run_ahead):
        kept = torch.empty(COUNT, dtype=torch.int64, device=CUDA)
        kept.copy_(source, non_blocking=True)
        ctx.save_for_backward(kept)
        ctx.seen, ctx.run_ahead = seen, run_ahead
        run_ahead()
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        ctx.seen.copy_(kept, non_blocking=True)
        del kept
        ctx.run_ahead()
        return torch.empty_like(grad), None, None, None


def ahead_by(which: str, choose: random.Random) -> Callable[[], object]:
    streams = _C.copy_counts(0)
    computation, out, back = 1, streams["stream_out"], streams["stream_in"]
    return {
        "computation": lambda: sim.progress(-1, computation),
        "out": lambda: sim.progress(-1, out),
        "in": lambda: sim.progress(-1, back),
        "neither": lambda: None,
        "either": lambda: sim.progress(choose.randrange(4), choose.choice([computation, out, back])),
    }[which]


def wrong_after(steps: int, which: str, seed: int = 0, count: int = 6, to: str | Path = "cpu") -> int:
    """The number of tensors that came back changed."""
    run_ahead, pairs = ahead_by(which, random.Random(seed)), []
    torch.cuda.empty_cache()  # memory that is given again at once
    sim.lazy(True)
    for _ in range(steps):
        x = torch.empty(4, device=CUDA, requires_grad=True)
        with offload_activations(to=to, in_flight=MIB) as offload:
            for _ in range(count):
                source = torch.full((COUNT,), next(values)).pin_memory()
                seen = torch.full((COUNT,), -1).pin_memory()
                pairs.append((source, seen))
                x = Moves.apply(x, source, seen, run_ahead)
        if which in ("computation", "in"):
            torch.cuda.synchronize()  # else it could not begin the backward pass without the copies
        x.sum().backward()
        assert offload.last.bytes_out == offload.last.bytes_in == (count - 1) * MIB
    torch.cuda.synchronize()
    sim.lazy(False)
    return sum(not torch.equal(source, seen) for source, seen in pairs)


@pytest.mark.parametrize("which", ["computation", "out", "in", "neither", "either"])
def test_what_comes_back_is_what_went_whoever_is_ahead(which: str) -> None:
    for n in range((100 if SOAK else 4) if which == "either" else 1):
        assert wrong_after(3, which, SEED + n) == 0, f"seed {SEED + n}"


@pytest.mark.parametrize(
    ("owner", "name", "which"),
    [
        (transfers.PinnedTransfer, "settle", "computation"),
        (pinned_memory.IncomingBytes, "tensor", "computation"),
    ],
)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, which: str) -> None:
    """The test above fails without any one of them. (Those in C: tests/c/test_copies.c.)"""
    function, wait = getattr(owner, name), _C.copy_await

    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C, "copy_await", lambda *_: None)
            assert _C.copy_await is not wait
            return function(*args)

    monkeypatch.setattr(owner, name, call)
    assert wrong_after(3, which) > 0


@pytest.mark.parametrize("saved", [1, 2])  # tensors of the storage: all had it by then, or not
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_each_stream_that_wants_it_waits_for_it_and_keeps_its_memory(
    tmp_path: Path, to: str, saved: int
) -> None:
    streams = _C.copy_counts(0)
    source, others = (torch.full((COUNT,), n).pin_memory() for n in (1, 2))
    seen = torch.full((COUNT,), -1).pin_memory()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.empty(4, device=CUDA, requires_grad=True)
    with offload_activations(to="cpu" if to == "cpu" else tmp_path, in_flight=0):
        y = Saves.apply(x, *[source.to(CUDA)] * saved)
        Saves.apply(x, megabyte())
    torch.cuda.synchronize()
    sim.lazy(True)
    with torch.cuda.stream(one):
        first = y.grad_fn.saved_tensors
    with torch.cuda.stream(other):
        second = y.grad_fn.saved_tensors
        seen.copy_(second[0], non_blocking=True)
    sim.progress(-1, other.cuda_stream)  # as far as it may
    place = first[0].data_ptr()
    assert second[0].data_ptr() == place
    del first, second
    with torch.cuda.stream(one):
        taken = [torch.empty(COUNT, dtype=torch.int64, device=CUDA) for _ in range(4)]
        for tensor in taken:
            tensor.copy_(others, non_blocking=True)
    for _ in range(2):
        sim.progress(-1, one.cuda_stream)
        sim.progress(-1, streams["stream_in"])
    sim.progress(-1, one.cuda_stream)
    torch.cuda.synchronize()
    sim.lazy(False)
    assert torch.equal(seen, source)


# ---- values ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, d)), 0.1, self.training)
        return x + self.narrow(functional.gelu(self.wide(self.norm_2(x))))


class Blocks(nn.Module):
    def __init__(self, dim: int, depth: int, around: Callable | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.around = around or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


def step(model: nn.Module, x: torch.Tensor, context, backwards: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with context:
        loss = model(x).float().square().mean()
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    return [p.grad.cpu() for p in model.parameters()]


AROUND = {
    "plain": None,
    "memopt.checkpoint": lambda block, x: memopt.checkpoint(block, x, use_reentrant=False),
    "torch's": lambda block, x: torch_checkpoint(block, x, use_reentrant=False),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_gradients_are_the_plain_runs(around: str, autocast: bool, lazy: bool) -> None:
    model = Blocks(64, 3, AROUND[around]).to(CUDA)
    x = torch.randn(4, 32, 64, device=CUDA)
    cast = torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext()
    sim.lazy(lazy)
    with sim.Compute():
        expected = step(model, x, cast)
        offload = offload_activations(1024, in_flight=0)
        with contextlib.ExitStack() as both:
            both.enter_context(cast)
            got = step(model, x, both_of(cast, offload))
    assert all(map(torch.equal, got, expected))
    assert offload.last.bytes_out == offload.last.bytes_in > 0


@contextlib.contextmanager
def both_of(one, other):
    with one, other:
        yield


@pytest.mark.parametrize("in_flight", [0, "64KiB", None, "1GiB"])
def test_a_graph_that_is_kept_gives_all_again(in_flight: int | str | None) -> None:
    model, x = Blocks(64, 3).to(CUDA), torch.randn(4, 32, 64, device=CUDA)
    with sim.Compute():
        expected = step(model, x, contextlib.nullcontext(), 3)
        offload = offload_activations(1024, in_flight=in_flight)
        got = step(model, x, offload, 3)
    assert all(map(torch.equal, got, expected))
    assert offload.last.bytes_in == 3 * offload.last.bytes_out  # each backward pass needs it anew
    assert (offload.last.bytes_out == 0) == (in_flight == "1GiB")


def test_gradients_of_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).to(CUDA), []
    grads = []
    with sim.Compute():
        for context in (contextlib.nullcontext(), offload_activations(64, in_flight=0)):
            x = torch.ones(32, 64, device=CUDA, requires_grad=True)
            model.zero_grad()
            with context:
                (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
                loss = grad.square().sum()
            loss.backward()
            grads.append([p.grad.cpu() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_as_a_decorator_and_one_inside_another() -> None:
    model, x = Blocks(64, 3).to(CUDA), torch.randn(4, 32, 64, device=CUDA)
    with sim.Compute():
        expected = step(model, x, contextlib.nullcontext())
        offload = offload_activations(1024, in_flight=0)
        plain = model.forward
        model.forward = offload(plain)
        with offload:
            got = step(model, x, offload)
        assert all(map(torch.equal, got, expected))
    assert not offload._passes


@pytest.mark.parametrize("when", ["at once", "while it leaves", "away"])
def test_what_changed_in_place_is_refused_as_autograd_does(when: str) -> None:
    x = torch.ones(COUNT, device=CUDA, requires_grad=True)
    with offload_activations(1024, in_flight=0 if when == "away" else "1GiB"):
        y = (x * 1).exp()
        if when == "away":
            (torch.ones(COUNT, device=CUDA, requires_grad=True) * 1).exp().sum()
        z = y.sum()
        if when == "at once":
            y.add_(1)
    if when != "at once":
        y.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: .*is at version 1; expected version 0"
    ):
        z.backward()


# ---- what is copied -------------------------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad, *(None for _ in ctx.saved_tensors))


def saved_by(*makes: Callable[[], tuple[torch.Tensor, ...]], **options) -> offload_activations:
    """One more is saved behind them, which stays: its maker still holds it."""
    x = torch.ones(4, device=CUDA, requires_grad=True)
    with offload_activations(**{"in_flight": 0, **options}) as offload:
        for make in (*makes, lambda: (megabyte(),)):
            x = Saves.apply(x, *make())
    x.sum().backward()
    return offload


def megabyte() -> torch.Tensor:
    return torch.empty(MIB, dtype=torch.uint8, device=CUDA)


def test_each_storage_goes_once_however_many_views_are_saved() -> None:
    def views() -> tuple[torch.Tensor, ...]:
        whole = megabyte()
        return whole, whole[10:], whole.view(2, -1), whole.view(torch.float32).t()

    offload = saved_by(views, views)
    assert offload.last.bytes_out == offload.last.bytes_in == 2 * MIB


def test_what_lives_on_stays() -> None:
    parameter = nn.Parameter(torch.empty(512, 1024, device=CUDA))
    buffer = megabyte()
    offload = saved_by(lambda: (parameter, parameter.t(), buffer, buffer[5:]), lambda: (megabyte(),))
    assert offload.last.bytes_out == offload.last.bytes_in == MIB


def test_what_was_held_elsewhere_leaves_when_it_no_longer_is() -> None:
    held = [megabyte() for _ in range(3)]
    offload = saved_by(lambda: tuple(held), lambda: (held.clear(), megabyte())[1:], lambda: (megabyte(),))
    assert offload.last.bytes_out == offload.last.bytes_in == 5 * MIB


def test_what_is_wanted_while_it_is_still_here_is_not_brought_back() -> None:
    """Its copy has begun, and the one that wants it holds it."""
    tensor = megabyte()
    x = torch.ones(4, device=CUDA, requires_grad=True)
    with offload_activations(in_flight="2MiB") as offload:
        y = Saves.apply(x, tensor)
        storage = weakref.ref(tensor.untyped_storage())
        del tensor
        z = Saves.apply(Saves.apply(x, megabyte()), megabyte())
        y.sum().backward()
    z.sum().backward()
    assert storage() is None
    assert (offload.last.bytes_out, offload.last.bytes_in) == (MIB, 0)


def test_small_ones_stay() -> None:
    small = [lambda: (megabyte()[:10].clone(),)]
    assert saved_by(*small, min_size=11).last.bytes_out == 0
    assert saved_by(*small, min_size=10).last.bytes_out == 10


def test_what_is_wanted_first_is_never_copied() -> None:
    offload = saved_by(*[lambda: (megabyte(),)] * 9, in_flight="3MiB")
    assert offload.last.bytes_out == offload.last.bytes_in == 7 * MIB
    assert saved_by(*[lambda: (megabyte(),)] * 9, in_flight="10MiB").last.bytes_out == 0
    for keep in range(11):
        offload = saved_by(*[lambda: (megabyte(),)] * 9, in_flight="2MiB", keep=keep * MIB)
        # The last one is held by its maker.
        assert offload.last.bytes_out == offload.last.bytes_in == min(9, 10 - keep) * MIB


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_free_while_the_device_has_not_done_anything() -> None:
    """The order is by streams: nobody waits, and nothing is kept back for a copy that is yet to be made."""
    ahead_by("neither", random.Random(0))
    pairs = [(torch.full((COUNT,), n).pin_memory(), torch.full((COUNT,), -1).pin_memory()) for n in range(12)]
    host_memory(CUDA).reserve(64 * MIB)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    sim.lazy(True)
    syncs, before = sim.stats()["syncs"], torch.cuda.memory_allocated()
    x = torch.empty(4, device=CUDA, requires_grad=True)
    with offload_activations(in_flight=MIB):
        for source, seen in pairs:
            x = Moves.apply(x, source, seen, lambda: None)
    assert torch.cuda.memory_allocated() - before < 1.1 * MIB
    x.backward(torch.empty_like(x))
    assert sim.stats()["syncs"] == syncs
    taken = (torch.cuda.memory_stats()["active_bytes.all.peak"] - before) / MIB
    torch.cuda.synchronize()
    sim.lazy(False)
    assert 3 <= taken < 3.1  # made, leaving, here


def test_a_step_that_repeats_takes_no_more_host_memory() -> None:
    wrong_after(1, "neither", count=40)
    before, counts = host_memory(CUDA).nbytes, _C.copy_counts(0)
    assert wrong_after(3, "neither", count=40) == 0
    assert host_memory(CUDA).nbytes == before
    assert _C.copy_counts(0)["bytes_out"] - counts["bytes_out"] == 3 * 39 * MIB


def in_use() -> int:
    return sum(ring.held()[0] for _, ring in host_memory(CUDA)._pieces)


def test_all_goes_when_the_pass_does() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for fails in (False, True):
        x = torch.ones(4, device=CUDA, requires_grad=True)
        with contextlib.suppress(ZeroDivisionError), offload_activations(in_flight=0):
            for n in range(4):
                x = Saves.apply(x, megabyte())
                assert not fails or n < 3 or 1 / 0
        assert in_use() > 0 or fails
        del x
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert in_use() == 0


def test_a_backward_pass_that_stops_keeps_nothing() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.ones(4, device=CUDA, requires_grad=True)
    with offload_activations(in_flight="2MiB") as offload:
        for n in range(8):
            x = Stops.apply(x) if n == 5 else Saves.apply(x, megabyte())
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    assert offload.last.bytes_in > 0
    del x
    gc.collect()
    torch.cuda.synchronize()
    # The error is here before autograd's thread has let go of the task that raised it.
    for _ in range(1000):
        if torch.cuda.memory_allocated() == before and in_use() == 0:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before
    assert in_use() == 0
    assert offload.last._coming_bytes == 0


def test_what_finds_no_room_on_the_host_stays_and_a_warning_says_so() -> None:
    limit = host_memory(CUDA).nbytes
    fill = list(iter(lambda: host_memory(CUDA).take(MIB, limit), None))
    with pytest.warns(UserWarning, match="tensors that do not fit stay on the device") as seen:
        offload = saved_by(*[lambda: (megabyte(),)] * 4, host_memory=limit)
    assert len(seen) == 1
    assert offload.last.bytes_out == 0
    del fill
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert limit < 4 * MIB or saved_by(lambda: (megabyte(),), host_memory=limit).last.bytes_out == MIB


def test_a_host_that_can_pin_no_more_is_no_error() -> None:
    memory = PinnedPool(CUDA)
    sim.fail("cuMemHostAlloc")
    assert memory.take(MIB) is None
    sim.fail_clear()
    room = memory.take(MIB)
    assert room is not None
    assert memory.trim() == 0
    del room
    assert memory.trim() == 32 * MIB
    assert memory.nbytes == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (transfers.PinnedTransfer, "fetch"),
        (transfers.StagedDiskTransfer, "fetch"),
        (transfers.StagedDiskTransfer, "advance"),
    ],
)
def test_no_memory_ahead_of_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """A fetch ahead may find no room on the device; when its tensor is wanted there is some."""
    function = getattr(owner, name)
    refused = []

    def full_at_first(self: transfers.StorageTransfer) -> None:
        if len(refused) < 2:
            refused.append(self)
            raise torch.OutOfMemoryError
        function(self)

    x = torch.ones(4, device=CUDA, requires_grad=True)
    to = "cpu" if owner is transfers.PinnedTransfer else tmp_path
    with offload_activations(to=to, in_flight="2MiB") as offload:
        for _ in range(8):
            x = Saves.apply(x, megabyte())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full_at_first)
        x.sum().backward()
    assert refused
    assert offload.last.bytes_in == offload.last.bytes_out


def test_in_a_captured_graph_nothing_leaves() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(COUNT, device=CUDA, requires_grad=True)
    (x * 2).exp().sum().backward()
    with torch.cuda.graph(graph), offload_activations(in_flight=0) as offload:
        y = (x * 2).exp().tanh().sum()
        y.backward()
    assert offload.last.bytes_out == 0


def test_a_size_that_is_none_is_refused() -> None:
    for wrong in (
        {"min_size": "much"},
        {"min_size": -1},
        {"in_flight": "-1"},
        {"keep": "-1"},
        {"host_memory": -5},
    ):
        with pytest.raises(ValueError, match=r"size|negative"):
            offload_activations(**wrong)


# ---- to a disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["computation", "out", "in", "neither", "either"])
def test_through_pinned_memory_to_a_disk(tmp_path: Path, which: str) -> None:
    for n in range((100 if SOAK else 2) if which == "either" else 1):
        assert wrong_after(2, which, SEED + n, to=tmp_path) == 0, f"seed {SEED + n}"
    assert list(tmp_path.iterdir()) == []


def test_gradients_through_a_disk_are_the_plain_runs(tmp_path: Path) -> None:
    model, x = Blocks(64, 3).to(CUDA), torch.randn(4, 32, 64, device=CUDA)
    with sim.Compute():
        expected = step(model, x, contextlib.nullcontext(), 2)
        for in_flight in (0, "64KiB"):
            offload = offload_activations(1024, tmp_path, in_flight=in_flight)
            got = step(model, x, offload, 2)
            assert all(map(torch.equal, got, expected))
            assert offload.last.bytes_in == 2 * offload.last.bytes_out > 0
    gc.collect()
    assert in_use() == 0


def test_little_pinned_memory_is_used_again_and_again_on_the_way_to_a_disk(tmp_path: Path) -> None:
    host_memory(CUDA).trim()
    offload = saved_by(*[lambda: (megabyte(),)] * 64, to=tmp_path, in_flight=MIB)
    assert offload.last.bytes_out == offload.last.bytes_in == 64 * MIB
    assert host_memory(CUDA).peak <= 8 * MIB
    assert host_memory(CUDA).nbytes == 32 * MIB


def test_what_comes_back_ahead_of_time_keeps_to_the_limit_of_pinned_memory(tmp_path: Path) -> None:
    host_memory(CUDA).trim()
    assert host_memory(CUDA).nbytes == 0
    offload = saved_by(*[lambda: (megabyte(),)] * 16, to=tmp_path, in_flight="8MiB", host_memory="2MiB")
    assert offload.last.bytes_out == offload.last.bytes_in == 9 * MIB
    assert host_memory(CUDA).nbytes == 2 * MIB
    x = torch.ones(4, device=CUDA, requires_grad=True)
    with offload_activations(to=tmp_path, in_flight=0, host_memory="2MiB") as offload:
        y = Saves.apply(x, megabyte())
        Saves.apply(x, megabyte())
    offload._writes.make_room(0)
    taken = [host_memory(CUDA).take(MIB, 2 * MIB) for _ in range(2)]
    assert None not in taken
    y.sum().backward()
    assert host_memory(CUDA).nbytes == 3 * MIB  # what is wanted at once comes, with no more than it needs


@pytest.mark.parametrize("refuses", [True, False])  # the job, or what it comes to
def test_pinned_memory_that_a_full_disk_did_not_take_is_nobodys_until_the_copy_is_over(refuses: bool) -> None:
    class Full:
        def write(self, *_: object) -> Full:
            if refuses:
                raise OSError(28, "planted: no space left")
            return self

        def finish(self) -> None:
            raise OSError(28, "planted: no space left")

    gc.collect()  # pinned memory that goes waits for the device
    _C.copy_counts(0)
    memory = PinnedPool(CUDA)
    flat = torch.full((MIB,), 1, dtype=torch.uint8).pin_memory().to(CUDA)
    torch.cuda.synchronize()
    sim.lazy(True)
    staging = memory.take(MIB)
    place = staging.memory
    with pytest.raises(OSError, match="planted"):
        transfer = transfers.StagedDiskTransfer(
            flat, SimpleNamespace(disk=Full(), offset=0), memory, staging, 1
        )
        transfer.written()
    transfer = staging = None
    gc.collect()
    assert sum(ring.held()[0] for _, ring in memory._pieces) == 0
    place.fill_(2)  # as the next one that is given the memory does
    torch.cuda.synchronize()
    sim.lazy(False)
    assert place.unique().tolist() == [2]


def test_a_graph_that_goes_before_it_was_written_leaves_nothing(tmp_path: Path) -> None:
    sim.lazy(True)
    x = torch.ones(4, device=CUDA, requires_grad=True)
    with offload_activations(to=tmp_path, in_flight="2MiB"):
        for _ in range(8):
            x = Saves.apply(x, megabyte())
    del x
    gc.collect()
    torch.cuda.synchronize()
    assert in_use() == 0
    assert list(tmp_path.iterdir()) == []
