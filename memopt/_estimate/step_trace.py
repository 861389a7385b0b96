"""One step of a script, operator by operator, as torch's own observer of operators writes it down.

A mode would see operators too, but under any mode autograd copies gradients instead of taking them over, and the peak
differs; the observer sees backward passes and recomputation without one. memopt's kernels, which torch does not know,
count their bytes themselves, and the simulated device what is copied.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import _profiler
from torch.utils._python_dispatch import _disable_current_modes

import memopt.sim
from memopt import _C
from memopt._estimate.step_time import HOST, WAIT, Segment
from memopt._offload.codes import Codes
from memopt.optim._disk_states import DiskState
from memopt.optim._one_pass import OnePass
from memopt.sim._compute import ON_HOST

_STEPS = 3  # the first ones, of which the last is counted: each that is observed takes time
_MARK = "memopt: a segment ends"
_CODING = "memopt: coding"
_COPIES = ("to_device", "to_host", "side_to_device", "side_to_host")


class Observation:
    """Operators as torch's observer writes them into a file, of which a process has one at a time.

    Args:
        folder: For the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"step-{os.getpid()}.json"
        _mark_coding()
        if not _profiler._add_execution_trace_observer(str(self._file)):
            raise RuntimeError("the operators of a step cannot be observed: something else observes them")
        _profiler._enable_execution_trace_observer()

    def mark(self) -> None:
        """End a segment."""
        with torch.autograd.profiler.record_function(_MARK):
            pass

    def end(self) -> str:
        """Return what was observed, for `segments`.

        No thread may be within an operator. That of a device's backward passes can still be, just after one.
        """
        _profiler._disable_execution_trace_observer()
        _profiler._remove_execution_trace_observer()
        text = self._file.read_text()
        self._file.unlink()
        return text

    def forget(self) -> None:
        """In a forked child, observe nothing: the file is its parent's."""
        _profiler._disable_execution_trace_observer()


@functools.cache
def _mark_coding() -> None:
    """Have the operators that code and decode saved activations be below a mark of their own from now on."""

    def marked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any) -> Any:
            mark = torch.autograd.profiler.record_function(_CODING)
            with _disable_current_modes():  # under one the mark would end before the operators
                mark.__enter__()
            try:
                return original(*args)
            finally:
                with _disable_current_modes():
                    mark.__exit__(None, None, None)

        return run

    for name in ("__init__", "decoded"):
        setattr(Codes, name, marked(getattr(Codes, name)))


class StepTrace:
    """An observer of whole steps, from one step of an optimizer to its next.

    Args:
        folder: For its file.
        perturbed: Whether the loops do now what they do once in many iterations: such a step is no ordinary one.
    """

    def __init__(self, folder: Path, perturbed: Callable[[], bool]) -> None:
        self._folder, self._perturbed = folder, perturbed
        self._of: Callable[[], torch.optim.Optimizer | None] | None = None
        self._observation: Observation | None = None
        self._counters: list[dict[str, int]] = []  # at the step's begin, and at each mark
        self._trace: tuple[str, list[dict[str, int]]] | None = None
        self._steps = self._depth = self._host_bytes = self._disk_bytes = 0
        engine: Any = torch.autograd
        engine._engine_run_backward = self._between_marks(engine._engine_run_backward)
        os.register_at_fork(after_in_child=self._forget)

    def stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note a step of an optimizer, or a backward pass where there is none.

        Whole steps are those of the one that steps first, and lives: a trial of an optimizer is none of the script's.
        """
        if self._steps == _STEPS:
            return
        if self._of is None:
            self._of = (lambda: None) if optimizer is None else weakref.ref(optimizer, self._gone)
        elif self._of() is not optimizer:
            return
        elif self._observation is not None:
            self._host_bytes += 0 if optimizer is None else _host_bytes(optimizer)
            self._disk_bytes += 0 if optimizer is None else _disk_bytes(optimizer)
            self._mark()
            whole = len(self._counters) > 2  # there was a backward pass
            self._end(keep=whole and (self._trace is None or not self._perturbed()))
            self._steps += whole
        if self._steps < _STEPS:
            self._begin()

    def _gone(self, _: object) -> None:
        self._of = None
        self.interrupt()

    def interrupt(self) -> None:
        """Do not count the step that is under way."""
        self._end(keep=False)

    def segments(self) -> list[dict[str, Any]] | None:
        """Return the last whole step that was observed, None without one."""
        self.interrupt()
        return None if self._trace is None else [asdict(one) for one in segments(*self._trace)]

    # ---- observing ------------------------------------------------------------------------------------------------

    def _between_marks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._mark()
            self._depth += 1  # a backward pass within one, as torch's checkpoints begin, is a part of it
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._mark()

        return run

    def _begin(self) -> None:
        self._observation, self._counters = Observation(self._folder), [self._counts()]

    def _mark(self) -> None:
        if self._observation is not None:
            self._observation.mark()
            self._counters.append(self._counts())

    def _counts(self) -> dict[str, int]:
        return counters() | {"host_bytes": self._host_bytes, "disk_bytes": self._disk_bytes}

    def _end(self, keep: bool) -> None:
        if self._observation is not None:
            text = self._observation.end()
            self._observation = None
            if keep:
                self._trace = text, self._counters

    def _forget(self) -> None:
        if self._observation is not None:
            self._observation.forget()
            self._observation = None


def _host_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step of memopt's reads and writes of parameters on the host; torch's are operators."""
    if not isinstance(optimizer, OnePass):
        return 0
    stepped = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and not p.is_cuda]
    states = [s for p in stepped for s in optimizer.state[p].values() if isinstance(s, torch.Tensor)]
    total: int = sum(2 * s.nbytes for s in states) + sum(2 * p.nbytes + p.grad.nbytes for p in stepped)
    return total


def _disk_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of states that a step of memopt's reads from a disk and writes to it."""
    stepped = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    states = [s for p in stepped for s in optimizer.state[p].values() if isinstance(s, DiskState)]
    return sum(2 * s.nbytes for s in states)


def counters() -> dict[str, int]:
    devices = range(torch.cuda.device_count())
    found = dict.fromkeys(("kernel_bytes", *_COPIES), 0)
    for device in devices:
        found["kernel_bytes"] += _C.kernel_status(device)["bytes"]
        stats = memopt.sim.stats(device)
        for name in _COPIES:
            found[name] += stats[name]
    return found


def segments(text: str, counted: list[dict[str, int]]) -> list[Segment]:
    """Return the segments of an observation, by what it wrote, and by the counters at its begin and at each mark."""
    collects = gc.isenabled()
    gc.disable()  # of the objects of 14 MB it takes twice as long as to read them, and frees none
    try:
        found = list(_operators(json.loads(text)))
    finally:
        if collects:
            gc.enable()
    return [
        Segment(operators, **{name: after[name] - before[name] for name in after})
        for operators, (before, after) in zip(found, itertools.pairwise(counted), strict=True)
    ]


# ---- reading a trace -------------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    identity: tuple[Any, ...]  # of the memory that it covers
    storage: Any
    shape: list[int]
    dtype: str
    bytes: int  # that it has in memory: an expanded dimension counts once


_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
}
_KINDS = {"c10::Half": "fp16", "c10::BFloat16": "bf16"}
# They do not read what they write to.
_OVERWRITE = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
# They touch as much of their first tensor as the others have, and no more.
_PARTLY = {
    "embedding", "index_select", "gather", "index", "take", "index_put_", "_index_put_impl_", "index_add_",
    "index_copy_", "scatter_", "scatter_add_", "nll_loss_forward",
}  # fmt: skip
_READ = {"_local_scalar_dense", "nonzero"}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"}


def _operators(trace: dict[str, Any]) -> Iterator[list[tuple[str, float, float]]]:
    """Yield the operators of each segment of a trace.

    An operator that is made of others counts as these; one whose operations torch's counter knows counts itself. What a
    hook codes while an operator saves its tensors is no part of that one.
    """
    nodes = _of_this_trace(trace["nodes"])
    known = {node["id"] for node in nodes}
    children, first = defaultdict(list), []
    for node in nodes:
        if node["name"] == _CODING or node["ctrl_deps"] == node["id"] or node["ctrl_deps"] not in known:
            first.append(node)
        else:
            children[node["ctrl_deps"]].append(node)
    met: list[tuple[int, tuple[str, float, float] | None]] = []

    def visit(node: dict[str, Any]) -> None:
        if node["name"] == _MARK:
            met.append((node["id"], None))
            return
        if node["name"] == ON_HOST:
            return
        call = _Call(node)
        row = call.counted()
        before = len(met)
        if row is None:
            for child in children[node["id"]]:
                visit(child)
            row = call.moved() if len(met) == before else None
        if row is not None:
            met.append((node["id"], row))

    for node in first:
        visit(node)
    segment: list[tuple[str, float, float]] = []
    for _, row in sorted(met, key=lambda one: one[0]):
        if row is not None:
            segment.append(row)
        else:
            yield segment
            segment = []


def _of_this_trace(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes in their order, without what was under way when the trace began, as the step in whose hook that
    was, or a range of the script's.

    That ends in this trace, but has a number that another node may have.
    """
    ordered = sorted(nodes, key=lambda node: int(node["id"]))
    first = next((number for number in map(_record, ordered) if number), 0)
    return [node for node in ordered if _record(node) >= first or not _record(node)]


def _record(node: dict[str, Any]) -> int:
    """Return the number of a call, of which a later one has a higher one; 0 of a thread and of the process."""
    return next((int(one["value"]) for one in node["attrs"] if one["name"] == "rf_id"), 0)


class _Call:
    """A node of a trace: a call of an operator of torch's, or of something else, which has no schema."""

    def __init__(self, node: dict[str, Any]) -> None:
        self._node = node
        text = next(one["value"] for one in node["attrs"] if one["name"] == "op_schema")
        self._schema: Any = _schema(text) if text else None
        self.name = node["name"].rpartition("::")[2]

    @functools.cached_property
    def _given(self) -> list[list[_Tensor]]:
        """Of each argument its tensors."""
        return _tensors(self._node["inputs"])

    @functools.cached_property
    def _inputs(self) -> list[_Tensor]:
        return [*itertools.chain(*self._given)]

    @functools.cached_property
    def _outputs(self) -> list[_Tensor]:
        return [*itertools.chain(*_tensors(self._node["outputs"]))]

    def counted(self) -> tuple[str, float, float] | None:
        """Return its row if torch's counter of operations knows it."""
        formula = _formula(self._node["name"]) if self._schema else None
        if formula is None or not any(one.identity[-1].startswith("cuda") for one in self._inputs):
            return None
        positional, named = [], {}
        inputs = self._node["inputs"]
        for argument, value, shape, kind in zip(
            self._schema.arguments, inputs["values"], inputs["shapes"], inputs["types"], strict=True
        ):
            given = _as_meta(value, shape, kind)
            if argument.kwarg_only:
                named[argument.name] = given
            else:
                positional.append(given)
        outputs = [_as_meta(*one) for one in zip(*(self._node["outputs"][n] for n in _SIDE), strict=True)]
        operations = formula(
            *positional, **named, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)
        )
        dtype = next((one.dtype for one in self._inputs if one.dtype in _DTYPES), "")
        kind = _KINDS.get(dtype, "tf32" if _uses_tf32("conv" in self.name) else "fp32")
        return kind, float(operations), float(self._bytes())

    def moved(self) -> tuple[str, float, float] | None:
        """Return its row by the bytes that it moves, None if it launches no kernel."""
        if self._schema is None or _has_no_kernel(self._schema.name, self._schema.overload_name):
            return None
        tensors = [*self._inputs, *self._outputs]
        places = {one.identity[-1] for one in tensors}
        on_card = any(place.startswith("cuda") for place in places)
        if not on_card and (places != {"cpu"} or all(one.bytes <= 8 for one in tensors)):
            return None  # of the host, a number that an operator wraps in a tensor for itself
        across = on_card and any(one.identity[-1] == "cpu" and one.bytes > 8 for one in tensors)
        if on_card and (self.name in _READ or (self.name == "copy_" and across)):
            to_host = self.name in _READ or self._inputs[0].identity[-1] == "cpu"
            waits = to_host and self._node["inputs"]["values"][-1] is not True  # non_blocking
            return (WAIT, 0.0, 0.0) if waits else None
        if not self._schema.is_mutable:
            given = {one.storage for one in self._inputs}
            if all(one.storage in given for one in self._outputs):
                return None  # a view that its schema does not tell, or nothing
        return ("fp32", 0.0, float(self._bytes())) if on_card else (HOST, 0.0, float(self._bytes("cpu")))

    def _bytes(self, device: str = "cuda") -> int:
        """Return the bytes that it reads and writes on devices of a type."""
        written = {one.identity: one.bytes for one in self._outputs}
        read = {one.identity: one.bytes for one in self._inputs}
        for argument, tensors in zip(self._schema.arguments, self._given, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed = {one.identity: one.bytes for one in tensors}
                written |= changed
                if self.name in _OVERWRITE or argument.is_out:
                    read = {key: size for key, size in read.items() if key not in changed}
        if self.name in _PARTLY:
            first = self._inputs[0].identity
            others = [size for key, size in (*read.items(), *written.items()) if key != first]
            for side in (read, written):
                if first in side:
                    side[first] = min(side[first], max(others, default=0))
        sides = (*read.items(), *written.items())
        return sum(size for key, size in sides if key[-1].startswith(device))


_SIDE = ("values", "shapes", "types")


def _tensors(side: dict[str, Any]) -> list[list[_Tensor]]:
    """Return the tensors of each argument of a call, or of each result."""
    rows = zip(*(side[name] for name in ("values", "shapes", "strides", "types")), strict=True)
    return [[*_tensors_of(*row)] for row in rows]


def _tensors_of(value: Any, shape: Any, strides: Any, kind: str) -> Iterable[_Tensor]:
    if kind.startswith("Tensor"):
        return (_tensor(value, shape, strides, kind),)
    if not kind.startswith("GenericList[Tensor"):
        return ()
    kinds = kind.removeprefix("GenericList[").removesuffix("]").split(",")
    rows = zip(value, shape, strides, kinds, strict=False)
    return (_tensor(*row) for row in rows if row[3].startswith("Tensor"))


def _tensor(value: list[Any], shape: list[int], strides: list[int], kind: str) -> _Tensor:
    _, storage, offset, _, size, device = value
    elements = math.prod(n for n, stride in zip(shape, strides, strict=False) if stride)
    identity = (storage, offset, tuple(shape), tuple(strides), device)
    return _Tensor(identity, storage, shape, kind[len("Tensor(") : -1], elements * size)


def _as_meta(value: Any, shape: Any, kind: str) -> Any:
    """Return an argument as it was given, but for tensors, which are without memory."""
    if kind.startswith("Tensor"):
        return torch.empty(shape, dtype=_DTYPES.get(kind[len("Tensor(") : -1], torch.int64), device="meta")
    return None if kind == "None" else value


@functools.cache
def _schema(text: str) -> Any:
    return torch._C.parse_schema(text)


@functools.cache
def _formula(name: str) -> Callable[..., int] | None:
    # It warns, as it is imported, of kernels of a triton that is not there.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from torch.utils.flop_counter import flop_registry

    space, _, operator = name.partition("::")
    return flop_registry.get(getattr(getattr(torch.ops, space, None), operator, None)) if operator else None


@functools.cache
def _has_no_kernel(name: str, overload: str) -> bool:
    """Return whether an operator launches none: it makes memory or views, or is made of other operators."""
    full = f"{name}.{overload}" if overload else name
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        return True
    returned = [one.alias_info for one in torch._C._get_schema(name, overload).returns]
    views = any(alias is not None and not alias.is_write for alias in returned)
    return views or name.rpartition("::")[2] in _NO_KERNEL


def _uses_tf32(convolution: bool) -> bool:
    backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul
    return bool(backend.fp32_precision == "tf32")
