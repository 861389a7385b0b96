"""Facts of PyTorch's pluggable allocator that memopt's own rests on.

The allocator here is written in Python over the simulated runtime: slow, and enough to see what torch calls."""

import ctypes

import pytest
import torch

import memopt.sim

SIM = {"memory": "1GiB"}
MIB = 1 << 20

MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
RECORD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Allocator:
    """malloc and free by address, as change_current_allocator takes them, and what was asked of them."""

    def __init__(self) -> None:
        self.device = memopt.sim._control.device_library()
        self.asked: list[int] = []
        self.freed = 0
        self.recorded: list[tuple[int, int]] = []
        self._malloc, self._free, self._record = MALLOC(self.malloc), FREE(self.free), RECORD(self.record)

    def malloc(self, size: int, device: int, stream: int) -> int | None:
        self.asked.append(size)
        address = ctypes.c_uint64()
        if self.device.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
            return None
        return address.value

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        self.freed += 1
        assert self.device.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def record(self, address: int, stream: int) -> None:
        self.recorded.append((address, stream))

    def torch_allocator(self):
        address = [ctypes.cast(function, ctypes.c_void_p).value for function in (self._malloc, self._free)]
        return torch._C._cuda_customAllocator(*address)


@pytest.fixture(scope="module")
def pool_allocator():
    torch.cuda.init()
    return Allocator()


def test_a_pool_asks_its_allocator_by_segment_and_returns_all_when_dropped(pool_allocator):
    inner = pool_allocator.torch_allocator()
    pool = torch.cuda.MemPool(inner)
    asked = len(pool_allocator.asked)
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(MIB, device="cuda")
    elsewhere = torch.empty(MIB, device="cuda")
    assert pool_allocator.asked[asked:] == [20 * MIB]
    assert len(pool.snapshot()) == 1
    assert torch.cuda.memory_allocated() == 8 * MIB
    del x, elsewhere
    freed = pool_allocator.freed
    del pool
    torch.cuda.empty_cache()
    assert pool_allocator.freed == freed + 1


def test_no_memory_in_a_pool_is_torchs_own_out_of_memory(pool_allocator, fill):
    inner = pool_allocator.torch_allocator()
    pool = torch.cuda.MemPool(inner)
    ooms = torch.cuda.memory_stats()["num_ooms"]
    with torch.cuda.use_mem_pool(pool):
        blocks = fill(100)
        assert len(blocks) == 10
        assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
        blocks.clear()
        # Cached by the pool, free, and yet not to be had in one piece:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    del pool
    torch.cuda.empty_cache()
    assert torch.empty(500 * MIB, dtype=torch.uint8, device="cuda").numel() == 500 * MIB


def test_a_pool_without_an_allocator_of_its_own_is_private():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        address = x.data_ptr()
        del x
    outside = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert outside.data_ptr() != address
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert inside.data_ptr() == address
    del inside, pool, outside
