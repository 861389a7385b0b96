"""An unmodified script on the simulated device, and what it needed of it.

    python -m memopt.estimation.child REQUEST.json

The request is request.py's; the answer is written as JSON to the file it names. The script's own output goes where this
process's goes, and the exit status is the script's."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memopt
from memopt.estimation.request import Request, read

if TYPE_CHECKING:
    from memopt.estimation.guesses import Guesses
    from memopt.estimation.script import End
    from memopt.estimation.watch import Peaks, Requests, Steps


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m memopt.estimation.child REQUEST.json")
    request = read(arguments[0])
    started = time.monotonic()
    _environment(request)
    import memopt.sim

    memopt.sim.activate(
        memory=request.memory,
        devices=request.devices,
        compute_capability=request.compute_capability,
        multiprocessors=request.multiprocessors,
        blank=not request.compute,
        context=request.context,
        cudnn_workspace=request.cudnn_workspace,
    )
    return _run(request, started)


def _environment(request: Request) -> None:
    """What torch reads when it is imported or first used."""
    if request.backend == "expandable":
        name = next(
            (name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ),
            "PYTORCH_ALLOC_CONF",
        )
        options = re.sub(r"expandable_segments:\w+,?", "", os.environ.get(name, ""))
        os.environ[name] = ",".join(["expandable_segments:True", *filter(None, options.split(","))])


def _run(request: Request, started: float) -> int:
    # Only now: torch links the simulated libraries.
    import torch

    from memopt.estimation import script
    from memopt.estimation.guesses import Guesses
    from memopt.estimation.watch import Peaks, Requests, Steps

    if request.backend == "pool":
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    guesses = Guesses(request.fraction)
    peaks, requests, steps = Peaks(), Requests(), Steps(request.steps)
    with _values(request, guesses):
        end = script.run(request.argv, request.module)
    peaks.note()
    answer = _answer(request, end, guesses, peaks, requests, steps)
    answer["seconds"] = round(time.monotonic() - started, 3)
    _write(Path(request.answer), answer)
    if end.error is not None and end.out_of_memory is None:
        script.show(end.error)
    return end.status


def _values(request: Request, guesses: Guesses) -> contextlib.AbstractContextManager[object]:
    if request.compute:
        from memopt.sim.compute import Compute

        return Compute()
    from memopt.estimation import values

    mode = values.Values(guesses)
    values.install(mode)
    return mode


def _answer(
    request: Request, end: End, guesses: Guesses, peaks: Peaks, requests: Requests, steps: Steps
) -> dict[str, Any]:
    import torch

    return {
        "peak_allocated": peaks.allocated,
        "peak_reserved": peaks.reserved,
        "device_peak": max(memopt.sim.stats(device)["bytes_peak"] for device in range(request.devices)),
        "retries": peaks.retries,
        "oom": _out_of_memory(end, requests),
        "failed_requests": len(requests.failed),
        "guesses": guesses.rows(),
        "unmodelled": [f"{name} ({count} calls)" for name, count in memopt.sim.missing_calls().items()],
        "steps": steps.done,
        "stopped": end.stopped,
        "exit_status": end.status,
        "error": None if end.error is None else f"{type(end.error).__name__}: {end.error}",
        "host_peak": _host_peak(),
        "versions": {
            "memopt": memopt.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
        },
        "simulated": {
            "compute_capability": request.compute_capability,
            "multiprocessors": request.multiprocessors,
            "memory": request.memory,
            "context": request.context,
            "cudnn_workspace": request.cudnn_workspace,
            "fraction": request.fraction,
            "backend": request.backend,
            "values": "computed" if request.compute else "guessed where not known",
        },
    }


def _out_of_memory(end: End, requests: Requests) -> dict[str, Any] | None:
    if end.out_of_memory is None:
        return None
    import traceback

    from memopt.estimation.guesses import is_user_file

    failed = requests.failed[-1] if requests.failed else None
    found: dict[str, Any] = {
        "file": None,
        "line": None,
        "text": str(end.out_of_memory).split(". ")[0],
        "function": None,
        "asked": failed.asked if failed else None,
        "allocated": failed.allocated if failed else None,
    }
    for frame in traceback.extract_tb(end.out_of_memory.__traceback__):
        if is_user_file(frame.filename):
            found |= {
                "file": frame.filename,
                "line": frame.lineno,
                "text": frame.line,
                "function": frame.name,
            }
    return found


def _host_peak() -> int:
    """The most bytes that this process had in memory. Not rusage's: that begins with the parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status tells no VmHWM")
    return int(found[1]) << 10


def _write(path: Path, answer: dict[str, Any]) -> None:
    """All of it or nothing: a reader may be waiting for the file."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(answer, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
