"""The parts of `memopt gpu-check` one after the other, each in a fresh process: an error of the device that ends a
process ends one part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from memopt._gpu_check.check_report import CheckReport, PartResult
from memopt._runtime import process

# Their order is that of the report; parts.py has a function of each name.
PARTS = {
    "environment": "driver, devices, and what of memopt works there",
    "kernels": "optimizer and scaler kernels, beside the CPU's loops",
    "aliasing": "memory at two addresses (double_map)",
    "streams": "memory that one stream frees and another gets",
    "driver": "time of the driver's calls",
    "allocator": "a training loop under each allocator: memory, time, losses",
    "bandwidth": "bytes a second of the kernels, beside a copy's",
    "estimate": "predicted and measured peak of a training step",
}
_SECONDS = {True: 300.0, False: 1800.0}  # of a part, by `quick`
MODULE = "memopt._gpu_check.parts"


def check(
    names: Sequence[str], quick: bool, simulated: bool, say: Callable[[str], None] = lambda text: None
) -> CheckReport:
    """Run these parts and report on them."""
    found = []
    for name in names:
        say(f"{name}: {PARTS[name]}")
        found.append(_checked(name, {"part": name, "quick": quick, "simulated": simulated}, _SECONDS[quick]))
        if name == "environment" and found[0].status == "not here":
            break  # without a device no other part says more
    return CheckReport(found, simulated)


def _checked(name: str, request: dict[str, Any], seconds: float) -> PartResult:
    start = time.monotonic()
    try:
        answer = process.ask(MODULE, request, seconds=seconds).what
    except process.ChildFailed as error:
        # Of its output the error alone: what stands before it has paths of this machine.
        lines = [str(error).partition("\n")[0], *error.output.splitlines()[-1:]]
        answer = {"status": "wrong", "text": ": ".join(lines)}
    return PartResult(name, **answer, seconds=time.monotonic() - start)
