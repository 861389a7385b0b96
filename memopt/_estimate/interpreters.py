"""Search for a Python with PyTorch's CUDA build: the simulated device needs its code, not a GPU."""

from __future__ import annotations

import os
import shutil
import sys

from memopt._runtime import process


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
    try:
        answer = process.ask("memopt._estimate.interpreters", python=path, seconds=600)
    except OSError as error:
        raise NoInterpreter(f"{path} does not run: {error}") from None
    except process.ChildFailed as error:
        if error.status == 0:
            text = (
                f"{path} is not a Python interpreter: it did not answer the query about the simulated device"
            )
        else:
            last = (error.output.strip() or str(error)).splitlines()[-1]
            text = f"{path} cannot run the simulated device: {last}"
        raise NoInterpreter(text) from None
    if answer.kind != "ready":
        raise NoInterpreter(f"{path} cannot run the simulated device: {answer.what['why']}")
    return path


def _probe() -> None:
    from memopt.sim import readiness

    next(process.requests())
    try:
        readiness()
    except RuntimeError as error:
        process.tell("refused", why=str(error))
    else:
        process.tell("ready")


if __name__ == "__main__":
    _probe()
