"""memopt.to_dtype_(): parameters and buffers converted to another floating-point dtype, in place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from memopt import _C
from memopt._runtime import arguments
from memopt._runtime.results import Result
from memopt._runtime.state_snapshot import is_offloaded
from memopt._runtime.storages import storage_bytes

Keep: TypeAlias = str | Iterable[Any] | Callable[[str, torch.Tensor], bool] | None

# Statistics that are summed up step by step lose too much in 8 or 11 bits of mantissa. Of the other norms CUDA's
# kernels take no parameters of another type than their input's; they sum in float32 whatever that is.
_NORMS = (torch.nn.modules.batchnorm._NormBase,)


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """The result of memopt.to_dtype_(). Print it.

    Attributes:
        before_bytes: Bytes of all the given storages before the conversion, each counted once.
        after_bytes: Bytes after it.
        dtype: The new dtype.
        converted: Names of the tensors that were converted.
        kept: Names of those left out by `keep`.
        untouched: Names of those that are not floating-point numbers, or have that dtype already.
        not_finite: Number of values that overflowed, by tensor name.
    """

    before_bytes: int
    after_bytes: int
    dtype: torch.dtype
    converted: list[str]
    kept: list[str]
    untouched: list[str]
    not_finite: dict[str, int]

    @property
    def freed_bytes(self) -> int:
        """Bytes freed by the conversion."""
        return self.before_bytes - self.after_bytes

    def __str__(self) -> str:
        lines = [
            f"{len(self.converted)} tensors to {_short(self.dtype)}: {_C.format_size(self.before_bytes)} before, "
            f"{_C.format_size(self.after_bytes)} after"
        ]
        for word, names in (("kept", self.kept), ("untouched", self.untouched)):
            if names:
                more = ", …" if len(names) > 4 else ""
                lines.append(f"  {word}: {', '.join(names[:4])}{more} ({len(names)})")
        for name, count in self.not_finite.items():
            lines.append(f"  overflowed: {count} values of {name}")
        return "\n".join(lines)


def to_dtype_(
    module_or_tensors: Any,
    dtype: torch.dtype,
    *,
    keep: Keep = "norms",
    allow_overflow: bool = False,
) -> Converted:
    """Convert floating-point parameters and buffers to another floating-point dtype, in place.

    Whatever holds a parameter, such as an optimizer, then holds the converted one. Tensors that share memory still
    share it afterwards (tied weights, views; a storage is converted once). Gradients are converted as well; integers,
    booleans and complex numbers are not. An optimizer's states keep their dtype. While a storage is converted it exists
    twice, but never the whole model.

    Args:
        module_or_tensors: A module, a tensor, or lists, tuples and dicts of them.
        dtype: float32, float64, float16, bfloat16, or a float8 dtype (for storage, not for computing).
        keep: Tensors that are not converted: "norms" (batch and instance norms, whose running statistics need float32;
            layer, group and RMS norms have none, and outside autocast CUDA wants their parameters in the dtype of their
            input), None for nothing, names or prefixes of names ("head", "layers.0"), modules, tensors, or a function
            of name and tensor.
        allow_overflow: Whether values that the dtype cannot represent become infinite (in float8 dtypes NaN or the
            largest value, as torch converts them) and are counted; otherwise they are an error.

    Returns:
        A Converted: bytes before and after; print it.

    Raises:
        TypeError: dtype is not floating-point, or the first argument is none of the accepted types. Nothing is changed.
        ValueError: A tensor has a graph behind it (its backward pass needs its old values), is expanded or quantized,
            or is of a tensor subclass (DTensor); or finite values overflow, where the message names the tensor and its
            largest value. Nothing is changed.

    Examples:
        >>> print(memopt.to_dtype_(model, torch.bfloat16))
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r} is not a floating-point type: use torch.bfloat16 or another")
    tensors = _named_tensors(module_or_tensors)
    stay = _kept(module_or_tensors, tensors, keep)
    chosen = {
        name: tensor for name, tensor in tensors.items()
        if name not in stay and tensor.is_floating_point() and tensor.dtype != dtype
    }  # fmt: skip
    everything = [*tensors.values(), *_gradients(tensors.values())]
    before = storage_bytes(everything)
    shared = _by_storage(chosen, tensors)
    for name, tensor in chosen.items():
        _check(name, tensor, shared, stay)
    not_finite = {
        name: n for name, tensor in chosen.items() if (n := _overflowing(name, tensor, dtype, allow_overflow))
    }
    for members in shared.values():
        _convert(members, dtype)
    return Converted(
        before_bytes=before,
        after_bytes=storage_bytes([*tensors.values(), *_gradients(tensors.values())]),
        dtype=dtype,
        converted=list(chosen),
        kept=[name for name in tensors if name in stay],
        untouched=[name for name in tensors if name not in stay and name not in chosen],
        not_finite=not_finite,
    )


# ---- what is given --------------------------------------------------------------------------------------------------


def _named_tensors(given: Any) -> dict[str, torch.Tensor]:
    """Return each tensor object once, by its first name."""
    if isinstance(given, torch.nn.Module):
        named: Iterable[tuple[str, Any]] = [*given.named_parameters(), *given.named_buffers()]
    elif isinstance(given, torch.Tensor | list | tuple | Mapping):
        leaves = pytree.tree_leaves_with_path(given)
        named = [
            (re.sub(r"[\[\]'.]+", ".", pytree.keystr(path)).strip(".") or "the tensor", leaf)
            for path, leaf in leaves
        ]
        named = [(name, leaf) for name, leaf in named if not isinstance(leaf, int | float | str | None)]
    else:
        raise TypeError(
            f"expected a module, a tensor, or a list, tuple or dict of tensors, not {type(given).__name__}"
        )
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _kept(given: Any, tensors: dict[str, torch.Tensor], keep: Keep) -> set[str]:
    if keep is None:
        return set()
    if callable(keep):
        return {name for name, tensor in tensors.items() if keep(name, tensor)}
    if not isinstance(keep, Iterable):
        raise TypeError(f"keep is {arguments.shown(keep)}: give names, modules, tensors, a function or None")
    wanted = [keep] if isinstance(keep, str) else list(keep)
    kept: set[str] = set()
    for one in wanted:
        if isinstance(one, torch.Tensor):
            found = {name for name, tensor in tensors.items() if tensor is one}
        elif isinstance(one, torch.nn.Module):
            own = {id(t) for t in (*one.parameters(), *one.buffers())}
            found = {name for name, tensor in tensors.items() if id(tensor) in own}
        elif one == "norms":
            modules = given.modules() if isinstance(given, torch.nn.Module) else ()
            own = {id(t) for m in modules if isinstance(m, _NORMS) for t in (*m.parameters(), *m.buffers())}
            kept |= {name for name, tensor in tensors.items() if id(tensor) in own}
            continue
        elif isinstance(one, str):
            found = {name for name in tensors if name == one or name.startswith(one + ".")}
        else:
            raise TypeError(f"keep: {type(one).__name__} is not a name, module or tensor")
        if not found:
            raise ValueError(
                f"keep: {one if isinstance(one, str) else type(one).__name__} is not part of the first argument"
            )
        kept |= found
    return kept


def _gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def _by_storage(
    chosen: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """Return all given tensors of each storage with a chosen tensor."""
    wanted = {t.untyped_storage()._cdata for t in chosen.values() if t.layout is torch.strided}
    found: dict[int, dict[str, torch.Tensor]] = {key: {} for key in wanted}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in wanted:
            found[tensor.untyped_storage()._cdata][name] = tensor
    return found


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check(
    name: str, tensor: torch.Tensor, shared: dict[int, dict[str, torch.Tensor]], stay: set[str]
) -> None:
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        or tensor.layout is not torch.strided
    ):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, {tensor.layout}: only plain tensors are converted in place"
        )
    if tensor.is_leaf and is_offloaded(tensor.grad):
        raise ValueError(
            f"{name} has a gradient that offload_gradients=True keeps in the host's memory: drop it before with "
            "zero_grad(set_to_none=True)"
        )
    if not tensor.is_leaf:
        raise ValueError(
            f"{name} has an autograd graph: detach() it, or convert the tensors that it was computed from"
        )
    members = shared[tensor.untyped_storage()._cdata]
    for other, member in members.items():
        if member.dtype != tensor.dtype or other in stay:
            raise ValueError(
                f"{name} and {other} share memory, but {other} is to remain {_short(member.dtype)}"
            )
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{name} is expanded, so several of its elements share one place in memory: make it contiguous() first"
        )


def _overflowing(name: str, tensor: torch.Tensor, dtype: torch.dtype, allowed: bool) -> int:
    """Count the finite values that the type cannot hold, in chunks, so that no copy of the tensor is made."""
    limit = torch.finfo(dtype).max
    if tensor.is_meta or torch.finfo(tensor.dtype).max <= limit:
        return 0
    rounds = limit + 2.0 ** math.floor(math.log2(limit)) * torch.finfo(dtype).eps / 2  # still to the limit
    count, largest = 0, 0.0
    with torch.no_grad():
        for part in tensor.detach().reshape(-1).split(1 << 22):
            rounded = part.to(dtype).to(part.dtype)
            # Some conversions to float8 give the largest number there is in the place of what is too large.
            lost = part.isfinite() & (~rounded.isfinite() | (part.abs() > rounds))
            if found := int(lost.sum()):
                count += found
                largest = max(largest, float(part[lost].abs().max()))
    if count and not allowed:
        raise ValueError(
            f"{name}: {count} values are beyond {_short(dtype)}'s largest, {limit:g}; the largest is {largest:g}: "
            "take torch.bfloat16, keep that tensor (keep=), or pass allow_overflow=True"
        )
    return count


# ---- converting -----------------------------------------------------------------------------------------------------


def _convert(members: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Convert all tensors of one storage.

    The whole storage is converted even where they show only a part of it, because other tensors may show the rest.
    """
    tensors = list(members.values())
    first = tensors[0]
    storage = first.untyped_storage()
    with torch.no_grad():
        count = storage.nbytes() // first.element_size()
        whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, (count,), (1,))
        converted = whole.to(dtype)
        del whole
        for tensor in tensors:
            gradient = tensor.grad
            tensor.grad = None  # one of another type is refused by the assignment of .data
            place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            tensor.data = torch.empty(0, dtype=dtype, device=tensor.device).set_(
                converted.untyped_storage(), *place
            )
            if gradient is not None:
                tensor.grad = gradient.to(dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
