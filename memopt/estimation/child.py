"""An unmodified script on the simulated device, and what it needed of it.

    python -m memopt.estimation.child REQUEST.json

The request is request.py's, the answer run.py's; it is written as JSON to the file that the request names. The script's
own output goes where this process's goes, and the exit status is the script's."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from memopt.estimation import kernel_compilers, pretended_ranks, protection, started
from memopt.estimation.descendants import fork_watched
from memopt.estimation.request import Request, read


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m memopt.estimation.child REQUEST.json")
    request = read(arguments[0])
    fork_watched()
    protection.confine(request.protection_of(), _folder(request))
    return estimate(request, arguments[0])


def estimate(request: Request, path: str) -> int:
    """In a process that is confined, with one thread, and without torch. path: of a request for what it starts."""
    started_at = time.monotonic()
    _environment(request)
    from memopt.sim import activation

    activation.activate(
        memory=request.memory,
        devices=request.devices,
        compute_capability=request.compute_capability,
        multiprocessors=request.multiprocessors,
        blank=not request.compute,
        context=request.context,
        cudnn_workspace=request.cudnn_workspace,
    )
    driver = activation.libraries() / "sim_cuda.so"
    os.environ.update(kernel_compilers.environment(driver, Path(_folder(request))))
    started.announce(path)
    files = protection.redirected(request.protection_of(), _folder(request))
    from memopt.estimation.run import Run  # imports torch, which links the simulated libraries now

    protection.saved(files)
    return Run(request, started_at, files).execute()


def _folder(request: Request) -> str:
    return str(Path(request.answer).resolve().parent)


def _environment(request: Request) -> None:
    """What torch reads when it is imported or first used."""
    if request.ranks:
        os.environ.update(pretended_ranks.environment(request.rank, request.ranks))
    if request.backend == "expandable":
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        name = next((name for name in names if name in os.environ), names[0])
        options = re.sub(r"expandable_segments:\w+,?", "", os.environ.get(name, ""))
        os.environ[name] = ",".join(["expandable_segments:True", *filter(None, options.split(","))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
