"""torch's tests of its own allocator (test_cuda.py), applied to memopt's where no other file here does: raw requests,
exact counts, fractions to the granule, delayed frees, backward on side streams, graphs beside each other, a fuzz of
contents. The device copies and computes nothing: contents are what was copied there."""

from __future__ import annotations

import gc
import os
import random
import threading

import pytest
import torch

import memopt
from memopt import sim

SIM = {"memory": "256MiB"}
MIB = 1 << 20
SEED = int(os.environ.get("MEMOPT_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
LONG = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def written(value: int, count: int) -> torch.Tensor:
    """On the device, by a copy that the stream does when it comes to it."""
    x = torch.empty(count, dtype=torch.int32, device="cuda")
    return x.copy_(torch.full((count,), value, dtype=torch.int32).pin_memory(), non_blocking=True)


def is_all(x: torch.Tensor, value: int) -> bool:
    return bool((x.cpu() == value).all())


def copy_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x)


def allocated() -> int:
    return torch.cuda.memory_allocated()


# ---- requests and counts ---------------------------------------------------------------------------------------------


def test_requests_without_a_tensor_are_counted_and_can_be_given_back():
    before = allocated()
    address = torch.cuda.caching_allocator_alloc(1)
    assert allocated() == before + 512
    torch.cuda.caching_allocator_delete(address)
    assert allocated() == before
    address = torch._C._cuda_cudaCachingAllocator_raw_alloc(3000, torch.cuda.current_stream().cuda_stream)
    assert allocated() == before + 3072
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    assert allocated() == before
    assert memopt.cuda.memory_stats()["failed_frees"] == 0


def test_a_tensor_of_a_kilobyte_is_active_for_as_long_as_it_lives():
    def active(what: str) -> int:
        return torch.accelerator.memory_stats()[f"active_bytes.all.{what}"]

    torch.accelerator.reset_peak_memory_stats()
    current, freed, peak = active("current"), active("freed"), torch.accelerator.max_memory_allocated()
    x = torch.randn(256, device="cuda")
    assert (active("current"), active("freed")) == (current + 1024, freed)
    assert torch.accelerator.max_memory_allocated() == peak + 1024
    del x
    torch.accelerator.empty_cache()
    assert (active("current"), active("freed")) == (current, freed + 1024)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == peak
    assert torch.accelerator.max_memory_reserved() == torch.accelerator.memory_reserved()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_names_that_torch_has_given_up_are_answered_too():
    x = block(3 * MIB)
    assert torch.cuda.memory_cached() == torch.cuda.memory_reserved() >= x.numel()
    assert torch.cuda.max_memory_cached() == torch.cuda.max_memory_reserved()
    del x
    torch.cuda.empty_cache()
    torch.cuda.reset_max_memory_allocated()
    torch.cuda.reset_max_memory_cached()
    assert torch.cuda.max_memory_allocated() == allocated()
    assert torch.cuda.max_memory_cached() == torch.cuda.memory_reserved()


# ---- out of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [800_000_000, 8_000_000_000])
def test_an_absurd_request_names_its_size_and_disturbs_no_other(gib: int):
    x = written(3, 1024)
    with pytest.raises(torch.OutOfMemoryError, match=rf"Tried to allocate {gib}\.00 GiB\. GPU 0 has a total"):
        torch.empty(gib << 30, dtype=torch.int8, device="cuda")
    assert is_all(x, 3) and is_all(copy_of(x), 3)


def test_a_fraction_holds_to_the_granule():
    total, granule = torch.cuda.get_device_properties(0).total_memory, 2 * MIB
    with pytest.raises(TypeError, match="float"):
        torch.cuda.set_per_process_memory_fraction(1)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            block(total // 2 + 1)
        x = block(total // 2 - granule)
        y = block(granule)  # and there is the end
        with pytest.raises(torch.OutOfMemoryError):
            block(1)
        del y
        assert block(granule).numel() == granule
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert x.numel() + block(total // 2).numel() == total - granule


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_frees_that_wait_for_a_stream_serve_requests_that_would_fail_else():
    sim.lazy(True)
    home, reader = torch.cuda.Stream(), torch.cuda.Stream()
    seen = torch.zeros(60, 1000, dtype=torch.int32).pin_memory()
    with torch.cuda.stream(home):
        for i in range(60):
            x = torch.empty(10 * MIB, dtype=torch.int32, device="cuda")  # six of them fill the device
            x[:1000].copy_(torch.full((1000,), i, dtype=torch.int32).pin_memory(), non_blocking=True)
            reader.wait_stream(home)
            with torch.cuda.stream(reader):
                seen[i].copy_(x[:1000], non_blocking=True)
            x.record_stream(reader)
            del x
            sim.progress(100, home.cuda_stream)  # the reader lags behind
    torch.cuda.synchronize()
    assert seen[:, 0].tolist() == list(range(60)) and bool((seen == seen[:, :1]).all())


def test_a_stream_may_be_recorded_through_a_view_that_begins_inside():
    sim.lazy(True)
    home, reader = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.empty(MIB - 3, dtype=torch.int32).pin_memory()
    sources = [torch.full((2 * MIB,), value, dtype=torch.int32).pin_memory() for value in (7, 8)]
    with torch.cuda.stream(home):
        whole = torch.empty_like(sources[0], device="cuda").copy_(sources[0], non_blocking=True)
        view = whole[MIB + 3 :]
        reader.wait_stream(home)
        with torch.cuda.stream(reader):
            out.copy_(view, non_blocking=True)
        view.record_stream(reader)
        del whole, view
        other = torch.empty_like(sources[1], device="cuda").copy_(
            sources[1], non_blocking=True
        )  # in its memory, but not yet
        sim.progress(100, home.cuda_stream)
    torch.cuda.synchronize()
    assert bool((out == 7).all()) and is_all(other, 8)
    assert memopt.cuda.memory_stats()["foreign_streams"] == 0


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return copy_of(x)

    @staticmethod
    def backward(context, gradient):
        return copy_of(gradient)


def test_backward_runs_on_the_streams_of_forward_and_each_gradient_arrives():
    """A block that is freed on the way is used again at once, on whichever stream asks next."""
    for i in range(100 if LONG else 10):
        streams = [torch.cuda.Stream() for _ in range(3)]
        here = torch.cuda.current_stream()
        gradient = torch.randn(300_000).cuda()
        leaf = torch.randn(300_000).cuda().requires_grad_()
        sim.lazy(True)
        x = leaf
        for stream in [*streams, *streams]:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.record_stream(stream)
                x = Copy.apply(x)
                block(MIB)
            here.wait_stream(stream)
            torch.cuda.current_stream().wait_stream(stream)
        x.record_stream(here)
        x.backward(gradient)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert torch.equal(leaf.grad.cpu(), gradient.cpu()), i
        assert torch.equal(x.detach().cpu(), leaf.detach().cpu()), i


def test_threads_with_streams_of_their_own_may_all_empty_the_cache():
    wrong: list[object] = []

    def work(number: int) -> None:
        choose = random.Random(SEED + number)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(300 if LONG else 40):
                    x = written(i, choose.randrange(1, MIB))
                    if choose.random() < 0.2:
                        torch.cuda.empty_cache()
                    if not is_all(x, i):
                        wrong.append((number, i))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [], f"MEMOPT_SEED={SEED}"


# ---- contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_what_was_written_is_there_until_it_is_freed_whatever_else_happens(late: bool):
    """Blocks of all sizes come and go on two streams, at the end of the device, with the cache emptied now and then."""
    print(f"MEMOPT_SEED={SEED}")
    torch.set_num_threads(1)
    choose = random.Random(SEED)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    live: list[tuple[torch.Tensor, torch.cuda.Stream, int]] = []
    failed = 0
    sim.lazy(late)
    for value in range(20_000 if LONG else 1500):
        if live and (choose.random() < 0.48 or sum(x.nbytes for x, _, _ in live) > 200 * MIB):
            x, stream, wrote = live.pop(choose.randrange(len(live)))
            with torch.cuda.stream(stream):
                if choose.random() < 0.3:
                    assert is_all(x[:1000], wrote), f"MEMOPT_SEED={SEED}, {value}"
            del x
        elif choose.random() < 0.02:
            torch.cuda.empty_cache()
        else:
            stream = choose.choice(streams)
            with torch.cuda.stream(stream):
                count = choose.choice([50, 3000, 300_000, 2_000_000, 5_000_000]) + choose.randrange(1000)
                try:
                    live.append((written(value, count), stream, value))
                except torch.OutOfMemoryError:
                    failed += 1
                    live = live[len(live) // 2 :]
    for x, stream, wrote in live:
        with torch.cuda.stream(stream):
            assert is_all(x, wrote), f"MEMOPT_SEED={SEED}"
    assert memopt.cuda.memory_stats()["failed_frees"] == 0


# ---- graphs ----------------------------------------------------------------------------------------------------------


def captured(static: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that copies static to its result, by way of two tensors that die within the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = copy_of(copy_of(copy_of(static)))
    return graph, result


def test_a_graphs_memory_is_counted_from_capture_to_the_last_use_of_its_result():
    static = written(5, 3 * MIB)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    live, held = allocated(), torch.cuda.memory_reserved()
    graph, y = captured(static)
    during = allocated() - y.nbytes
    assert (
        live <= during <= live + 1024
    )  # the random generator's two; what was between is free, and the graph's still
    assert torch.cuda.memory_reserved() >= held + 2 * y.nbytes
    counts = memopt.cuda.memory_stats()["live_blocks"]
    graph.replay()
    assert (allocated(), memopt.cuda.memory_stats()["live_blocks"]) == (during + y.nbytes, counts)
    assert is_all(y, 5)
    del graph
    gc.collect()
    assert is_all(y, 5)
    del y
    gc.collect()
    torch.cuda.empty_cache()
    assert (allocated(), torch.cuda.memory_reserved()) == (live, held)


def test_a_tensor_that_a_capture_uses_on_a_second_stream_is_kept_from_the_rest_of_the_capture():
    static, noise = written(1, MIB), written(77, MIB)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x = copy_of(static)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = copy_of(x)
        x.record_stream(side)
        address = x.data_ptr()
        del x
        others = [copy_of(noise) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]  # y may come after them
        torch.cuda.current_stream().wait_stream(side)
    for value in (1, 5):
        static.copy_(written(value, MIB))
        torch.cuda.synchronize()
        sim.lazy(True)
        graph.replay()
        torch.cuda.synchronize()
        sim.lazy(False)
        assert is_all(y, value)
        assert all(is_all(other, 77) for other in others)


def test_graphs_with_pools_of_their_own_replay_at_the_same_time():
    statics = [written(n, MIB) for n in range(3)]
    torch.cuda.synchronize()
    graphs = [captured(static) for static in statics]
    streams = [torch.cuda.Stream() for _ in graphs]
    choose = random.Random(SEED)
    for i in range(20 if LONG else 3):
        for n, static in enumerate(statics):
            static.copy_(written(10 * i + n, MIB))
        torch.cuda.synchronize()
        sim.lazy(True)
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for _ in range(8):
            sim.progress(1, choose.choice(streams).cuda_stream)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert all(is_all(y, 10 * i + n) for n, (_, y) in enumerate(graphs)), f"MEMOPT_SEED={SEED}"


# ---- history ---------------------------------------------------------------------------------------------------------


def test_memory_that_comes_and_goes_is_in_the_history_with_who_asked():
    def who_asks() -> torch.Tensor:
        return block(9 * MIB)

    def who_gives_back() -> None:
        torch.cuda.empty_cache()

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        x = who_asks()
        size = x.numel()
        del x
        who_gives_back()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    taken = [e for e in events if e["action"] in ("segment_alloc", "segment_map")]
    given = [e for e in events if e["action"] in ("segment_free", "segment_unmap")]
    assert sum(e["size"] for e in taken) == sum(e["size"] for e in given) >= size
    assert any("who_asks" in frame["name"] for frame in taken[0]["frames"])
    assert any("who_gives_back" in frame["name"] for frame in given[-1]["frames"])
