"""memopt.checkpoint_sequential: a chain of functions, checkpointed in segments of equal length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.checkpointing.regions import IS_CURRIED, checkpoint

_SINCE = "In a future release," if IS_CURRIED else "In version 2.9"
_NOT_PASSED = (
    "torch.utils.checkpoint.checkpoint_sequential: the use_reentrant "
    "parameter should be passed explicitly. "
    f"{_SINCE} we will raise an exception if use_reentrant "
    "is not passed. use_reentrant=False is "
    "recommended, but if you need to preserve the current default "
    "behavior, you can pass use_reentrant=True. Refer to docs for more "
    "details on the differences between the two variants."
)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """functions applied to input, one after the other, in `segments` segments of len(functions) // segments each; the
    last one takes what is left, and keeps its intermediate results. As torch.utils.checkpoint.checkpoint_sequential.

    kwargs: preserve_rng_state, and memopt.checkpoint's batch_norm_once."""
    if use_reentrant is None:
        warnings.warn(_NOT_PASSED, stacklevel=2)
        use_reentrant = True
    options = {name: kwargs.pop(name) for name in ("preserve_rng_state", "batch_norm_once") if name in kwargs}
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    chain = list(functions.children()) if isinstance(functions, torch.nn.Sequential) else functions
    size = len(chain) // segments
    end = 0
    for start in range(0, size * (segments - 1), size):
        end = start + size
        input = checkpoint(_Segment(chain[start:end]), input, use_reentrant=use_reentrant, **options)
    return _Segment(chain[end:])(input)


class _Segment:
    """Functions in a row."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.functions = functions

    def __call__(self, input: Any) -> Any:
        for function in self.functions:
            input = function(input)
        return input
