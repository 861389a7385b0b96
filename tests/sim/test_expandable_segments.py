"""Expandable segments: one reservation that grows by the virtual memory functions."""

import pytest
import torch

import memopt.sim

SIM = {"memory": "2GiB"}
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
MIB = 1 << 20


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def test_a_segment_grows_in_place_by_mapping():
    mallocs, creates = memopt.sim.calls("cudaMalloc"), memopt.sim.calls("cuMemCreate")
    first, second = block(50), block(50)
    segments = [s for s in torch.cuda.memory_snapshot() if s["total_size"] >= 100 * MIB]
    assert len(segments) == 1
    assert segments[0]["is_expandable"]
    assert second.data_ptr() == first.data_ptr() + 50 * MIB
    assert memopt.sim.calls("cudaMalloc") == mallocs
    assert memopt.sim.calls("cuMemCreate") > creates


def test_an_empty_cache_unmaps_and_gives_the_memory_back():
    used = memopt.sim.stats()["bytes"]
    kept, dropped = block(40), block(40)
    address, data = kept.data_ptr(), torch.arange(40 * MIB, dtype=torch.uint8)
    kept.copy_(data)
    del dropped
    torch.cuda.empty_cache()
    assert memopt.sim.stats()["bytes"] - used == 40 * MIB == torch.cuda.memory_reserved()
    assert kept.data_ptr() == address
    assert torch.equal(kept.cpu(), data)


def test_holes_merge_into_one_large_block_without_new_memory():
    blocks = [block(64) for _ in range(10)]
    del blocks[2:7]  # 320 MiB, side by side
    reserved = torch.cuda.memory_reserved()
    big = block(320)
    assert torch.cuda.memory_reserved() == reserved
    del blocks, big


def test_out_of_memory_leaves_data_intact():
    x = torch.randn(3_000_000)
    on_device = x.to("cuda")
    with pytest.raises(torch.OutOfMemoryError):
        block(3 << 10)
    assert torch.equal(on_device.cpu(), x)


def test_no_mapping_is_left_when_all_is_freed():
    before = memopt.sim.stats()
    x = [block(30), block(70)]
    del x
    torch.cuda.empty_cache()
    after = memopt.sim.stats()
    for what in ("bytes", "handles", "mappings"):
        assert after[what] == before[what], what
