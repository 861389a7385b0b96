"""memopt.compare_steps(): the reporter of what a technique saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt._compare import step_measurements
from memopt._compare import step_process as fresh_process
from memopt._compare.step_measurements import FEWEST, RECORDED, Build
from memopt._compare.step_table import StepComparison
from memopt._memory.recording.recorder import cuda_is_here


def compare_steps(
    variants: Mapping[str, Build],
    *,
    steps: int = 10,
    device: torch.device | str | None = None,
    fresh_process: bool = False,
) -> StepComparison:
    """Measure variants of the same training step, each built from nothing.

    The variants run one after the other. An out-of-memory error is a result, and is shown as one; other exceptions end
    the comparison. Times are said to differ only if the middle halves of their steps do not overlap.

    Args:
        variants: By name, functions that build all that a step needs and return the step: a function without arguments
            that returns its loss (a number, a tensor of one element) or None. The others are compared with the first.
            Memory allocated before a variant was built (a data set that all read) is not counted.
        steps: Number of steps of each variant, at least 3. The first two are recorded, for live bytes by torch's own
            allocator; the others are timed, without a recorder.
        device: "cuda" or "cpu"; by default CUDA if there is a device.
        fresh_process: Whether each variant runs in a process of its own, whose growth in resident bytes is measured.
            Its functions have to be importable there: in a module, or in a script that starts its work under
            `if __name__ == "__main__"`.

    Returns:
        A StepComparison: print it, or plot() it.

    Raises:
        ValueError: There are no variants, too few steps, or no such device name.
        TypeError: A variant is not such a function.
        RuntimeError: The device is missing, or a variant cannot be sent to another process.

    Example:
        >>> def plain():
        ...     model, optimizer = build()
        ...     def step():
        ...         loss = model(x).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         return loss
        ...     return step
        >>> print(memopt.compare_steps({"plain": plain, "checkpointed": checkpointed}))
    """
    if not variants:
        raise ValueError("there is nothing to compare: give variants, a dict of functions by name")
    for name, build in variants.items():
        if not callable(build):
            raise TypeError(f"variant {name!r} is {type(build).__name__}, not a function that builds a step")
    if steps < FEWEST:
        raise ValueError(f"steps={steps}: {RECORDED} are recorded, so that at least {FEWEST} are needed")
    kind = torch.device(device).type if device is not None else "cuda" if cuda_is_here() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the CPU and CUDA devices can be measured")
    if kind == "cuda" and not cuda_is_here():
        raise RuntimeError(f"device={device!r}: there is no CUDA device here: leave device out")
    run = _in_fresh_process if fresh_process else step_measurements.measure
    step_measurements.settle()
    return StepComparison({name: run(build, steps, kind) for name, build in variants.items()}, steps, kind)


def _in_fresh_process(build: Build, steps: int, device: str) -> step_measurements.MeasuredStep:
    return fresh_process.measure(build, steps, device)
