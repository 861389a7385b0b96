"""Values that a script's control flow needs on the simulated device, by one of two dispatch modes.

Values keeps host shadows of a blank device. It is on where Python runs: in forward passes, optimizers, hooks and
recomputation. In a backward pass it is off: under any mode, even one that does nothing, autograd copies gradients
instead of taking them over, and the peak differs. A script therefore allocates with the mode what it allocates without.

Computed guesses nothing: every operation is computed, and the host reads the device's own values. Estimates are
compared with it, at sizes that the host can compute.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

from memopt._estimate.host_reads import Guesses, HostReads, HostShadows, most_elements
from memopt._estimate.host_tensors import HostTensors
from memopt._runtime.higher_order import run_under
from memopt._runtime.operands import leaves, map_leaves
from memopt.sim._compute import SHAPE_FROM_VALUES, Compute, alias

_aten = torch.ops.aten

# They move no values, or host_reads.py has kept their shadows.
_AS_THEY_ARE = {
    _aten.detach,
    _aten.alias,
    _aten.record_stream,
    _aten.set_,
    _aten.resize_,
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten.bincount,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
    # No gradient is ever infinite: "found" stays what it was, and so does the scale.
    _aten._amp_foreach_non_finite_check_and_unscale_,
    _aten._amp_update_scale_,
}
# What they make holds nothing that a sound program reads.
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
# They do not read what they write to.
_OVERWRITE = {
    _aten.copy_,
    _aten.fill_,
    _aten.zero_,
    _aten.uniform_,
    _aten.normal_,
    _aten.random_,
    _aten.bernoulli_,
    _aten.exponential_,
    _aten.log_normal_,
    _aten.geometric_,
    _aten.cauchy_,
}
_TRACED = (FakeTensor, FunctionalTensor)  # they stand for tensors while something is traced, and hold nothing
_PLAIN = torch._C._disabled_torch_dispatch_impl
_INFINITY = float("inf")
_NO_SUCH_SHADOW = (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError)


class _Call(NamedTuple):
    """An operation that has run. Of the tensors in it: `inputs`, those on the device that it was given; `outputs`, all
    that it gave; `written`, those of the inputs that it wrote to."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """The mode. install() first: it is what keeps it out of backward passes."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile falls back to eager, which needs other memory

    def __init__(self, guesses: Guesses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guesses = guesses
        self.shadows = HostShadows()
        self.host = HostTensors()
        self._reads = HostReads(self.shadows, guesses)
        self._random_state = torch.Generator().manual_seed(0).get_state()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(one.__torch_dispatch__ is not _PLAIN for one in types):
            if any(issubclass(one, _TRACED) for one in types):
                return func(*args, **kwargs)
            return NotImplemented  # a tensor made of tensors: its own operations come here, on its parts
        if isinstance(func, HigherOrderOperator):
            return run_under(self, func, args, kwargs)
        if torch.is_inference_mode_enabled():
            # Nothing before has taken apart what is made of other operations.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        packet = func.overloadpacket
        given = leaves((args, kwargs))
        without_contents = self.host.among(given)
        if without_contents and packet is _aten._local_scalar_dense:
            return self.guesses.item(args[0])
        if without_contents and packet is _aten._amp_foreach_non_finite_check_and_unscale_:
            return None
        if func.is_view or torch.Tag.inplace_view in func.tags or packet in _AS_THEY_ARE:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in given if _on_cuda(leaf)]
        written = _written(func, args, kwargs)
        on_host = not inputs and all(leaf.type == "cpu" for leaf in given if isinstance(leaf, torch.device))
        if without_contents and on_host and not _is_out(func):
            result = self.host.result(func, args, kwargs, written)
            finite = _of_finite_numbers(func, args)
            return result if finite is None else finite.expand(result.shape)
        with self._reads.checks(packet):
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        if without_contents:
            self._forget(outputs, written)
        elif inputs or any(map(_on_cuda, outputs)):
            self._follow(_Call(func, args, kwargs, inputs, outputs, written))
        return result

    def _follow(self, call: _Call) -> None:
        """Update the known values of the tensors that an operation has written."""
        if call.func.overloadpacket in _EMPTY:
            (out,) = call.outputs
            self.shadows.put(out, None, made=True)
        elif call.outputs or call.written:
            if self._one_for_all(call) or self._computed(call) or self._assumed(call):
                return
            self._forget(call.outputs, call.written)

    def _forget(self, outputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        for tensor in (*outputs, *written):
            if tensor.is_cuda:
                self.shadows.forget(tensor)

    def _computed(self, call: _Call) -> bool:
        """The operation once more, on the shadows, if all that it reads has one."""
        func, args, kwargs, inputs, outputs, written = call
        overwrites = func.overloadpacket in _OVERWRITE or _is_out(func)
        unread = {id(tensor) for tensor in written} if overwrites else set()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if any(out.numel() > most_elements(out.dtype, draws) for out in outputs):
            return False
        shadows: dict[int, torch.Tensor] = {}
        for tensor in inputs:
            values = self.shadows.get(tensor)
            if values is None and id(tensor) in unread:
                values = torch.empty(tensor.shape, dtype=tensor.dtype)
            if values is None:
                return False
            shadows[id(tensor)] = values

        def on_host(leaf: object) -> object:
            if _on_cuda(leaf):
                return shadows[id(leaf)]
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf

        host_args, host_kwargs = map_leaves(on_host, (args, kwargs))
        if isinstance(host_kwargs.get("generator"), torch.Generator):
            host_kwargs["generator"] = None
        try:
            with self._host_random_numbers() if draws else contextlib.nullcontext():
                values = func(*host_args, **host_kwargs)
        except _NO_SUCH_SHADOW:  # the CPU has no such operation, or not for such shadows: nothing is known
            return False
        results = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
        if [one.shape for one in results] != [one.shape for one in outputs]:
            return False
        drawn = draws or any(map(self.shadows.drawn, inputs))
        there_before = {id(tensor) for tensor in inputs}
        for out, value in zip(outputs, results, strict=True):
            if out.is_cuda:
                self.shadows.put(out, value, made=id(out) not in there_before, drawn=drawn)
            elif inputs and value.data_ptr() != out.data_ptr():
                out.copy_(value)  # from the device to the host
        return True

    @contextlib.contextmanager
    def _host_random_numbers(self) -> Iterator[None]:
        """Draw from a separate generator: the script's random numbers on the host stay the same."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(before)

    def _one_for_all(self, call: _Call) -> bool:
        """Compute with one element where all elements of the inputs are equal, whatever their size."""
        func, args, kwargs, inputs, outputs, written = call
        ones = {id(tensor): self.shadows.the_one(tensor) for tensor in inputs}
        if not ones or None in ones.values() or written or len(outputs) != 1 or not outputs[0].is_cuda:
            return False
        if torch.Tag.pointwise in func.tags:
            value = func(*map_leaves(lambda leaf: ones.get(id(leaf), leaf), args), **kwargs)
        elif func.overloadpacket in (_aten.any, _aten.all, _aten.amax, _aten.amin):
            value = next(iter(ones.values()))
        else:
            return False
        self.shadows.put_one(outputs[0], value)
        return True

    def _assumed(self, call: _Call) -> bool:
        """Assume values: numbers are finite, and an unknown mask holds in the fraction of places that `fraction` says.

        all(), any() and a sum of the mask follow from that. A value that is copied to the host is not zero, by which a
        script might divide.
        """
        if len(call.outputs) != 1 or not call.inputs:
            return False
        out, source = call.outputs[0], call.inputs[0]
        finite = _of_finite_numbers(call.func, call.args)
        if finite is not None and out.is_cuda:
            self.shadows.put_one(out, finite)
            return True
        packet, fraction = call.func.overloadpacket, self.guesses.fraction
        if not out.is_cuda:
            self.guesses.add("copy", f"{str(source.dtype).removeprefix('torch.')} values copied to the host")
            if out.is_floating_point() and out.numel() <= most_elements(out.dtype, drawn=True):
                out.fill_(1.0)
            return True
        if packet is _aten._is_all_true:  # what torch's own checks ask, as of distributions
            self.shadows.put_one(out, torch.tensor(True))
            return True
        if source.dtype != torch.bool or out.numel() > most_elements(out.dtype):
            return False
        if packet in (_aten.all, _aten.any) and out.numel() == 1:  # of more it is a mask again
            holds = self.guesses.holds(fraction == 1.0 if packet is _aten.all else fraction > 0.0)
            self.guesses.add("test", f"{packet.__name__}() of a mask is {holds}")
            self.shadows.put(out, torch.full(out.shape, holds), made=True)
            return True
        if packet is _aten.sum and not out.is_floating_point():
            places = source.numel() // max(1, out.numel())
            self.guesses.add("test", "the number of True elements of a mask")
            self.shadows.put(out, torch.full(out.shape, round(places * fraction), dtype=out.dtype), made=True)
            return True
        return False


def _on_cuda(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _is_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor)]
    return found


def _of_finite_numbers(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Answer tests for finite numbers: all are finite. isfinite is made of x == x and |x| != inf."""
    packet = func.overloadpacket
    if packet in (_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf):
        return torch.tensor(False)
    if packet in (_aten.eq, _aten.ne) and len(args) == 2:
        itself = args[0] is args[1]
        if itself or (isinstance(args[1], float) and args[1] == _INFINITY):
            return torch.tensor((packet is _aten.eq) == itself)
    return None


# ---- where the mode is on ------------------------------------------------------------------------------------------


def install(values: Values) -> None:
    """Keep the mode out of backward passes, and of recomputation in them, from now on for the life of the process.

    What is offloaded to the host has no contents from now on.
    """
    values.host.install(values)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _without(values, getattr(torch.autograd, name)))
    hook = torch_checkpoint._recomputation_hook
    hook.__enter__ = _entering(values, hook.__enter__)
    hook.__exit__ = _leaving(hook.__exit__)
    function = torch_checkpoint.CheckpointFunction
    function.backward = staticmethod(_within(values, function.backward))


def _without(values: Values, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Only ours, and only where it is the innermost: torch.compile needs its own.
        if _get_current_dispatch_mode() is not values:
            return original(*args, **kwargs)
        try:
            with _pop_mode_temporarily():
                return original(*args, **kwargs)
        finally:
            values.shadows.forget_gradients()

    return run


def _within(values: Values, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        pushed = _enter(values)
        try:
            return original(*args, **kwargs)
        finally:
            if pushed:
                _pop_mode()

    return run


def _entering(values: Values, original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(hook: Any) -> Any:
        hook.values_entered = _enter(values)
        return original(hook)

    return enter


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(hook: Any, *exception: Any) -> Any:
        if hook.values_entered:
            _pop_mode()
        return original(hook, *exception)

    return leave


def _enter(values: Values) -> bool:
    """Enter the mode if it is off."""
    if _len_torch_dispatch_stack() > 0:
        return False
    _push_mode(values)
    return True


# ---- values that are computed ----------------------------------------------------------------------------------------


_INDEX = _aten.index.Tensor  # it finds out for itself what a mask selects, and takes memory for it
_FROM_DEVICE = SHAPE_FROM_VALUES - {_INDEX}


class _DeviceValues(HostShadows):
    """The values of a device that keeps them."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize(tensor.device)
        return alias(tensor)

    def drawn(self, tensor: torch.Tensor) -> bool:
        return False

    def put(self, tensor: torch.Tensor, values: torch.Tensor, *, made: bool, drawn: bool = False) -> None:
        alias(tensor).copy_(values)


class Computed(Compute):
    def __init__(self) -> None:
        super().__init__()
        self._reads = HostReads(_DeviceValues(), Guesses())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FROM_DEVICE:
            return func(*args, **(kwargs or {}))
        if func is _INDEX:
            return self.computed(func, args, kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self._reads.checks(func.overloadpacket):  # the CPU checks the values
            return super().__torch_dispatch__(func, types, args, kwargs)
