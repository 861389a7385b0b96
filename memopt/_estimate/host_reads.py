"""Operations whose result the host reads, on the simulated device.

They answer from the host shadow of their input, or guess, and the guess is counted. They are overridden at the CUDA
dispatch key, so that C++ reaches them too: x[mask], and its backward.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from memopt._estimate.guesses import Guesses

_aten = torch.ops.aten

# What they ask of values that they are given, and what a sound program's answer.
_CHECKS = {
    _aten.normal: (True, True),  # is no standard deviation negative? It asks twice.
    _aten.multinomial: (True, False),  # are all weights finite and none negative; is their sum 0?
}


class Known(Protocol):
    """An object that knows tensors' values, such as HostShadows."""

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None: ...

    def drawn(self, tensor: torch.Tensor) -> bool: ...

    def put(self, tensor: torch.Tensor, values: torch.Tensor, *, made: bool) -> None: ...


class HostReads:
    """The overrides of these operations, active as long as the object lives."""

    def __init__(self, shadows: Known, guesses: Guesses) -> None:
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
        values = self._known(tensor, "test" if tensor.dtype == torch.bool else "value", "the value")
        if values is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            return self._guesses.holds(self._guesses.fraction < 0.5)
        return 1.0 if tensor.is_floating_point() or tensor.is_complex() else 0

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        values = self._known(mask, "shape", "the places that are not zero")
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
        chosen = self._known(mask, "shape", "what a mask selects")
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
        values = self._known(repeats, "shape", "how often to repeat, the values")
        known = values is not None
        stand_in = torch.ones(repeats.shape, dtype=repeats.dtype) if values is None else values
        return self._on_device(torch.repeat_interleave(stand_in), repeats.device, known)

    def _unique(self, operation: Any) -> Callable[..., Any]:
        def answer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            values = self._known(tensor, "shape", "the number of different values")
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
