"""Answers to a host that reads values of a device that keeps none: from host shadows, or guessed and counted.

A host shadow is the value that a storage would hold, kept on the host. Integers, booleans and a few floats (labels,
masks, lengths, counters, scales) have one as long as every operation that made them had its inputs' shadows: they
decide what a script does. Weights and activations have none.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function
from torch.utils._pytree import tree_map

from memopt._memory.recording.user_code import is_user_file
from memopt.sim._compute import ON_HOST


class Guess(NamedTuple):
    kind: str
    what: str
    where: str  # the file's whole path and the line, "….py:41"; "" in a backward pass


# "shape": a tensor's size depends on it; "test": the answer about a mask, or about one boolean; both change
# with `fraction`. "value": another number that it read; "copy": values that it copied to the host.
KINDS = ("shape", "test", "value", "copy")
BY_FRACTION = ("shape", "test")


class Guesses:
    """The assumptions of an estimate: answers to the script that no value on the device decided, by source line.

    `fraction` scales them all. Values that the model computes (which rows a mask selects) are not known. An unknown
    mask is assumed true in that fraction of its places; an unknown test of one value is assumed false, or true if
    fraction is below a half. Runs with 0 and 1 bound the script's need.
    """

    def __init__(self, fraction: float = 1.0) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(
                f"fraction={fraction!r} must lie between 0 and 1: it is the share of True in an unknown mask"
            )
        self.fraction = fraction
        # Lines of the script that assert something: whether it holds.
        self.asserts: dict[tuple[str, int], bool] = {}
        self._counts: Counter[Guess] = Counter()

    def add(self, kind: str, what: str) -> None:
        file, line = _users_line()
        self._counts[Guess(kind, what, f"{file}:{line}" if file else "")] += 1

    def holds(self, otherwise: bool) -> bool:
        """Answer a test of unknown values: as an assert statement asserts it, else `otherwise`."""
        return self.asserts.get(_users_line(), otherwise)

    def item(self, tensor: torch.Tensor) -> Any:
        """Answer for the unknown value of a tensor of one element: a number is not zero, by which a script might
        divide."""
        is_test = tensor.dtype == torch.bool
        self.add("test" if is_test else "value", f"the value of {_form(tensor)}")
        if is_test:
            return self.holds(self.fraction < 0.5)
        return 1.0 if tensor.is_floating_point() or tensor.is_complex() else 0

    def forget(self) -> None:
        """Drop the guesses of the process that this one was forked from."""
        self._counts.clear()

    @property
    def hang_on_fraction(self) -> bool:
        """Return whether another fraction could give another peak."""
        return any(guess.kind in BY_FRACTION for guess in self._counts)

    def rows(self) -> list[dict[str, Any]]:
        """Return JSON-able rows: those that decide a shape first; of a kind, the most frequent first."""
        order = sorted(self._counts.items(), key=lambda item: (KINDS.index(item[0].kind), -item[1], item[0]))
        return [guess._asdict() | {"count": count} for guess, count in order]


def _users_line() -> tuple[str, int]:
    """The innermost line that is the user's, not torch's, Python's or ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


# ---- host shadows ----------------------------------------------------------------------------------------------------


MOST_INTEGERS = 1 << 22  # elements that a shadow may have
MOST_FLOATS = 1 << 10
MOST_DRAWN = 1 << 16  # floats, of random numbers: masks are made by comparing them
MOST_BYTES = 256 << 20  # of all shadows together


@dataclass
class _HostShadow:
    """The shadow of a storage. `values`: its bytes; or, if all elements are equal, one element as a tensor."""

    values: torch.UntypedStorage | torch.Tensor
    drawn: bool = False  # random numbers, of another generator than the device's
    may_be_gradient: bool = False


class HostShadows:
    def __init__(self) -> None:
        self._shadows: dict[int, _HostShadow] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._bytes = 0

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a CPU tensor over the values, None if they are not known.

        Values written to it are known afterwards. A tensor whose elements are all equal is expanded, and cannot be
        written to.
        """
        shadow = self._shadow(tensor)
        if shadow is None:
            return None
        if isinstance(shadow.values, torch.Tensor):
            return shadow.values.expand(tensor.size()) if shadow.values.dtype == tensor.dtype else None
        if shadow.values.nbytes() != tensor.untyped_storage().nbytes():
            return None  # resized since
        return _over(shadow.values, tensor)

    def the_one(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the element, as a tensor of no dimensions, if all are known to be equal; else None."""
        shadow = self._shadow(tensor)
        values = None if shadow is None else shadow.values
        return values if isinstance(values, torch.Tensor) and values.dtype == tensor.dtype else None

    def drawn(self, tensor: torch.Tensor) -> bool:
        shadow = self._shadow(tensor)
        return shadow is not None and shadow.drawn

    def put(
        self, tensor: torch.Tensor, values: torch.Tensor | None, *, made: bool, drawn: bool = False
    ) -> None:
        """Set the tensor's known values; None: zeros. `made`: the tensor was created just now.

        Unknown parts of a storage stay unknown, and so do values beyond the size that may be kept.
        """
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        shadow = self._shadow(tensor)
        if shadow is not None and not (
            isinstance(shadow.values, torch.UntypedStorage) and shadow.values.nbytes() == size
        ):
            self._drop(storage._cdata)
            shadow = None
        if shadow is None:
            whole = tensor.numel() * tensor.element_size() == size
            if not whole or tensor.numel() > most_elements(tensor.dtype, drawn):
                return
            if self._bytes + size > MOST_BYTES:
                return
            # Gradients are made in backward passes, where nobody looks on, so the tensor was there before.
            may_be_gradient = tensor.is_floating_point() and (tensor.numel() > 1 or not made)
            with record_function(ON_HOST):  # none of the script's operators
                made_now = torch.zeros(size, dtype=torch.uint8).untyped_storage()
            shadow = _HostShadow(made_now, may_be_gradient=may_be_gradient)
            self._add(storage, shadow, size)
            if values is None:
                return  # zeros whose pages nobody has touched
        shadow.drawn = shadow.drawn or drawn
        assert isinstance(shadow.values, torch.UntypedStorage)
        _over(shadow.values, tensor).copy_(torch.zeros(()) if values is None else values)

    def put_one(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set all elements of the tensor, which fills its storage, to this one."""
        if not has_storage(tensor):
            return
        self.forget(tensor)
        if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            self._add(tensor.untyped_storage(), _HostShadow(value.reshape(()).to("cpu", tensor.dtype)), 0)

    def forget(self, tensor: torch.Tensor) -> None:
        if has_storage(tensor):
            self._drop(tensor.untyped_storage()._cdata)

    def forget_gradients(self) -> None:
        """Forget what may be a gradient: a backward pass adds to gradients while the mode is off."""
        for key in [key for key, shadow in self._shadows.items() if shadow.may_be_gradient]:
            self._drop(key)

    # ---- the table ----------------------------------------------------------------------------------------------

    def _shadow(self, tensor: torch.Tensor) -> _HostShadow | None:
        return self._shadows.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None

    def _add(self, storage: torch.UntypedStorage, shadow: _HostShadow, size: int) -> None:
        key = storage._cdata
        self._shadows[key] = shadow
        self._bytes += size
        # A storage's address is another's once it is gone.
        self._watches[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        self._watches.pop(key, None)
        shadow = self._shadows.pop(key, None)
        if shadow is not None and isinstance(shadow.values, torch.UntypedStorage):
            self._bytes -= shadow.values.nbytes()


def most_elements(dtype: torch.dtype, drawn: bool = False) -> int:
    if dtype.is_floating_point or dtype.is_complex:
        return MOST_DRAWN if drawn else MOST_FLOATS
    return MOST_INTEGERS


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _over(values: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(values, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[arg-type]


# ---- answers to the host ---------------------------------------------------------------------------------------------


_aten = torch.ops.aten

# What they ask of values that they are given, and what a sound program's answer.
_CHECKS = {
    _aten.normal: (True, True),  # is no standard deviation negative? It asks twice.
    _aten.multinomial: (True, False),  # are all weights finite and none negative; is their sum 0?
}


class HostReads:
    """Operations whose result the host reads, overridden as long as the object lives.

    They answer from the host shadow of their input, or guess, and the guess is counted. They are overridden at the CUDA
    dispatch key, so that C++ reaches them too: x[mask], and its backward.
    """

    def __init__(self, shadows: HostShadows, guesses: Guesses) -> None:
        self._shadows = shadows
        self._guesses = guesses
        self._checks: list[bool] = []
        self._library = torch.library.Library("aten", "IMPL")
        answers: list[tuple[Any, Callable[..., Any]]] = [
            (_aten._local_scalar_dense.default, self._item),
            (_aten.nonzero.default, self._nonzero),
            (_aten.masked_select.default, self._masked_select),
            (_aten.bincount.default, self._bincount),
            (_aten.repeat_interleave.Tensor, self._repeat_interleave),
            (_aten._unique2.default, self._unique(_aten._unique2.default)),
            (_aten.unique_consecutive.default, self._unique(_aten.unique_consecutive.default)),
            (_aten.unique_dim.default, self._unique(_aten.unique_dim.default)),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "overriding a previously registered kernel": yes
            for operation, answer in answers:
                self._library.impl(operation, answer, "CUDA")

    @contextlib.contextmanager
    def checks(self, operation: Any) -> Iterator[None]:
        """Enter an operation that may check its arguments: its checks read values derived from them, which nobody
        knows."""
        before, self._checks = self._checks, list(_CHECKS.get(operation, ()))
        try:
            yield
        finally:
            self._checks = before

    # ---- what is known of a tensor ------------------------------------------------------------------------------

    def _known(self, tensor: torch.Tensor, kind: str, what: str) -> torch.Tensor | None:
        values = self._shadows.get(tensor)
        if values is None:
            self._guesses.add(kind, f"{what} of {_form(tensor)}")
        elif self._shadows.drawn(tensor):
            self._guesses.add(kind, f"{what} of random {_form(tensor)}, drawn on the host")
        return values

    def _part(self, elements: int) -> int:
        return math.ceil(elements * self._guesses.fraction)

    def _on_device(self, values: torch.Tensor, device: torch.device, known: bool) -> torch.Tensor:
        made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=device)
        if known:
            self._shadows.put(made, values, made=True)
        return made

    # ---- the operations -----------------------------------------------------------------------------------------

    def _item(self, tensor: torch.Tensor) -> Any:
        torch.cuda.current_stream(tensor.device).synchronize()  # as the read would wait
        if self._checks:
            return self._checks.pop(0)
        if self._shadows.get(tensor) is None:
            return self._guesses.item(tensor)
        values = self._known(tensor, "test" if tensor.dtype == torch.bool else "value", "the value")
        assert values is not None
        return values.item()

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        values = self._known(mask, "shape", "the positions of the nonzero elements")
        if values is not None:
            found = torch.nonzero(values)
            rows = len(found)
        else:
            rows = self._part(mask.numel())
        # The layout that CUDA's kernel gives: a column after the other.
        made = torch.empty_strided(
            (rows, mask.dim()), (1, max(1, rows)), dtype=torch.int64, device=mask.device
        )
        if values is not None:
            self._shadows.put(made, found, made=True)
        return made

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tensor, mask = torch.broadcast_tensors(tensor, mask)
        chosen = self._known(mask, "shape", "the selection by a mask")
        if chosen is None:
            return tensor.new_empty(self._part(mask.numel()))
        made = tensor.new_empty(int(chosen.sum()))
        values = self._shadows.get(tensor)
        if values is not None:
            self._shadows.put(made, values.masked_select(chosen), made=True)
        return made

    def _bincount(
        self, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        values = self._known(tensor, "shape", "the number of bins")
        factors = None if weights is None else self._shadows.get(weights)
        stand_in = values
        if stand_in is None:  # the same in each bin
            stand_in = torch.arange(tensor.numel()) % max(1, minlength)
        counts = torch.bincount(stand_in, minlength=minlength)
        if weights is not None:
            counts = counts.double() if factors is None else torch.bincount(stand_in, factors, minlength)
        return self._on_device(counts, tensor.device, known=weights is None or factors is not None)

    def _repeat_interleave(self, repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
        values = self._shadows.get(repeats)
        if values is None and output_size is not None:  # nothing is read
            return repeats.new_empty(output_size)
        values = self._known(repeats, "shape", "the repeat counts")
        known = values is not None
        stand_in = torch.ones(repeats.shape, dtype=repeats.dtype) if values is None else values
        return self._on_device(torch.repeat_interleave(stand_in), repeats.device, known)

    def _unique(self, operation: Any) -> Callable[..., Any]:
        def answer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values = self._known(tensor, "shape", "the number of distinct values")
            known = values is not None
            if values is None:
                different = max(1, self._part(tensor.numel()))
                values = (torch.arange(tensor.numel()) % different).view(tensor.shape).to(tensor.dtype)
            return tree_map(
                lambda one: self._on_device(one, tensor.device, known), operation(values, *args, **kwargs)
            )

        return answer


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
