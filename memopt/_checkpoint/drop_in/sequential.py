"""memopt.checkpoint_sequential: a chain of functions, checkpointed in equal segments or by an optimal schedule.

By a schedule, plans are made when they are first needed, and kept by the functions' identities and everything that the
schedule depends on. They hold nothing of the functions but numbers. A runner is made for each call and lives as long as
its graph.
"""

from __future__ import annotations

import os
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torchs
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memopt._checkpoint.checked_plan import Candidate, Forward, checked_plan
from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.drop_in.checkpoint import IS_CURRIED, checkpoint, is_tracing
from memopt._checkpoint.plan import SLOTS
from memopt._checkpoint.runner import ChainRunner, changeable, unchangeable
from memopt._checkpoint.stages.costs import device_of, tensors_in
from memopt._checkpoint.stages.measure import ChainMeasurement, default_loss
from memopt._checkpoint.stages.model_chain import without_graph
from memopt._checkpoint.stages.module_state import Changes, WeakChanges, changes_within, joined, watched
from memopt._checkpoint.stages.trace_forward import autocast_kinds, autocast_of
from memopt._offload.schedule_sets import ScheduleOffload, bandwidth, destination
from memopt._runtime import arguments
from memopt._runtime.originals import original
from memopt._runtime.state_snapshot import preserve_state
from memopt.chain import Op
from memopt.optim._state_bytes import OptimizerBytes

torchs_sequential = original(torchs, "checkpoint_sequential")

_SINCE = "In a future release," if IS_CURRIED else "In version 2.9"
_NOT_PASSED = (
    "torch.utils.checkpoint.checkpoint_sequential: the use_reentrant "
    "parameter should be passed explicitly. "
    f"{_SINCE} we will raise an exception if use_reentrant "
    "is not passed. use_reentrant=False is "
    "recommended, but if you need to preserve the current default "
    "behavior, you can pass use_reentrant=True. Refer to docs for more "
    "details on the differences between the two variants."
)

Function = Callable[[Any], Any]
MOST_PLANS = 64  # of one chain: of inputs whose shapes differ in every step not all are kept


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int | None,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    memory_budget: int | float | str | None = None,
    to: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Apply functions one after the other, and recompute intermediate results in the backward pass.

    A drop-in for torch.utils.checkpoint.checkpoint_sequential. With memory_budget the functions run by the fastest
    recomputation schedule that stays within it. Random states are then restored, and running statistics count a batch
    once. The functions are measured when they are first called with an input of new shapes, dtypes and devices, which
    takes some runs of each. They must therefore be the same objects from call to call, not new lambdas.

    Args:
        functions: The functions or modules, or an nn.Sequential.
        segments: Number of segments, of len(functions) // segments functions each. The last one takes the rest, and
            keeps its intermediate results. Not used with memory_budget, and may be None then.
        input: The first function's input.
        use_reentrant: As in memopt.checkpoint. Not used with memory_budget.
        memory_budget: Most bytes that this chain may need from the call to the end of its backward: parameters and
            buffers of the functions, their gradients, the input, saved tensors, the output and its gradient. Subtract
            other memory (an optimizer's state, other parts of the model) first. An int, "8GiB", or a fraction (a float)
            of the device's memory.
        to: With memory_budget, the place where functions may keep their saved sets until their backward, if that is
            faster than recomputing them, as in memopt.auto_checkpoint.
        **kwargs: preserve_rng_state, and batch_norm_once as in memopt.checkpoint.

    Returns:
        The last function's output.

    Raises:
        memopt.chain.InfeasibleBudget: No schedule fits; the message names the least feasible budget.
        ValueError: The budget or `to` cannot be read (nothing has run then), there are neither segments nor a budget,
            `to` is given without a budget, or an argument is unknown.
        OSError: The disk cannot be written to.

    Examples:
        >>> y = memopt.checkpoint_sequential(layers, None, x, memory_budget="2GiB")
    """
    if memory_budget is not None:
        unknown = kwargs.keys() - {"preserve_rng_state", "batch_norm_once"}
        if unknown:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        # Not children(), which leaves out a module that is there a second time.
        return run_within(tuple(functions), input, memory_budget, to)
    if to is not None:
        raise ValueError("to= is where a schedule may offload to: give memory_budget as well")
    if segments is None:
        raise ValueError("segments is None: give the number of segments, or memory_budget")
    if segments > max(1, len(functions)):
        raise ValueError(f"segments={segments}: expected 1 to {len(functions)}, the number of functions")
    if use_reentrant is None:
        warnings.warn(_NOT_PASSED, stacklevel=2)
        use_reentrant = True
    options = {name: kwargs.pop(name) for name in ("preserve_rng_state", "batch_norm_once") if name in kwargs}
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    chain = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else functions
    size = len(chain) // segments
    end = 0
    for start in range(0, size * (segments - 1), size):
        end = start + size
        input = checkpoint(_Segment(chain[start:end]), input, use_reentrant=use_reentrant, **options)
    return _Segment(chain[end:])(input)


class _Segment:
    """Functions that are called one after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.functions = functions

    def __call__(self, input: Any) -> Any:
        for function in self.functions:
            input = function(input)
        return input


# ---- by a schedule ---------------------------------------------------------------------------------------------------


def run_within(
    functions: tuple[Function, ...],
    input: Any,
    memory_budget: int | float | str,
    to: str | os.PathLike[str] | None = None,
) -> Any:
    """Apply functions to the input, one after the other, within the budget."""
    tensors = tensors_in(input)
    modules = modules_of(functions)
    tensors += [parameter for module in modules for parameter in module.parameters()] if not tensors else []
    device = next((t.device for t in tensors), torch.device("cpu"))
    budget, place = arguments.budget(memory_budget, device), destination(to, device)
    if not functions or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing():
        return _Segment(functions)(input)
    plans, use = plans_of(functions), use_of(functions, input, budget, place)
    if use not in plans.by_use:
        plans.keep(use, plan(functions, input, budget, place))
    operations = plans.by_use[use]
    if operations is None:
        return _Segment(functions)(input)
    return operations.runner(functions)(input)


def module_of(function: Function) -> torch.nn.Module | None:
    module = getattr(function, "__self__", function)
    return module if isinstance(module, torch.nn.Module) else None


def modules_of(functions: Sequence[Function]) -> list[torch.nn.Module]:
    return [module for function in functions if (module := module_of(function)) is not None]


def identity_of(function: Function) -> tuple[Any, ...]:
    """Return a key that is the same in every call: a bound method is a new object each time it is looked up."""
    return (function.__self__, function.__func__) if isinstance(function, types.MethodType) else (function,)


def is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def parameters_behind(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward pass from these makes gradients for."""
    found, seen = [], set()
    ahead = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.append(leaf)
        ahead += [following for following, _ in node.next_functions if following is not None]
    return found


class FunctionChain:
    """The functions as the stages of a chain on a copy of this input; what each works with is found by running it."""

    def __init__(self, functions: Sequence[Function], input: Any) -> None:
        self.functions = functions
        self.names = [getattr(function, "__name__", type(function).__name__) for function in functions]
        self.lingering = [None] * len(functions)
        self.changing: list[int] = []
        self.norms: list[list[torch.nn.Module]] = []
        self.state: list[Changes] = []
        # No backward pass of a measurement goes into what made the input, and nothing changes it.
        self.input = pytree.tree_map(
            lambda x: (
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            ),
            input,
        )
        modules = modules_of(functions)
        standing = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        trained: dict[int, torch.Tensor] = {}

        def noting(function: Function, value: Any) -> Any:
            out = function(value)
            given = {id(unchangeable(tensor)) for tensor in tensors_in(value)}
            trained.update(
                (id(leaf), leaf) for leaf in parameters_behind(tensors_in(out)) if id(leaf) not in given
            )
            return out

        value = pytree.tree_map(
            lambda x: changeable(x.clone().detach().requires_grad_()) if is_trained(x) else x, self.input
        )
        called: list[list[torch.nn.Module]] = []
        for k, function in enumerate(functions):
            versions = [(tensor, tensor._version) for tensor in tensors_in(value)]
            own = [] if (module := module_of(function)) is None else module.modules()
            with batch_norm.kept() as copies, watched(own) as snapshot:
                value = without_graph(noting, (function, value), {}, self.names[k])
            called.append(list(snapshot.modules))
            self.state.append(snapshot.changes())
            self.norms.append(list(copies.own))
            standing += [buffer for norm in copies.own for buffer in norm.buffers(recurse=False)]
            if any(tensor._version != version for tensor, version in versions):
                self.changing.append(k)
        if 0 in self.changing:
            raise ValueError(
                f"functions[0], {self.names[0]}, changes its input in place, but running it again needs that input: "
                "give it a copy, or call it before checkpoint_sequential"
            )
        changes = joined(*self.state)
        self.state = [
            joined(own, changes_within(changes, modules))
            for own, modules in zip(self.state, called, strict=True)
        ]
        self.needs_gradients = any(tensor.requires_grad for tensor in tensors_in(value))
        self.trainable = list(trained.values())
        self.standing = [*standing, *self.trainable, *tensors_in(self.input)]
        self.device, self.mapped = device_of(self.standing), ((), 0)

    def run(self, run: Callable[..., Any]) -> Any:
        value = self.input
        for k in range(len(self.functions)):
            value = run(k, value)
        return value


class Operations(NamedTuple):
    """The parts of a ChainRunner. state: what each stage changes in modules, which the plan does not keep alive."""

    ops: list[Op]
    passing: set[int]
    changing: list[int]
    state: list[WeakChanges]
    offload: ScheduleOffload | None

    def runner(self, functions: Sequence[Function]) -> ChainRunner:
        state = [changes.now() for changes in self.state]
        return ChainRunner(functions, self.ops, self.passing, self.changing, self.offload, state=state)


class Plans:
    """The plans of one chain. references: to the objects that the chain's identity depends on."""

    def __init__(self, references: list[weakref.ref[Any]]) -> None:
        self.references = references
        self.by_use: OrderedDict[Any, Operations | None] = OrderedDict()  # None: nothing is to run again

    def keep(self, use: Any, operations: Operations | None) -> None:
        self.by_use[use] = operations
        while len(self.by_use) > MOST_PLANS:
            self.by_use.popitem(last=False)


_chains: dict[tuple[int, ...], Plans] = {}
_lock = threading.Lock()


def plans_of(functions: Sequence[Function]) -> Plans:
    """Return the plans of the chain of these functions, kept as long as all of them live.

    If one cannot be referred to weakly, new plans are returned, which nobody keeps.
    """
    parts = [part for function in functions for part in identity_of(function)]
    key = tuple(map(id, parts))

    def forget(_: weakref.ref[Any]) -> None:
        _chains.pop(key, None)

    plans = _chains.get(key)
    if plans is None:
        try:
            plans = Plans([weakref.ref(part, forget) for part in parts])
        except TypeError:
            return Plans([])
        with _lock:
            plans = _chains.setdefault(key, plans)
    return plans


def use_of(functions: Sequence[Function], input: Any, budget: int, to: str | None) -> Any:
    """Return a key of everything that a plan depends on besides the functions."""
    leaves, spec = pytree.tree_flatten(input)
    modules = modules_of(functions)
    return (
        budget,
        to,
        spec,
        tuple(
            (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            if isinstance(x, torch.Tensor) and x.layout is torch.strided
            else type(x)
            for x in leaves
        ),
        autocast_of(autocast_kinds(leaves)),
        tuple(inner.training for module in modules for inner in module.modules()),
        tuple((p.requires_grad, p.grad is None) for module in modules for p in module.parameters()),
    )


def plan(functions: Sequence[Function], input: Any, budget: int, to: str | None) -> Operations | None:
    """Measure the chain in any context, and leave everything as it was."""
    modules = modules_of(functions)
    with ExitStack() as stack:
        # What an outer region, or who else looks on, would count or keep.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
        )
        stack.enter_context(batch_norm.kept())
        stack.enter_context(preserve_state(*modules))
        state = stack.enter_context(watched(inner for module in modules for inner in module.modules()))
        stack.callback(state.put_back)
        chain = FunctionChain(functions, input)
        if not chain.needs_gradients:
            return None
        accumulate = any(parameter.grad is not None for parameter in chain.trainable)
        stack.enter_context(preserve_state(parameters=chain.trainable))
        measured = ChainMeasurement(chain, default_loss)
        offload: ScheduleOffload | None = None

        def forward_by(candidate: Candidate) -> Forward:
            nonlocal offload
            tried, ops, passing = candidate
            offload = None if to is None else ScheduleOffload(to, tried.offload_slots)
            run = (
                _Segment(functions)
                if tried.keeps_all
                else ChainRunner(functions, ops, passing, chain.changing, offload, state=chain.state)
            )

            def forward() -> tuple[Any, torch.Tensor]:
                with torch.enable_grad():
                    out = run(chain.input)
                    return out, default_loss(out)

            return forward

        found, ops, passing = checked_plan(
            measured,
            budget,
            SLOTS,
            beside=OptimizerBytes([], [], [], 0),
            accumulate=accumulate,
            whose="checkpoint_sequential's chain",
            forward_by=forward_by,
            speed=None if to is None else bandwidth(to, measured.device),
        )
    if found.keeps_all:
        return None
    return Operations(
        ops, passing, chain.changing, [WeakChanges(changes) for changes in chain.state], offload
    )
