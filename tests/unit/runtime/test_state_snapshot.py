"""Snapshots of what running a model changes: in place, bit for bit, as often as asked."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

from memopt._runtime.state_snapshot import (
    BufferValues,
    GradientTensors,
    Modes,
    ModuleTensors,
    RandomState,
    preserve_state,
    refill,
)


class Counting(nn.Module):
    """Changes a buffer in place, another by a new one, and a third by way of `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        for name in ("calls", "replaced", "hidden"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        self.hidden.data.add_(1)
        return self.norm(self.linear(x)) + random.random() + float(numpy.random.rand()) + torch.rand(())


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_a_run_of_a_model_leaves_nothing():
    model = Counting()
    model.linear.bias.requires_grad_(False)
    gradient = torch.ones(4, 4)
    model.linear.weight.grad = gradient
    buffers = [(b, b.clone(), b._version) for b in model.buffers()]
    start = RandomState()
    expected = draws()
    start.restore()
    with preserve_state(model):
        model.requires_grad_(True)
        model.linear.weight.grad = None
        model(torch.randn(8, 4)).sum().backward()
    assert draws() == expected
    assert model.linear.weight.grad is gradient and torch.equal(gradient, torch.ones(4, 4))
    assert not model.linear.bias.requires_grad and model.linear.bias.grad is None
    for now, (buffer, value, version) in zip(model.buffers(), buffers, strict=True):
        assert now is buffer and torch.equal(now, value)
        # What counted no change counts none on its way back, for graphs that have saved it.
        assert now._version == version or now is model.calls or now is model.norm.num_batches_tracked


def test_it_leaves_nothing_where_the_run_fails_either():
    model = Counting()
    with pytest.raises(KeyError), preserve_state(model):
        model(torch.randn(8, 4))
        raise KeyError
    assert float(model.calls) == float(model.replaced) == float(model.hidden) == 0


def test_a_graph_that_has_saved_a_buffer_goes_on():
    buffer, x = torch.tensor(3.0), torch.ones((), requires_grad=True)
    module = nn.Module()
    module.register_buffer("kept", buffer)
    out = x * buffer
    with preserve_state(module):
        buffer.data.mul_(2)
    out.backward()
    assert float(x.grad) == 3


def test_buffers_of_inference_mode():
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("made", torch.zeros(3))
    with preserve_state(module), torch.inference_mode():
        module.made.add_(1)
    assert torch.equal(module.made, torch.zeros(3))


def test_a_changed_buffer_without_a_copy_is_an_error_where_it_is_asked_for():
    model = Counting()
    saved = BufferValues(ModuleTensors.of([model]).buffers, lambda _: False)
    model.calls += 1
    saved.restore(is_required=False)
    with pytest.raises(ValueError, match="buffer calls of Counting"):
        saved.restore()


def test_modes_are_those_of_each_module():
    model = Counting()
    model.norm.training = False
    modes = Modes(model)
    modes.set_eval()
    assert not any(module.training for module in model.modules())
    model.train()
    modes.restore()
    assert model.training and model.linear.training and not model.norm.training


def test_gradients_are_the_tensors_that_were_there():
    model = nn.Linear(2, 2)
    model.weight.grad = first = torch.ones(2, 2)
    saved = GradientTensors(model.parameters())
    saved.clear()
    assert model.weight.grad is None
    model.bias.grad = torch.ones(2)
    saved.restore()
    assert model.weight.grad is first and model.bias.grad is None


def test_importing_numpy_draws_nothing():
    """Its states are compared only where there were some."""
    code = """
from memopt._runtime import state_snapshot
import sys
sys.modules.pop("numpy", None)
state = state_snapshot.RandomState()
import random
assert not state.was_drawn_from()
sys.modules["numpy"] = __import__("types").SimpleNamespace(random=__import__("types").SimpleNamespace(
    get_state=lambda: ("MT19937", b"", 0, 0, 0.0)))
assert not state.was_drawn_from()
random.random()
assert state.was_drawn_from()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1, "b": 2}, {1, 2}])
def test_containers_get_their_content_back(content):
    kept = content.copy()
    content.clear()
    refill(content, kept)
    assert content == kept


def test_a_dict_gets_its_order_back():
    found = {"a": 1, "b": 2}
    kept = found.copy()
    found["a"] = found.pop("a")
    refill(found, kept)
    assert list(found) == ["a", "b"]
