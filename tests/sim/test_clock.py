"""The virtual clock from Python: the same program takes the same time in every run, and prices change it."""

from __future__ import annotations

import pytest
import torch

from memopt import sim

SIM = {"memory": "256MiB"}
US = 1000


def step() -> dict[str, int]:
    """Three launches and a wait; what they take."""
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    before = sim.clock()
    for _ in range(3):
        x.add_(1)
    torch.cuda.synchronize()
    after = sim.clock()
    return {name: after[name] - before[name] for name in after}


def test_the_same_step_takes_the_same_time_each_time():
    sim.lazy(True)
    step()
    first = step()
    assert [step() for _ in range(3)] == [first] * 3
    assert first["device"] >= 3 * sim.price("kernel")
    assert first["host"] >= first["device"] - 10 * US  # it waited for the device


def test_a_price_changes_the_time_and_the_old_one_is_returned():
    sim.lazy(True)
    step()
    cheap = step()
    before = sim.price("kernel", 1000 * US)
    try:
        dear = step()
    finally:
        assert sim.price("kernel", before) == 1000 * US
    # The device's time includes what it waits for the host before the first launch.
    assert dear["device"] - cheap["device"] == pytest.approx(3 * (1000 * US - before), rel=0.01)
    assert sim.price("cuMemCreate") == 29 * US
    assert sim.price("cudaLaunchKernel") == 2.5 * US  # of another library


def test_events_keep_virtual_time():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.zeros(1 << 20, device="cuda")
    sim.lazy(True)
    begin.record()
    x.zero_()
    x.copy_(x + 1)
    end.record()
    end.synchronize()
    assert 0 < begin.elapsed_time(end) < 1


def test_what_has_no_price_and_a_device_that_is_not_there_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'cuNothing' has no price: name a function"):
        sim.price("cuNothing")
    with pytest.raises(ValueError, match=r"'kernel' must not be negative, not -1 ns"):
        sim.price("kernel", -1)
    with pytest.raises(ValueError, match="no simulated device 1"):
        sim.clock(1)
