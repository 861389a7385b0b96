"""Two devices under memopt's allocator: each reads and writes the other's memory, whichever was used first, as copies,
DataParallel and NCCL within one process do."""

import pytest
import torch
from torch import nn

import memopt

SIM = {"memory": "1GiB", "devices": 2}


@pytest.fixture(autouse=True, scope="module")
def memopts_allocator():
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def test_memory_of_before_the_second_device_was_used_is_within_its_reach():
    host = torch.arange(1_000_000.0)
    first = host.to("cuda:0")  # mapped when there was one device
    second = first.to("cuda:1")
    assert torch.equal(second.cpu(), host)
    first.zero_()
    first.copy_(second)
    assert torch.equal(first.cpu(), host)


def test_memory_of_afterwards_is_so_from_the_start():
    host = torch.arange(5_000_000.0)
    for here, there in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        one = host.to(here)
        other = torch.empty_like(host, device=there)
        other.copy_(one)
        assert torch.equal(other.cpu(), host)
        part = one[::3]
        other[::3].copy_(part)  # with gaps: by a kernel that reads the peer
        assert torch.equal(other.cpu(), host)


def test_what_a_layer_gives_goes_on_to_the_next_device_and_its_gradient_back():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    x = torch.randn(16, 64)
    plain(x).square().mean().backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    plain[0].to("cuda:0")
    plain[1].to("cuda:1")
    plain[1](plain[0](x.to("cuda:0")).to("cuda:1")).square().mean().backward()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    for p, wanted in zip(plain.parameters(), expected, strict=True):
        assert p.grad.device == p.device and p.grad.shape == wanted.shape
