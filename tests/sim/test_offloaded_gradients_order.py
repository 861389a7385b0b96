"""The order of copies and computation with offload_gradients=True, offload_states=True and step_in_backward=True, on a
device that does its work as late as it may or, on one stream, as early: the step reads the gradient that was made, and
the states that the last one has left. Each wait is needed, and none is the host's."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt.amp
import memopt.optim
from memopt import _C, sim
from memopt._offload.pinned_memory import CopyIn
from memopt._offload.transfers import PinnedTransfer
from memopt.optim._backward_steps import _Side
from memopt.optim._offloaded_gradients import _WayToHost
from memopt.optim._one_pass import OnePass
from memopt.optim._turns import GradientTrip, HostTrip, Turns
from tests.helpers.stream_orders import run_ahead

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
COUNT = 1 << 17  # elements of a layer's parameter: not of the allocator's small ones
LAYERS = 6
WAITS = ["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
         "cuEventSynchronize", "cuCtxSynchronize"]  # fmt: skip


AHEAD = ["computation", "computation, the others slowly", "copies", "copies in", "steps", "neither", "either"]


class Makes(torch.autograd.Function):
    """Makes its gradient by a copy from the host: copies and memopt's kernels are what the simulated device does at its
    own time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        made = torch.empty(COUNT, device="cuda")
        made.copy_(ctx.layer.gradient, non_blocking=True)
        ctx.layer.ahead()
        return torch.empty_like(grad), made, None


class Layer(nn.Module):
    def __init__(self, number: int, ahead: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COUNT).cuda())
        self.number, self.ahead = number, ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Makes.apply(x, self.weight, self)  # type: ignore[no-any-return]


def added(total: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add in place by a kernel of memopt's: the device computes none of torch's here."""
    group = {"params": [total], "lr": -1.0, "weight_decay": 0, "maximize": False, "stochastic_rounding": False,
             "momentum": 0, "dampening": 0, "nesterov": False}  # fmt: skip
    total.grad = other
    of: tuple[dict[Any, Any], list[dict[str, Any]]] = {}, [group]
    plan = _C.UpdatePlan(*of, True)
    assert plan.collect(*of, True) == []
    plan.run(0)
    plan.drop()
    total.grad = None
    return total


def host_waits() -> int:
    """But those for the table of the eighth kernel before (csrc/driver/staging.h)."""
    return sum(map(sim.calls, WAITS)) - _C.kernel_status()["waits"]


def wrong_after(
    steps: int,
    ahead: str,
    seed: int = 0,
    *,
    states: bool = False,
    gradients: bool = True,
    backward: bool = False,
    passes: int = 1,
) -> int:
    """The number of parameters, of what was read of them after each step, and of states that are not what the steps
    should have made of them. backward: they are taken there. passes: backward passes that add up."""
    where: list[int] = []
    go = functools.partial(run_ahead, ahead, where, random.Random(seed))

    def ahead_of(self: OnePass, scaling: Any) -> None:
        go()
        update(self, scaling)
        go()

    layers = [Layer(k, go) for k in range(LAYERS)]
    optimizer = memopt.optim.SGD(
        (layer.weight for layer in layers),
        lr=1.0,
        momentum=0.5 if states else 0.0,
        offload_gradients=gradients and not backward,
        offload_states=states,
        step_in_backward=backward,
    )
    seen: list[list[torch.Tensor]] = []
    model = nn.Sequential(*layers)
    x = torch.empty(4, device="cuda", requires_grad=True)
    zeros = [torch.zeros(COUNT).pin_memory() for _ in layers]
    update = OnePass._update
    for step in range(-1, steps):  # the first one takes what is taken once
        if step == 0:
            streams = _C.copy_counts(0)
            where += streams["stream_in"], streams["stream_out"]
            where += (stream.cuda_stream for stream in sides(optimizer))
            for layer, zero in zip(layers, zeros, strict=True):
                layer.weight.data.copy_(zero, non_blocking=True)
                if states:
                    optimizer.state[layer.weight]["momentum_buffer"].copy_(zero)
            torch.cuda.synchronize()
            sim.lazy(True)
        optimizer.zero_grad()
        for layer in layers:
            layer.gradient = torch.full((COUNT,), 100.0 * step + layer.number).pin_memory()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OnePass, "_update", ahead_of)
            patch.setattr(torch.Tensor, "__iadd__", added, raising=False)
            before = host_waits()
            for _ in range(passes):
                model(x).backward(torch.empty_like(x))
            if not backward:
                memopt.amp.clip_grad_norm_(model.parameters(), 1e30)
            optimizer.step()
            if step >= 0:
                seen.append([torch.empty(COUNT).pin_memory() for _ in layers])
            for layer, read in zip(layers, seen[-1] if seen else (), strict=False):
                read.copy_(layer.weight.detach(), non_blocking=True)
            for _ in range(50 if "slowly" in ahead else 1):
                go()
            assert step < 0 or host_waits() == before
    torch.cuda.synchronize()
    sim.lazy(False)
    wrong = 0
    for k, layer in enumerate(layers):
        p = buffer = 0.0
        for step in range(steps):
            buffer = (0.5 * buffer if states else 0.0) + passes * (100.0 * step + k)
            p -= buffer
            wrong += not torch.equal(seen[step][k], torch.full((COUNT,), p))
        wrong += not torch.equal(layer.weight.detach().cpu(), torch.full((COUNT,), p))
        if states:
            left = optimizer.state_dict()["state"][k]["momentum_buffer"]
            wrong += not torch.equal(left, torch.full((COUNT,), buffer))
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("ahead", ["computation", "copies", "copies in", "neither", "either"])
def test_the_step_reads_what_was_made_for_it_whoever_is_ahead(ahead: str, states: bool) -> None:
    for n in range((200 if SOAK else 1) if ahead == "either" else 1):
        assert wrong_after(3, ahead, SEED + n, states=states) == 0, f"seed {SEED + n}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_step_in_the_backward_pass_reads_what_was_made_for_it(ahead: str) -> None:
    for n in range((200 if SOAK else 1) if ahead == "either" else 1):
        wrong = wrong_after(3, ahead, SEED + n, states=True, backward=True)
        assert wrong == 0, f"seed {SEED + n}"


def sides(optimizer: Any) -> list[torch.cuda.Stream]:
    """The streams of steps in the backward pass, and of gradients that add up."""
    if optimizer._backward_steps is not None:
        return [side.stream for side in optimizer._backward_steps._sides.values()]
    ways = optimizer._offload._ways.values() if optimizer._offload is not None else ()
    return [way._side for way in ways if way._side is not None]


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize(
    ("owner", "name", "ahead"),
    [
        (torch.cuda.Stream, "wait_stream", "steps"),
        (_Side, "finish", "computation, the others slowly"),
        (CopyIn, "join", "steps"),
        (Turns, "end", "steps"),
    ],
)
def test_each_wait_of_a_step_in_the_backward_pass_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, ahead: str
) -> None:
    if owner in (CopyIn, Turns):
        without(monkeypatch, owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda *_: None)
    assert wrong_after(3, ahead, states=True, backward=True) > 0


class Fails(torch.autograd.Function):
    """Ends a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


@pytest.mark.parametrize("option", ["step_in_backward", "offload_gradients"])
def test_what_a_failed_backward_pass_has_begun_is_over_before_it_is_read(option: str) -> None:
    layers = [Layer(k, lambda: None) for k in range(3)]
    optimizer: Any = memopt.optim.SGD(
        (layer.weight for layer in layers), lr=1.0, momentum=0.5, offload_states=True, **{option: True}
    )
    for layer in layers:
        layer.gradient = torch.full((COUNT,), 3.0).pin_memory()
    x = torch.empty(4, device="cuda", requires_grad=True)
    nn.Sequential(*layers)(x).backward(torch.empty_like(x))
    if option == "step_in_backward":
        optimizer.step()
    torch.cuda.synchronize()
    for layer in layers:  # what torch would have computed
        layer.weight.data.copy_(torch.full((COUNT,), -3.0))
        optimizer.state[layer.weight]["momentum_buffer"] = torch.full((COUNT,), 3.0)
    read = torch.empty(COUNT).pin_memory()
    norm = torch.empty((), dtype=torch.float64).pin_memory()
    sim.lazy(True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(torch.Tensor, "__iadd__", added, raising=False)
        nn.Sequential(*layers[1:])(Fails.apply(x)).backward(torch.empty_like(x))
    if option == "step_in_backward":
        optimizer.zero_grad()
        read.copy_(layers[1].weight.detach(), non_blocking=True)
    else:
        norm.copy_(layers[1].weight.grad.norm64, non_blocking=True)
    streams = _C.copy_counts(0)
    others = (streams["stream_in"], streams["stream_out"], *(one.cuda_stream for one in sides(optimizer)))
    for other in others * 50:
        sim.progress(-1, 1)
        sim.progress(1, other)
    torch.cuda.synchronize()
    sim.lazy(False)
    if option == "step_in_backward":
        assert torch.equal(read, torch.full((COUNT,), -3.0 - (1.5 + 3.0)))
    else:
        assert torch.isclose(norm, torch.tensor(6.0 * COUNT**0.5, dtype=torch.float64))


def test_a_gradient_is_kept_until_its_step_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(self: _Side) -> None:
        self._held -= self._reading.popleft()[0].nbytes

    monkeypatch.setattr(_Side, "_settle", drop)
    assert wrong_after(3, "computation", states=True, backward=True) > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", AHEAD)
def test_gradients_add_up_to_what_was_made(ahead: str) -> None:
    for n in range((200 if SOAK else 1) if ahead == "either" else 1):
        assert wrong_after(3, ahead, SEED + n, passes=3) == 0, f"seed {SEED + n}"


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize(("owner", "name"), [(torch.cuda.Stream, "wait_stream"), (_WayToHost, "settle")])
def test_each_wait_of_gradients_that_add_up_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    if owner is _WayToHost:
        without(monkeypatch, owner, name)
    else:
        monkeypatch.setattr(owner, name, lambda *_: None)
    assert any(wrong_after(3, ahead, SEED, passes=3) > 0 for ahead in AHEAD)


@pytest.mark.sampled("waits that a step needs")
def test_what_is_added_is_kept_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = _WayToHost.leave
    monkeypatch.setattr(_WayToHost, "leave", lambda self, grad, other=None: leave(self, grad))
    assert any(wrong_after(3, ahead, SEED, passes=3) > 0 for ahead in AHEAD)


def without(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """That function no longer makes anyone wait."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C, "copy_await", lambda *_: None)
            return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize(("owner", "name"), [(PinnedTransfer, "settle"), (CopyIn, "join")])
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    without(monkeypatch, owner, name)
    assert wrong_after(3, "computation") > 0


@pytest.mark.sampled("waits that a step needs")
def test_what_comes_is_behind_the_copy_out_of_what_had_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for trip in (GradientTrip, HostTrip):
        begin = trip.begin
        monkeypatch.setattr(trip, "begin", lambda self, there, after, begin=begin: begin(self, there, 0))
    assert wrong_after(3, "copies in", states=True) > 0


@pytest.mark.sampled("waits that a step needs")
def test_a_step_ends_behind_its_copies_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the rooms, which are others' afterwards, and write what the next step reads."""
    assert wrong_after(3, "copies in", states=True, gradients=False) == 0
    without(monkeypatch, Turns, "end")
    assert wrong_after(3, "copies in", states=True, gradients=False) > 0


def test_a_step_that_fails_ends_behind_what_was_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come into memory that is another's."""
    layers = [Layer(k, lambda: None) for k in range(4)]
    optimizer = memopt.optim.SGD((layer.weight for layer in layers), lr=1.0, offload_gradients=True)
    for layer in layers:
        layer.gradient = torch.full((COUNT,), 3.0).pin_memory()
    x = torch.empty(4, device="cuda", requires_grad=True)
    nn.Sequential(*layers)(x).backward(torch.empty_like(x))
    optimizer.step()
    torch.cuda.synchronize()
    source = torch.full((COUNT,), 7.0).pin_memory()

    def failing(*_: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(OnePass, "_update", failing)
    sim.lazy(True)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    later = [
        torch.empty(COUNT, device="cuda") for _ in range(4)
    ]  # two of them where the turns had their room
    for tensor in later:
        tensor.copy_(source, non_blocking=True)
    for _ in range(20):
        sim.progress(-1, 1)
        sim.progress(1, _C.copy_counts(0)["stream_in"])
    torch.cuda.synchronize()
    sim.lazy(False)
    assert all(torch.equal(tensor.cpu(), source) for tensor in later)


def test_the_norm_of_gradients_on_host_and_device_is_read_once_it_is_there() -> None:
    layer, here = Layer(0, lambda: None), nn.Parameter(torch.zeros(4))
    optimizer = memopt.optim.SGD([layer.weight], lr=1.0, offload_gradients=True)
    x = torch.empty(4, device="cuda", requires_grad=True)
    for number in (3.0, 5.0):  # the second one's norm comes where the first one's was
        layer.gradient = torch.full((COUNT,), number).pin_memory()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        sim.lazy(number == 5.0)
        layer(x).backward(torch.empty_like(x))
        here.grad = torch.full((4,), 1e-6)
        norm = memopt.amp.clip_grad_norm_([here, layer.weight], number * COUNT**0.5 / 2)
        assert torch.isclose(norm, torch.tensor(number * COUNT**0.5))
        assert torch.allclose(here.grad, torch.full((4,), 0.5e-6))
    torch.cuda.synchronize()
    sim.lazy(False)
