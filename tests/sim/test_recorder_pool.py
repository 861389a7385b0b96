"""The recorder on memopt's allocator, whose history answers torch's names: the same recording as on torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt.cuda
from memopt._memory.recording import recorder
from memopt.sim._activation import wait_for_workers

SIM = {"memory": "256MiB"}


@pytest.fixture(scope="module", autouse=True)
def current_allocator():
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def test_bytes_modules_lines_and_categories_are_those_of_the_program():
    running = recorder.start("cuda")
    try:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            (model(torch.randn(32, 64, device="cuda")) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert wait_for_workers(60)  # autograd's threads drop what they hold after backward() has returned
        seen = running.recording()
        assert seen.source.startswith("history of memopt's allocator")
        stats = torch.cuda.memory_stats()
        assert int(seen.live_bytes()[-1]) == stats["requested_bytes.all.current"]
        assert running.position("cuda:0") == seen.events
        steps = [mark.event for mark in seen.marks if mark.kind == "step"]
        parameters = sum(p.nbytes for p in model.parameters())
        states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.is_cuda)
        for event in steps:
            at = seen.by_category(event)
            assert (at["parameters"], at["gradients"], at["optimizer"]) == (parameters, parameters, states)
        assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= {
            seen.modules[n] for n in seen.columns["module"].tolist()
        }
        assert int(seen.reserved_bytes[-1]) == torch.cuda.memory_reserved()
        assert any(row.text.startswith("(model(torch.randn") for row in seen.by_line())
    finally:
        running.stop()
