"""memopt.checkpoint_sequential: a chain of functions, checkpointed in equal segments or by an optimal schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from memopt._checkpoint.drop_in.checkpoint import IS_CURRIED, checkpoint
from memopt._checkpoint.function_chain import run_within
from memopt._runtime.originals import original

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
    """Apply functions one after the other, and recompute intermediate results in the backward pass.

    A drop-in for torch.utils.checkpoint.checkpoint_sequential. With memory_budget the functions run by the fastest
    schedule of recomputation that stays within it. Random states are then restored, and running statistics count a
    batch once. The functions are measured when they are first called with an input of new shapes, dtypes and devices,
    which takes some runs of each. They must therefore be the same objects from call to call, not new lambdas.

    Args:
        functions: The functions or modules, or an nn.Sequential.
        segments: Number of segments, of len(functions) // segments functions each. The last one takes the rest, and
            keeps its intermediate results. Not used with memory_budget, and may be None then.
        input: The first function's input.
        use_reentrant: As in memopt.checkpoint. Not used with memory_budget.
        memory_budget: Most bytes that this chain may need from the call to the end of its backward: parameters and
            buffers of the functions, their gradients, the input, saved tensors, the output and its gradient. Other
            memory (an optimizer's state, other parts of the model) is to be subtracted first. An int, "8GiB", or a
            fraction (a float) of the device's memory.
        **kwargs: preserve_rng_state, and batch_norm_once as in memopt.checkpoint.

    Returns:
        The last function's output.

    Raises:
        memopt.chain.InfeasibleBudget: No schedule fits; the message names the least feasible budget.
        ValueError: The budget cannot be read (nothing has run then), there are neither segments nor a budget, or an
            argument is unknown.

    Example:
        >>> y = memopt.checkpoint_sequential(layers, None, x, memory_budget="2GiB")
    """
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
    """Functions that are called one after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.functions = functions

    def __call__(self, input: Any) -> Any:
        for function in self.functions:
            input = function(input)
        return input
