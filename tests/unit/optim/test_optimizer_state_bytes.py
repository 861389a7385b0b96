"""The bytes of an optimizer's state are known before its first step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import memopt
import memopt.optim
from memopt.optim._state_bytes import state_bytes


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 5))


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 1.0, "amsgrad": True}])


KINDS = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
    "two groups": two_groups,
    "memopt.AdamW": lambda p: memopt.optim.AdamW(p),
    "memopt.SGD": lambda p: memopt.optim.SGD(p, lr=0.1, momentum=0.9),
    "8 bits": lambda p: memopt.optim.AdamW(p, state_bits=8),
    "4 bits": lambda p: memopt.optim.AdamW(p, state_bits=4),
    "factored": lambda p: memopt.optim.AdamW(p, state_bits=4, factored=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_after_a_step(kind: str) -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    optimizer = KINDS[kind](list(net.parameters()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before, groups = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append(2))
    foretold = state_bytes(optimizer)
    everywhere.remove()
    assert not optimizer.state and not calls
    assert optimizer.state_dict() == groups
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    for p in net.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    there = {
        t.untyped_storage()._cdata: t
        for s in optimizer.state.values()
        for t in s.values()
        if torch.is_tensor(t)
    }
    assert foretold == state_bytes(optimizer) == sum(t.untyped_storage().nbytes() for t in there.values())


def test_codes_of_4_bits_are_of_parameters_in_one_order() -> None:
    """Those in another order have 8 bits."""
    net = nn.Conv2d(32, 64, 3)
    plain = state_bytes(memopt.optim.AdamW(net.parameters(), state_bits=4))
    net = net.to(memory_format=torch.channels_last)
    optimizer = memopt.optim.AdamW(net.parameters(), state_bits=4)
    foretold = state_bytes(optimizer)
    assert foretold - plain == 32 * 64 * 9
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert foretold == state_bytes(optimizer)


def test_what_cannot_be_foretold_is_said_with_the_way_out() -> None:
    optimizer = torch.optim.LBFGS(model().parameters())
    with pytest.raises(ValueError, match=r"LBFGS has no state yet.*closure.*give the state's bytes"):
        state_bytes(optimizer)


def test_auto_checkpoint_counts_them() -> None:
    net, x = model(), torch.randn(512, 64)  # the passes take more than the optimizer's step
    optimizer = torch.optim.AdamW(net.parameters())
    plans = [
        memopt.auto_checkpoint(net, x, memory_budget="1GiB", optimizer=given).plan
        for given in (None, optimizer, state_bytes(optimizer), "1MiB")
    ]
    assert [plan.peak_bytes - plans[0].peak_bytes for plan in plans] == [
        0,
        state_bytes(optimizer),
        state_bytes(optimizer),
        2**20,
    ]
    with pytest.raises(ValueError, match="size"):
        memopt.auto_checkpoint(net, x, memory_budget="1GiB", optimizer="much")
