"""A variant of a step in a process of its own, where nothing of another variant is left."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection

from memopt._compare import step_measurements
from memopt._compare.step_measurements import Build, MeasuredStep
from memopt._runtime.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from memopt._runtime.process import ended


def measure(build: Build, steps: int, device: str) -> MeasuredStep:
    """Measure a step in a fresh process, as step_measurements.measure() does here, with `resident`.

    Raises RuntimeError if the function cannot be sent or the process ends without an answer; else what the variant
    raises.
    """
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
            f"the process of {getattr(build, '__qualname__', build)} {ended(child.exitcode or 0)} without an answer; "
            "a script needs `if __name__ == '__main__':` around what it starts"
        ) from None
    except BaseException:  # an interrupt: nobody waits for its answer
        child.kill()
        raise
    finally:
        ours.close()
        child.join(timeout=60)
    if isinstance(answer, MeasuredStep):
        return answer
    raise answer


def _answer(pipe: Connection, build: Build, steps: int, device: str) -> None:
    try:
        step_measurements.settle()
        counts = reset_peak_resident()  # else the peak may be of before
        before = resident_bytes()
        found: object = step_measurements.measure(build, steps, device)
        assert isinstance(found, MeasuredStep)
        found = replace(found, resident=max(peak_resident_bytes() - before, 0) if counts else None)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
            found = error
        except Exception:  # an exception that pickle cannot make again goes as its text
            found = RuntimeError(f"{type(error).__name__}: {error}")
    pipe.send(found)
    pipe.close()
