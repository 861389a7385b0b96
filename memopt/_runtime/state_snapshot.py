"""Snapshots of the state that running a model changes.

Each is taken when it is made; restore() puts it back in place, bit for bit, as often as it is called.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from memopt._runtime.storages import memory_of

# ---- random states -----------------------------------------------------------------------------------------------


class DeviceGenerator:
    """The generator of a device whose module (like torch.cuda) exposes none: its state is the module's."""

    def __init__(self, module: Any, index: int) -> None:
        self.module, self.index = module, index

    def get_state(self) -> Tensor:
        with self.module.device(self.index):
            state: Tensor = self.module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        with self.module.device(self.index):
            self.module.set_rng_state(state)


def generators(module: Any, indices: Iterable[int]) -> list[Any]:
    """Default generators of these devices of a module like torch.cuda."""
    known = getattr(module, "default_generators", ())
    return [known[index] if index < len(known) else DeviceGenerator(module, index) for index in indices]


def python_random() -> tuple[Any, ...]:
    """The states of Python's random and, where NumPy is loaded, of its global generator: one value, to be compared."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def set_python_random(state: tuple[Any, ...]) -> None:
    """Set the states that python_random() returned."""
    own, *parts = state
    random.setstate(own)
    if parts:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = parts
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def is_drawn_from(state: tuple[Any, ...]) -> bool:
    """Return whether the states differ from those that python_random() returned; NumPy's counts only if it was loaded
    then."""
    return python_random()[: len(state)] != state


class RandomState:
    """The states of torch's default generators, Python's random and NumPy's global generator, if NumPy is loaded.

    devices: the accelerators whose generators count beside the CPU's, every CUDA device in use if None. python: False
    leaves out Python's and NumPy's. Generators that a program made for itself are its own.
    """

    __slots__ = ("_python", "_states")

    def __init__(self, devices: Iterable[torch.device] | None = None, *, python: bool = True) -> None:
        indices: dict[str, dict[int, None]] = {}
        for device in _cuda_devices() if devices is None else devices:
            if device.type not in ("cpu", "meta"):
                indices.setdefault(device.type, {})[device.index or 0] = None
        found: list[Any] = [torch.default_generator]
        for kind, of_kind in indices.items():
            found += generators(torch.get_device_module(kind), of_kind)
        self._states = [(generator, generator.get_state()) for generator in found]
        self._python = python_random() if python else None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that torch's states take."""
        return sum(state.nbytes for _, state in self._states)

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)
        if self._python is not None:
            set_python_random(self._python)

    def was_drawn_from(self) -> bool:
        """Return whether any state differs from the snapshot."""
        return bool(self._drawn_from()) or (self._python is not None and is_drawn_from(self._python))

    def forget_unchanged(self) -> None:
        """Keep only those of torch's states that have changed since: a state takes 5 KB of host memory."""
        self._states = self._drawn_from()

    def _drawn_from(self) -> list[tuple[Any, Tensor]]:
        return [pair for pair in self._states if not torch.equal(pair[0].get_state(), pair[1])]

    def present(self) -> list[Tensor]:
        """Return the present states of torch's generators."""
        return [generator.get_state() for generator, _ in self._states]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore torch's states within the context; restore the present ones afterwards."""
        before = self.present()
        try:
            for generator, state in self._states:
                generator.set_state(state)
            yield
        finally:
            for (generator, _), state in zip(self._states, before, strict=True):
                generator.set_state(state)


def _cuda_devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return [torch.device("cuda", index) for index in range(count)]


# ---- containers --------------------------------------------------------------------------------------------------

CONTAINERS = (list, dict, set, collections.deque)


def content_ids(container: Any) -> list[int]:
    """Return the identities of the contents of one of CONTAINERS, keys included."""
    members = (
        (part for item in container.items() for part in item) if isinstance(container, dict) else container
    )
    return list(map(id, members))


def refill(container: Any, content: Any) -> None:
    """Restore a container's former content if it has another one."""
    if content_ids(container) != content_ids(content):
        container.clear()
        (container.extend if isinstance(container, list | collections.deque) else container.update)(content)


# ---- modules -----------------------------------------------------------------------------------------------------

Buffer: TypeAlias = tuple[nn.Module, str, Tensor]  # the module that has it, its name there, and it


class ModuleTensors(NamedTuple):
    """Parameters and buffers of modules, each parameter once, in the order of a walk."""

    parameters: list[Tensor]
    buffers: list[Buffer]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> ModuleTensors:
        """Find the tensors of modules. This runs in each step; nn.Module's own iterators take several times as long."""
        left: list[nn.Module | None] = [*modules]
        left.reverse()
        seen, known = set[int](), set[int]()
        found = ModuleTensors([], [])
        while left:
            module = left.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    found.parameters.append(parameter)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found.buffers.append((module, key, buffer))
            if module._modules:
                left.extend(reversed(module._modules.values()))
        return found


def version(tensor: Tensor) -> int:
    """Return the number of changes in place; tensors of inference mode count none."""
    return -1 if tensor.is_inference() else tensor._version


class SavedBuffer(NamedTuple):
    """A buffer, its version, and a copy of its values on its device, if there is one."""

    module: nn.Module
    key: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    def has_changed(self) -> bool:
        """Return whether another buffer has the name, or this one's version has changed."""
        return self.module._buffers.get(self.key) is not self.buffer or version(self.buffer) != self.version

    def restore(self, *, is_required: bool) -> None:
        buffer, copy = self.buffer, self.copy
        if version(buffer) != self.version:
            if copy is not None:
                buffer.copy_(copy)
            elif is_required:
                raise ValueError(
                    f"buffer {self.key} of {type(self.module).__name__} ({buffer.nbytes} bytes) was changed in place "
                    "by a step that ran out of memory, and no earlier step had changed it: run the first step with a "
                    "smaller batch"
                )
        elif copy is not None:
            # Some operations (batch_norm) write without counting a version. These are the values that belong to it, for
            # a graph too that has saved them.
            with torch.inference_mode() if buffer.is_inference() else nullcontext():
                (buffer if buffer.is_inference() else buffer.data).copy_(copy)
        self.module._buffers[self.key] = buffer


class BufferValues:
    """The buffers under their names, and their values where is_copied says so."""

    def __init__(
        self, buffers: Iterable[Buffer], is_copied: Callable[[Buffer], bool] = lambda _: True
    ) -> None:
        self.saved = [
            SavedBuffer(*one, version(one[2]), one[2].detach().clone() if is_copied(one) else None)
            for one in buffers
        ]

    def restore(self, *, is_required: bool = True) -> None:
        """Raises ValueError where a buffer without a copy has changed, if is_required."""
        with torch.no_grad():
            for one in self.saved:
                one.restore(is_required=is_required)


class Modes:
    """The modes, training or evaluation, of modules and of all in them.

    They are set by the attribute: some libraries merge weights at eval().
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._note(module for root in roots for module in root.modules())

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> Modes:
        """Return the modes of these modules alone."""
        modes = cls()
        modes._note(modules)
        return modes

    def _note(self, modules: Iterable[nn.Module]) -> None:
        self._training = [(module, module.training) for module in modules]

    def set_eval(self) -> None:
        for module, _ in self._training:
            module.training = False

    def restore(self) -> None:
        for module, training in self._training:
            module.training = training

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the modes within the context, and the present ones afterwards."""
        present = [(module, module.training) for module, _ in self._training]
        if present == self._training:
            yield
            return
        try:
            self.restore()
            yield
        finally:
            for module, training in present:
                module.training = training


class GradientTensors:
    """The tensor that each parameter has as its gradient, not a copy of it, and whether it requires one."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._found = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]

    def clear(self) -> None:
        for parameter, *_ in self._found:
            parameter.grad = None

    def restore(self) -> None:
        for parameter, requires_grad, gradient in self._found:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


@contextmanager
def preserve_state(*modules: nn.Module, parameters: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore the modules' buffers, gradients and requires_grad, and the random states, when the context ends.

    parameters: others whose gradients count. What autocast has cast is cast again: this begins with none of it, and
    leaves none.
    """
    own, buffers = ModuleTensors.of(modules)
    tensors = [*own, *parameters]
    random_state = RandomState(tensor.device for tensor in tensors)
    saved, gradients = BufferValues(buffers), GradientTensors(tensors)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        random_state.restore()
        saved.restore()
        gradients.restore()


# ---- training ----------------------------------------------------------------------------------------------------


class TrainingState:
    """All that training steps change, kept on the host, so that a try has as much of the device as the real run.

    Values are kept once a storage and go back into the same memory: as many bytes of host memory as parameters,
    buffers, gradients and optimizer states have.

    models, optimizers, scalers: any number of each. stateful: what else changes, objects with state_dict() and
    load_state_dict() (schedulers), or with get_state() and set_state() (generators).

    ValueError for a lazy module that has not run yet: what it will make of itself cannot be undone.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any],
        stateful: Iterable[Any] = (),
    ) -> None:
        self._values: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        known: set[int] = set()
        models = list(models)
        self._modes = Modes(*models)
        for model in models:
            for name, module in model.named_modules():
                uninitialized = getattr(module, "has_uninitialized_params", None)
                if uninitialized is not None and uninitialized():
                    raise ValueError(
                        f"{name or 'the model'} is a lazy module without a shape: run a step first"
                    )
                self._note(module._parameters)
                self._note(module._buffers)
            for parameter in model.parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._gradients.append((parameter, _on_host(parameter.grad)))
        for optimizer in optimizers:
            self._note(optimizer.state)
            self._note(optimizer.param_groups)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        self._note(parameter)
                        self._gradients.append((parameter, _on_host(parameter.grad)))
        for scaler in scalers:
            self._note(vars(scaler))
        self._stateful = [(one, _state_of(one)) for one in stateful]
        self._random = RandomState()

    def restore_values(self) -> None:
        """Restore values and random states, between tries.

        What a step has made beside them (optimizer states, gradients) stays, as it does between a run's steps.
        """
        for storage, values in self._values.values():
            if storage.nbytes() != values.nbytes():
                storage.resize_(values.nbytes())
            storage.copy_(values)
        self._random.restore()

    def restore(self) -> None:
        for container, content in self._containers.values():
            refill(container, content)
        self.restore_values()
        for parameter, gradient in self._gradients:
            _give(parameter, gradient)
        self._modes.restore()
        for one, state in self._stateful:
            (one.load_state_dict if hasattr(one, "load_state_dict") else one.set_state)(state)

    def _note(self, thing: Any) -> None:
        if isinstance(thing, Tensor):
            for device, address, _, part in memory_of(thing):
                if (device, address) not in self._values:
                    storage = part.untyped_storage()
                    # A copy even where it is on the host: cpu() gives the same storage there.
                    values = storage.clone() if storage.device.type == "cpu" else storage.cpu()
                    self._values[device, address] = storage, values
        elif isinstance(thing, dict | list):
            if id(thing) not in self._containers:
                self._containers[id(thing)] = thing, copy.copy(thing)
                for value in thing.values() if isinstance(thing, dict) else thing:
                    self._note(value)
        elif isinstance(thing, tuple | set | frozenset):
            for value in thing:
                self._note(value)


def _state_of(one: Any) -> Any:
    if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
        return copy.deepcopy(one.state_dict())
    if hasattr(one, "get_state") and hasattr(one, "set_state"):
        return one.get_state()
    raise TypeError(
        f"stateful: {type(one).__name__} has neither state_dict() and load_state_dict() nor get_state() and set_state()"
    )


def is_offloaded(gradient: Tensor | None) -> bool:
    """Return whether it stands for one that offload_gradients=True keeps in the host's memory."""
    offloaded = sys.modules.get("memopt.optim._offloaded_gradients")
    return offloaded is not None and type(gradient) is offloaded.HostGradient


def _on_host(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient's values on the host.

    A gradient that is more than plain memory (sparse, a DTensor) stays where it is."""
    if gradient is None:
        return None
    plain = is_offloaded(gradient) or (type(gradient) is Tensor and gradient.layout is torch.strided)
    kept = gradient.detach()
    return kept.to("cpu", copy=True) if plain else kept.clone()


def _give(parameter: Tensor, kept: Tensor | None) -> None:
    """Restore a gradient in its own memory, if that still exists, so that views of it show the values too."""
    gradient = parameter.grad
    if kept is None:
        parameter.grad = None
    elif (
        gradient is not None
        and not is_offloaded(gradient)
        and gradient.layout is kept.layout
        and (gradient.shape, gradient.dtype, gradient.stride()) == (kept.shape, kept.dtype, kept.stride())
        and not gradient.requires_grad
    ):
        gradient.copy_(kept)
    else:
        parameter.grad = kept.to(parameter.device, copy=True)
