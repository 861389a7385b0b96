"""torch finds the device and its allocator, copies and kernels' launches work."""

import torch

import memopt.sim

SIM = {"memory": "2GiB", "compute_capability": "8.6", "multiprocessors": 84}
MIB = 1 << 20


def test_torch_sees_one_device_with_the_properties_it_was_activated_with():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == (8, 6)
    assert properties.multi_processor_count == 84
    assert properties.total_memory == 2 << 30
    assert properties.name.lower().startswith("simulated")
    assert torch.cuda.mem_get_info() == (2 << 30, 2 << 30)


def test_a_tensor_is_counted_and_its_segment_comes_from_the_device():
    used = memopt.sim.stats()["bytes"]
    x = torch.empty(MIB, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * MIB
    assert torch.cuda.memory_reserved() == 20 * MIB  # torch's size for a request of 1 to 10 MiB
    assert memopt.sim.stats()["bytes"] - used == 20 * MIB
    assert torch.cuda.mem_get_info()[0] == (2 << 30) - 20 * MIB - used
    del x
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert memopt.sim.stats()["bytes"] == used


def test_data_survives_the_way_to_the_device_and_back():
    host = torch.randn(1000, 1000)
    assert torch.equal(host.to("cuda").cpu(), host)
    assert torch.equal(host.pin_memory().to("cuda", non_blocking=True).cpu(), host)
    assert torch.equal(host.to("cuda").clone().cpu(), host)
    strided = host.to("cuda")[::2, ::3]
    assert strided.shape == (500, 334)


def test_calls_are_counted_by_name():
    before = memopt.sim.calls("cudaMalloc")
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert memopt.sim.calls("cudaMalloc") == before + 1
    del x


def test_a_kernel_launch_is_counted_and_changes_nothing():
    x = torch.zeros(1000).cuda()
    torch.cuda.synchronize()
    launches = memopt.sim.stats()["launches"]
    x += 1
    torch.cuda.synchronize()
    assert memopt.sim.stats()["launches"] == launches + 1
    assert x.cpu().sum() == 0


def test_every_symbol_that_this_torch_imports_is_there():
    import pathlib

    assert memopt.sim.coverage(pathlib.Path(torch.__file__).parent / "lib") == {}


def test_an_unknown_function_is_refused_by_name():
    import pytest

    with pytest.raises(ValueError, match="cudaNonsense"):
        memopt.sim.calls("cudaNonsense")
    with pytest.raises(ValueError, match="cudaNonsense"):
        memopt.sim.fail("cudaNonsense")


def test_nothing_of_nvidia_is_mapped():
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    cuda = [path for path in paths if "/libcud" in path or "/libcublas" in path or "/libnvidia" in path]
    assert cuda == []
