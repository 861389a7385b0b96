"""Which Python has PyTorch's CUDA build: the simulated device needs its code, not a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from memopt.estimation import child_process

# The probe's answer: a program that is no Python may end with status 0 too.
_READY = "memopt: the simulated device can run here"


class NoInterpreter(RuntimeError):
    """No Python here can run the simulated device. The message says why, and the mend."""


def find(python: str | None = None) -> str:
    """The path of the Python that will run the child: the one asked for, else this one. NoInterpreter where its torch
    is missing, or is no CUDA build."""
    if python is None:
        from memopt.sim import readiness

        try:
            readiness()
        except RuntimeError as error:
            raise NoInterpreter(
                f"{error}; or name another Python with python= (--python). No GPU is needed"
            ) from None
        return sys.executable
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise NoInterpreter(f"there is no Python at {python!r}")
    path = os.path.abspath(path)
    line = child_process.command(path, "memopt.estimation.interpreters", "")
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoInterpreter(f"{path} does not run: {error}") from None
    if done.returncode == 0 and _READY not in done.stdout:
        raise NoInterpreter(f"{path} is no Python: it was asked for the simulated device and did not answer")
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        raise NoInterpreter(f"{path} cannot run the simulated device: {last}")
    return path


def _probe() -> int:
    from memopt.sim import readiness

    try:
        readiness()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(_READY)
    return 0


if __name__ == "__main__":
    sys.exit(_probe())
