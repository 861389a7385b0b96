"""memopt.checkpoint_sequential: a chain of functions, checkpointed in segments of equal length, or by the fastest
schedule within a budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from memopt.checkpointing.function_chain import run_within
from memopt.checkpointing.regions import IS_CURRIED, checkpoint
from memopt.originals import original

torchs_sequential = original(torchs, "checkpoint_sequential")

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
    segments: int | None,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    memory_budget: int | float | str | None = None,
    **kwargs: Any,
) -> Any:
    """functions applied to input, one after the other, in `segments` segments of len(functions) // segments each; the
    last one takes what is left, and keeps its intermediate results. As torch.utils.checkpoint.checkpoint_sequential.

    memory_budget: bytes, "8GiB", or a fraction (a float) of the device's memory. With it the functions are run by the
    fastest schedule of recomputation that stays within; segments, which may be None, and use_reentrant say nothing
    then, random states are restored and running statistics count a batch once. It counts what this chain needs from
    its call to the end of its backward: the parameters and buffers of the functions, their gradients, the input, all
    that is made and saved on the way, the output and its gradient. What else lives (an optimizer's state, other parts
    of the model) is the caller's to take off. The functions are measured when they are first called with an input of
    its shapes, types and devices, which takes some runs of each; so they must be the same objects from call to call,
    not lambdas made anew. ValueError for a budget that cannot be read, before anything runs;
    memopt.chain.InfeasibleBudget, naming the least one, where no schedule fits.

    kwargs: preserve_rng_state, and memopt.checkpoint's batch_norm_once."""
    if memory_budget is not None:
        unknown = kwargs.keys() - {"preserve_rng_state", "batch_norm_once"}
        if unknown:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        # Not children(), which leaves out a module that is there a second time.
        return run_within(tuple(functions), input, memory_budget)
    if segments is None:
        raise ValueError("segments is None: give a number of them, or memory_budget")
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
