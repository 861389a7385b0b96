"""A trace of one run of a module's forward, as steps that can be run again, some of them at a time.

A step is a call that the forward itself makes: a function of torch's, or a module, which stays whole. Where modules are
opened, the steps of a module that has children are those of its own forward, unless they cannot be traced: then it is
one step, as before. The same functions in the same order on the same tensors make the same bits and the same graph.
Tensors are numbered as they are made, those among the arguments first. Parameters and buffers are looked up by name
whenever a step runs. Modules are called, with their hooks.

Other effects of a forward are not seen. A trace therefore names its assumptions (`Expected`): the arguments except for
the tensors' values, and, where the forward asked, shapes; and the attributes of the modules whose code it stands for.
Where anything more could matter, `refusal` says what, and the trace is not used: a tensor's value that Python read, a
random number of Python's, an attribute that changed, tensors of unknown origin (of a custom autograd.Function, say).
"""

from __future__ import annotations

import enum
import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from memopt._checkpoint.stages.module_forwards import is_its_classes
from memopt._offload.visits import residency_of
from memopt._runtime.state_snapshot import CONTAINERS, is_drawn_from, python_random

KIND = frozenset(
    "dim ndim ndimension dtype device layout get_device is_nested is_floating_point is_complex is_signed is_sparse "
    "is_quantized is_mkldnn is_meta is_cpu is_cuda is_xpu is_mps is_inference type".split()
)
SHAPE = frozenset("shape size numel nelement __len__ nbytes".split())
STRIDES = frozenset("stride is_contiguous storage_offset".split())
GRADIENT = frozenset("requires_grad is_leaf".split())
UNSEEN = frozenset("data grad backward requires_grad_ retain_grad set_ resize_ detach_ __set__".split())
CONSTANTS = (
    bool, int, float, complex, str, type(None), type(...), enum.Enum, type, types.FunctionType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
SIMPLE = (bool, int, float, complex, str, type(None))
PRODUCTS = ("linear", "conv", "mm", "matmul", "einsum")  # in the names of torch's functions
UNREAD = frozenset("forward plan _parameters _buffers _modules _is_full_backward_hook".split())


def is_leaf(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is value


class Arguments(NamedTuple):
    """Nested values: leaves, with the numbers of those that are tensors of the trace, and the modules' own."""

    leaves: list[Any]
    uses: list[tuple[int, int]]  # place, number
    owned: list[tuple[int, torch.nn.Module, str]]
    spec: pytree.TreeSpec

    def filled(self, values: dict[int, torch.Tensor]) -> list[Any]:
        leaves = self.leaves.copy()
        for place, number in self.uses:
            leaves[place] = values[number]
        for place, module, name in self.owned:
            leaves[place] = getattr(module, name)
        return leaves

    def fill(self, values: dict[int, torch.Tensor]) -> Any:
        return pytree.tree_unflatten(self.filled(values), self.spec)


class TracedCall(NamedTuple):
    target: Callable[..., Any]
    arguments: Arguments
    keywords: tuple[str, ...] | None  # the names of the last of its arguments; None where they are nested
    makes: list[tuple[int, int]]  # leaf of what it returns, number
    has_matrix: bool  # multiplies by parameters of two dimensions or more

    def run(self, values: dict[int, torch.Tensor]) -> None:
        leaves = self.arguments.filled(values)
        if self.keywords is None:
            args, kwargs = pytree.tree_unflatten(leaves, self.arguments.spec)
            out = self.target(*args, **kwargs)
        elif self.keywords:
            count = len(leaves) - len(self.keywords)
            out = self.target(*leaves[:count], **dict(zip(self.keywords, leaves[count:], strict=True)))
        else:
            out = self.target(*leaves)
        if self.makes:
            leaves = [out] if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)
            for leaf, number in self.makes:
                values[number] = leaves[leaf]


class Attribute:
    """A read of a tensor attribute that is a tensor: torch hands a mode an object for it that cannot be copied."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, tensor: torch.Tensor) -> Any:
        return getattr(tensor, self.__name__)


class Functional:
    """A function of torch.nn.functional that pickle would look for under another name, such as max_pool2d."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.nn.functional, self.__name__)(*args, **kwargs)

    @staticmethod
    def instead_of(function: Any) -> Any:
        if "<locals>" not in getattr(function, "__qualname__", ""):
            return function
        named = vars(torch.nn.functional).items()
        return next((Functional(name) for name, value in named if value is function), function)


class TensorKind(NamedTuple):
    dtype: torch.dtype
    device: torch.device
    dim: int
    layout: torch.layout
    shape: torch.Size | None
    strides: tuple[int, ...] | None
    requires_grad: bool | None

    @staticmethod
    def of(tensor: torch.Tensor, reads: frozenset[str]) -> TensorKind:
        return TensorKind(
            tensor.dtype,
            tensor.device,
            tensor.dim(),
            tensor.layout,
            tensor.shape if "shape" in reads else None,
            tensor.stride() if "strides" in reads else None,
            tensor.requires_grad if "requires_grad" in reads else None,
        )


class Attributes(NamedTuple):
    """Attributes of a module that its code can read, without tensors (looked up in each run) and hooks."""

    own: dict[str, Any]
    children: dict[str, torch.nn.Module | None]
    contents: dict[str, list[Any]]  # of containers among its own

    @staticmethod
    def of(module: torch.nn.Module) -> Attributes:
        own = {
            name: value
            for name, value in module.__dict__.items()
            if name not in UNREAD
            and not name.startswith(("_forward_", "_backward_", "_state_dict", "_load_state"))
        }
        contents = {name: members(value) for name, value in own.items() if isinstance(value, CONTAINERS)}
        return Attributes(own, dict(module._modules), contents)

    def changed(self, module: torch.nn.Module) -> str | None:
        """Return the name of an attribute that has changed, None if there is none."""
        missing = object()
        for was, now in ((self.own, module.__dict__), (self.children, module._modules)):
            for name, value in was.items():
                other = now.get(name, missing)
                if was is self.own and name in self.contents and type(other) is type(value):
                    before, after = self.contents[name], members(other)
                    if len(before) != len(after) or not all(map(is_same, before, after)):
                        return f"the contents of {name}"
                elif not is_same(value, other):
                    return name
        return None


def members(container: Any) -> list[Any]:
    """Return the contents of one of CONTAINERS, keys included."""
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def target_of(step: TracedCall) -> Any:
    """Return what tells the step's target from another's in a trace that is made anew."""
    if isinstance(step.target, (Attribute, Functional)):
        return type(step.target), step.target.__name__
    return step.target


class RecordedCalls(NamedTuple):
    """The calls of a trace, without shapes. Two traces that have the same can be cut at the same places."""

    targets: list[Any]
    uses: list[tuple[list[int], list[tuple[torch.nn.Module, str]]]]
    makes: list[list[int]]
    changes: list[tuple[int, list[int]]]
    refusal: str | None

    @staticmethod
    def of(trace: ForwardTrace) -> RecordedCalls:
        noted = [*(step.arguments for step in trace.steps), trace.result]
        return RecordedCalls(
            [target_of(step) for step in trace.steps],
            [([n for _, n in one.uses], [(owner, name) for _, owner, name in one.owned]) for one in noted],
            [[number for _, number in step.makes] for step in trace.steps],
            trace.changes,
            trace.refusal,
        )


def is_same(value: Any, other: Any) -> bool:
    return other is value or (
        isinstance(value, SIMPLE) and type(other) is type(value) and bool(other == value)
    )


def has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def can_open(module: torch.nn.Module) -> bool:
    """Return whether the module's own forward may stand for a call of it.

    Not where that has effects which come with the whole module: hooks, parametrizations, running statistics, parameters
    that its call brings.
    """
    return (
        any(True for _ in module.children())
        and residency_of(module) is None
        and not isinstance(module, _NormBase)
        and is_its_classes(module)
        and not has_hooks(module)
        and "parametrizations" not in module._modules
        and not isinstance(module, torch.jit.ScriptModule)
    )


def autocast_kinds(leaves: Iterable[Any]) -> tuple[str, ...]:
    """The types of device whose autocast matters to what is given these."""
    return tuple(sorted({"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor))}))


def autocast_of(kinds: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(
        (kind, enabled, torch.get_autocast_dtype(kind) if enabled else None)
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
        for enabled in (torch.is_autocast_enabled(kind),)
    )


class Expected:
    """Arguments and execution state for which a trace is valid."""

    def __init__(
        self,
        args: Any,
        kwargs: Any,
        reads: frozenset[str],
        opened: list[torch.nn.Module],
        without_hooks: list[torch.nn.Module],
    ) -> None:
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.reads = reads
        self.leaves = [TensorKind.of(x, reads) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.opened = [(module, Attributes.of(module)) for module in opened]
        self.without_hooks = without_hooks
        self.kinds = autocast_kinds(leaves)
        self.autocast = autocast_of(self.kinds)

    def difference(self, leaves: list[Any], spec: pytree.TreeSpec) -> str | None:
        """Describe the first difference from the recorded arguments and state, None if there is none."""
        if spec != self.spec:
            return "its arguments have changed"
        for n, (leaf, expected) in enumerate(zip(leaves, self.leaves, strict=True)):
            now = TensorKind.of(leaf, self.reads) if isinstance(leaf, torch.Tensor) else leaf
            if type(now) is not type(expected) or now != expected:
                return f"its argument {n} has changed from {expected} to {now}"
        for module, before in self.opened:
            if (name := before.changed(module)) is not None:
                return f"{name} of {type(module).__name__} has changed"
        for module in self.without_hooks:
            if has_hooks(module):
                return f"{type(module).__name__} has hooks"
        return "autocast has changed" if autocast_of(self.kinds) != self.autocast else None


@contextmanager
def module_calls(call: Callable[..., Any]) -> Iterator[None]:
    """Replace every call of a module in this thread by call(its __call__, module, args, kwargs)."""
    original = torch.nn.Module.__call__
    thread = threading.get_ident()

    def instead(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(module, *args, **kwargs)
        return call(original, module, args, kwargs)

    torch.nn.Module.__call__ = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


def has_matrix(module: torch.nn.Module) -> bool:
    """Return whether the module multiplies by parameters; embedding tables are only looked up and do not count."""
    return any(
        parameter.dim() > 1
        for inner in module.modules()
        if not isinstance(inner, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for parameter in inner.parameters(recurse=False)
    )


class Given(NamedTuple):
    """Tensors that a call is given, with the versions that they have before it."""

    tensors: list[torch.Tensor]
    versions: list[int | None]

    @staticmethod
    def of(args: Any, kwargs: Any) -> Given:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        return Given(tensors, [None if tensor.is_inference() else tensor._version for tensor in tensors])

    def changed(self) -> list[torch.Tensor]:
        return [
            tensor
            for tensor, version in zip(self.tensors, self.versions, strict=True)
            if version is not None and tensor._version != version
        ]


class ForwardTrace(TorchFunctionMode):
    """A mode that runs the module's forward with these arguments and traces it. out: the result.

    arguments: the number of each leaf of (args, kwargs), None where it is not a tensor. steps, result: the calls, and
    the structure of the result. changes: (step, numbers of all values in a storage that it changed in place). refusal:
    the reason why the trace cannot be used, None if it can. storages: the number of each value's, -1 for one that has
    none. nbytes: of each storage.

    opens: whether modules in it are opened. refusals: of such modules, whose call is one step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        opens: bool = False,
    ) -> None:
        super().__init__()
        self.opens = opens
        self.refusals: list[str] = []
        self.opened: dict[torch.nn.Module, None] = {}
        self.nbytes: list[int] = []
        self.storage_numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.steps: list[TracedCall] = []
        self.refusal: str | None = None
        self.numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.storages: list[int] = []  # of each number
        self.changes: list[tuple[int, list[int]]] = []
        self.reads: set[str] = set()
        self.called: list[torch.nn.Module] = []
        self.inside = False  # of a module that is a step
        self.names = {
            id(tensor): (owner, name)
            for owner in module.modules()
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
            if tensor is not None
        }
        leaves = pytree.tree_leaves((args, kwargs))
        self.arguments: list[int | None] = [None] * len(leaves)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self.constant(leaf)
                continue
            if self.known(leaf) is not None:
                self.refuse("it is given the same tensor twice")
            self.arguments[place] = self.number(leaf)
        self.kinds = autocast_kinds(leaves)
        self.execution_state = self.now()
        chance, state = python_random(), {owner: Attributes.of(owner) for owner in module.modules()}
        with module_calls(self.call), self:
            self.out = forward(*args, **kwargs)
        self.result = self.note(self.out)
        called = {inner for leaf in self.called for inner in leaf.modules()}
        opened = [owner for owner in state if owner not in called]
        for owner in opened:
            self.check_attributes(owner, state[owner])
        if is_drawn_from(chance):
            self.refuse("it draws random numbers from Python or NumPy")
        if self.refusal is None and self.keeps(leaves, called):
            gc.collect()  # unless it is garbage only
            if self.keeps(leaves, called):
                self.refuse("it keeps a tensor that it made")
        self.expected = Expected(args, kwargs, frozenset(self.reads), opened, list(self.opened))

    def keeps(self, given: list[Any], called: Iterable[torch.nn.Module]) -> bool:
        """Return whether a tensor that a step made lives on, and is none of the result.

        Someone will look for it, in a list of losses say, and later runs of the steps would put none there. What a
        called module keeps is its own affair: it is called again. A graph must keep nothing meanwhile."""
        made = {number for step in self.steps for _, number in step.makes}
        kept = {
            id(tensor)
            for ref, number in self.numbers.values()
            if number in made and (tensor := ref()) is not None
        }
        if kept:
            own = [[*vars(module).values(), *module._buffers.values()] for module in called]
            there = pytree.tree_leaves((self.out, given, own))
            bases = [leaf._base for leaf in there if isinstance(leaf, torch.Tensor)]  # of views
            kept -= set(map(id, (*there, *bases)))
        return bool(kept)

    def check_attributes(self, module: torch.nn.Module, before: Attributes) -> None:
        if (name := before.changed(module)) is not None:
            self.refuse(f"it changes {name} of {type(module).__name__}")
        if len(Attributes.of(module).own) != len(before.own):
            self.refuse(f"it gives {type(module).__name__} new attributes")

    def now(self) -> tuple[Any, ...]:
        return torch.is_grad_enabled(), autocast_of(self.kinds)

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def number(self, tensor: torch.Tensor) -> int:
        number = len(self.storages)
        self.numbers[id(tensor)] = weakref.ref(tensor), number
        self.storages.append(self.storage(tensor))
        return number

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of the tensor's storage, in `nbytes`. Another one may come to lie at the same address."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not plain or tensor.layout is not torch.strided or tensor.is_nested:
            self.refuse("it uses tensors that are not plain and strided")
            return -1
        storage = tensor.untyped_storage()
        ref, number = self.storage_numbers.get(storage._cdata, (None, -1))
        if ref is None or ref() is not storage:
            number = len(self.nbytes)
            self.nbytes.append(storage.nbytes())
            self.storage_numbers[storage._cdata] = weakref.ref(storage), number
        return number

    def known(self, tensor: torch.Tensor) -> int | None:
        ref, number = self.numbers.get(id(tensor), (None, None))
        return number if ref is not None and ref() is tensor else None

    def constant(self, value: Any) -> None:
        parts = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
        for part in parts:
            if not isinstance(part, CONSTANTS):
                self.refuse(f"it handles a {type(part).__name__}")

    def note(self, value: Any) -> Arguments:
        leaves, spec = pytree.tree_flatten(value)
        noted = Arguments(leaves, [], [], spec)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                self.constant(leaf)
                continue
            leaves[place] = None
            if (number := self.known(leaf)) is not None:
                noted.uses.append((place, number))
            elif id(leaf) in self.names:
                noted.owned.append((place, *self.names[id(leaf)]))
            else:
                self.refuse(f"it uses a tensor of unknown origin, {list(leaf.shape)}")
        return noted

    def call(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.inside or self.refusal:
            return original(module, *args, **kwargs)
        if _get_current_function_mode() is not self:
            self.refuse("it calls a module within a torch function mode")
            return original(module, *args, **kwargs)
        if self.opens and can_open(module):
            return self.open(original, module, args, kwargs)
        self.called.append(module)
        self.inside = True
        try:
            with _pop_mode_temporarily():
                return self.step(module, args, kwargs)
        finally:
            self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.refusal:
            return func(*args, **(kwargs or {}))
        return self.step(func, args, kwargs or {})

    def open(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module with the steps of its own forward; where these cannot be traced, as one step after all."""
        attributes, first = Attributes.of(module), module not in self.opened
        self.opened[module] = None
        begun, numbers, changes = len(self.steps), len(self.storages), len(self.changes)
        known, reads = dict(self.numbers), set(self.reads)
        with _pop_mode_temporarily():
            given, arguments = Given.of(args, kwargs), self.note((args, kwargs))
        refusal = self.refusal  # of the call as one step; its own steps need not handle what it is given
        self.refusal = None
        out = original(module, *args, **kwargs)
        self.check_attributes(module, attributes)
        if self.refusal is None or not first:  # or an earlier call of it has been taken for its steps
            return out
        self.refusals.append(f"{type(module).__name__}: {self.refusal}")
        del self.opened[module], self.steps[begun:], self.changes[changes:], self.storages[numbers:]
        self.numbers, self.reads, self.refusal = known, reads, refusal
        self.called.append(module)
        with _pop_mode_temporarily():
            return self.add(module, args, kwargs, given, arguments, out)

    def step(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run the call and, if it makes or changes tensors, add it to the trace."""
        given = Given.of(args, kwargs)
        arguments = self.note((args, kwargs))
        return self.add(target, args, kwargs, given, arguments, target(*args, **kwargs))

    def add(self, target: Any, args: Any, kwargs: Any, given: Given, arguments: Arguments, out: Any) -> Any:
        """Add a call that has run to the trace, and return what it returned."""
        if self.now() != self.execution_state:
            self.refuse("it changes grad mode or autocast")
        if self.refusal:
            return out
        changed = given.changed()
        storages = {self.storage(tensor) for tensor in changed}
        is_module = isinstance(target, torch.nn.Module)
        if not is_module and any(id(tensor) in self.names for tensor in changed):
            self.refuse("it changes a parameter or buffer in place")
            return out
        name = getattr(target, "__name__", "")
        if name == "__get__":
            name = target.__self__.__name__
            target = Attribute(name)
        elif not is_module:
            target = Functional.instead_of(target)
        if not is_module and name in UNSEEN:
            self.refuse(f"it uses {name} of a tensor")
            return out
        leaves, spec = pytree.tree_flatten(out)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not is_module and not tensors and self.read(name, out):
            return out
        if any(leaf is not None and not isinstance(leaf, torch.Tensor) for leaf in leaves):
            self.refuse(f"{name or type(target).__name__} returns something that is not a tensor")
            return out
        makes = []
        for place in tensors:
            leaf = leaves[place]
            # Returned as it was given: by another name from here on, as another time it may be another tensor.
            if self.known(leaf) is not None and self.storage(leaf) not in storages:
                leaves[place] = torch.ops.aten.alias(leaf)
            makes.append((place, self.number(leaves[place])))
        if storages:
            values = [n for n, storage in enumerate(self.storages) if storage in storages]
            self.changes.append((len(self.steps), values))
        if is_module:
            matrix = has_matrix(target)
        else:
            matrix = any(word in name for word in PRODUCTS) and any(
                getattr(owner, own).dim() > 1 for _, owner, own in arguments.owned
            )
        nested = not all(is_leaf(value) for value in (*args, *kwargs.values()))
        self.steps.append(TracedCall(target, arguments, None if nested else tuple(kwargs), makes, matrix))
        return pytree.tree_unflatten(leaves, spec)

    def read(self, name: str, out: Any) -> bool:
        """Return whether the attribute depends on a tensor's metadata only, not on its values."""
        if name in KIND:
            return True
        for reads, names in (("shape", SHAPE), ("strides", STRIDES), ("requires_grad", GRADIENT)):
            if name in names:
                self.reads.add(reads)
                return True
        if out is not None:
            self.refuse(f"{name} returns something that is not a tensor")
        return out is not None
