"""The child process of an estimate: an unmodified script on the simulated device, and the memory that it needed.

    python -m memopt._estimate.child REQUEST.json

The request is request.py's, the answer run.py's; it is written as JSON to the file that the request names. The script's
own output goes where this process's goes, and the exit status is the script's.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from memopt._estimate import fake_process_group, kernel_compilers, protection, started
from memopt._estimate.descendants import fork_watched
from memopt._estimate.request import Request, read


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m memopt._estimate.child REQUEST.json")
    request = read(arguments[0])
    fork_watched()
    protection.confine(request.protection_of(), _folder(request))
    return estimate(request, arguments[0])


def estimate(request: Request, path: str) -> int:
    """Run the request in a confined process with one thread, before torch is imported. path: the request for its
    children."""
    started_at = time.monotonic()
    _environment(request)
    from memopt.sim import _activation

    _activation.activate(
        memory=request.memory,
        devices=request.devices,
        compute_capability=request.compute_capability,
        multiprocessors=request.multiprocessors,
        blank=not request.compute,
        context=request.context,
        cudnn_workspace=request.cudnn_workspace,
    )
    driver = _activation.libraries() / "sim_cuda.so"
    os.environ.update(kernel_compilers.environment(driver, Path(_folder(request))))
    started.announce(path)
    files = protection.redirected(request.protection_of(), _folder(request))
    from memopt._estimate.run import Run  # imports torch, which links the simulated libraries now

    protection.saved(files)
    return Run(request, started_at, files).execute()


def _folder(request: Request) -> str:
    return str(Path(request.answer).resolve().parent)


def _environment(request: Request) -> None:
    """Set the environment variables that torch reads when it is imported or first used."""
    if request.ranks:
        os.environ.update(fake_process_group.environment(request.rank, request.ranks))
    if request.backend == "expandable":
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        name = next((name for name in names if name in os.environ), names[0])
        options = re.sub(r"expandable_segments:\w+,?", "", os.environ.get(name, ""))
        os.environ[name] = ",".join(["expandable_segments:True", *filter(None, options.split(","))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
