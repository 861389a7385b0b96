"""The calls that `memopt gpu-check` times: they are made, and nothing is left of them, whichever fails."""

from __future__ import annotations

import pytest

from memopt import sim
from memopt._gpu_check.driver_calls import Driver, map_once, use_events

SIM = {"memory": "1GiB", "blank": True}


def test_calls_are_counted_and_nothing_is_left_of_them():
    driver = Driver()
    for whole, pieces in ((False, 10), (True, 1)):
        before = {
            name: sim.calls(name) for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")
        }
        map_once(driver, 10, whole, {})
        made = {name: sim.calls(name) - count for name, count in before.items()}
        assert made == {"cuMemCreate": 10, "cuMemMap": 10, "cuMemSetAccess": pieces, "cuMemUnmap": pieces}
    use_events(driver, 10, {})
    assert sim.stats()["bytes"] == sim.stats()["handles"] == 0
    driver.close()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_call_that_fails_ends_it_with_its_name_and_nothing_is_left(call, after):
    driver = Driver()
    sim.fail(call, after=after, count=1)
    with pytest.raises(RuntimeError, match=call):
        map_once(driver, 10, False, {})
    sim.fail_clear()
    assert sim.stats()["bytes"] == sim.stats()["handles"] == 0
    driver.close()


def test_a_device_that_is_too_small_is_named():
    driver = Driver()
    with pytest.raises(RuntimeError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY, with 5.. of 1000 handles"):
        map_once(driver, 1000, False, {})
    assert sim.stats()["bytes"] == 0
    driver.close()
