"""Hooks that observe a program where torch allows it: modules' forward passes, backward passes and optimizers' steps.

From them a recorder learns which module runs, where a step ends, and the purpose of tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as optim_optimizer
from torch.utils import _pytree as pytree

from memopt._memory.recording.module_calls import ModuleCalls
from memopt._memory.recording.recording import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, Frame, Stack

_DEPTH = 64  # frames of a stack
_OFTEN = 16  # steps between two attributions of what seldom changes: parameters and states


class Listener(Protocol):
    """A receiver of the program's events. A position is whatever the listener counts."""

    def attribute(self, tensors: Iterable[torch.Tensor], category: int) -> None: ...

    def begins(self, phase: str, stack: Stack) -> None:
        """Note the beginning of "forward" (the first since a backward pass or a step), "backward" or "step"
        (optimizer's)."""

    def ends(self, phase: str) -> None:
        """End "backward" or "step"; a forward pass ends with what begins after it."""


def stack_here(depth: int) -> Stack:
    """Return this thread's stack, from `depth` frames above the caller."""
    frame = sys._getframe(depth + 1)
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class ProgramHooks:
    """The hooks of a listener, active from start() to stop()."""

    def __init__(self, listener: Listener) -> None:
        self.modules = ModuleCalls(self._enter, self._leave)
        self._listener = listener
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._backward = threading.Lock()
        self._in_graph = False  # since the first forward pass after a backward pass or a step
        self._first = 0  # the module whose it was
        self._had_backward = False  # since the last step
        self._steps = 0
        self._undo: list[Callable[[], None]] = []

    def start(self, modules: bool = True) -> None:
        if modules:
            self.modules.start()
        self._undo += [
            optim_optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            optim_optimizer.register_optimizer_step_post_hook(self._after_step).remove,
            self._watch_backward(),
        ]

    def stop(self) -> None:
        self.modules.stop()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # ---- modules ------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module) -> None:
        if not self._in_graph:
            self._in_graph = True
            self._first = id(module)
            self._listener.begins("forward", ())

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._roots:
            self._roots.add(module)
            self._listener.attribute(_state_of([module]), PARAMETERS)
        if self._first == id(module):  # what the others are given may be what this one made
            given = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.is_leaf and not isinstance(leaf, nn.Parameter)
            ]
            self._listener.attribute(given, INPUTS)

    # ---- backward passes and steps ------------------------------------------------------------------------------

    def _watch_backward(self) -> Callable[[], None]:
        engine: Any = torch.autograd
        original = engine._engine_run_backward

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._backward.acquire(blocking=False):  # one within another, or beside it
                return original(*args, **kwargs)
            try:
                self._listener.begins("backward", stack_here(1))
                self._in_graph, self._had_backward = False, True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._listener.attribute(self._gradients(), GRADIENTS)
                    self._listener.ends("backward")
            finally:
                self._backward.release()

        def undo() -> None:
            if engine._engine_run_backward is run:
                engine._engine_run_backward = original

        engine._engine_run_backward = run
        return undo

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._optimizers.add(optimizer)
        if not self._had_backward:  # else they were attributed where they were made
            self._listener.attribute(_gradients_of(_parameters_of([optimizer])), GRADIENTS)
        self._in_graph = self._had_backward = False
        self._listener.begins("step", ())

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._steps < 2 or not self._steps % _OFTEN:
            self._attribute_states([optimizer])
        self._steps += 1
        self._listener.ends("step")

    def attribute_all(self) -> None:
        """Attribute all tensors whose purpose is known at this moment."""
        self._listener.attribute(_state_of(self._roots), PARAMETERS)
        self._attribute_states(self._optimizers)
        self._listener.attribute(self._gradients(), GRADIENTS)

    def facts(self) -> dict[str, Any]:
        """Return facts about the models that ran: the auto_checkpoint plan of the first that has one."""
        planning = sys.modules.get("memopt._checkpoint.plan.plan")
        if planning is None:
            return {}
        parts = (part for root in self._roots for part in root.modules())
        plans = (plan for part in parts if isinstance(plan := vars(part).get("plan"), planning.Plan))
        plan = next(plans, None)
        return {} if plan is None else {"plan": plan.as_dict()}

    def _attribute_states(self, optimizers: Iterable[Any]) -> None:
        self._listener.attribute(_parameters_of(optimizers), PARAMETERS)
        states = pytree.tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        self._listener.attribute([leaf for leaf in states if isinstance(leaf, torch.Tensor)], OPTIMIZER)

    def _gradients(self) -> list[torch.Tensor]:
        of_modules = [parameter for root in self._roots for parameter in root.parameters()]
        return _gradients_of({*of_modules, *_parameters_of(self._optimizers)})


def _state_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _parameters_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
