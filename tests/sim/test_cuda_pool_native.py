"""CudaPool under PyTorch's native allocator: a torch.cuda.MemPool over an arena."""

import pytest
import torch
from cuda_pool_tests import *  # noqa: F403
from cuda_pool_tests import MIB, empty

import memopt.cuda

SIM = {"memory": "1GiB"}


def test_the_route_is_a_mempool_and_its_limits_are_said_once(run_script):
    done = run_script("""
import memopt.sim
memopt.sim.activate(memory="1GiB")
import warnings, torch, memopt.cuda
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first, second = memopt.cuda.CudaPool(), memopt.cuda.CudaPool()
print(first.stats()["route"], len(caught), caught[0].filename.endswith("script.py"), caught[0].message)
print(" ".join(torch.__version__.split(".")[:2]))
""")
    assert done.returncode == 0, done.stderr
    said, version = done.stdout.splitlines()
    assert said.startswith("MemPool 1 True CudaPool under PyTorch's own allocator is a torch.cuda.MemPool")
    assert ("not returned to the device" in said) == (tuple(map(int, version.split())) < (2, 13))


def test_torchs_statistics_count_the_tensors():
    pool = memopt.cuda.CudaPool("128MiB")
    before = torch.cuda.memory_allocated()
    t = pool.allocate("10MiB")
    assert torch.cuda.memory_allocated() - before == 10 * MIB
    del t
    assert torch.cuda.memory_allocated() == before
    pool.close()


def test_torchs_snapshot_has_the_segments():
    pool = memopt.cuda.CudaPool("128MiB")
    t = pool.allocate("30MiB")
    segments = [
        s
        for s in torch.cuda.memory_snapshot()
        if s["address"] <= t.data_ptr() < s["address"] + s["total_size"]
    ]
    assert [s["total_size"] for s in segments] == [30 * MIB]
    del t
    pool.close()


def test_a_use_mem_pool_inside_the_context_is_found_out():
    pool, torchs = memopt.cuda.CudaPool("128MiB"), torch.cuda.MemPool()
    with pool, torch.cuda.use_mem_pool(torchs):
        with pytest.raises(RuntimeError, match="use_mem_pool was entered inside"):
            pool.allocate("1MiB")
    assert pool.stats()["allocations"] == 0
    pool.close()


def test_more_pools_than_there_are_sources_are_refused():
    pools = []
    with pytest.raises(memopt.Error, match="close a pool"):
        for _ in range(65):
            pools.append(memopt.cuda.CudaPool())
    assert len(pools) == 64
    for pool in pools:
        pool.close()
    pool = memopt.cuda.CudaPool("32MiB")
    assert pool.allocate(MIB).numel() == MIB
    pool.close()
    assert empty(1).numel() == MIB
