"""Planned failures of CUDA calls, as torch meets them."""

import pytest
import torch

import memopt.sim

SIM = {"memory": "1GiB"}
MIB = 1 << 20


def test_one_refused_allocation_is_retried_by_torch():
    torch.empty(1, device="cuda")
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    memopt.sim.fail("cudaMalloc")
    x = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert x.numel() == 300 * MIB
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1


def test_refused_for_good_is_out_of_memory_and_over_when_cleared():
    memopt.sim.fail("cudaMalloc", count=1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    memopt.sim.fail_clear()
    assert torch.empty(300 * MIB, dtype=torch.uint8, device="cuda").numel() == 300 * MIB


def test_calls_before_the_planned_one_pass():
    memopt.sim.fail("cudaMalloc", after=2, count=2)
    held = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    held.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
    assert len(held) == 3


def test_an_error_code_reaches_python_with_its_name():
    x = torch.zeros(4).cuda()
    memopt.sim.fail("cudaStreamSynchronize", code=719)  # cudaErrorLaunchFailure
    with pytest.raises(RuntimeError, match=r"LAUNCH_FAILED|launch failure"):
        x.cpu()
    assert x.cpu().sum() == 0


def test_each_failing_malloc_of_a_training_step_is_survived_or_reported():
    """Fail the n-th cudaMalloc, for every n: the step ends or raises out of memory, and leaks nothing."""

    def step() -> None:
        model = torch.nn.Linear(512, 512).cuda()
        model(torch.zeros(64, 512, device="cuda")).sum().backward()
        torch.cuda.synchronize()

    step()
    torch.cuda.empty_cache()
    held = memopt.sim.stats()["bytes"]
    for n in range(100):
        before = memopt.sim.calls("cudaMalloc")
        memopt.sim.fail("cudaMalloc", after=n, count=2)
        try:
            step()
            survived = True
        except torch.OutOfMemoryError:
            survived = False
        memopt.sim.fail_clear()
        calls = memopt.sim.calls("cudaMalloc") - before
        torch.cuda.empty_cache()
        assert memopt.sim.stats()["bytes"] == held
        if survived and calls <= n:
            break
    else:
        raise AssertionError("a step of a small layer made 100 allocations")
    assert n >= 1
