"""The base of the one-pass optimizers: a step that C walks, the contract with gradient scalers, and state dicts.

torch's scaler sets, for one call of step(), `found_inf` and, unless the gradients are unscaled already, `grad_scale`:
the gradients are then divided by it and kept so, as torch's fused optimizers do. memopt's calls `_memopt_step()`, reads
the gradients in it, and answers with a `ScaledStep`. The walk is memopt._C.UpdatePlan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import lr_scheduler, optimizer

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.signals import interrupted_later
from memopt.optim._backward_steps import BackwardSteps, SteppedGradient
from memopt.optim._disk_states import DiskState, DiskStates, StateFile, here
from memopt.optim._offloaded_gradients import GradientOffload, HostGradient
from memopt.optim._scaled_step import ScaledStep
from memopt.optim._state_layout import FLOATS, is_plain, like, not_like
from memopt.optim._turns import Home, HostStates, Piece, in_turns

OWN_OPTIONS = (
    "state_bits",
    "factored",
    "min_8bit_size",
    "master_weights",
    "stochastic_rounding",
    "offload_gradients",
    "offload_states",
    "step_in_backward",
)

# Where torch's own wrappers of step() are from: hooks and profile, and the learning rates' count of steps.
TORCHS_WRAPPERS = (optimizer.__file__, lr_scheduler.__file__)


class OnePass(torch.optim.Optimizer):
    """The base, before one of torch.optim's classes, whose states the methods below know how to make."""

    _step_supports_amp_scaling = True
    _scaled: ScaledStep | None = None  # while _memopt_step() runs step()
    _plan: _C.UpdatePlan | None = None
    _is_collected = False  # the plan has collected what the next step() takes
    _first_index = 0  # of the first element, while a piece of a parameter is stepped
    _own_defaults: dict[str, Any] | None = None
    _offload: GradientOffload | None = None
    _backward_steps: BackwardSteps | None = None
    _homes: dict[int, Home] = {}  # noqa: RUF012  # each optimizer's own, by id(parameter), once it has one
    _files: dict[str, StateFile] = {}  # noqa: RUF012  # each optimizer's own, by directory, once it has one
    state: Any
    _is_sgd = False
    _is_elementwise = True  # a step of a parameter's elements needs no others
    _like_p: tuple[str, ...] = ()  # the states that have their parameter's shape

    # ---- a class's own --------------------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError if options of a group exclude each other."""

    def _check_parameters(self, params: list[Tensor]) -> None:
        """Raise ValueError for parameters of a new group that the optimizer cannot take."""

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Create the missing states of a plain parameter. Return whether its momentum buffer has no value yet."""
        raise NotImplementedError

    def _read(self, state: dict[str, Any]) -> None:
        """Rename the loaded states of one parameter to the names used here."""

    def _check_state(self, p: Tensor, state: dict[str, Any]) -> str | None:
        """Describe which of these cannot be a state of p; None if all can."""
        step = state.get("step")
        if isinstance(step, Tensor) and step.numel() != 1:
            return f"its state 'step' has the shape {tuple(step.shape)}"
        return next(filter(None, (not_like(p, state, name) for name in self._like_p)), None)

    def _relay(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Convert loaded states of p to the form in which this optimizer keeps them."""
        raise NotImplementedError

    def _update_by_torch(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        """Take torch's own step for what is not plain; with found_inf its fused one."""
        raise NotImplementedError

    def _check_gradient(self, grad: Tensor) -> None:
        """Raise torch's exception for a gradient that torch refuses."""

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient; with step_in_backward=True, that backward() has not stepped.

        Args:
            closure: A function that evaluates the model again and returns the loss.

        Returns:
            The closure's loss, None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        if self._backward_steps is not None:
            self._take_gradients(shared=True)  # of parameters that were frozen when they came
            for p in (p for group in self.param_groups for p in group["params"]):
                if type(p.grad) is SteppedGradient:
                    p.grad = None
        scaling = self._scaled
        if scaling is not None:
            scaling.found_inf = self.found_inf  # a hook may have set another
        elif hasattr(self, "found_inf") or hasattr(self, "grad_scale"):
            scaling = ScaledStep(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        offloads = ("offload_gradients", "offload_states")
        if self._homes or any(group.get(name) for group in self.param_groups for name in offloads):
            self._update_in_turns(scaling)
        else:
            self._update(scaling)
        return loss

    def _update_in_turns(self, scaling: ScaledStep | None) -> None:
        """Step every parameter, some at a time, as what they need comes from the host."""
        if scaling is not None and scaling.is_skipped_on_cpu():
            return
        self._check_files()
        self._take_gradients(shared=True)  # of parameters that were frozen when they came
        with torch.no_grad():
            first = self._complete_all()  # so that no turn takes memory
        if first and scaling is not None and scaling.is_skipped():
            self._forget(first)
            return
        try:
            with interrupted_later(fatal=False):
                parameters = [p for group in self.param_groups for p in group["params"]]
                for piece in in_turns(parameters, self.state, self._homes, self._is_elementwise):
                    if piece is None:
                        # A new plan: torch's step may have made states.
                        numbers = [number for number, _ in first]
                        self._plan = _C.UpdatePlan(self.state, self.param_groups, self._is_sgd, numbers)
                        self._update(scaling)
                        first = [(number, p) for number, p in first if p.grad is None]  # those of other turns
                    else:
                        self._update_piece(piece, scaling, any(p is piece.of for _, p in first))
                        first = [(number, p) for number, p in first if p is not piece.of or not piece.is_last]
                if scaling is not None:
                    scaling.store_all(parameters)
        except BaseException:
            self._forget(first)
            raise
        finally:
            self._plan = None  # it holds what was on the device
        self._check_files()

    def _check_files(self) -> None:
        for file in self._files.values():
            file.check()

    def _update_piece(self, piece: Piece, scaling: ScaledStep | None, is_first: bool) -> None:
        """Step a piece, as if it was all that this optimizer has."""
        alone = self._alone(piece.p, piece.states, self.group_of(piece.of))
        alone._first_index = piece.first_index
        alone._plan = _C.UpdatePlan(alone.state, alone.param_groups, self._is_sgd, [0] if is_first else [])
        alone._update(scaling)

    def _alone(self, p: Tensor, states: dict[str, Any], group: dict[str, Any]) -> Self:
        """Return this optimizer as that of p alone, with a group's options."""
        self.__dict__.setdefault("_homes", {})  # both have the same
        self.__dict__.setdefault("_files", {})
        alone = object.__new__(type(self))
        alone.__dict__ |= self.__dict__ | {
            "state": {p: states},
            "param_groups": [{**group, "params": [p]}],
            "_plan": None,
        }
        return alone

    def group_of(self, p: Tensor) -> dict[str, Any]:
        """Return the parameter's group, {} for one that has left it."""
        return next((group for group in self.param_groups if any(p is one for one in group["params"])), {})

    def step_alone(self, p: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter, whose gradient is there, by its group's options."""
        self._alone(p, self.state[p], group)._update_in_turns(None)

    def _ready(self, scaling: ScaledStep | None) -> tuple[list[int], list[tuple[int, Tensor]]] | None:
        """Collect for a step, with all states. Return the numbers of the parameters that the plan cannot take, and
        those that have their first step; None if the step is skipped."""
        plan, first = self._plan, []
        left = self._collect()
        if left is None or (left and self._lack_states(left)):
            if scaling is not None and scaling.is_skipped_on_cpu():
                if plan is not None:
                    plan.drop()
                return None
            with torch.no_grad():
                first = self._complete_all()
            if first and scaling is not None and scaling.is_skipped():
                self._forget(first)
                return None
            numbers = [number for number, _ in first]
            plan = self._plan = _C.UpdatePlan(self.state, self.param_groups, self._is_sgd, numbers)
            left = plan.collect(self.state, self.param_groups, True)
        assert left is not None
        return left, first

    def _update(self, scaling: ScaledStep | None) -> None:
        """Step every parameter whose gradient is there."""
        ready = self._ready(scaling)
        if ready is None:
            return
        (left, first), plan = ready, self._plan
        assert plan is not None
        try:
            if left:
                with torch.no_grad():
                    self._update_left(plan, left, scaling)
            for number in plan.devices():
                self._run(number, plan, scaling)
        except BaseException:
            self._forget(first)
            raise
        finally:
            plan.drop()

    def _run(self, number: int, plan: _C.UpdatePlan, scaling: ScaledStep | None) -> None:
        """Step the parameters of a CUDA device, or of the host for -1."""
        if number >= 0:
            kernels.prepare()
        device = torch.device("cpu") if number < 0 else torch.device("cuda", number)
        factor, found_inf, store = None, None, False
        if scaling is not None:
            factor, found_inf = scaling.factor(device), scaling.found_inf_on(device)
            store = scaling.store
        needed = plan.scratch(number)
        scratch = torch.empty(needed, dtype=torch.uint8, device=device) if needed else None
        plan.run(number, factor, found_inf, store, self._first_index, scratch)

    def _memopt_step(
        self, read: Callable[[_C.Gradients | None], ScaledStep | None], *args: Any, **kwargs: Any
    ) -> Any:
        """step(*args, **kwargs) for a scaler that reads the gradients before it.

        Args:
            read: Called with the gradients that the step has collected for itself, with None where others' code comes
                between the two. It returns a ScaledStep, or None if the step is to be another.
            *args: As step()'s.
            **kwargs: As step()'s.

        Returns:
            What step() does, or NotImplemented where read() returned None.
        """
        try:
            scaled = read(None if args or kwargs else self._collect_ahead())
            if scaled is None:
                return NotImplemented
            self._scaled = scaled
            # Hooks and subclasses know torch's scaler.
            self.found_inf, self.grad_scale = scaled.found_inf, scaled.grad_scale
            try:
                return self.step(*args, **kwargs)
            finally:
                self._scaled = None
                del self.found_inf, self.grad_scale
        finally:
            self._forget_collected()

    def _lack_states(self, left: list[int]) -> bool:
        """Return whether one of these parameters was left out because of its gradient's order and still lacks
        states."""
        flat = [(p, group) for group in self.param_groups for p in group["params"]]
        return any(
            not self.state.get(p)
            and self._has_states(group)
            and p.grad.layout is torch.strided
            and is_plain(p)
            for p, group in (flat[number] for number in left)
        )

    def _has_states(self, group: dict[str, Any]) -> bool:
        return True

    def _collect(self) -> list[int] | None:
        if self._is_collected:
            self._is_collected = False
            return []
        return None if self._plan is None else self._plan.collect(self.state, self.param_groups)

    def _collect_ahead(self) -> _C.Gradients | None:
        """Collect for the next step(), and return the gradients that it will take.

        None where it would not take them all, or where others' code runs before it does, which may give parameters
        other gradients. The caller calls step() at once, and _forget_collected() in any case.
        """
        if self._plan is None or not _is_bare(self):
            return None
        left = self._plan.collect(self.state, self.param_groups)
        if left or left is None:
            self._plan.drop()
            return None
        gradients = self._plan.gradients()
        self._is_collected = True
        return gradients

    def _forget_collected(self) -> None:
        if self._is_collected and self._plan is not None:
            self._plan.drop()
        self._is_collected = False

    def _complete_all(self) -> list[tuple[int, Tensor]]:
        first: list[tuple[int, Tensor]] = []
        number = 0
        try:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.grad.layout is torch.strided and is_plain(p):
                        if self._complete(p, group):
                            first.append((number, p))
                        self._take_home(p, group)
                    number += 1
        except BaseException:
            self._forget(first)
            raise
        return first

    def _forget(self, first: list[tuple[int, Tensor]]) -> None:
        """Forget that these had a first step, because it was not taken: their buffers have no value yet."""
        if first:
            self._plan = None
        for _, p in first:
            self.state[p].pop("momentum_buffer", None)

    def _update_left(self, plan: _C.UpdatePlan, left: list[int], scaling: ScaledStep | None) -> None:
        """Update the parameters that the plan could not take.

        Gradients in another order than their parameters, or with gaps, are copied for it; all else is torch's.
        """
        flat = [(p, group) for group in self.param_groups for p in group["params"]]
        self._check_states({p: self.state.get(p, {}) for p in (flat[number][0] for number in left)})
        rest: dict[tuple[int, torch.device], list[Tensor]] = {}
        for number in left:
            p, group = flat[number]
            self._check_gradient(p.grad)
            grad = _in_order(p)
            if grad is not None and plan.add(number, grad):
                if scaling is not None and scaling.store:
                    scaling.keep(p, grad)
            else:
                rest.setdefault((id(group), p.device), []).append(p)
        groups = {id(group): group for group in self.param_groups}
        for (which, device), params in rest.items():
            grads, found_inf = [p.grad for p in params], None
            if scaling is not None:
                found_inf = scaling.found_inf_on(device)
                grads = scaling.scaled(params, device)
            if found_inf is not None and (
                device.type != "cuda" or any(g.is_sparse or not g.is_floating_point() for g in grads)
            ):
                if found_inf.item() != 0:
                    continue
                found_inf = None
            self._update_by_torch(params, grads, groups[which], found_inf)

    def _check_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        places = {
            id(p): (g, i) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])
        }
        for p, state in states.items():
            wrong = self._check_state(p, state) if id(p) in places else None
            if wrong:
                number, index = places[id(p)]
                names = self.param_groups[number].get("param_names")
                raise ValueError(
                    f"parameter {index} of param group {number}{f' ({names[index]})' if names else ''}, of shape "
                    f"{tuple(p.shape)}: {wrong}; states can be loaded only from an optimizer of the same parameters "
                    "in the same order"
                )

    # ---- param groups and state dicts --------------------------------------------------------------------------------

    def memory(self) -> dict[str, dict[str, int]]:
        """Count the bytes of parameters, gradients and states by where they are.

        Returns:
            Bytes by device and kind. What offload_gradients and offload_states keep on the host is at "cpu", what
            offload_states keeps in a directory at "disk".

        Examples:
            >>> optimizer.memory()
            {'cuda:0': {'parameters': 16060522496, 'states': 1164}, 'cpu': {'gradients': 16060522496, 'states': ...}}
        """
        found: dict[str, dict[str, int]] = {}
        for p in (p for group in self.param_groups for p in group["params"]):
            states = (("states", value) for value in self.state.get(p, {}).values())
            for kind, value in (("parameters", p), ("gradients", p.grad), *states):
                if not isinstance(value, Tensor) or type(value) is SteppedGradient:
                    continue
                if value.layout is torch.strided:
                    stands_in = {HostGradient: "cpu", DiskState: "disk"}
                    there = found.setdefault(stands_in.get(type(value), str(value.device)), {})
                    there[kind] = there.get(kind, 0) + value.nbytes
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's optimizers do.

        Args:
            param_group: Its parameters and options; memopt's own options too.

        Raises:
            ValueError: differentiable=True, options that exclude each other, or offload_gradients=True or
                step_in_backward=True with a parameter that another optimizer has so.
            OSError: offload_states is a directory that does not exist, or cannot be written to.
            RuntimeError: One of these two in a process of several ranks.
        """
        for name, value in (self._own_defaults or {}).items():
            self.defaults.setdefault(name, value)
        if isinstance(param_group, dict):
            whole = {**self.defaults, **param_group}
            if whole.get("differentiable"):
                kind = type(self).__name__
                raise ValueError(
                    f"memopt.optim.{kind} works outside autograd: use torch.optim.{kind} for differentiable=True"
                )
            if whole["offload_gradients"] and whole["step_in_backward"]:
                raise ValueError(
                    "step_in_backward=True uses each gradient up as it is made, and none is left to wait on the host: "
                    "leave out offload_gradients=True or, to clip or accumulate gradients, step_in_backward=True"
                )
            directory = _directory(whole["offload_states"])
            if directory and whole["step_in_backward"]:
                raise ValueError(
                    "step_in_backward=True steps each parameter as its gradient comes, and cannot read its states from "
                    f"offload_states={directory!r} ahead of that: give offload_gradients=True instead, or "
                    "offload_states=True"
                )
            self._check_group(whole)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            self._check_parameters(group["params"])
            if directory := _directory(group["offload_states"]):
                group["offload_states"] = directory
                self._file_in(directory)
            self._take_gradients()
        except BaseException:
            self.param_groups.pop()
            raise

    def _take_gradients(self, shared: bool = False) -> None:
        """Have the gradients of groups with offload_gradients=True leave as they are made, and those of groups with
        step_in_backward=True used. shared: but for those that another optimizer has, as where this is a copy."""

        def chosen(name: str) -> list[Tensor]:
            return [p for group in self.param_groups if group.get(name) for p in group["params"]]

        if leaving := chosen("offload_gradients"):
            self._offload = self._offload or GradientOffload(self)
            self._offload.take(leaving, shared)
        if stepped := chosen("step_in_backward"):
            self._backward_steps = self._backward_steps or BackwardSteps(self)
            self._backward_steps.take(stepped, shared)

    def _take_home(self, p: Tensor, group: dict[str, Any]) -> None:
        """Have the parameter's states where its group wants them; on a disk they stay until others are loaded."""
        wanted = group.get("offload_states")
        if not wanted or p not in self.state or not is_plain(p):
            return
        homes, states = self.__dict__.setdefault("_homes", {}), self.state[p]
        home = homes.get(id(p))
        if directory := _directory(wanted):
            if not isinstance(home, DiskStates) or not home.names(states):
                file = self._file_in(directory)
                if home is not None:
                    home.wait()
                if not isinstance(home, DiskStates) or home.file is not file:
                    home = DiskStates(file)
            home.take(p, states)
            homes[id(p)] = home
        elif p.is_cuda and not (isinstance(home, DiskStates) and home.names(states)):
            if not isinstance(home, HostStates):
                home = homes[id(p)] = HostStates()
            home.take(states, p.device)

    def _file_in(self, directory: str) -> StateFile:
        """Return the file in that directory; a new one where there is none, or it has failed."""
        files = self.__dict__.setdefault("_files", {})
        if directory not in files or files[directory].failure:
            files[directory] = StateFile(directory)
        file: StateFile = files[directory]
        return file

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as torch's optimizers do.

        Args:
            set_to_none: Whether to set .grad to None; gradients that are not on the device can only be dropped.
        """
        self._settle()
        super().zero_grad(set_to_none)

    def _settle(self) -> None:
        for hooks in (self._offload, self._backward_steps):
            if hooks is not None:
                hooks.settle()

    def _wait_for_states(self) -> None:
        self._settle()
        for home in self._homes.values():
            home.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's optimizers do; states on the host or a disk as the last step has left them."""
        self._wait_for_states()
        own, self.state = self.state, here(self.state)
        try:
            return super().state_dict()  # type: ignore[no-any-return]
        finally:
            self.state = own

    def __getstate__(self) -> dict[str, Any]:
        self._wait_for_states()
        held: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**held, "state": here(self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch's optimizers or memopt's, with any options.

        The states are brought into the form in which this optimizer keeps them; state_bits, master_weights and so on
        stay as they are here.

        Args:
            state_dict: What state_dict() returned, of an optimizer of the same parameters in the same order.

        Raises:
            ValueError: As torch's, and where a state cannot be its parameter's: a tensor of another shape, one of two
                moments, codes without their scales, a type that no optimizer here keeps. Nothing has changed
                then.
        """
        handle = self.register_load_state_dict_pre_hook(
            _keep_tensors
        )  # the last: what the others give is kept
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = self.__dict__.get("param_groups", [])  # [] where a pickle is loaded
        loaded = {p: s for p, s in state["state"].items() if isinstance(s, dict) and _release(s)}
        for held in loaded.values():
            self._read(held)
        if loaded:
            self._check_states(loaded)
        super().__setstate__(state)
        self._plan = None
        for old, new in zip(before, self.param_groups, strict=False):
            new.update({name: old[name] for name in OWN_OPTIONS if name in old})
        self._take_gradients(shared=True)
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        with torch.no_grad():
            for p in loaded:
                if id(p) in group_of:
                    self._relay(p, self.state[p], group_of[id(p)])
                    self._take_home(p, group_of[id(p)])  # before the next one's come to the device
            for p in self.state:
                if id(p) in group_of:
                    self._take_home(p, group_of[id(p)])


def _directory(offload_states: Any) -> str:
    """Return the absolute path of a directory for states; "" for True and False."""
    if isinstance(offload_states, bool) or offload_states is None:
        return ""
    path = os.fspath(offload_states) if isinstance(offload_states, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ValueError(f"offload_states={offload_states!r}: give True, False, or a directory on a disk")
    return os.path.abspath(path)


def _is_bare(stepped: OnePass) -> bool:
    """Return whether stepped.step() begins with OnePass.step, apart from torch's own wrappers."""
    if stepped._optimizer_step_pre_hooks or optimizer._global_optimizer_pre_hooks:
        return False
    step: Any = getattr(stepped.step, "__func__", stepped.step)
    while hasattr(step, "__wrapped__"):
        code = getattr(step, "__code__", None)
        if code is None or code.co_filename not in TORCHS_WRAPPERS:
            return False
        step = step.__wrapped__
    return step is OnePass.step


class _UncastTensor:
    """A tensor in a state dict on its way past torch, which would cast it to its parameter's type."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _keep_tensors(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def kept(states: Any) -> Any:
        if not isinstance(states, dict):
            return states
        return {name: _UncastTensor(v) if isinstance(v, Tensor) else v for name, v in states.items()}

    return {**state_dict, "state": {key: kept(states) for key, states in state_dict["state"].items()}}


def _release(states: dict[str, Any]) -> bool:
    kept = [name for name, value in states.items() if isinstance(value, _UncastTensor)]
    for name in kept:
        states[name] = states[name].tensor
    return bool(kept)


def _in_order(p: Tensor) -> Tensor | None:
    """Return the gradient of p in the order of p's elements; None if it is not a plain one."""
    grad = p.grad
    if grad is None or type(grad) not in (Tensor, torch.nn.Parameter) or grad.layout is not torch.strided:
        return None
    if not is_plain(p) or grad.shape != p.shape or grad.device != p.device or not grad.is_floating_point():
        return None
    exact = grad.dtype in FLOATS and torch.float64 not in (p.dtype, grad.dtype)
    return like(p, grad.dtype if exact else p.dtype, grad)
