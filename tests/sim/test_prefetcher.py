"""memopt.data.Prefetcher to the simulated device: values, bytes on both sides, failures, positions."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memopt
from memopt import _C, sim
from memopt.data import Prefetcher
from memopt.data._prefetch.batch_transport import batch_memory

SIM = {"memory": "256MiB"}

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Pair = namedtuple("Pair", ["image", "label"])


def images(count: int = 4, seed: int = 0, size: int = 33) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size + 2), dtype=torch.uint8, generator=generator)


def on_the_host(x: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return x.float().div(255).sub(mean).div(std)


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaders_batches_arrive_and_are_the_hosts_bit_for_bit(workers: int, pin: bool) -> None:
    x, y = images(20), torch.arange(20)
    dataset = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=6, num_workers=workers, pin_memory=pin)
    batches = Prefetcher(loader, "cuda", widen=0, scale=True, mean=MEAN, std=STD)
    for _ in range(2):
        seen = list(batches)
        assert all(a.device == b.device == CUDA and not a._is_view() for a, b in seen)
        assert torch.equal(torch.cat([a.cpu() for a, _ in seen]), on_the_host(x))
        assert torch.equal(torch.cat([b.cpu() for _, b in seen]), y)
    assert len(batches) == 4


def test_every_dtype_order_and_size_arrives_as_it_was() -> None:
    dtypes = [
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.complex64,
        torch.bfloat16,
    ]
    dtypes += [torch.uint16, torch.float8_e4m3fn]
    made: dict[str, Any] = {str(d): (torch.rand(5, 7, 3) * 9).to(d) for d in dtypes}
    made["transposed"] = torch.rand(6, 5, 4, 3).permute(2, 0, 3, 1)
    made["channels last"] = torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last)
    made["gaps"] = torch.rand(9, 8)[::2, 1:5]
    made["expanded"] = torch.rand(1, 4).expand(5, 4)
    made["negated"] = torch.complex(torch.rand(4), torch.rand(4)).conj().imag
    made["conjugated"] = torch.complex(torch.rand(4), torch.rand(4)).conj()
    made["scalar"] = torch.tensor(3)
    made["empty"] = torch.empty(0, 4)
    made["sparse"] = torch.eye(3).to_sparse()
    made["of a graph"] = torch.ones(3, requires_grad=True) * 2
    made["pinned"] = torch.rand(3, 4).pin_memory()
    made["pinned, gaps"] = torch.rand(9, 8).pin_memory()[::2, 1:5]
    made["pinned, a part"] = torch.rand(9, 8).pin_memory()[3:5]
    made["there"] = torch.rand(3, device=CUDA)
    (got,) = Prefetcher([made], "cuda")
    for name, before in made.items():
        assert got[name].device == CUDA and got[name].dtype == before.dtype, name
        a, b = (
            t.detach().cpu().to_dense() if name == "sparse" else t.detach().cpu() for t in (got[name], before)
        )
        a, b = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (a, b))
        assert torch.equal(a.resolve_conj(), b.resolve_conj()), name
    for name in ("transposed", "channels last", "scalar", "pinned, a part"):
        assert got[name].stride() == made[name].stride()
    assert got["there"] is made["there"]


def test_a_batch_is_like_one_that_was_moved_by_hand() -> None:
    x = images()
    batch = {"pair": Pair(x, torch.arange(4)), "twice": [x, x], "text": "x"}
    (got,) = Prefetcher([batch], "cuda")
    assert type(got["pair"]) is Pair and got["text"] == "x"
    assert got["pair"].image is got["twice"][0] is got["twice"][1]
    version = got["pair"].image._version
    got["pair"].label.add_(1)
    assert got["pair"].image._version == version, "each tensor has a version of its own"
    assert got["pair"].label.untyped_storage().nbytes() == 32, "and a storage"
    with torch.inference_mode():
        it = iter(Prefetcher([{"x": x}, {"x": x}], "cuda", widen="x"))
        first = next(it)
    for one in (first, next(it)):
        assert not one["x"].is_inference()


def test_what_goes_by_a_method_of_its_own() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    (got,) = Prefetcher([packed], "cuda")
    assert type(got) is type(packed) and got.data.is_cuda and not got.batch_sizes.is_cuda

    class OnlyTo:
        def __init__(self, where: object) -> None:
            self.where = where

        def to(self, device: torch.device) -> OnlyTo:
            return OnlyTo(device)

    (moved,) = Prefetcher([OnlyTo(None)], "cuda")
    assert moved.where == CUDA


class MadeAtEachAccess(UserDict[str, Any]):
    def __getitem__(self, key: str) -> torch.Tensor:
        value = self.data[key]
        return torch.tensor(value, dtype=torch.int16) if isinstance(value, list) else value


@pytest.mark.parametrize("widen", [None, True])
def test_a_mapping_may_make_its_tensors_at_each_access(widen: bool | None) -> None:
    made = [{str(n): [n, step] for n in range(9)} for step in range(3)]
    for batch, before in zip(Prefetcher(map(MadeAtEachAccess, made), "cuda", widen=widen), made, strict=True):
        assert type(batch) is MadeAtEachAccess
        assert all(one.device == CUDA for one in batch.values())
        assert {key: one.tolist() for key, one in batch.items()} == before


def test_a_batch_of_many_tensors_is_ordered_once() -> None:
    """Two events, and two waits: for what home was given, and for the batch."""
    made = [{str(n): torch.full((n + 1,), step) for n in range(20)} for step in range(5)]
    list(Prefetcher(made, "cuda"))
    calls = {"cuMemcpyHtoDAsync_v2": 20, "cuEventRecord": 2, "cuStreamWaitEvent": 2}
    before = {call: sim.calls(call) for call in calls}
    seen = list(Prefetcher(made, "cuda"))
    for call, each in calls.items():
        assert sim.calls(call) - before[call] <= each * len(made), call
    assert sim.calls("cuMemcpyHtoDAsync_v2") - before["cuMemcpyHtoDAsync_v2"] == 100
    for batch, want in zip(seen, made, strict=True):
        assert all(torch.equal(batch[key].cpu(), one) for key, one in want.items())


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_a_quarter_of_the_bytes_travels_and_waits() -> None:
    x = images(8, size=254)  # 8 x 3 x 254 x 256: no power of two
    for widen, each in ((True, x.nbytes), (None, x.nbytes)):
        before = _C.copy_counts(0)["bytes_in"]
        batches = Prefetcher([x] * 6, "cuda", 2, widen=widen)
        it = iter(batches)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        for n in range(6):
            batch = next(it)
            held = torch.cuda.memory_allocated() - base
            assert held == min(5 - n, 2) * each + batch.nbytes
            del batch
        assert _C.copy_counts(0)["bytes_in"] - before == 6 * x.nbytes
        assert batches.pinned_bytes == 2 * x.nbytes
        assert torch.cuda.memory_allocated() == base
        # depth of them on their way, and the one that is widened, narrow and wide.
        assert torch.cuda.max_memory_allocated() - base == 3 * each + (4 * each if widen else 0)


def test_pinned_memory_is_exact_shared_and_goes_with_the_last_of_its_users() -> None:
    live = sim.stats()["host_allocations"]
    x = images(5, size=99)
    page = -(-x.nbytes // 4096) * 4096
    first, second = Prefetcher([x] * 3, "cuda", 3), Prefetcher([x] * 3, "cuda", 2)
    assert len(list(first)) == len(list(second)) == 3
    assert first.pinned_bytes == second.pinned_bytes == 3 * page
    del first
    assert second.pinned_bytes == 3 * page
    del second
    gc.collect()
    assert Prefetcher([], "cuda").pinned_bytes == 0
    assert sim.stats()["host_allocations"] == live


def test_batches_that_are_pinned_take_no_more_of_it_and_are_let_go() -> None:
    batches = Prefetcher([images().pin_memory() for _ in range(4)], "cuda")
    assert len(list(batches)) == 4 and batches.pinned_bytes == 0
    there: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(50):
            batch = images().pin_memory()
            there.add(batch)
            yield batch
            del batch

    batches = Prefetcher(loader(), "cuda", 2)
    most = max(len(there) for _ in batches)
    torch.cuda.synchronize()
    assert most <= 3 and len(there) <= 3 and len(batch_memory(CUDA)._flying) <= 3, "depth, and one"


def test_batches_of_all_sizes_have_pinned_memory_within_its_bound() -> None:
    sizes = [10, 200, 50, 199, 201, 320, 20, 330, 340, 5, 340, 341]
    made = [torch.full((size, 1000), size) for size in sizes]
    batches = Prefetcher(made, "cuda", 2)
    largest = 0
    for batch, before in zip(batches, made, strict=True):
        assert torch.equal(batch.cpu(), before)
    largest = -(-max(one.nbytes for one in made) // 4096) * 4096
    assert batches.pinned_bytes <= 2 * (2 * largest * 9 / 8 + 4096)
    assert len(list(Prefetcher([made[0]] * 5, "cuda", 2))) == 5
    assert batches.pinned_bytes <= 2 * largest * 9 / 8 + 4096, "the old ring went when nothing lay in it"


def test_nothing_is_left_after_a_break_a_close_or_an_error() -> None:
    def fails() -> Iterator[torch.Tensor]:
        yield images()
        raise KeyError("the loader's")

    base = torch.cuda.memory_allocated()
    batches = Prefetcher([images()] * 9, "cuda", 3)
    for _ in batches:
        break
    del _
    assert torch.cuda.memory_allocated() == base
    with Prefetcher((images() for _ in range(9)), "cuda", 3) as one:
        next(iter(one))
    assert torch.cuda.memory_allocated() == base
    gc.disable()
    it = iter(Prefetcher(fails(), "cuda", 3))
    assert next(it).is_cuda
    assert torch.cuda.memory_allocated() == base, "the exception that is kept holds no batch"
    with pytest.raises(KeyError, match="the loader's"):
        next(it)
    with pytest.raises(StopIteration):
        next(it)
    there = weakref.ref(it)
    del it
    assert there() is None, "nor the iterator"
    gc.enable()
    assert torch.cuda.memory_allocated() == base
    memory = batch_memory(CUDA)
    memory.settle()
    assert all(ring.held()[0] == 0 for _, ring in memory._pieces), "no slot is held"


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_loader_that_breaks_is_told_of_in_its_place_and_ctrl_c_at_once() -> None:
    """Neither loses a batch."""
    raised = iter([3, 5])
    interrupted = iter([True])

    class Breaks:
        def __init__(self) -> None:
            self.n = -1

        def __iter__(self) -> Breaks:
            return self

        def __next__(self) -> torch.Tensor:
            if self.n == 6 and next(interrupted, False):
                raise KeyboardInterrupt
            self.n += 1
            if self.n == 8:
                raise StopIteration
            if self.n in (3, 5):
                raise ValueError(f"number {next(raised)}")
            return torch.tensor([self.n])

    it = iter(Prefetcher(Breaks(), "cuda", 2))
    seen: list[object] = []
    while True:
        try:
            seen.append(next(it).item())
        except ValueError as error:
            seen.append(str(error))
        except KeyboardInterrupt:
            seen.append("interrupted")
        except StopIteration:
            break
    # Number 6 is there when 7 is asked for, which is when it is interrupted.
    assert seen == [0, 1, 2, "number 3", 4, "number 5", "interrupted", 6, 7]


def test_prefetching_does_not_run_out_of_memory_where_plain_loading_does_not() -> None:
    """There is room for one batch and a half beside what the program holds."""
    x = torch.zeros(40 * MIB, dtype=torch.uint8)
    x[0], x[-1] = 1, 2
    held = torch.empty(175 * MIB, dtype=torch.uint8, device=CUDA)
    batches = Prefetcher([x, x, x], "cuda", 2)
    seen = 0
    it = iter(batches)
    for _ in range(3):
        batch = next(it)
        assert batch[0].item() == 1 and batch[-1].item() == 2
        seen += 1
        del batch
    assert seen == 3
    more = torch.empty(50 * MIB, dtype=torch.uint8, device=CUDA)
    it = iter(Prefetcher([x, x + 1], "cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        next(it)
    del more
    assert next(it)[-1].item() == 2, "it is still the next"
    del held
    assert next(it)[-1].item() == 3


CALLS = ["cuMemHostAlloc", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"]
CALLS += ["cudaMalloc", "cuEventQuery"]


@pytest.mark.parametrize("call", CALLS)
def test_each_call_that_fails_leaves_nothing_and_loses_no_batch(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = [(images(2, seed=n, size=5), torch.arange(n, 9), torch.ones(n + 1).pin_memory()) for n in range(2)]
    base = torch.cuda.memory_allocated()
    failed = 0
    for after in range(200):
        gc.collect()
        torch.cuda.empty_cache()
        it = iter(Prefetcher(made, "cuda", 1, widen=0, scale=True, mean=MEAN, std=STD))
        before = sim.calls(call)
        sim.fail(call, after=after, count=1, code=2)
        seen: list[tuple[torch.Tensor, ...]] = []
        errors = 0
        while len(seen) < 2 and errors < 3:
            try:
                seen.append(next(it))
            except (memopt.Error, RuntimeError, MemoryError) as error:
                assert str(error) or isinstance(error, MemoryError)
                errors += 1
        reached = sim.calls(call) - before > after
        sim.fail_clear()
        for got, (x, *rest) in zip(seen, made, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, [on_the_host(x), *rest], strict=True)), (
                after
            )
        got = ()
        del seen, it
        assert torch.cuda.memory_allocated() == base
        failed += errors
        if not reached:
            break
    assert after > 0, f"{call} is called"


def test_a_host_that_can_pin_nothing_is_told_of_once_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [(images(seed=n), images(seed=n).pin_memory(), torch.arange(n)) for n in range(1, 5)]
    gc.collect()
    sim.fail("cuMemHostAlloc", after=0, count=1000, code=2)
    with caplog.at_level(logging.WARNING, "memopt"):
        batches = Prefetcher(made, "cuda", 2)
        seen = list(batches)
    sim.fail_clear()
    for got, want in zip(seen, made, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    assert len([r for r in caplog.records if "cannot pin" in r.message]) == 1
    assert batches.pinned_bytes == 0


def test_a_captured_stream_is_refused_and_the_batch_is_still_the_next() -> None:
    it = iter(Prefetcher([images(), images(seed=1)], "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(memopt.Error, match="leave offloading and prefetching out"):
            next(it)
    assert torch.equal(next(it).cpu(), images())


# ---- positions ------------------------------------------------------------------------------------------------------


class Counts:
    """As a StatefulDataLoader: its state is of the batch that it gave last. One object for ever."""

    def __init__(self) -> None:
        self.state = {"n": 0, "ended": False}

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.state["ended"]:
            self.state.update(n=0, ended=False)
        while self.state["n"] < 7:
            self.state["n"] += 1
            yield torch.tensor([self.state["n"] - 1])
        self.state["ended"] = True

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_position_is_behind_the_last_batch_given_out_not_the_last_one_fetched(depth: int) -> None:
    for stop in range(8):
        batches = Prefetcher(Counts(), "cuda", depth)
        it = iter(batches)
        given = [next(it).item() for _ in range(stop)]
        state = batches.state_dict()
        assert state == {"n": stop, "ended": False}
        again = Prefetcher(Counts(), "cuda", depth)
        again.load_state_dict(state)
        assert again.state_dict() == state
        given += [one.item() for one in again]
        assert given == list(range(7))
        assert again.state_dict() == {"n": 7, "ended": True}
        assert [one.item() for one in again] == list(range(7)), "the next epoch"
