"""memopt.release() on a device: what torch's cache holds goes back to the device, also where an exception was kept."""

from __future__ import annotations

import pytest
import torch

import memopt
import memopt.sim
from memopt._offload.pinned_memory import host_memory

SIM = {"memory": "256MiB", "context": "8MiB"}
MIB = 1 << 20


def failing() -> None:
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    torch.empty(200 * MIB + len(y), dtype=torch.uint8, device="cuda")


def test_what_a_kept_exception_held_is_the_devices_again():
    torch.cuda.init()
    start = memopt.sim.stats()["bytes"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        failing()
    stays = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert memopt.sim.stats()["bytes"] - start > 128 * MIB
    found = memopt.release()
    assert caught.value.args and memopt.sim.stats()["bytes"] - start < 24 * MIB
    assert found.freed_bytes["cuda:0"] == 128 * MIB == found.returned_bytes["cuda:0"]
    assert found.after["cuda:0"].allocated_bytes == stays.nbytes
    assert "3.00 MiB in tensors" in str(found) and "stays" in str(found)


def test_workspaces_and_pinned_memory_go_too():
    a = torch.ones(64, 64, device="cuda")
    a @ a
    host = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    del host
    assert torch.cuda.memory_allocated() > a.nbytes
    pinned = memopt.sim.stats()["host_allocations"]
    memopt.release()
    assert torch.cuda.memory_allocated() == a.nbytes
    if hasattr(torch._C, "_host_emptyCache"):
        assert memopt.sim.stats()["host_allocations"] < pinned
    assert torch.equal((a @ a).shape and a, a)


def test_pinned_memory_of_offloading_goes_where_nothing_lies_in_it():
    memory = host_memory(torch.device("cuda", 0))
    lies = memory.take(40 * MIB)
    room = memory.take(48 * MIB)
    del room
    assert memory.nbytes == 88 * MIB
    memopt.release()
    assert memory.nbytes == lies.memory.nbytes == 40 * MIB
