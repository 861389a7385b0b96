"""The layers' parameters that are on the device, and when they come and go.

    enter   a layer is called. Its parameters' copies are waited for and stand in the module in the parameters' place;
            copies of what is expected next are begun
    leave   it returned, or raised: the parameters are back in their places
    back    the backward pass asks for a parameter that the layer saved. With the first of a layer's, the rest of it is
            fetched, and what the layers called before it saved is begun
    done    the backward pass has ended

A copy goes when what it came for is over and others want its place: in the forward pass the one used longest ago, in
the backward pass as soon as all that was saved of the parameter has been asked for. What is left at the end of the
forward pass is what the backward pass begins with, and need not travel again. No copy outlives its pass: between passes
the parameters belong to the optimizer."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from memopt._offload.carriers import Carrier, ParameterCopy
from memopt._offload.model_layers import Layer, ParameterSlot
from memopt._offload.saved_parameters import Reference, SavedParameters

T = TypeVar("T")
MOST_AHEAD = 64  # layers
_task: Callable[[], int] = torch._C._current_graph_task_id


class PrefetchOrder(Generic[T]):
    """The order in which layers are called, learned from one forward pass for the next. first: what is expected of the
    first pass."""

    def __init__(self, first: Sequence[T]) -> None:
        self._expected: list[T] = list(first)
        self._now: list[T] = []
        self._at = 0  # of the expected, the next

    def begin(self) -> None:
        """Begin a pass, which is expected to repeat the last one."""
        if self._now:
            self._expected = self._now
        self._now, self._at = [], 0

    def saw(self, item: T) -> None:
        self._now.append(item)
        n = len(self._expected)
        # As expected; or further on, something was left out; or, in another order, wherever it was.
        for place in (*range(self._at, n), *range(min(self._at, n))):
            if self._expected[place] is item:
                self._at = place + 1
                return

    def ahead(self) -> Iterator[T]:
        """Return the layers expected next, nearest first."""
        return iter(self._expected[self._at :])


class PlacedCopy:
    """A device copy that stands in a parameter's place from now on."""

    __slots__ = ("_form", "_pointer", "copy", "parameter", "slot")

    def __init__(self, slot: ParameterSlot, parameter: torch.Tensor, copy: torch.Tensor) -> None:
        self.slot, self.parameter, self.copy = slot, parameter, copy
        self._form, self._pointer = _form(copy), copy.data_ptr()
        slot.owner._parameters[slot.name] = copy  # type: ignore[assignment]

    def take_out(self) -> None:
        """Put the parameter back in its place, unless the layer has put something else there."""
        if self.slot.owner._parameters.get(self.slot.name) is self.copy:
            self.slot.owner._parameters[self.slot.name] = self.parameter  # type: ignore[assignment]

    @property
    def changed(self) -> bool:
        """Return whether the copy was written to, or its .data assigned.

        A write in place through .data shows in neither. An RNN on a device also assigns .data, to have its weights in
        one piece for cuDNN, with the same values."""
        if _form(self.copy) != self._form:
            return True
        return self.copy.data_ptr() != self._pointer and not isinstance(self.slot.owner, nn.RNNBase)

    def write_back(self) -> None:
        value = self.copy.detach()
        if (value.shape, value.dtype) == (self.parameter.shape, self.parameter.dtype):
            with torch.no_grad():
                self.parameter.copy_(value)
        else:
            self.parameter.data = value.to(self.parameter.device)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor._version, tensor.dtype, tensor.size(), tensor.stride()


def take_out(placed: Sequence[PlacedCopy]) -> list[PlacedCopy]:
    """Put all parameters back in their places. Return one copy of each that the layer has changed."""
    for one in placed:
        one.take_out()
    for owner in {one.slot.owner for one in placed}:
        if isinstance(owner, nn.RNNBase):
            owner._init_flat_weights()  # a list besides, which it computes with and holds
    return list({id(one.parameter): one for one in placed if one.changed}.values())


class LayerRun:
    """One call of a layer. saved: how often each parameter was saved in it, by id. number: of the calls."""

    __slots__ = ("__weakref__", "_gone", "layer", "left", "number", "placed", "saved", "task")

    def __init__(self, layer: Layer, number: int, gone: Callable[[LayerRun], None]) -> None:
        self.layer, self.number, self._gone = layer, number, gone
        self.saved: dict[int, tuple[torch.Tensor, int]] = {}
        self.left: dict[int, int] = {}  # of what was saved, what this backward pass has not asked for yet
        self.task = -1
        self.placed: list[PlacedCopy] = []

    def wanted(self) -> list[torch.Tensor]:
        return [parameter for parameter, _ in self.saved.values()]

    def begin(self, task: int) -> None:
        if self.task != task:
            self.task = task
            self.left = {key: count for key, (_, count) in self.saved.items()}

    def __del__(self) -> None:
        self._gone(self)


class LayerResidency:
    def __init__(self, layers: Sequence[Layer], carrier: Carrier) -> None:
        self.layers, self.carrier = list(layers), carrier
        self.order: PrefetchOrder[Layer] = PrefetchOrder([layer for layer in layers if layer.whole])
        self.depth = 0  # calls of the model, one within another
        self._lock = threading.RLock()
        self._here: OrderedDict[Layer, dict[int, ParameterCopy]] = OrderedDict()  # used longest ago first
        self._by_storage: dict[int, tuple[Layer, torch.Tensor]] = {}
        self._active: dict[Layer, LayerRun] = {}
        self._alive: Counter[Layer] = Counter()  # runs that a backward pass may yet ask for
        self._calls = itertools.count()
        self._trail: dict[int, weakref.ref[LayerRun]] = {}  # that saved something, by number
        self._tasks: set[int] = set()  # backward passes under way
        self._turn: weakref.ref[LayerRun] | None = None  # whose backward it is
        self._runs_again: set[Layer] = set()  # layers called in a backward pass: checkpointed
        self._parts: set[int] = set()  # slots of modules that were called within their layer's call

    # ---- the forward pass --------------------------------------------------------------------------------------------

    def run_model(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own call."""
        outermost = self.depth == 0 and _task() == -1
        if outermost:
            self._begin_pass(torch.is_grad_enabled())
        self.depth += 1
        whole = False
        try:
            out = call(*args, **kwargs)
            whole = True
            return out
        finally:
            self.depth -= 1
            if outermost:
                self._end_pass(whole)

    def run_layer(
        self,
        layer: Layer,
        slots: Sequence[ParameterSlot],
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        by_stage: bool = False,
    ) -> Any:
        """Run the call of a layer, or of a part of one that is called by itself.

        by_stage: it is a plan's stage, whose hooks must not see what it saves of parameters, in whichever run."""
        if layer in self._active:
            if not by_stage and slots is not layer.slots:
                self._parts.add(id(slots))
            with SavedParameters(self) if by_stage and torch.is_grad_enabled() else nullcontext():
                return call(*args, **kwargs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "offload_layers: a layer is called while a CUDA graph is captured; its parameters are moved by "
                "copies that a graph does not replay. Capture the plain model, or run this one without a graph"
            )
        alone = self.depth == 0 and _task() == -1
        # A part of a layer that a checkpointed region in it runs again: the region's hooks saw what it saved.
        hooked = torch.is_grad_enabled() and (by_stage or _task() == -1 or id(slots) not in self._parts)
        whole = False
        if alone:
            self._forget_backwards()
        with self._lock:
            self._alive[layer] += 1
            run = LayerRun(layer, next(self._calls), self._run_gone)
        try:
            self._enter(run, slots)
            with SavedParameters(self) if hooked else nullcontext():
                out = call(*args, **kwargs)
            whole = True
            return out
        finally:
            self._leave(run)
            del run
            if alone:
                self._end_pass(whole)

    def _begin_pass(self, grad_mode: bool) -> None:
        self._forget_backwards()
        with self._lock:
            self._drop([layer for layer in self._here if layer not in self._active])
            self.order.begin()
        self.carrier.finish()
        self.carrier.passed(grad_mode)

    def _forget_backwards(self) -> None:
        """Forget backward passes that raised, since they do not report their end.

        When the program calls the model, or a part of it, outside any backward pass, none is running."""
        with self._lock:
            self._tasks.clear()
            self._turn = None

    def _end_pass(self, whole: bool) -> None:
        """End a pass: when this returns, the program may write to the parameters."""
        self.carrier.settle()
        with self._lock:
            gone = [layer for layer in self._here if not (whole and self._alive[layer])]
            self._drop([layer for layer in gone if layer not in self._active])

    def _enter(self, run: LayerRun, slots: Sequence[ParameterSlot]) -> None:
        layer = run.layer
        placed: list[tuple[ParameterSlot, torch.Tensor]] = []
        for slot in slots:
            parameter = slot.owner._parameters.get(slot.name)
            if parameter is not None and self.carrier.travels(parameter):
                placed.append((slot, parameter))
        parameters = list({id(p): p for _, p in placed}.values())
        with self._lock:
            task = _task()
            ahead: list[tuple[Layer, list[torch.Tensor]]] = []
            if task != -1:
                self._runs_again.add(layer)
                self._begin_task(task)
                ahead = self._ahead_in_backward(layer)
            elif layer.whole and self.depth:
                self.order.saw(layer)
                ahead = self._ahead_in_forward()
            ahead = self._make_room(layer, parameters, ahead)
            copies = self._fetch(layer, parameters)
            self._prefetch(ahead)
            stand_ins = {
                id(p): self.carrier.stand_in(p, copy.tensor())
                for p, copy in zip(parameters, copies, strict=True)
            }
            self._active[layer] = run
            for slot, parameter in placed:
                stand_in = stand_ins[id(parameter)]
                if stand_in is not parameter:
                    run.placed.append(PlacedCopy(slot, parameter, stand_in))

    def _leave(self, run: LayerRun) -> None:
        """Leave a layer that has returned or raised; after an exception, the graph made so far may still be used."""
        with self._lock:
            changed = take_out(run.placed)
            run.placed.clear()
            self._active.pop(run.layer, None)
            if run.saved:
                self._trail[run.number] = weakref.ref(run)
            if self.carrier.planned is not None and _task() == -1:
                self._keep_within(
                    self.carrier.planned, [one for one in self._here if one not in self._active]
                )
        for placed in changed:
            placed.write_back()

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def parameter_of(self, storage: int) -> torch.Tensor | None:
        layer, parameter = self._by_storage.get(storage, (None, None))
        return parameter if layer in self._active else None

    def refer(self, parameter: torch.Tensor) -> LayerRun:
        key = id(parameter)
        for run in reversed(self._active.values()):
            if key in self._here.get(run.layer, ()):
                break
        else:
            raise RuntimeError(
                "a parameter was saved for the backward pass while its layer was not being called"
            )
        _, count = run.saved.get(key, (parameter, 0))
        run.saved[key] = parameter, count + 1
        return run

    def back(self, reference: Reference) -> torch.Tensor:
        run, parameter = reference.run, reference.parameter
        layer, key = run.layer, id(parameter)
        task = _task()
        if not self.carrier.travels(parameter):
            return parameter.detach()
        if task == -1:  # somebody looks at what a node saved, and may write to the parameter next
            tensor = self.carrier.fetch([parameter])[0].tensor()
            self.carrier.settle()
            return tensor
        with self._lock:
            self._begin_task(task)
            run.begin(task)
            ahead: list[tuple[Layer, list[torch.Tensor]]] = []
            if self._turn is None or self._turn() is not run:
                self._turn = weakref.ref(run)
                ahead = self._ahead_in_backward(layer, run)
                wanted = [p for p in run.wanted() if run.left[id(p)] > 0]
                ahead = self._make_room(layer, wanted, ahead)
                self._fetch(layer, wanted)
                self._prefetch(ahead)
            copy = self._fetch(layer, [parameter])[0]
            tensor = copy.tensor()
            run.left[key] -= 1
            last = self._alive[layer] <= 1 or self.carrier.planned is not None
            over = run.left[key] <= 0 and last and layer not in self._active
            if over and self.carrier.copies:  # the asker holds the copy; pages would come again
                self._forget(layer, key)
            return tensor

    def _begin_task(self, task: int) -> None:
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))

    def _end_task(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
            if self._tasks:  # one within another
                return
            self._turn = None
            self._drop([layer for layer in self._here if layer not in self._active])
        self.carrier.finish()
        self.carrier.settle()

    def _run_gone(self, run: LayerRun) -> None:
        layer = run.layer
        with self._lock:
            self._trail.pop(run.number, None)
            self._alive[layer] -= 1
            if self._alive[layer] <= 0 and self.depth == 0 and layer not in self._active:
                self._drop([layer])

    @property
    def device(self) -> torch.device:
        """The device of the copies."""
        return self.carrier.device

    # ---- copies ------------------------------------------------------------------------------------------------------

    def _ahead_in_forward(self) -> list[tuple[Layer, list[torch.Tensor]]]:
        found: dict[Layer, list[torch.Tensor]] = {}
        for layer in self.order.ahead():
            if layer not in self._active and layer not in found:
                found[layer] = [p for p in layer.parameters() if self.carrier.travels(p)]
                if len(found) == MOST_AHEAD:
                    break
        return list(found.items())

    def _ahead_in_backward(
        self, layer: Layer, run: LayerRun | None = None
    ) -> list[tuple[Layer, list[torch.Tensor]]]:
        """Return the layers called before this run, or before the layer's last run, that saved tensors."""
        found: dict[Layer, list[torch.Tensor]] = {}
        passed = False
        for ref in reversed(list(self._trail.values())):  # a run may go meanwhile
            earlier = ref()
            if earlier is None:
                continue
            if not passed:
                passed = earlier is run or (run is None and earlier.layer is layer)
                continue
            if earlier.layer is layer or earlier.layer in found:
                continue
            again = earlier.layer in self._runs_again
            found[earlier.layer] = earlier.layer.parameters() if again else earlier.wanted()
            if len(found) == MOST_AHEAD:
                break
        return list(found.items())

    def _make_room(
        self,
        layer: Layer,
        parameters: Iterable[torch.Tensor],
        ahead: list[tuple[Layer, list[torch.Tensor]]],
    ) -> list[tuple[Layer, list[torch.Tensor]]]:
        """Drop copies that have no room beside those needed now and next.

        Return the part of the next ones that has room."""
        left, taken = self.carrier.allowance(sum(p.nbytes for p in parameters)), self.carrier.taken
        if self.carrier.planned is not None and layer not in self._active:  # another stage's part of it
            for key in self._here.get(layer, {}).keys() - set(map(id, parameters)):
                self._forget(layer, key)
        coming: list[tuple[Layer, list[torch.Tensor]]] = []
        for following, wanted in ahead:
            nbytes = sum(taken(p.nbytes) for p in wanted)
            if nbytes > left and (coming or self.carrier.strict or not left):
                break
            coming.append((following, wanted))
            left -= nbytes
        keep = {layer, *self._active, *(following for following, _ in coming)}
        self._keep_within(left, [other for other in self._here if other not in keep])
        return coming

    def _keep_within(self, left: int, others: Sequence[Layer]) -> None:
        """Drop those of these layers that were used longest ago, until the rest take no more than `left` bytes."""
        for n in reversed(range(len(others))):
            left -= sum(self.carrier.taken(copy.nbytes) for copy in self._here[others[n]].values())
            if left < 0:
                self._drop(others[: n + 1])
                break

    def _fetch(self, layer: Layer, parameters: Sequence[torch.Tensor]) -> list[ParameterCopy]:
        here = self._here.setdefault(layer, {})
        self._here.move_to_end(layer)
        missing = [p for p in parameters if id(p) not in here or not here[id(p)].holds(p)]
        for parameter in missing:
            self._forget(layer, id(parameter))
        if missing:
            with torch.inference_mode(False), torch.no_grad():
                for parameter, copy in zip(missing, self.carrier.fetch(missing), strict=True):
                    here[id(parameter)] = copy
                    self._by_storage[copy.storage] = layer, parameter
        return [here[id(p)] for p in parameters]

    def _prefetch(self, ahead: Iterable[tuple[Layer, list[torch.Tensor]]]) -> None:
        """Begin copies that are not needed yet. If there is no memory for them, they are made when they are needed."""
        for layer, parameters in ahead:
            try:
                self._fetch(layer, parameters)
            except torch.OutOfMemoryError:
                return
            self._here.move_to_end(layer)

    def _forget(self, layer: Layer, key: int) -> None:
        copy = self._here.get(layer, {}).pop(key, None)
        if copy is not None:
            self._by_storage.pop(copy.storage, None)
            self.carrier.drop(copy)

    def _drop(self, layers: Iterable[Layer]) -> None:
        for layer in list(layers):
            for key in list(self._here.get(layer, ())):
                self._forget(layer, key)
            self._here.pop(layer, None)

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters, also those in whose places copies stand now."""
        placed = {id(one.copy): one.parameter for run in self._active.values() for one in run.placed}
        found = [p for layer in self.layers for p in layer.parameters()]
        return list({id(own): own for p in found for own in (placed.get(id(p), p),)}.values())

    @contextmanager
    def between_calls(self) -> Iterator[None]:
        """Put all parameters in their places within the context, although layers are being called."""
        called = [(run, [placed.slot for placed in run.placed]) for run in self._active.values()]
        for run, _ in reversed(called):
            self._leave(run)
        try:
            yield
        finally:
            for run, slots in called:
                self._enter(run, slots)

    def here(self) -> int:
        """Return the current bytes of copies."""
        return sum(copy.nbytes for copies in self._here.values() for copy in copies.values())

    def is_wanted(self) -> bool:
        """Return whether a backward pass may still need something."""
        return any(count > 0 for count in self._alive.values())

    def drop_all(self) -> None:
        """Drop all copies from the device, after an error or at the end."""
        self._forget_backwards()
        with self._lock:
            self._drop(list(self._here))
        self.carrier.finish()
        self.carrier.settle()
