"""Two devices: memories apart, copies between them, threads on both."""

import threading

import pytest
import torch

import memopt.sim

SIM = {"memory": "1GiB", "devices": 2}
MIB = 1 << 20


def test_both_devices_are_seen_and_have_memory_of_their_own():
    assert torch.cuda.device_count() == 2
    x = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_allocated(1) == 900 * MIB
    assert memopt.sim.stats(1)["bytes"] - memopt.sim.stats(0)["bytes"] == 900 * MIB
    y = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        torch.empty(200 * MIB, dtype=torch.uint8, device="cuda:1")
    del x, y


def test_a_tensor_moves_between_devices():
    host = torch.arange(1000.0)
    assert torch.equal(host.to("cuda:0").to("cuda:1").cpu(), host)
    assert torch.equal(host.to("cuda:1").to("cuda:0").cpu(), host)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:2")
    with pytest.raises(ValueError, match="2"):
        memopt.sim.stats(2)


def test_threads_allocate_and_record_streams_on_both_devices():
    errors = []

    def work(k: int) -> None:
        try:
            device = k % 2
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                for i in range(500):
                    size = (i * 7919 + k * 131) % 4_000_000 + 1
                    x = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
                    x.record_stream(torch.cuda.default_stream(device))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert errors == []
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 0
