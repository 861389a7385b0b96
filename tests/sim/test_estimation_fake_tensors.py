"""memopt.estimate() on fake tensors in a process that has a GPU and has trained on it, as a notebook's has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt

SIM = {"memory": "1GiB"}
ROWS, WIDTH = 64, 256


def chain():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


def fake(*arguments, **more):
    return memopt.estimate(*arguments, method="fake tensors", **more)


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_on_the_device_takes_what_it_takes_on_the_cpu(trained):
    expected = fake(chain(), torch.ones(ROWS, WIDTH), optimizer=torch.optim.Adam)
    model, sample = chain().cuda(), torch.ones(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(3):
            model(sample).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if trained:
        train()
    before = [(p.data_ptr(), p.device) for p in model.parameters()], len(optimizer.state)
    for found in (
        fake(model, sample, optimizer=torch.optim.Adam),
        fake(model, sample, optimizer=optimizer),
        fake(train),
    ):
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.15), found
        for category in ("parameters", "gradients", "optimizer"):
            assert found.by_category[category] == expected.by_category[category], found
    assert ([(p.data_ptr(), p.device) for p in model.parameters()], len(optimizer.state)) == before
    train()
