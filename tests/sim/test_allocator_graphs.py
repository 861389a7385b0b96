"""CUDA graphs and private pools through memopt's allocator: a captured graph has its addresses until it is released."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import memopt
from memopt import _C, sim

SIM = {"memory": "256MiB"}
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


@pytest.fixture(autouse=True)
def all_is_given_back():
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stats = memopt.cuda.memory_stats()
    assert stats["live_blocks"] == 0
    assert sim.stats()["bytes"] == stats["held_bytes"] == 0
    assert _C.allocator_misuse()["unbalanced_pools"] == 0


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def captured(source: torch.Tensor, pool=None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that copies source to the tensor, by way of one that dies within the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        between = torch.empty_like(source)
        between.copy_(source)
        target = torch.empty_like(source)
        target.copy_(between)
        del between
    return graph, target


def test_replays_compute_on_the_values_of_the_moment():
    source = torch.arange(1000).cuda()
    graph, target = captured(source)
    for start in (0, 1000, 5):
        source.copy_(torch.arange(start, start + 1000))
        graph.replay()
        assert torch.equal(target.cpu(), torch.arange(start, start + 1000))


@pytest.mark.parametrize("count", [1000, 3 * MIB // 8, 30 * MIB // 8])
def test_what_a_graph_uses_is_nobody_elses_until_it_is_released(count: int):
    """Also what died within the capture, and what its outputs were, once they are dead: replays write there."""
    source = torch.arange(count).cuda()
    graph, target = captured(source)
    first = target.data_ptr()
    del target
    others = [block(count * 8) for _ in range(3)]
    for i, other in enumerate(others):
        other.copy_(torch.full((count * 8,), i + 1, dtype=torch.uint8))
    graph.replay()
    torch.cuda.synchronize()
    assert first not in [other.data_ptr() for other in others]
    for i, other in enumerate(others):
        assert bool((other.cpu() == i + 1).all())


def test_a_released_graphs_memory_serves_others():
    source = block(60 * MIB)
    graph, target = captured(source)
    del source
    with pytest.raises(torch.OutOfMemoryError):
        block(150 * MIB)
    graph.reset()
    del target, graph
    assert block(150 * MIB).numel() == 150 * MIB


def test_graphs_that_share_a_pool_reuse_what_the_first_left_and_keep_it_until_the_last_goes():
    source = torch.arange(MIB).cuda()
    first, a = captured(source)
    held = memopt.cuda.memory_stats()["held_bytes"]
    second, b = captured(source, pool=first.pool())
    # The second's target is new, but what died within the first serves it.
    assert memopt.cuda.memory_stats()["held_bytes"] <= held + 8 * MIB
    del a
    first.reset()
    gc.collect()
    block(8 * MIB).copy_(torch.ones(8 * MIB, dtype=torch.uint8))
    second.replay()
    assert torch.equal(b.cpu(), torch.arange(MIB))


def test_a_pool_handle_is_shared_before_any_capture():
    handle = torch.cuda.graph_pool_handle()
    source = torch.arange(1000).cuda()
    graphs = [captured(source, pool=handle) for _ in range(3)]
    source.add_(0)
    source.copy_(torch.arange(7, 1007))
    for graph, target in graphs:
        graph.replay()
        assert torch.equal(target.cpu(), torch.arange(7, 1007))


def test_a_tensor_that_outlives_its_graph_is_good_until_it_is_freed():
    source = torch.arange(MIB).cuda()
    graph, target = captured(source)
    graph.replay()
    graph.reset()
    del graph
    gc.collect()
    others = [block(8 * MIB).copy_(torch.ones(8 * MIB, dtype=torch.uint8)) for _ in range(4)]
    assert torch.equal(target.cpu(), torch.arange(MIB))
    del others


def test_a_capture_takes_only_the_streams_it_captures():
    source = torch.arange(1000).cuda()
    other = torch.cuda.Stream()
    outside = []

    def allocate() -> None:
        with torch.cuda.stream(other):
            outside.append(block(MIB))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        target = source.clone()
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    pools = {
        block["address"]: tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
    }
    assert pools[outside[0].data_ptr()] == (0, 0)
    assert pools[target.data_ptr()] == tuple(graph.pool()) != (0, 0)
    outside.clear()


def test_the_cache_is_emptied_beside_a_capture_and_what_that_uses_after_it():
    """No wait: nobody can tell when the capture will end."""
    stream = torch.cuda.Stream()
    dropped, kept = block(20 * MIB), block(4 * MIB)
    waits = memopt.cuda.memory_stats()["host_waits"]

    def empty() -> None:
        nonlocal dropped
        dropped.record_stream(stream)
        dropped = None
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            block(250 * MIB)

    thread = threading.Thread(target=empty)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        target = block(MIB)
        thread.start()
        thread.join()
        held = memopt.cuda.memory_stats()["held_bytes"]
        target.copy_(block(MIB))
    assert memopt.cuda.memory_stats()["host_waits"] == waits
    assert held >= 24 * MIB
    torch.cuda.empty_cache()
    assert memopt.cuda.memory_stats()["held_bytes"] < 16 * MIB
    assert kept.numel() == 4 * MIB


def fails(graph: torch.cuda.CUDAGraph, pool=None) -> None:
    """A capture with a synchronisation, which no capture allows; torch notices, and then CUDA at the end."""
    with pytest.raises(RuntimeError, match="during capture"), torch.cuda.graph(graph, pool=pool):
        between = block(3 * MIB)
        torch.cuda.synchronize()
        del between


def test_a_capture_that_fails_ends_its_pool():
    source = torch.arange(1000).cuda()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        fails(graph)
        del graph
        assert not _C.allocator_private_pools(0)
    graph, target = captured(source)
    graph.replay()
    assert torch.equal(target.cpu(), torch.arange(1000))


def test_a_copy_that_no_capture_allows_ends_its_pool():
    """Noticed by CUDA (torch 2.10), or by torch before CUDA does, and then the capture ends well (since 2.11)."""
    source = torch.arange(1000).cuda()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        target = source.clone()
        target.cpu()
    del target
    gc.collect()
    assert not _C.allocator_private_pools(0)


def test_a_capture_that_fails_in_a_shared_pool_leaves_the_pool_to_the_others():
    # In torch 2.11 the allocator of pinned memory stays in a failed capture's pool, and refuses that to another.
    pinned_memory_stays = torch.__version__.startswith("2.11.")
    source = torch.arange(MIB).cuda()
    first, target = captured(source)
    for _ in range(1 if pinned_memory_stays else 2):
        fails(torch.cuda.CUDAGraph(), pool=first.pool())
        gc.collect()
        assert list(_C.allocator_private_pools(0)) == [tuple(first.pool())]
    others = [block(8 * MIB).copy_(torch.ones(8 * MIB, dtype=torch.uint8)) for _ in range(4)]
    first.replay()
    assert torch.equal(target.cpu(), torch.arange(MIB))
    if not pinned_memory_stays:
        second, again = captured(source, pool=first.pool())
        second.replay()
        assert torch.equal(again.cpu(), torch.arange(MIB))
    assert all(bool((other.cpu() == 1).all()) for other in others)


def test_a_capture_ended_on_the_wrong_stream_goes_on_and_ends_on_the_right_one():
    source = torch.arange(1000).cuda()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        first = source.clone()
    with pytest.raises(RuntimeError, match="same stream"):
        graph.capture_end()
    with torch.cuda.stream(stream):
        second = first.clone()
        graph.capture_end()
    pool = _C.allocator_private_pools(0)
    assert list(pool) == [tuple(graph.pool())]
    graph.replay()
    assert torch.equal(second.cpu(), torch.arange(1000))


def test_an_out_of_memory_in_a_capture_is_one_and_the_next_capture_works():
    source = torch.arange(1000).cuda()
    with pytest.raises(torch.OutOfMemoryError):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            block(1 << 30)
    graph, target = captured(source)
    graph.replay()
    assert torch.equal(target.cpu(), torch.arange(1000))


def test_a_private_pool_without_a_capture_serves_its_thread_only():
    """As torch's own users of pools do (CUDA graph trees, symmetric memory)."""
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    inside = block(MIB)
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(block(MIB)))
    thread.start()
    thread.join()
    torch._C._cuda_endAllocateToPool(0, pool)
    address = inside.data_ptr()
    del inside
    outside = [block(MIB) for _ in range(4)]
    assert address not in [x.data_ptr() for x in (*outside, *elsewhere)]
    torch._C._cuda_releasePool(0, pool)
    assert _C.allocator_misuse()["unbalanced_pools"] == 0


def test_graphed_callables_run_forward_and_backward():
    module = torch.nn.Linear(8, 8).cuda()
    sample = torch.zeros(4, 8, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(module, (sample,))
    x = torch.zeros(4, 8, device="cuda", requires_grad=True)
    graphed(x).sum().backward()
    assert x.grad is not None and module.weight.grad.shape == (8, 8)
    torch._C._cuda_clearCublasWorkspaces()
