"""A variant of a step in a process of its own, where nothing of another variant is left."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from memopt.step_comparison import measuring
from memopt.step_comparison.measuring import Build, MeasuredStep


def measure(build: Build, steps: int, device: str) -> MeasuredStep:
    """As measuring.measure(), with `resident`. Raises RuntimeError where the function cannot be sent, or the process
    ends without an answer, and what the variant raises."""
    try:
        pickle.dumps(build)
    except Exception as error:  # whatever a __reduce__ raises
        raise RuntimeError(
            f"{getattr(build, '__qualname__', build)!r} cannot be sent to a fresh process ({error}): define it in a "
            "module, at the top, or leave fresh_process out"
        ) from error
    # Forked it would have this process's memory, and torch's threads would be missing.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, build, steps, device), daemon=True)
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"the process of {getattr(build, '__qualname__', build)} ended with status {child.exitcode} and no answer; "
            "a script needs `if __name__ == '__main__':` around what it starts"
        ) from None
    finally:
        ours.close()
        child.join(timeout=60)
    if isinstance(answer, MeasuredStep):
        return answer
    raise answer


def _answer(pipe: Connection, build: Build, steps: int, device: str) -> None:
    try:
        measuring.settle()
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        before = _status("VmRSS")
        found: object = measuring.measure(build, steps, device)
        assert isinstance(found, MeasuredStep)
        found = replace(found, resident=max(_status("VmHWM") - before, 0))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
            found = error
        except Exception:  # an exception that pickle cannot make again goes as its text
            found = RuntimeError(f"{type(error).__name__}: {error}")
    pipe.send(found)
    pipe.close()


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}: is this Linux?")
