"""memopt's optimizer in the place of another with the same param groups; bytes on the device, and seconds of a step."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import memopt.optim
from memopt._checkpoint.stages.costs import block_bytes
from memopt._fit.trial_gradients import TrialGradients
from memopt._offload.pinned_memory import ALIGNED, aligned
from memopt._run.plan import STATES_ON_DISK, STEP_IN_BACKWARD, options_of, plain
from memopt._runtime.device_clock import synchronize
from memopt._runtime.originals import original
from memopt.optim import _disk_states
from memopt.optim._backward_steps import SteppedGradient
from memopt.optim._offloaded_gradients import HostGradient
from memopt.optim._one_pass import OWN_OPTIONS, OnePass
from memopt.optim._state_bytes import (
    Kind,
    OptimizerBytes,
    foretold,
    kind_of,
    step_unhooked,
    trial_of,
)
from memopt.optim._turns import TURN

HOOKING = ("offload_gradients", "step_in_backward")  # options with hooks on the parameters themselves
_KINDS = ("Adam", "AdamW", "SGD", "Muon")


def counterpart_of(optimizer: torch.optim.Optimizer) -> type[OnePass]:
    """Return memopt's class for an optimizer. Raises ValueError, with the reason, where there is none."""
    kind = type(optimizer)
    ours = [getattr(memopt.optim, name) for name in _KINDS]
    if kind in ours:
        if any(group.get(name) for group in optimizer.param_groups for name in HOOKING):
            raise ValueError("it takes gradients in the backward pass already")
        return kind
    for name, mine in zip(_KINDS, ours, strict=True):
        if hasattr(torch.optim, name) and kind is original(torch.optim, name):
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                raise ValueError("it has hooks on its steps, which another optimizer would not call")
            return mine  # type: ignore[no-any-return]
    raise ValueError(f"memopt.optim has no {kind.__name__}; it has {', '.join(_KINDS)}")


def make(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], options: dict[str, Any]
) -> OnePass:
    """Return memopt's optimizer of these param groups, which are the optimizer's or copies; they get the options.

    Raises ValueError where its options exclude these.
    """
    kind = counterpart_of(optimizer)
    taken = inspect.signature(kind).parameters
    if unknown := options.keys() - taken.keys():
        raise ValueError(f"memopt.optim.{kind.__name__} has no {'=, '.join(sorted(unknown))}=")
    for group in groups:
        group.update(options)
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return kind(groups, **(defaults | options))


def trial_copy(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> OnePass:
    """Return memopt's optimizer without states, of param groups of its own, that leaves the parameters alone."""
    quiet = {name: value for name, value in options.items() if name not in HOOKING}
    groups = [{**group, "params": [*group["params"]]} for group in optimizer.param_groups]
    return make(optimizer, groups, quiet)


# ---- bytes -----------------------------------------------------------------------------------------------------------


class OnDevice(NamedTuple):
    """Bytes of an optimizer on the device. states: bytes of its states, wherever they are. besides: bytes that the
    backward pass takes for gradients on their way to the host, and for steps within it. on_host: bytes of the host's
    memory for states."""

    taken: OptimizerBytes
    states: int
    besides: int
    on_host: int = 0


def bytes_with(optimizer: torch.optim.Optimizer, names: Iterable[str], device: torch.device) -> OnDevice:
    """Return what memopt's optimizer with these techniques takes."""
    options = options_of(names)
    placed = {"offload_states", *HOOKING}
    trial = trial_copy(optimizer, {k: v for k, v in options.items() if k not in placed})
    found = foretold(trial)
    is_cut = trial._is_elementwise and not any(group.get("factored") for group in trial.param_groups)
    states = sum(found.coming)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    total = sum(p.nbytes for p in trained) or 1
    of_states = [states * p.nbytes // total for p in trained]
    largest = max((p.nbytes for p in trained), default=0)
    coming, passing, besides, on_host = found.coming, found.passing, 0, 0
    on_disk = STATES_ON_DISK in map(plain, names)
    if "offload_states" in options:
        coming, on_host = [], sum(map(aligned, found.coming))
    if on_disk:  # through an area each way
        area = min(on_host, _disk_states.AREA)
        on_host = 2 * area
        if device.type != "cuda":
            coming, on_host = [area + ALIGNED] * 2, 0
    if STEP_IN_BACKWARD in {*names}:
        besides = sum(passing)
        passing = []
        if "offload_states" in options:
            besides += largest + _room(max(of_states, default=0))
    else:
        leaving = "offload_gradients" in options
        loads = [
            (aligned(p.nbytes) if leaving else 0) + (aligned(size) if "offload_states" in options else 0)
            for p, size in zip(trained, of_states, strict=True)
        ]
        turn = _disk_states.DISK_TURN if on_disk else TURN
        cut = [
            piece
            for load, p, size in zip(loads, trained, of_states, strict=True)
            for piece in _pieces(load, (p.nbytes + size if on_disk else load) * is_cut, turn)
        ]
        passing = [*passing, *_rooms(cut, turn)] if cut else passing
        if "offload_states" in options:  # the first step makes them on the device, a parameter's at a time
            passing = max(passing, [max(of_states, default=0)], key=sum)
        besides = largest if leaving else 0
    blocks = sum(block_bytes(size, device) for size in found.coming)
    return OnDevice(OptimizerBytes([], coming, passing, 0), blocks, besides, on_host)


def trial_gradients(optimizer: torch.optim.Optimizer, names: Iterable[str], sums: bool) -> TrialGradients:
    """Return hooks by which gradients of trial steps go as with these techniques. sums: to others, of before."""
    options = options_of(names)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    away = "offload_states" in options
    rooms: dict[int, list[int]] = {}
    if STEP_IN_BACKWARD in {*names}:
        placed = {"offload_states", *HOOKING}
        found = foretold(trial_copy(optimizer, {k: v for k, v in options.items() if k not in placed}))
        states, total = sum(found.coming), sum(p.nbytes for p in trained) or 1
        for p in trained:
            rooms[id(p)] = [*found.passing, *([_room(states * p.nbytes // total)] if away else [])]
    leaving = "offload_gradients" in options
    return TrialGradients(trained, rooms, stays=leaving or away, sums=leaving and sums, has_norms=leaving)


def _room(load: int) -> int:
    return load if load <= TURN else max(load, 2 * TURN)


def _pieces(load: int, whole: int, turn: int) -> list[int]:
    """Return the bytes that come for each piece of a parameter, of whose `whole` bytes a piece has a turn's; 0 of one
    that is not cut."""
    piece = load * turn // whole if whole > turn else load
    return [*[piece] * (load // piece), *filter(None, [load % piece])] if piece else []


def _rooms(cut: Sequence[int], turn: int) -> list[int]:
    """Return the bytes of the two rooms of a step in turns (memopt.optim._turns.Turns)."""
    most, left = min(turn, max(cut)), 0
    turns: list[int] = []
    for load in cut:
        if load > left:
            turns.append(0)
            left = max(most, load)
        turns[-1] += load
        left -= load
    return [max(turns[k::2], default=0) for k in (0, 1)]


# ---- seconds ---------------------------------------------------------------------------------------------------------


# Bytes of parameters that are stepped for the clock; gradients and states are several times as many.
TIMED = 64 << 20
STEPS = 3


def step_seconds(
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    most: int = TIMED,
    device: torch.device | None = None,
) -> float:
    """Return the seconds of a step with these techniques, without copies to and from the host.

    A copy of the optimizer steps parameters of the kinds of its own; the fewest of several times count. Where these
    have more than `most` bytes, it steps some of them, and the seconds are those of all by their bytes. device: where
    they are; None: where the optimizer's are.
    """
    names = {*names}
    if names:
        placed = {"offload_states", *HOOKING}
        options = {name: value for name, value in options_of(names).items() if name not in placed}
        optimizer = trial_copy(optimizer, options)
    kinds, total = _kinds_to_step(optimizer, most)
    if not kinds:
        return 0.0
    if device is not None:
        kinds = [kind._replace(device=device) for kind in kinds]
    trial, made = trial_of(optimizer, kinds)
    for p in made:
        assert p.grad is not None
        p.grad.fill_(1e-3)  # with zeros a CPU's step takes longer
    device = made[0].device if device is None else device

    def step() -> None:
        if STEP_IN_BACKWARD not in names:
            step_unhooked(trial)
            return
        assert isinstance(trial, OnePass)
        for p in made:
            trial.step_alone(p, trial.group_of(p))

    step_unhooked(trial)  # which makes the states
    seconds = []
    for _ in range(STEPS):
        synchronize(device)
        begun = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    share: float = sum(p.nbytes for p in made) / total
    return min(seconds) / share


def _kinds_to_step(optimizer: torch.optim.Optimizer, most: int) -> tuple[list[Kind], int]:
    """Return kinds of trained parameters of so many bytes at most, but one at least; and the bytes of all trained."""
    trained = [
        (index, p)
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad and p.numel()
    ]
    total = sum(p.nbytes for _, p in trained)
    taken: list[Kind] = []
    left = most
    for index, p in sorted(trained, key=lambda one: one[1].nbytes, reverse=True):
        if p.nbytes <= left or not taken:  # of small ones alone a step takes far longer for a byte
            taken.append(kind_of(index, p))
            left -= p.nbytes
    return taken, total


# ---- in the place of another -----------------------------------------------------------------------------------------


def load_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load states; the param groups stay the dicts that they are, to which schedulers and programs refer."""
    groups = optimizer.param_groups
    values = [dict(group) for group in groups]
    optimizer.load_state_dict(state)
    for group, value in zip(groups, values, strict=True):
        group.clear()
        group.update(value)
    optimizer.param_groups = groups


def replaced(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> tuple[OnePass, Callable[[], None]]:
    """Return memopt's optimizer with the optimizer's own param groups and its states, and a function that undoes it.

    A learning-rate scheduler of the optimizer sets the rates of both, since the param groups are the same dicts.
    """
    before = [dict(group) for group in optimizer.param_groups]
    state = optimizer.state_dict()

    def own_groups_again() -> None:
        for group, was in zip(optimizer.param_groups, before, strict=True):
            for name in [*group]:
                if name in OWN_OPTIONS and name not in was:
                    del group[name]
            group.update({name: was[name] for name in OWN_OPTIONS if name in was})

    try:
        mine = make(optimizer, optimizer.param_groups, options)
        load_states(mine, state)
    except BaseException:
        own_groups_again()
        raise
    optimizer.state = defaultdict(dict)  # what it held would live twice
    mine.register_step_post_hook(lambda *_: _note_step(optimizer))

    def undo() -> None:
        states: dict[str, Any] = mine.state_dict(full=True)  # type: ignore[call-arg]
        for hooks in (mine._offload, mine._backward_steps):
            if hooks is not None:
                hooks.remove()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(p.grad, HostGradient):
                p.grad = p.grad.on_device()
            elif isinstance(p.grad, SteppedGradient):
                p.grad = None
        own_groups_again()
        if not isinstance(optimizer, OnePass):
            for number, group in enumerate(states["param_groups"]):
                for index in group["params"]:
                    if index in states["state"]:
                        states["state"][index] = _torchs(
                            states["state"][index], optimizer.param_groups[number]
                        )
        mine.state = defaultdict(dict)
        load_states(optimizer, states)

    return mine, undo


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Have a scheduler know that a step came before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _torchs(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return a state as torch's optimizers make theirs: the count of steps is on the host, where it need not be."""
    step = state.get("step")
    if isinstance(step, torch.Tensor) and not (group.get("capturable") or group.get("fused")):
        return {**state, "step": step.cpu()}
    return state
