"""The samples of a batch, how it is cut, and the weight of each part's loss in that of the whole.

Samples are along a dimension of tensors and arrays, or the elements of lists; they are found in whatever tuples,
mappings and dataclasses they are in."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

Lists = Literal["samples", "tensors"]
Reduction = Literal["mean", "sum"] | Callable[..., Any]
_Steps = tuple[int | str, ...]  # from the arguments to a value: positions, keywords, keys, fields

# They have no samples: each micro-batch is given them whole.
_WHOLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    type(None),
)


class Cutting(NamedTuple):
    """The caller's reading of the arguments.

    unbatched: arguments that every micro-batch is given whole, by position, keyword, key or field. batch_dim: the
    dimension of the samples, of all tensors or of some by the same names. lists: the meaning of a list that could be
    both.
    """

    unbatched: Collection[int | str] = ()
    batch_dim: int | Mapping[int | str, int] = 0
    lists: Lists | None = None

    def is_whole(self, steps: _Steps) -> bool:
        return any(self._names(steps, name) for name in self.unbatched)

    def dim(self, steps: _Steps) -> int:
        if isinstance(self.batch_dim, int):
            return self.batch_dim
        return next((dim for name, dim in self.batch_dim.items() if self._names(steps, name)), 0)

    def key(self) -> Hashable:
        """Return a key that is equal for equal readings."""
        dims = self.batch_dim if isinstance(self.batch_dim, int) else frozenset(self.batch_dim.items())
        return frozenset(self.unbatched), dims, self.lists

    @staticmethod
    def _names(steps: _Steps, name: int | str) -> bool:
        """Return whether the name is on the path. A number is an argument's position; a name may be anywhere."""
        return name == steps[0] if isinstance(name, int) else name in steps


class _Leaf(NamedTuple):
    steps: _Steps
    value: Any
    dim: int

    @property
    def size(self) -> int | None:
        """Return the size of the samples' dimension; None if there is none."""
        shape = self.value.shape
        return int(shape[self.dim]) if -len(shape) <= self.dim < len(shape) else None


class SplitBatch:
    """The arguments of a call, their number of samples, and micro-batches of them.

    Raises ValueError where the samples cannot be told, naming the argument and the remedy; TypeError for an argument of
    which is not known how to cut it.
    """

    def __init__(self, args: tuple[Any, ...], named: dict[str, Any], cutting: Cutting) -> None:
        self.args, self.named, self.cutting = args, named, cutting
        self._tensors: list[_Leaf] = []
        self._lists: list[_Leaf] = []
        for steps, value in self._arguments():
            self._survey(steps, value)
        self._samples_lists: set[_Steps] = set()
        self._doubt = ""
        self.samples = self._count()
        self.shapes = tuple(
            (
                tuple(leaf.value.shape[: leaf.dim]) + tuple(leaf.value.shape[leaf.dim :][1:]),
                str(leaf.value.dtype),
            )
            for leaf in self._tensors
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        return (leaf.value for leaf in self._tensors if isinstance(leaf.value, torch.Tensor))

    def micro_batch(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return samples start to stop, as views if the samples are the first dimension."""
        if start == 0 and stop == self.samples:
            return self.args, self.named
        if self._doubt:
            raise ValueError(self._doubt)
        cut = [self._cut((k,), value, start, stop) for k, value in enumerate(self.args)]
        named = {name: self._cut((name,), value, start, stop) for name, value in self.named.items()}
        return tuple(cut), named

    # ---- what there is -----------------------------------------------------------------------------------------------

    def _arguments(self) -> Iterator[tuple[_Steps, Any]]:
        yield from (((k,), value) for k, value in enumerate(self.args))
        yield from (((name,), value) for name, value in self.named.items())

    def _survey(self, steps: _Steps, value: Any) -> None:
        if self.cutting.is_whole(steps):
            return
        if _is_array(value):
            self._tensors.append(_Leaf(steps, value, self.cutting.dim(steps)))
        elif type(value) is list:
            self._lists.append(_Leaf(steps, value, self.cutting.dim(steps)))
        elif (children := _children(value)) is not None:
            for step, child in children:
                self._survey((*steps, step), child)
        elif not (isinstance(value, _WHOLE) or callable(value)):
            raise TypeError(
                f"{_named(steps)} is a {type(value).__qualname__}, and memopt.backward does not know how to split "
                "one: pass the tensors in it, register it with torch.utils._pytree.register_pytree_node, or name it "
                "in unbatched= if every micro-batch needs it whole"
            )

    def _count(self) -> int:
        sizes = {leaf.size for leaf in self._tensors}
        if not sizes and not self._lists:
            raise ValueError(
                "memopt.backward was given no tensor, and therefore no samples: pass the batch after fn"
            )
        samples = self._of_tensors() if sizes else self._of_lists()
        for leaf in self._lists:
            self._decide(leaf, samples)
        return samples

    def _of_tensors(self) -> int:
        first = self._tensors[0]
        for leaf in self._tensors:
            if getattr(leaf.value, "is_nested", False):
                raise ValueError(
                    f"{_named(leaf.steps)} is a nested tensor: pass its samples as a list, lists='samples'"
                )
            if leaf.size is None or leaf.size != first.size:
                other = "no such dimension" if leaf.size is None else f"{leaf.size}"
                raise ValueError(
                    f"the samples of a batch are along dimension {leaf.dim} of its tensors, where "
                    f"{_named(leaf.steps)} (shape {tuple(leaf.value.shape)}) has {other}"
                    + (f", and {_named(first.steps)} {first.size}" if leaf is not first else "")
                    + f": name it in unbatched=({leaf.steps[-1]!r},) if every micro-batch "
                    "needs it whole, or give the dimension of its samples in batch_dim="
                )
        assert first.size is not None
        return first.size

    def _of_lists(self) -> int:
        """Return the number of samples if no tensor is outside of lists."""
        lengths = {len(leaf.value) for leaf in self._lists}
        inside = [_sizes_in(leaf) for leaf in self._lists]
        sizes = set().union(*inside)
        told = self.cutting.lists
        samples = told == "samples" or (told is None and not sizes) or (told is None and len(sizes) > 1)
        if told is None and len(sizes) == 1 and len(lengths) == 1:
            raise ValueError(
                f"{_named(self._lists[0].steps)} is a list of {lengths.pop()} whose tensors all have size "
                f"{sizes.pop()} in the dimension of samples: pass lists='samples' if each element is a sample, "
                "lists='tensors' if each holds all of them"
            )
        found = lengths if samples else sizes
        if len(found) != 1 or None in found:
            raise ValueError(
                f"the lists of the batch differ in their number of samples: lengths {sorted(lengths)}, tensors' sizes "
                f"{sorted(map(str, sizes))}"
            )
        (number,) = found
        assert number is not None
        return number

    def _decide(self, leaf: _Leaf, samples: int) -> None:
        """Decide whether a list is one of samples, or holds tensors that have them."""
        told, sizes = self.cutting.lists, _sizes_in(leaf)
        by_sample = len(leaf.value) == samples and told != "tensors"
        by_tensor = sizes == {samples} and told != "samples"
        if not by_sample and not by_tensor:
            raise ValueError(
                f"{_named(leaf.steps)} is a list of {len(leaf.value)}, but the batch has {samples} samples: name it "
                f"in unbatched=({leaf.steps[-1]!r},) if every micro-batch needs it whole"
            )
        if (
            by_sample and by_tensor
        ):  # by chance, where the last batch is a short one: no reason to stop unless it is cut
            self._doubt = (
                f"{_named(leaf.steps)} is a list of {samples} tensors of {samples} samples: pass lists='samples' if "
                "each element is a sample, lists='tensors' if each holds all of them"
            )
        elif by_sample:
            self._samples_lists.add(leaf.steps)

    # ---- cutting -----------------------------------------------------------------------------------------------------

    def _cut(self, steps: _Steps, value: Any, start: int, stop: int) -> Any:
        if self.cutting.is_whole(steps):
            return value
        if _is_array(value):
            return _narrow(value, self.cutting.dim(steps), start, stop)
        if type(value) is list and steps in self._samples_lists:
            return value[start:stop]
        if _children(value) is None:
            return value
        return _rebuilt(value, lambda step, child: self._cut((*steps, step), child, start, stop))


def _is_array(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _narrow(value: Any, dim: int, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor):
        micro_batch = value.narrow(dim, start, stop - start)
        return micro_batch if dim == 0 else micro_batch.contiguous()  # as .view() in a model expects it
    return value[(slice(None),) * (dim % value.ndim) + (slice(start, stop),)]


def _sizes_in(leaf: _Leaf) -> set[int | None]:
    """Return the tensors' numbers of samples, in case the list is not one of samples."""
    found: set[int | None] = set()
    left = list(leaf.value)
    while left:
        value = left.pop()
        if _is_array(value):
            found.add(_Leaf(leaf.steps, value, leaf.dim).size)
        elif (children := _children(value)) is not None:
            left += [child for _, child in children]
    return found


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(value: Any) -> Sequence[tuple[int | str, Any]] | None:
    """Return a container's content by position, key or field; None if it is not a container."""
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", None) or range(len(value))
        return list(zip(names, value, strict=True))
    if isinstance(value, Mapping):
        return list(value.items())
    if _is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if type(value) in _pytree.SUPPORTED_NODES:
        children, _ = _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return list(enumerate(children))
    return None


def _rebuilt(value: Any, change: Callable[[int | str, Any], Any]) -> Any:
    """Return a container of the same kind with other children."""
    children = [change(step, child) for step, child in _children(value) or ()]
    if isinstance(value, list):
        return children
    if isinstance(value, tuple):
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    if isinstance(value, Mapping):
        changed = dict(zip(value, children, strict=True))
        if type(value) is dict:
            return changed
        again: Any = copy.copy(
            value
        )  # with what else it carries: BatchEncoding's encodings, a defaultdict's factory
        for key, child in changed.items():
            again[key] = child
        return again
    if _is_dataclass(value):
        again = copy.copy(value)
        for field, child in zip(dataclasses.fields(value), children, strict=True):
            object.__setattr__(again, field.name, child)  # a frozen one too
        return again
    node = _pytree.SUPPORTED_NODES[type(value)]
    return node.unflatten_fn(children, node.flatten_fn(value)[1])


def _named(steps: _Steps) -> str:
    first, *rest = steps
    name = f"argument {first}" if isinstance(first, int) else f"argument {first!r}"
    return name + "".join(f"[{step!r}]" for step in rest)


# ---- what the parts count for ----------------------------------------------------------------------------------------


class Weights:
    """reduction: "mean" or "sum" over samples, or a function that gives what a micro-batch counts for in a mean."""

    def __init__(self, reduction: Reduction, split: SplitBatch) -> None:
        if not callable(reduction) and reduction not in ("mean", "sum"):
            raise ValueError(
                f"reduction={reduction!r}: expected 'mean', 'sum', or a function that counts the elements over which "
                "a micro-batch's loss is a mean"
            )
        self.reduction, self._split = reduction, split
        self._counts: dict[tuple[int, int], Any] = {}

    @property
    def by_samples(self) -> bool:
        """Return whether the reduction is a mean whose weights are the numbers of samples."""
        return self.reduction == "mean"

    def count(self, start: int, stop: int) -> Any:
        """Return the weight of those samples, as a number or a tensor of one element."""
        if not callable(self.reduction):
            return stop - start
        key = (start, stop)
        if key not in self._counts:
            args, named = self._split.micro_batch(start, stop)
            with torch.no_grad():
                count = self.reduction(*args, **named)
            if isinstance(count, Tensor) and count.dim():
                raise ValueError(
                    f"memopt.backward: reduction= returned a tensor of shape {tuple(count.shape)} for {stop - start} "
                    "samples: reduce it to a scalar, their weight: .sum()"
                )
            self._counts[key] = count
        return self._counts[key]

    def is_nothing(self, start: int, stop: int) -> bool:
        """Return whether a micro-batch has zero weight (all tokens masked, for example): it has no mean and is skipped.

        Waits for the device if the weight is a tensor there.
        """
        return callable(self.reduction) and not self._is_whole(start, stop) and not self.count(start, stop)

    def reduced(self, loss: Any, start: int, stop: int) -> Tensor:
        """Return the loss of a micro-batch, as its part of the whole batch's loss."""
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"memopt.backward: fn returned a {type(loss).__qualname__}: it must return the loss alone"
            )
        if loss.dim() == 0:
            return loss * self._weight(start, stop) if self._is_weighted(start, stop) else loss
        if loss.shape[0] != stop - start:
            raise ValueError(
                f"memopt.backward: fn returned a loss of shape {tuple(loss.shape)} for {stop - start} samples: reduce "
                "it to a scalar, or return a loss for each sample"
            )
        if self.reduction == "sum":
            return loss.sum()
        if callable(self.reduction):
            return loss.sum() / self.count(0, self._split.samples)
        mean = loss.mean()
        return mean * self._weight(start, stop) if self._is_weighted(start, stop) else mean

    def _is_whole(self, start: int, stop: int) -> bool:
        return start == 0 and stop == self._split.samples

    def _is_weighted(self, start: int, stop: int) -> bool:
        return self.reduction != "sum" and not self._is_whole(start, stop)

    def _weight(self, start: int, stop: int) -> Any:
        return self.count(start, stop) / self.count(0, self._split.samples)
