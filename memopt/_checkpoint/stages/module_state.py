"""State that modules change in their forward: found in a first run, held for later runs, put back around them.

State is what a module keeps under a name: buffers, parameters, and its own attributes (tensors, numbers, containers of
either, generators). What a forward changes of it is another object afterwards, or the same one with other contents. A
run that comes again must find what the first one found, and count for nothing: so it is given copies of what is
changed in place, and afterwards each name has again what it had. A tensor that a hook makes before the forward (weight
normalisation by hooks) is found under its name too. Running statistics of batch normalisation are not looked at here:
no value depends on them in training (batch_norm.py).

State kept elsewhere (globals, objects that are no modules, files) is not seen, nor a parameter changed in place by
`.data`."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from memopt._checkpoint.stages.trace_forward import SIMPLE, Attributes
from memopt._runtime.state_snapshot import (
    CONTAINERS,
    RandomState,
    content_ids,
    is_drawn_from,
    python_random,
    refill,
    set_python_random,
)

MISSING = object()


class StateSlot(NamedTuple):
    """A name under which a module keeps something: where is "_buffers", "_parameters" or, of its own attributes, ""."""

    module: torch.nn.Module
    where: str
    name: str

    def values(self) -> dict[str, Any]:
        own = vars(self.module)
        values: dict[str, Any] = own[self.where] if self.where else own
        return values

    def get(self) -> Any:
        return self.values().get(self.name, MISSING)

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.values().pop(self.name, None)
        else:
            self.values()[self.name] = value

    def __str__(self) -> str:
        return f"{self.name} of {type(self.module).__name__}"


class PythonRandom(NamedTuple):
    """Python's and NumPy's random states, as a slot."""

    def get(self) -> Any:
        return python_random()

    def put(self, value: Any) -> None:
        set_python_random(value)


Changes = dict[
    StateSlot | PythonRandom, bool
]  # whether the contents change, and not only the object under the name


def slots_of(modules: Iterable[torch.nn.Module], parameters: bool = True) -> Iterator[StateSlot]:
    """Return all slots except running statistics of batch normalisation.

    parameters: whether parameters are included."""
    for module in modules:
        if not isinstance(module, _NormBase):
            yield from (StateSlot(module, "_buffers", name) for name in module._buffers)
        if parameters:
            yield from (StateSlot(module, "_parameters", name) for name in module._parameters)
        yield from (StateSlot(module, "", name) for name in Attributes.of(module).own)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are the bytes of a storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host that can be compared even where it is NaN; copies are real on the simulated device
    too."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Seen:
    """A value as it was, to be compared with the current one."""

    def __init__(self, slot: StateSlot) -> None:
        self.value = value = slot.get()
        self.contents: Any = None
        self.is_parameter = slot.where == "_parameters"
        if isinstance(value, torch.Tensor):
            self.version = 0 if value.is_inference() else value._version
            if is_plain(value):
                # An operation on `.data` moves no version; a copy of all parameters would be large.
                self.contents = value.data if self.is_parameter else bits(value)
        elif isinstance(value, torch.Generator):
            self.contents = value.get_state()
        elif isinstance(value, CONTAINERS):
            self.contents = copy.copy(value)

    def is_another(self, value: Any) -> bool:
        """Return whether another object is there now."""
        simple = isinstance(value, SIMPLE) and type(value) is type(self.value)
        return value is not self.value and not (simple and value == self.value)

    def has_changed(self) -> bool:
        """Return whether the object that was there has other contents now."""
        value = self.value
        if isinstance(value, torch.Tensor):
            moved = not value.is_inference() and value._version != self.version
            return moved or self.differs(value)
        if isinstance(value, torch.Generator):
            return not torch.equal(value.get_state(), self.contents)
        if isinstance(value, CONTAINERS):
            return type(value) is not type(self.contents) or content_ids(value) != content_ids(self.contents)
        return False

    def differs(self, value: torch.Tensor) -> bool:
        if self.contents is None:
            return False
        if self.is_parameter:
            same = value.data_ptr() == self.contents.data_ptr() and value.shape == self.contents.shape
            return not (same or torch.equal(bits(value), bits(self.contents)))
        return not torch.equal(bits(value), self.contents)

    def put_back(self) -> None:
        """Restore the former contents."""
        value = self.value
        if isinstance(value, torch.Tensor):
            if self.contents is None or not self.differs(value):
                return
            if self.is_parameter:
                value.data = self.contents
            else:
                with torch.no_grad():
                    value.copy_(self.contents.view(value.dtype).view(value.shape))
        elif isinstance(value, torch.Generator):
            value.set_state(self.contents)
        elif isinstance(value, CONTAINERS):
            refill(value, self.contents)


class Snapshot:
    """All state of these modules, as it is now, or when a module is added.

    parameters: whether parameters are included."""

    def __init__(self, modules: Iterable[torch.nn.Module], parameters: bool = True) -> None:
        self.parameters = parameters
        self.modules: dict[torch.nn.Module, None] = {}
        self.seen: dict[StateSlot, Seen] = {}
        self.random = python_random()
        for module in modules:
            self.add(module)

    def add(self, module: torch.nn.Module) -> None:
        if module not in self.modules:
            self.modules[module] = None
            self.seen.update((slot, Seen(slot)) for slot in slots_of((module,), self.parameters))

    def changes(self) -> Changes:
        found: Changes = {}
        for slot in dict.fromkeys((*self.seen, *slots_of(self.modules, self.parameters))):
            seen = self.seen.get(slot)
            contents = seen is not None and seen.has_changed()
            if contents or seen is None or seen.is_another(slot.get()):
                found[slot] = contents
        if is_drawn_from(self.random):
            found[PythonRandom()] = False
        return found

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Restore everything; the snapshot, used as a context, does so at its end."""
        for slot in self.changes():
            if isinstance(slot, PythonRandom):
                slot.put(self.random)
            elif (seen := self.seen.get(slot)) is None:
                slot.put(MISSING)
            else:
                slot.put(seen.value)
                seen.put_back()


@contextmanager
def watched(modules: Iterable[torch.nn.Module]) -> Iterator[Snapshot]:
    """Return a snapshot of these modules, and of others when they are first called in the meantime."""
    snapshot = Snapshot(modules)
    thread = threading.get_ident()

    def see(module: torch.nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            snapshot.add(module)

    handle = register_module_forward_pre_hook(see)
    try:
        yield snapshot
    finally:
        handle.remove()


def joined(*all_changes: Changes) -> Changes:
    found: Changes = {}
    for changes in all_changes:
        for slot, contents in changes.items():
            found[slot] = contents or found.get(slot, False)
    return found


def changes_within(changes: Changes, modules: Iterable[torch.nn.Module]) -> Changes:
    """Return the changes that concern these modules, which may only read what another module changes."""
    changed = {
        value.untyped_storage()._cdata
        for slot, contents in changes.items()
        if contents and isinstance(value := slot.get(), torch.Tensor) and is_plain(value)
    }
    found: Changes = {slot: contents for slot, contents in changes.items() if isinstance(slot, PythonRandom)}
    for slot in slots_of(modules):
        value = slot.get()
        if isinstance(value, torch.Tensor) and is_plain(value) and value.untyped_storage()._cdata in changed:
            found[slot] = True
        elif slot in changes:
            found[slot] = changes[slot]
    return found


def buffers_beside(modules: Iterable[torch.nn.Module], changes: Changes) -> list[StateSlot]:
    """Return the buffers that no run is known to change."""
    return [slot for slot in slots_of(modules) if slot.where == "_buffers" and slot not in changes]


@contextmanager
def unchanged(buffers: Iterable[StateSlot], stage: int) -> Iterator[None]:
    """Check that a stage's run leaves these unchanged: no copies were kept, so a second run would find other values."""
    before = [
        (slot, value, value._version)
        for slot in buffers
        if isinstance(value := slot.get(), torch.Tensor) and not value.is_inference()
    ]
    yield
    for slot, value, version in before:
        if value._version != version:
            raise RuntimeError(
                f"{slot} is changed by its forward pass, stage {stage} of the chain, but was not when the model was "
                "measured: a second run would differ from the first. Call auto_checkpoint() again, with the model as "
                "it is used now (train() or eval(), a sample like this batch)"
            )


class WeakChanges:
    """Changes that refer weakly to their modules."""

    def __init__(self, changes: Changes) -> None:
        self.of_python = PythonRandom() in changes
        self.of_modules = [
            (weakref.ref(slot.module), slot.where, slot.name, contents)
            for slot, contents in changes.items()
            if isinstance(slot, StateSlot)
        ]

    def now(self) -> Changes:
        """Return the changes of modules that still live."""
        found: Changes = {PythonRandom(): False} if self.of_python else {}
        for ref, where, name, contents in self.of_modules:
            if (module := ref()) is not None:
                found[StateSlot(module, where, name)] = contents
        return found


class Copier:
    """A copier of contents; tensors of one storage become tensors of one copy."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                made = self.tensor(value).requires_grad_(value.requires_grad)
            # What has a graph may be changed in place, a leaf may not.
            return made if value.grad_fn is None else made.clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        return copy.copy(value) if isinstance(value, CONTAINERS) else value

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        if not is_plain(value):
            return value.detach().clone()
        storage = value.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.clone()
        known = self.storages[storage._cdata]
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(known, value.storage_offset(), value.shape, value.stride())


class Found(NamedTuple):
    """A value found under a name. contents: a copy, if the value is changed in place."""

    slot: StateSlot | PythonRandom
    value: Any
    contents: bool
    version: int
    requires_grad: bool

    @staticmethod
    def of(slot: StateSlot | PythonRandom, contents: bool, copier: Copier) -> Found:
        value = slot.get()
        if contents:
            return Found(slot, copier(value), True, 0, False)
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return Found(slot, value, False, 0, False)
        # Not its graph: that is outside of the stage.
        kept = value if value.grad_fn is None else value.detach()
        return Found(slot, kept, False, value._version, value.requires_grad)

    def again(self, copier: Copier) -> Any:
        if self.contents:
            return copier(self.value)
        if not isinstance(self.value, torch.Tensor) or self.value.is_inference():
            return self.value
        if self.value._version != self.version:
            raise RuntimeError(
                f"{self.slot} has been modified by an inplace operation since a checkpointed stage used it, which must "
                "run again: change a copy of it, or leave that stage out of checkpointing"
            )
        if self.requires_grad and not self.value.requires_grad:
            return self.value.detach().requires_grad_()
        return self.value


class ModuleState:
    """A copy of the state that the next run finds and such runs change, for later runs of the same."""

    __slots__ = ("found",)

    def __init__(self, changes: Changes) -> None:
        copier = Copier()
        self.found = [Found.of(slot, contents, copier) for slot, contents in changes.items()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [found.value for found in self.found if isinstance(found.value, torch.Tensor)]

    @contextmanager
    def again(self) -> Iterator[None]:
        present = [(found.slot, found.slot.get()) for found in self.found]
        copier = Copier()
        try:
            for found in self.found:
                found.slot.put(found.again(copier))
            yield
        finally:
            for slot, value in present:
                slot.put(value)

    def repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for any number of later runs, none of which has a lasting effect."""
        if not self.found:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.again():
                return function(*args, **kwargs)

        return run


class StageState:
    """Random state of the CPU and of the arguments' devices, autocast of both, the default device, and what the stage's
    runs change in modules."""

    __slots__ = ("autocast", "default_device", "modules", "random")

    def __init__(self, leaves: Iterable[Any], changes: Changes) -> None:
        self.modules = ModuleState(changes)
        devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.random = RandomState(devices, python=False)
        self.autocast = [
            (
                kind,
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys(("cpu", *(device.type for device in devices)))
            if kind != "meta" and torch.amp.is_autocast_available(kind)
        ]
        self.default_device = torch.get_default_device()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the recorded state within the context, and the present state afterwards."""
        with ExitStack() as stack:
            stack.enter_context(self.modules.again())
            stack.enter_context(self.random.again())
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            yield


def cut(changes: Changes, beside: Iterable[torch.Tensor] = ()) -> None:
    """Detach values under these names from their graph; they still require a gradient.

    Values in the memory of one of `beside` are left as they are."""
    kept = {tensor.untyped_storage()._cdata for tensor in beside if is_plain(tensor)}
    for slot in changes:
        value = slot.get()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and is_plain(value):
            if value.untyped_storage()._cdata not in kept:
                slot.put(value.detach().requires_grad_())
