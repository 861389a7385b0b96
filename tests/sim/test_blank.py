"""A blank device: reads give zeros, writes are dropped, so a card larger than the host costs no memory."""

import resource

import torch
from torch import nn

import memopt.sim

SIM = {"memory": "400GiB", "blank": True, "context": "450MiB"}
GIB = 1 << 30


def test_the_context_is_taken_off_the_free_memory():
    free, total = torch.cuda.mem_get_info()
    assert total == 400 * GIB
    assert free <= 400 * GIB - 450 * (1 << 20)


def test_copies_to_the_device_are_dropped_and_read_as_zeros():
    assert torch.ones(1000).cuda().cpu().sum() == 0
    assert torch.arange(8, device="cuda").cpu().tolist() == [0] * 8
    assert torch.ones(3).cuda().isnan().any().item() is False


def test_a_tensor_of_a_hundred_gibibytes_costs_the_host_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    x.zero_()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == 100 * GIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    del x


def test_a_step_of_a_large_model_runs():
    with torch.device("cuda"):
        model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(16)])  # 4 GiB of weights
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(16, 8192, device="cuda")).sum().backward()
    optimizer.step()
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert torch.cuda.max_memory_allocated() > 4 * weights  # weights, gradients, two moments
    assert memopt.sim.stats()["bytes_peak"] > 4 * weights
