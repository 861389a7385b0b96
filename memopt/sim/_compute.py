"""Real numbers on the simulated device.

Each ATen op first runs on cuda, so that it allocates, launches and frees as it does on a GPU (its kernels do nothing).
Then the same op runs on CPU tensors over the same memory, and its values are kept. A loss under Compute is the CPU's,
bit for bit, while the memory behaviour is that of PyTorch's own CUDA allocator.

_host_kernels.py has the CPU forms of cuDNN's operations, fused cells and fused attention. An op whose CPU form lacks
the 16-bit type is computed in 32 bits. An op that the simulated device cannot run (of sparse and nested tensors) runs
on the CPU alone and its result is moved over, so that its temporary memory on a GPU is not counted. An op without a CPU
form, and a CUDA graph, is an error; a kernel launched outside ATen is not, and computes nothing (give it a host body
with memopt.sim.emulate). torch.compile runs eagerly under it. Every op is followed by a wait for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch._tensor_str as tensor_str
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._runtime.higher_order import run_under
from memopt._runtime.operands import leaves, map_leaves
from memopt.sim._activation import is_active
from memopt.sim._host_kernels import HOST_KERNELS

ON_HOST = "memopt: the values of an operation"  # a range for whoever observes operators

_aten = torch.ops.aten

# The shape of the result depends on values: the CPU decides, and its answer is moved over.
SHAPE_FROM_VALUES = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.bincount.default,
    _aten.index.Tensor,
    _aten.repeat_interleave.Tensor,
}
# So do these, of which only this mode knows: by name where they are of libraries that may not be there.
_DECIDED_ON_HOST = {
    "aten::_nested_tensor_from_mask",
    "aten::_nested_tensor_from_mask_left_aligned",
    "torchvision::nms",
}
# They read, move or point to what is there, or ask the device or the tensor itself, and compute nothing.
_AS_THEY_ARE = {
    _aten._local_scalar_dense.default,
    _aten._fused_sdp_choice.default,
    _aten._use_cudnn_ctc_loss.default,
    _aten._use_cudnn_ctc_loss.Tensor,
    _aten._use_miopen_ctc_loss.default,
    _aten._use_miopen_ctc_loss.Tensor,
    _aten._coalesced_.default,
    _aten._sparse_coo_tensor_with_dims_and_tensors.default,
    _aten._sparse_compressed_tensor_with_dims.default,
    _aten.sparse_compressed_tensor.comp_plain_value_size,
    _aten._nested_tensor_size.default,
    _aten._nested_tensor_strides.default,
    _aten._nested_tensor_storage_offsets.default,
    _aten.is_set_to.default,  # two aliases of one storage are storages of their own
    _aten.record_stream.default,
    _aten.is_pinned.default,
    _aten._pin_memory.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten._cudnn_rnn_flatten_weight.default,  # its copies are real
    _aten._cudnn_init_dropout_state.default,  # read by cuDNN alone
}
# Between processes, and within one: real copies.
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


class Compute(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """A dispatch mode under which simulated CUDA ops return the values of the same ops on the CPU.

    Raises:
        RuntimeError: The simulated device is not active.

    Examples:
        >>> with memopt.sim.Compute():
        ...     train()
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        if not is_active():
            raise RuntimeError(
                "Compute works on the simulated device only: call memopt.sim.activate() before importing torch"
            )
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = HostGenerators()

    def __enter__(self) -> Compute:
        tensor_str._tensor_str = _computed_text  # type: ignore[assignment]
        _modes.entered = [*_entered(), self]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _modes.entered = _entered()[:-1]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(dispatches, types)):
            if FakeTensor in types:
                return func(*args, **kwargs)
            return NotImplemented  # what it does with the tensors within comes here again
        if isinstance(func, HigherOrderOperator):
            return run_under(self, func, args, kwargs)
        if func in _AS_THEY_ARE or func.is_view or func.namespace in _COLLECTIVES:
            return func(*args, **kwargs)
        if func in SHAPE_FROM_VALUES and any(map(on_cuda, leaves((args, kwargs)))):
            return self._moved(func, args, kwargs)
        return self.computed(func, args, kwargs)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an op's result on cuda, with the values that the CPU computes.

        Results that are not tensors (torch.equal's) are the CPU's.

        Args:
            func: The op.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            RuntimeError: The shapes of the two results differ.
        """
        given = leaves((args, kwargs))
        inputs = [leaf for leaf in given if on_cuda(leaf)]
        if inputs and (func.name() in _DECIDED_ON_HOST or not all(map(is_plain, inputs))):
            return self._moved(func, args, kwargs)
        generators = {leaf: self._generators.of(leaf) for leaf in given if isinstance(leaf, torch.Generator)}
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as refused:
            if not inputs or func._schema.is_mutable:
                raise
            return self._moved(func, args, kwargs, refused)
        results = leaves(result)
        if not inputs and not any(map(on_cuda, results)):
            return result
        if not all(map(is_plain, results)):
            return self._moved(func, args, kwargs) if inputs else result  # else it was copied, which is real
        with record_function(ON_HOST):
            values = _on_host(func, args, kwargs, inputs, generators)
            for generator, on_host in generators.items():
                self._generators.drawn(generator, on_host)
            if func in HOST_KERNELS:
                _keep(result, values)
                return result
            # In place and out=: done by aliasing.
            written = {tensor.untyped_storage().data_ptr() for tensor in inputs}
            computed = leaves(values)
            for tensor, value in zip(results, computed, strict=True):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if value is None or not on_cuda(tensor) or not tensor.numel():
                    continue  # None: a gradient that was not asked for, and that the device's kernel makes all the same
                if tensor.untyped_storage().data_ptr() in written:
                    continue
                if tensor.shape != value.shape:
                    raise RuntimeError(
                        f"{func}: {tuple(tensor.shape)} on cuda, {tuple(value.shape)} on the CPU"
                    )
                alias(tensor).copy_(value)
        if all(isinstance(one, torch.Tensor) for one in results):
            return result
        both = zip(results, computed, strict=True)
        merged = (mine if isinstance(mine, torch.Tensor) else value for mine, value in both)
        return map_leaves(lambda _: next(merged), result)

    def _moved(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], refused: RuntimeError | None = None
    ) -> Any:
        """Return the CPU's result, moved to the device.

        refused: the device's error, which is raised if the CPU refuses too.
        """
        inputs = [leaf for leaf in leaves((args, kwargs)) if on_cuda(leaf)]
        if func._schema.is_mutable and not all(map(is_plain, _written(func, args, kwargs))):
            raise RuntimeError(
                f"memopt.sim.Compute cannot write to a sparse or nested tensor in place ({func}): use the op without "
                "the underscore, or call .coalesce() or .to_dense() first"
            )
        try:
            values = _on_host(func, args, kwargs, inputs, {})
        except RuntimeError as error:
            raise (refused or error) from None
        if torch.device(kwargs.get("device") or "cuda").type != "cuda":
            return values
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            return written[0] if len(written) == 1 else tuple(written)
        return map_leaves(
            lambda leaf: leaf.to(inputs[0].device) if isinstance(leaf, torch.Tensor) else leaf, values
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an op writes to."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]


def _on_host(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    generators: dict[torch.Generator, torch.Generator],
) -> Any:
    """Run an operation on the CPU over the same memory; inputs: the tensors on the device among its arguments.

    Raises:
        RuntimeError: The CPU has no such operation; the message names it.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{func} while a CUDA graph is captured: a graph replays kernels, which compute nothing on the simulated "
            "device, so memopt.sim.Compute has no values for it: run without CUDA graphs, or, to see its memory "
            "only, without Compute, as `memopt estimate` does"
        )
    # Copies are real work: the CPU must not overtake them.
    for device in {tensor.device for tensor in inputs} or {None}:
        torch.cuda.synchronize(device)
    run = HOST_KERNELS.get(func, func)
    there = functools.partial(_on_cpu, generators=generators)
    try:
        return run(*map_leaves(there, args), **map_leaves(there, kwargs))
    except RuntimeError as error:  # NotImplementedError is one
        wide = _in_32_bits(run, map_leaves(there, args), map_leaves(there, kwargs), func._schema.is_mutable)
        if wide is not None:
            return wide
        if not isinstance(error, NotImplementedError):
            raise
        raise RuntimeError(
            f"memopt.sim.Compute has no values for {func}, which the CPU does not implement: use ops that the CPU has "
            "too (for your own kernels: memopt.sim.emulate), or use `memopt estimate`, which needs no values "
            f"({str(error).partition('. ')[0]})"
        ) from None


_SHORT = (torch.float16, torch.bfloat16)


def _in_32_bits(run: Callable[..., Any], args: Any, kwargs: Any, writes: bool) -> Any:
    """Run the operation with 32-bit types for 16-bit ones; None where that fails too.

    The values get their own dtype back as they are copied.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _SHORT:
            pairs.append((leaf, leaf.float()))
            return pairs[-1][1]
        return torch.float32 if leaf in _SHORT else leaf

    args, kwargs = map_leaves(widened, args), map_leaves(widened, kwargs)
    if not pairs:
        return None
    try:
        values = run(*args, **kwargs)
    except RuntimeError:
        return None
    for short, wide in pairs if writes else ():
        short.copy_(wide)
    return map_leaves(lambda leaf: leaf.to(pairs[0][0].dtype) if _is_wide(leaf) else leaf, values)


def _is_wide(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32


def install(mode: Compute) -> None:
    """Enter the mode until the process ends, in this thread and in those that are started later.

    Compiled functions run eagerly, because fullgraph=True would refuse the mode.
    """
    start, compiled = threading.Thread.start, torch.compile

    def start_computing(self: threading.Thread) -> None:
        run = self.run

        def computing() -> None:
            with mode:
                run()

        self.run = computing  # type: ignore[method-assign]
        start(self)

    @functools.wraps(compiled)
    def compile_nothing(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        return compiled(*args, **kwargs)

    mode.__enter__()
    threading.Thread.start = start_computing  # type: ignore[method-assign]
    torch.compile = compile_nothing  # type: ignore[assignment]


def _keep(result: Any, values: Any) -> None:
    """Write a host kernel's values into the results; a missing value, or None, leaves a result as it is."""
    for tensor, value in zip(leaves(result), leaves(values), strict=False):
        if on_cuda(tensor) and isinstance(value, torch.Tensor) and tensor.numel():
            alias(tensor).copy_(value)


def _on_cpu(leaf: object, generators: dict[torch.Generator, torch.Generator]) -> object:
    if on_cuda(leaf):
        return alias(leaf)
    if isinstance(leaf, torch.Generator):
        return generators.get(leaf, torch.default_generator)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


# ---- tensors on the host ---------------------------------------------------------------------------------------------


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def on_cuda(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda and not dispatches(type(leaf))


def dispatches(kind: type) -> bool:
    """Return whether tensors of this type handle their operations themselves, as fake ones and wrapper classes do."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def is_plain(leaf: object) -> bool:
    """Return whether a tensor's memory is one storage that its shape and strides describe."""
    return not isinstance(leaf, torch.Tensor) or (leaf.layout is torch.strided and not leaf.is_nested)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over a cuda tensor's memory."""
    if tensor.is_nested:
        parts = (
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
        return torch._nested_view_from_buffer(alias(tensor.values()), *parts)
    if tensor.layout is torch.sparse_coo:
        indices, values = alias(tensor._indices()), alias(tensor._values())
        coalesced = tensor.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, tensor.shape, is_coalesced=coalesced, check_invariants=False
        )
    if tensor.layout in _COMPRESSED:
        outer, inner = (alias(getattr(tensor, name)()) for name in _COMPRESSED[tensor.layout])
        return torch.sparse_compressed_tensor(
            outer, inner, alias(tensor.values()), tensor.shape, layout=tensor.layout, check_invariants=False
        )
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class HostGenerators:
    """CPU generators that stand for the device's and give the numbers of a CPU generator of the same seed.

    A device generator has no identity but its position: seed and offset, which also tell whether it was set back.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, generator: torch.Generator) -> torch.Generator:
        """Return a CPU generator in the state that the device's generator has now."""
        if generator.device.type != "cuda" or generator in torch.cuda.default_generators:
            return torch.default_generator  # which is seeded together with it
        on_host = torch.Generator().manual_seed(generator.initial_seed())
        state = self._states.get(_position(generator))
        return on_host if state is None else on_host.set_state(state)

    def drawn(self, generator: torch.Generator, on_host: torch.Generator) -> None:
        """Note that both generators have advanced."""
        if on_host is not torch.default_generator:
            self._states.pop(_position(generator), None)
            self._states[_position(generator)] = on_host.get_state()
            while len(self._states) > _MOST_POSITIONS:
                del self._states[next(iter(self._states))]


_MOST_POSITIONS = 256


def _position(generator: torch.Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


# ---- printing --------------------------------------------------------------------------------------------------------


_modes = threading.local()  # .entered: those of this thread, the innermost last
_text_of = tensor_str._tensor_str


def _entered() -> list[Compute]:
    return getattr(_modes, "entered", [])


def _computed_text(tensor: Any, indent: int) -> str:
    """The text of a tensor with its values. torch makes it with all modes off, on the tensor's own device."""
    with _entered()[-1] if _entered() and tensor.is_cuda else contextlib.nullcontext():
        return _text_of(tensor, indent)  # type: ignore[no-any-return,no-untyped-call]
