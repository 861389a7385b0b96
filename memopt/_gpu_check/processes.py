"""The parts of `memopt gpu-check` one after the other, each in a fresh process: an error of the device that ends a
process ends one part."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from memopt._gpu_check.check_report import CheckReport, PartResult
from memopt._runtime import process

# Their order is that of the report; parts.py has a function of each name.
PARTS = {
    "environment": "driver, devices, and what of memopt works there",
    "kernels": "optimizer and scaler kernels, beside the CPU's loops, by each way of loading them",
    "aliasing": "memory at two addresses (double_map), also by peers and dependent launches",
    "streams": "memory that one stream frees and another gets",
    "driver": "time of the driver's calls, idle and beside a kernel",
    "allocator": "training loops under each allocator: memory, time, losses; errors, waits, graphs, a fork",
    "bandwidth": "bytes a second of the kernels, beside a copy's",
    "estimate": "a training step here, as predicted, and request by request on the simulated device",
    "features": "optimizers, backward, offloading, checkpointing, loss head, Prefetcher, CudaPool, IPC, NCCL",
}
_SECONDS = {True: 300.0, False: 3600.0}  # of a part, by `quick`
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
        # Of its output the error alone.
        lines = [str(error).partition("\n")[0], *error.output.splitlines()[-1:]]
        answer = {"status": "wrong", "text": ": ".join(lines)}
    figures = {
        figure: _impersonal(value) if isinstance(value, str) else value
        for figure, value in answer.get("figures", {}).items()
    }
    status, text = answer["status"], _impersonal(answer["text"])
    return PartResult(name, status, text, figures, seconds=time.monotonic() - start)


# A file's folders: what begins with a slash that follows no word, so that GB/s is none.
_FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/:;,'\"]+/)+")


def _impersonal(text: str) -> str:
    """A text of a report without this machine's name and folders, for it is shown to others."""
    node = platform.node()
    shown = _FOLDERS.sub("…/", text)
    return re.sub(rf"\b{re.escape(node)}\b", "this machine", shown) if node else shown
