"""The order of copies and computation in offload_layers, on a device that does its work as late as it may or, on one
stream, as early: what a layer reads is its parameter, what comes back is its gradient. Each wait is needed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import _C, sim
from memopt._offload import carriers

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
COUNT = 1 << 17  # elements of a layer's parameter: not of the allocator's small ones
NEVER = torch.zeros(COUNT)


class Reads(torch.autograd.Function):
    """Copies the parameter to the host in its forward and in its backward, and makes its gradient by a copy from the
    host: copies are what the simulated device does at its own time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        layer.forward_saw.copy_(weight, non_blocking=True)
        layer.ahead()
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        layer = ctx.layer
        layer.backward_saw.copy_(weight, non_blocking=True)
        del weight
        made = torch.empty(COUNT, device="cuda")
        made.copy_(layer.gradient, non_blocking=True)
        layer.ahead()
        return torch.empty_like(grad), made, None


class Layer(nn.Module):
    def __init__(self, number: int, ahead: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((COUNT,), float(number)))
        self.number, self.ahead = number, ahead

    def prepare(self, step: int) -> None:
        self.forward_saw, self.backward_saw = ((NEVER - 1).pin_memory() for _ in range(2))
        self.gradient = torch.full((COUNT,), 100.0 * step + self.number).pin_memory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(x, self.weight, self)


def wrong_after(steps: int, ahead: str, seed: int = 0, *, late: bool = False) -> int:
    """The number of wrong values. late: the device does nothing until the host waits for it."""
    choose = random.Random(seed)
    where: list[int] = []

    def run_ahead() -> None:
        if ahead == "computation":
            sim.progress(-1, 1)
        elif ahead == "copies":
            sim.progress(-1, where[0])
            sim.progress(-1, where[1])
        elif ahead == "either":
            sim.progress(choose.randrange(4), choose.choice([1, *where]))

    layers = [Layer(k, run_ahead) for k in range(5)]
    model = nn.Sequential(*layers)
    handle = memopt.offload_layers(model, device="cuda")
    streams = _C.copy_counts(0)
    where += streams["stream_in"], streams["stream_out"]
    wrong = 0
    x = torch.empty(4, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    sim.lazy(True)
    for step in range(steps):
        values = [layer.weight.detach().clone() for layer in layers]
        for layer in layers:
            layer.prepare(step)
        out = model(x)
        if late:  # what a program may do between the passes: in plain models it is torch's to order
            with torch.no_grad():
                kept = [layer.weight.detach().clone() for layer in layers]
                for layer in layers:
                    layer.weight.data.fill_(-7.0)
            torch.cuda.synchronize()
            for layer, value in zip(layers, kept, strict=True):
                layer.weight.data.copy_(value)
        out.backward(torch.empty_like(out))
        grads = [layer.weight.grad.clone() for layer in layers]  # as the program finds them
        with torch.no_grad():
            for layer in layers:
                layer.weight += 1  # as an optimizer does, at once
        torch.cuda.synchronize()
        for layer, value, grad in zip(layers, values, grads, strict=True):
            wrong += not torch.equal(layer.forward_saw, value)
            wrong += not torch.equal(layer.backward_saw, value)
            wrong += not torch.equal(grad, layer.gradient)
        model.zero_grad()
    sim.lazy(False)
    handle.release()
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", ["computation", "copies", "neither", "either"])
def test_layers_read_their_parameters_and_gradients_come_back_whoever_is_ahead(ahead: str) -> None:
    for n in range((200 if SOAK else 3) if ahead == "either" else 1):
        assert wrong_after(3, ahead, SEED + n) == 0, f"seed {SEED + n}"


def test_what_the_program_writes_after_a_forward_pass_is_not_what_that_pass_reads() -> None:
    assert wrong_after(2, "neither", late=True) == 0


def without(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """That function no longer makes anyone wait."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C, "copy_await", lambda *_: None)
            patch.setattr(_C, "copy_wait", lambda *_: None)
            return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize(
    ("owner", "name", "ahead", "late"),
    [
        (carriers.ToDevice, "settle", "neither", True),
        (carriers.DeviceCopy, "tensor", "computation", False),
        (carriers.GradTransfer, "wait", "neither", False),
    ],
)
def test_each_wait_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, ahead: str, late: bool
) -> None:
    """The tests above fail without any one of them. (Those in C: tests/c/test_copies.c.)"""
    without(monkeypatch, owner, name)
    assert wrong_after(3, ahead, late=late) > 0


def test_a_copy_that_nobody_wanted_keeps_its_memory_until_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (False, True):
        if fault:
            without(monkeypatch, carriers.DeviceCopy, "__del__")
        host = torch.full((COUNT,), 1.0).pin_memory()
        source, seen = torch.full((COUNT,), 2.0).pin_memory(), (NEVER - 1).pin_memory()
        to_device = carriers.ToDevice(torch.device("cuda", 0))
        torch.cuda.synchronize()
        sim.lazy(True)
        to_device.fetch([host])
        other = torch.empty(COUNT, device="cuda")  # in the same memory
        other.copy_(source, non_blocking=True)
        sim.progress(-1, 1)
        sim.progress()
        seen.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert torch.equal(seen, source) != fault


def test_a_gradient_keeps_its_memory_until_its_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (False, True):
        if fault:
            without(monkeypatch, carriers.ToHost, "_release")
        source, others = (torch.full((COUNT,), value).pin_memory() for value in (1.0, 2.0))
        to_host = carriers.ToHost(torch.device("cuda", 0), 0)
        # Memory is there, on the host as on the device: taking it anew would wait for the device.
        warm = [to_host.memory.lend(NEVER) for _ in range(2)], [NEVER.cuda() for _ in range(10)]
        del warm
        gradient, after = source.cuda(), source.cuda()
        torch.cuda.synchronize()
        sim.lazy(True)
        on_host, _ = to_host.send(gradient)
        place = gradient.data_ptr()
        del gradient
        to_host.send(after)  # another's gradient: the first one's memory is the computation's again
        taken = [torch.empty(COUNT, device="cuda") for _ in range(8)]
        assert place in [tensor.data_ptr() for tensor in taken]
        for tensor in taken:
            tensor.copy_(others, non_blocking=True)
        sim.progress(-1, 1)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert torch.equal(on_host, source) != fault
        del on_host  # giving its memory back waits for the device


def test_a_look_at_what_was_saved_is_over_when_the_program_goes_on() -> None:
    """A hook that may write to the parameter then."""
    layer = Layer(3, lambda: None)
    handle = memopt.offload_layers(layer, device="cuda")
    layer.prepare(0)
    out = layer(torch.empty(4, device="cuda", requires_grad=True))
    torch.cuda.synchronize()
    sim.lazy(True)
    (seen,) = out.grad_fn.saved_tensors
    layer.weight.data.fill_(-7.0)
    torch.cuda.synchronize()
    sim.lazy(False)
    assert torch.equal(seen.cpu(), torch.full((COUNT,), 3.0))
    del out, seen
    handle.remove()


def test_copies_overlap_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's forward begins, the next one's copy has begun, and the layer after that has not."""
    begun: list[list[int]] = []
    fetch = carriers.ToDevice.fetch
    now: list[int] = []

    def noted(self: Any, hosts: Any) -> Any:
        now.extend(int(host[0]) for host in hosts)
        return fetch(self, hosts)

    monkeypatch.setattr(carriers.ToDevice, "fetch", noted)
    layers = [Layer(k, lambda: begun.append(list(now))) for k in range(5)]
    model = nn.Sequential(*layers)
    handle = memopt.offload_layers(model, device="cuda")
    for layer in layers:
        layer.prepare(0)
    x = torch.empty(4, device="cuda", requires_grad=True)
    out = model(x)
    out.backward(torch.empty_like(out))
    forward = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    # 4 and 3 were there still.
    backward = [[], [2], [2, 1], [2, 1, 0], [2, 1, 0]]
    assert begun == forward + [forward[-1] + more for more in backward]
    assert handle.bytes_in == 8 * 4 * COUNT
    assert handle.bytes_out == 5 * 4 * COUNT
    handle.remove()
