"""The processes of estimates: an unmodified script on the simulated device, and the memory that it needed.

    python -m memopt._estimate.script_process REQUEST.json

The answer is written as JSON to the file that the request names. The script's own output goes where this process's
goes, and the exit status is the script's. Without a request in its arguments the process gets them one by one from its
parent (_runtime/process.py), each with a file for the script's output: torch is imported once, and every script runs in
a fork.

Python finds the simulated device in the processes that the script starts, their writes are redirected like the
script's, and their memory on a card counts. A script that replaces itself (exec) is still estimated, with its new
arguments.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memopt._estimate import protection
from memopt._estimate.request import Request, read
from memopt._run import simulated
from memopt._run.plan import allocator_environment
from memopt._run.user_program import call_after_torch, call_before_torch
from memopt._runtime import process
from memopt.sim import _activation

if TYPE_CHECKING:
    from memopt._estimate.script_run import Run


def main(arguments: list[str]) -> int:
    if arguments:
        protection.fork_watched()
        return run(arguments[0])
    for path, output in process.requests():
        _write_to(output)
        if "torch" not in sys.modules:
            prepare()
        status = protection.fork_and_watch()
        if status is None:
            return run(path)
        process.tell("ended", status=os.waitstatus_to_exitcode(status))
    return 0


def prepare() -> None:
    """Import torch, with the simulated libraries but no device yet.

    The garbage collector leaves alone what is there then: else it would visit all of torch, again and again while it is
    imported, and in each fork, where it would copy the pages of what it visits.
    """
    gc.disable()
    _environment_of_torch()
    os.environ[_REQUEST] = ""  # in a simulated run its startup would make a device when torch is looked for
    _activation.load()
    with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
        # torch makes this folder, which is each run's own later, and nothing is confined yet.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        from memopt._estimate import script_run  # noqa: F401

    gc.freeze()
    gc.enable()


def _write_to(output: str) -> None:
    """Let the file take the place of standard output and standard error."""
    file = os.open(output, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)


def run(path: str) -> int:
    """Run a request in this process, which is confined to what it may write. Must have one thread."""
    request = read(path)
    protection.confine(request.protection_of(), _folder(request))
    return estimate(request, path)


def estimate(request: Request, path: str) -> int:
    """Run the request in a confined process. path: the request for its children."""
    started_at = time.monotonic()
    _environment_of_torch()
    _environment(request)
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
    os.environ.update(compiler_environment(driver, Path(_folder(request))))
    announce(path)
    files = protection.redirected(request.protection_of(), _folder(request))
    from memopt._estimate.script_run import Run  # imports torch, which links the simulated libraries

    protection.saved(files)
    return Run(request, started_at, files).execute()


def _folder(request: Request) -> str:
    return str(Path(request.answer).resolve().parent)


def _environment_of_torch() -> None:
    """Set the environment variables that torch reads when it is imported."""
    # torch warns of each failed request, which the answer tells, and of each observed step.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A worker of the compiler would be a process of its own, which has no simulated device.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _environment(request: Request) -> None:
    """Set the environment variables that torch reads when it first uses a card, or other ranks."""
    if request.ranks:
        os.environ.update(_rank_environment(request.rank, request.ranks))
    os.environ.update(allocator_environment(request.backend, os.environ))


_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def _rank_environment(rank: int, count: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set."""
    place = {
        "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": count, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": count,
    }  # fmt: skip
    missing = {name: value for name, value in _ADDRESS.items() if name not in os.environ}
    return {name: str(value) for name, value in place.items()} | missing | {"TORCHELASTIC_RUN_ID": "estimate"}


def compiler_environment(driver: Path, folder: Path) -> dict[str, str]:
    """Return the environment variables for torch.compile's compilers.

    Triton compiles its launcher against libcuda.so.1, which the dynamic linker then finds already loaded, and compiles
    real kernels, which nothing runs. `driver`: the simulated libcuda; `folder`: for the life of the process, and for
    compiled files if none are kept.
    """
    link = folder / "libcuda" / "libcuda.so.1"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(driver)
    compiled = protection.kept_kernels() or folder / "compiled"
    return {
        "TRITON_LIBCUDA_PATH": str(link.parent),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
    }


# ---- processes that the script starts --------------------------------------------------------------------------------


_REQUEST, _SCRIPT = "MEMOPT_ESTIMATE", "MEMOPT_ESTIMATE_PROCESS"
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def announce(request: str) -> None:
    """Announce the estimate to all processes that this one, the script's, will start. request: a file's path."""
    os.environ.update(simulated.environment(_activation.active_settings(), os.environ))
    os.environ[_REQUEST], os.environ[_SCRIPT] = request, str(os.getpid())


def begin(path: str) -> None:
    """Join the estimate at the start of such a process."""
    request = read(path)
    if os.getpid() == int(os.environ[_SCRIPT]):
        script = script_of(sys.orig_argv[1:])
        if script is not None:
            sys.path.insert(0, "")  # the place of the script's folder, which Python has not taken yet
            _end_with(lambda: estimate(replace(request, argv=script[0], module=script[1]), path))
    files = protection.redirected(request.protection_of(), str(Path(path).parent))
    call_before_torch(_activation.activate_from)
    call_after_torch(lambda: protection.saved(files))
    if not request.ranks:
        _count(request, files)


def _count(request: Request, files: protection.Files) -> None:
    """Make this process report its memory on a card; its loops are shortened as the script's are."""
    script = script_of(sys.orig_argv[1:])
    if script is not None and any(
        folder in script[0][0] for folder in ("/site-packages/", "/dist-packages/")
    ):
        return  # a library's own, as torch.compile's
    if script is not None and not script[1] and _names_torch(script[0][0]):
        sys.path.insert(0, "")
        _end_with(lambda: _run_of(replace(request, argv=script[0], module=False), files).execute())
    call_after_torch(lambda: _watch(_run_of(request, files)))
    if any("multiprocessing.spawn" in word for word in sys.orig_argv):
        import torch  # noqa: F401  # the script's functions are compiled next


def _names_torch(script: str) -> bool:
    try:
        return b"torch" in Path(script).read_bytes()
    except OSError:
        return False


def _run_of(request: Request, files: protection.Files) -> Run:
    from memopt._estimate.script_run import Run

    return Run(request, 0.0, files, main=False)


def _watch(run: Run) -> None:
    """Watch this process until it ends."""
    from memopt._estimate.script import End

    if threading.current_thread() is threading.main_thread():  # a mode is a thread's own
        run.values().__enter__()
    atexit.register(lambda: run.answer(End("end", 0)))
    os._exit = run.leaving(os._exit)  # type: ignore[assignment]


def script_of(arguments: Sequence[str]) -> tuple[list[str], bool] | None:
    """Return a Python's script or module with its arguments, and whether it is a module; None for -c and stdin."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest.pop(0)
        if option in _WITH_VALUE:
            rest[:1] = []
        elif option.startswith("--"):
            continue
        elif "c" in option[1:]:
            return None
        elif option.endswith("m"):
            return (rest, True) if rest else None
    return (rest, False) if rest and rest[0] != "-" else None


def _end_with(script: Callable[[], int]) -> None:
    """End this process as the script ends."""
    status = 1
    try:
        status = script()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end: threads, then what is registered
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
