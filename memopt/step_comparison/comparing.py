"""memopt.compare_steps(): the reporter of what a technique saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.profiling.recorder import cuda_is_here
from memopt.step_comparison import fresh_process, measuring
from memopt.step_comparison.measuring import FEWEST, RECORDED, Build
from memopt.step_comparison.step_table import StepComparison


def compare_steps(
    variants: Mapping[str, Build],
    *,
    steps: int = 10,
    device: torch.device | str | None = None,
    fresh_process: bool = False,
) -> StepComparison:
    """Measures ways of doing the same training step, each built from nothing:

        def plain():
            model, optimizer = build()
            def step():
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss
            return step

        print(memopt.compare_steps({"plain": plain, "checkpointed": checkpointed}))

    variants: by name, functions that build all that a step needs and return the step, a function without arguments that
    returns its loss (a number, a tensor of one element) or None. The first is what the others are held against. What
    was there before a variant was built (a data set that all of them read) is not counted.
    steps: at least 3 of each variant. The first two are recorded, for live bytes by torch's own allocator; the others
    are timed, without a recorder.
    device: "cuda" or "cpu"; by default CUDA where there is a device.
    fresh_process: each variant in a process of its own, whose growth in resident bytes is told too. Its functions have
    to be importable there: in a module, or in a script that starts its work under `if __name__ == "__main__"`.

    An out of memory is a result, and is shown as one; other exceptions end the comparison. One variant runs after the
    other, and times are said to differ only where the middle halves of their steps do not overlap.

    Raises ValueError for no variants, too few steps or another device, TypeError where a variant is not such a
    function, RuntimeError where there is no such device or a variant cannot be sent to another process."""
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
    run = _in_fresh_process if fresh_process else measuring.measure
    measuring.settle()
    return StepComparison({name: run(build, steps, kind) for name, build in variants.items()}, steps, kind)


def _in_fresh_process(build: Build, steps: int, device: str) -> measuring.MeasuredStep:
    return fresh_process.measure(build, steps, device)
