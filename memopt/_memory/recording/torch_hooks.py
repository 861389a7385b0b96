"""Hooks that observe a program where torch allows it: modules' forward passes, backward passes and optimizers' steps.

From them a recorder learns which module runs, where a step ends, and the purpose of tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as optim_optimizer
from torch.utils import _pytree as pytree

from memopt import _C
from memopt._memory.recording.recording import GRADIENTS, INPUTS, OPTIMIZER, OTHER, PARAMETERS, Frame, Stack

if TYPE_CHECKING:
    from memopt._memory.recording.recorder import Recorder

_DEPTH = 64  # frames of a stack
_OFTEN = 16  # steps between two attributions of what seldom changes: parameters and states


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
    """The hooks of a recorder, active from start() to stop()."""

    def __init__(self, recorder: Recorder) -> None:
        self.modules = ModuleCalls(self._enter, self._leave)
        self._recorder = recorder
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
            self._recorder.begins("forward", ())

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._roots:
            self._roots.add(module)
            self._recorder.attribute(_state_of([module]), PARAMETERS)
        if self._first == id(module):  # what the others are given may be what this one made
            given = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.is_leaf and not isinstance(leaf, nn.Parameter)
            ]
            self._recorder.attribute(given, INPUTS)

    # ---- backward passes and steps ------------------------------------------------------------------------------

    def _watch_backward(self) -> Callable[[], None]:
        engine: Any = torch.autograd
        original = engine._engine_run_backward

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._backward.acquire(blocking=False):  # one within another, or beside it
                return original(*args, **kwargs)
            try:
                self._recorder.begins("backward", stack_here(1))
                self._in_graph, self._had_backward = False, True
                try:
                    return original(*args, **kwargs)
                finally:
                    self._recorder.attribute(self._gradients(), GRADIENTS)
                    self._recorder.ends("backward")
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
            self._recorder.attribute(_gradients_of(_parameters_of([optimizer])), GRADIENTS)
        self._in_graph = self._had_backward = False
        self._recorder.begins("step", ())

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._steps < 2 or not self._steps % _OFTEN:
            self._attribute_states([optimizer])
        self._steps += 1
        self._recorder.ends("step")

    def attribute_all(self) -> None:
        """Attribute all tensors whose purpose is known at this moment."""
        self._recorder.attribute(_state_of(self._roots), PARAMETERS)
        self._attribute_states(self._optimizers)
        self._recorder.attribute(self._gradients(), GRADIENTS)

    def facts(self) -> dict[str, Any]:
        """Return facts about what ran: its optimizers, and the auto_checkpoint plan of the first model with one."""
        stepped = {_described(optimizer) for optimizer in self._optimizers}
        told = {"optimizers": [{"kind": kind, "options": [*options]} for kind, options in sorted(stepped)]}
        return told | self._plan()

    def _plan(self) -> dict[str, Any]:
        planning = sys.modules.get("memopt._checkpoint.plan")
        if planning is None:
            return {}
        parts = (part for root in self._roots for part in root.modules())
        plans = (plan for part in parts if isinstance(plan := vars(part).get("plan"), planning.Plan))
        plan = next(plans, None)
        return {} if plan is None else {"plan": plan.as_dict()}

    def _attribute_states(self, optimizers: Iterable[Any]) -> None:
        self._recorder.attribute(_parameters_of(optimizers), PARAMETERS)
        states = pytree.tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        self._recorder.attribute([leaf for leaf in states if isinstance(leaf, torch.Tensor)], OPTIMIZER)

    def _gradients(self) -> list[torch.Tensor]:
        of_modules = [parameter for root in self._roots for parameter in root.parameters()]
        return _gradients_of({*of_modules, *_parameters_of(self._optimizers)})


def _described(optimizer: Any) -> tuple[str, tuple[str, ...]]:
    """Return the name of an optimizer of torch's, "" of another, and those of its switches that are on."""
    kind = type(optimizer)
    name = kind.__name__ if kind is getattr(torch.optim, kind.__name__, None) else ""
    switches = ("amsgrad", "differentiable", "foreach", "fused")
    return name, tuple(one for one in switches if any(group.get(one) for group in optimizer.param_groups))


def _state_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _parameters_of(optimizers: Iterable[Any]) -> list[torch.Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


# ---- module calls ----------------------------------------------------------------------------------------------------
# The module whose forward pass a thread runs, noted in C at nn.Module._call_impl, which runs every forward pass.
#
# torch's global hooks would report the same at some 8 µs a call instead of 0.2, and torch.compile would trace them.


class ModuleCalls:
    """The running module, from start() to stop(). `names`: of modules, by index; index 0 is "", for none.

    entered(module) and left(module, args, kwargs) are called for a module that is called while none runs.
    """

    def __init__(
        self,
        entered: Callable[[nn.Module], None],
        left: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self.names: list[str] = [""]
        self._entered, self._left = entered, left
        self._indices: list[Any] = [0]
        self._texts: list[Any] = ["0"]
        self._known: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._taken: dict[str, int] = {}
        compiler: Any = torch._C._dynamo.eval_frame
        self._calls = _C.ModuleCalls(nn.Module._call_impl, self._enter, self._leave, compiler.set_eval_frame)

    def start(self) -> None:
        self._calls.start()

    def stop(self) -> None:
        self._calls.stop()

    def tell(self, told: Callable[[Any], None], as_text: bool = False) -> None:
        """Call `told` whenever another module runs, with its index, or with that as text."""
        self._calls.tell(told, self._texts if as_text else self._indices)

    def note(self, most: int) -> None:
        """Keep the last `most` times at which another module begins to run."""
        self._calls.note(most)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those times, in microseconds since 1970, and the index of the module that runs from each time on."""
        noted = self._calls.moments()
        pairs = torch.frombuffer(noted, dtype=torch.int64) if noted else torch.empty(0, dtype=torch.int64)
        times, indices = pairs.view(-1, 2).unbind(1)
        return times.contiguous(), indices.contiguous()

    # ---- called by ModuleCalls ----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, outermost: bool) -> int:
        if torch.compiler.is_compiling():
            return 0
        known = self._known.get(id(module))  # by id: a module may have an __eq__ of its own
        if known is None:
            known = self._name(module, outermost)
        if outermost:
            self._entered(module)
        return known[1]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._left(module, args, kwargs)

    def _name(self, module: nn.Module, outermost: bool) -> tuple[weakref.ref[nn.Module], int]:
        """Return the module's path from the outermost module that was called, which is named by its class."""
        base = type(module).__name__
        if outermost:
            self._taken[base] = nth = self._taken.get(base, 0) + 1
            base = base if nth == 1 else f"{base}#{nth}"
        for path, below in module.named_modules() if outermost else [("", module)]:
            if id(below) not in self._known:
                self._know(below, f"{base}.{path}" if path else base)
        return self._known[id(module)]

    def _know(self, module: nn.Module, name: str) -> None:
        identity, index, calls, known = id(module), len(self.names), self._calls, self._known

        def gone(_: Any) -> None:
            calls.forget(identity)
            known.pop(identity, None)

        self.names.append(name)
        self._indices.append(index)
        self._texts.append(str(index))
        known[identity] = weakref.ref(module, gone), index
        calls.know(module, index)


# ---- attribution -----------------------------------------------------------------------------------------------------
# Attribution of blocks to categories by the tensors' owners: an optimizer its states, a module its parameters.
#
# An attribution says that at some moment a tensor at this address was of this category. The block that lived there then
# gets the category for its whole life. An attribution therefore acts backwards, and a gradient counts as one from its
# first byte on.


def category_column(values: array[int]) -> torch.Tensor:
    """A copy, which leaves the array free to grow."""
    return (
        torch.frombuffer(values, dtype=torch.int64).clone() if values else torch.empty(0, dtype=torch.int64)
    )


class Attributions:
    """The attributions of one device. A position is the number of births and deaths there so far."""

    def __init__(self) -> None:
        self._positions = array("q")
        self._addresses = array("q")
        self._categories = array("q")

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, position: int, addresses: Iterable[int], category: int) -> None:
        before = len(self._addresses)
        self._addresses.extend(addresses)
        added = len(self._addresses) - before
        self._positions.extend(array("q", [position]) * added)
        self._categories.extend(array("q", [category]) * added)

    def forget(self, position: int) -> None:
        """Drop attributions from before a position, whose events are gone too."""
        gone = bisect_left(self._positions, position)  # they were made in order
        for column in (self._positions, self._addresses, self._categories):
            del column[:gone]

    def categories(
        self, born: torch.Tensor, died: torch.Tensor, address: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Return each block's category, OTHER where none is attributed.

        first: the position of the blocks' event 0. Of several attributions of a block the first category of all counts.
        """
        found = torch.full_like(born, OTHER)
        if not len(born) or not len(self):
            return found
        after = category_column(self._positions) - first - 1  # the event after which it was attributed
        attributed, category = category_column(self._addresses), category_column(self._categories)
        known = after >= -1
        after, attributed, category = after[known], attributed[known], category[known]
        # The last block born at that address by then: blocks and attributions on one scale, by address, then time.
        places = address.unique()
        span = int(torch.cat((died, after, born)).max()) + 3
        block_key = torch.searchsorted(places, address) * span + born + 1
        sorted_keys, order = block_key.sort()
        place = torch.searchsorted(places, attributed).clamp(max=len(places) - 1)
        at = torch.searchsorted(sorted_keys, place * span + after + 1, right=True) - 1
        block = order[at.clamp(min=0)]
        right = (at >= 0) & (address[block] == attributed) & (died[block] > after) & (born[block] <= after)
        return found.scatter_reduce(0, block[right], category[right], "amin")
