"""PyTorch's caching allocator on the simulated device: out of memory, retries, statistics, snapshots, limits."""

import pickle

import pytest
import torch

import memopt.sim

SIM = {"memory": "2GiB"}
MIB = 1 << 20


def test_what_does_not_fit_raises_out_of_memory_with_torchs_message():
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    message = str(error.value)
    assert "CUDA out of memory" in message
    assert "Tried to allocate 3.00 GiB" in message
    assert "total capacity of 2.00 GiB" in message
    assert torch.empty(MIB, device="cuda").numel() == MIB  # the process goes on


def test_the_device_holds_exactly_its_memory(fill):
    blocks = fill(100)
    assert len(blocks) == 20  # 2048 MiB
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    assert memopt.sim.stats()["bytes"] == 2000 * MIB
    blocks.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == 2 << 30


def test_a_refused_allocation_frees_the_cache_and_tries_again():
    x = torch.empty(1500 * MIB, dtype=torch.uint8, device="cuda")
    del x  # cached, so that the next one does not fit
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    y = torch.empty(1600 * MIB, dtype=torch.uint8, device="cuda")
    assert y.numel() == 1600 * MIB
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1


def test_statistics_agree_with_the_device():
    held = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (30, 40, 50)]
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 120 * MIB
    assert stats["reserved_bytes.all.current"] == memopt.sim.stats()["bytes"] == 120 * MIB
    del held[1]
    assert torch.cuda.max_memory_allocated() == 120 * MIB
    assert torch.cuda.memory_allocated() == 80 * MIB
    assert "120.0 MiB" in torch.cuda.memory_summary() or "122880 KiB" in torch.cuda.memory_summary()


def test_a_snapshot_tells_each_block_and_history_each_event(tmp_path):
    torch.cuda.memory._record_memory_history()
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    segments = torch.cuda.memory_snapshot()
    assert [s["total_size"] for s in segments if s["address"] == address] == [30 * MIB]
    del x
    file = tmp_path / "history.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = [event["action"] for event in pickle.loads(file.read_bytes())["device_traces"][0]]
    assert [a for a in actions if a in ("alloc", "free_requested")] == ["alloc", "free_requested"]


def test_an_observer_hears_of_out_of_memory():
    heard = []
    torch._C._cuda_attach_out_of_memory_observer(
        lambda device, size, total, free: heard.append((device, size))
    )
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    assert heard == [(0, 4 << 30)]


def test_a_memory_fraction_is_a_limit_below_the_device():
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        x = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        del x
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.empty(600 * MIB, dtype=torch.uint8, device="cuda").numel() == 600 * MIB


def test_memory_taken_away_is_memory_torch_cannot_have():
    memopt.sim.set_memory("1GiB")
    try:
        assert torch.cuda.mem_get_info()[0] == 1 << 30
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        memopt.sim.set_memory("2GiB")
    assert torch.empty(1200 * MIB, dtype=torch.uint8, device="cuda").numel() == 1200 * MIB


def test_the_peak_of_the_device_is_kept_and_can_be_reset():
    memopt.sim.reset_peak()
    before = memopt.sim.stats()["bytes"]
    x = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    assert memopt.sim.stats()["bytes_peak"] == before + 100 * MIB
    memopt.sim.reset_peak()
    assert memopt.sim.stats()["bytes_peak"] == before


def test_raw_allocations_and_host_statistics_work():
    address = torch.cuda.caching_allocator_alloc(MIB)
    assert torch.cuda.memory_allocated() == MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    pinned = torch.empty(10).pin_memory()
    assert pinned.is_pinned()
    assert torch.cuda.memory.host_memory_stats()["num_host_alloc"] >= 1
