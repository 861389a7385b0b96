"""CudaPool under memopt's own allocator: an arena of it."""

import pytest
import torch
from cuda_pool_tests import *  # noqa: F403
from cuda_pool_tests import MIB, inside

import memopt.cuda
import memopt.sim

SIM = {"memory": "1GiB"}


@pytest.fixture(scope="module", autouse=True)
def current():
    """Not when this is imported: names are collected in one process, which takes one allocator only."""
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    torch.empty(1, device="cuda")


def test_the_route_is_memopts():
    pool = memopt.cuda.CudaPool()
    assert pool.stats()["route"] == "memopt"
    pool.close()


def test_memory_that_a_second_stream_uses_is_written_by_nobody_else_before():
    pool = memopt.cuda.CudaPool("128MiB")
    ones, twos = (torch.full((100 * MIB,), value, dtype=torch.uint8).cuda() for value in (1, 2))
    torch.cuda.synchronize()
    memopt.sim.lazy(True)  # nothing runs before somebody waits for it
    stream = torch.cuda.Stream()
    t = pool.allocate("100MiB")
    with torch.cuda.stream(stream):
        t.copy_(ones)
    t.record_stream(stream)
    address = t.data_ptr()
    pool.free(t)
    u = pool.allocate("100MiB")
    u.copy_(twos)
    torch.cuda.current_stream().synchronize()  # without the record, this alone would run, and the other stream after it
    torch.cuda.synchronize()
    memopt.sim.lazy(False)
    assert bool((u.cpu() == 2).all())
    assert u.data_ptr() == address  # else nothing was put to the test
    pool.close()


def test_a_graph_captured_inside_the_context_has_its_own_memory():
    pool = memopt.cuda.CudaPool("128MiB")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = torch.ones(MIB, device="cuda")
    with pool, torch.cuda.graph(graph, stream=stream):
        y = x + x
    assert not inside(pool, y)
    del y, graph
    pool.close()
