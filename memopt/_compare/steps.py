"""memopt.compare_steps(): what a technique saved, each way of doing a step measured from nothing."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from memopt._compare.step_table import RECORDED, MeasuredStep, StepComparison
from memopt._memory.oom import exceptions
from memopt._memory.oom.exceptions import out_of_memory_in
from memopt._memory.recording import recorder
from memopt._memory.recording.recorder import cuda_is_here
from memopt._memory.recording.recording import CATEGORIES, Recording
from memopt._runtime.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from memopt._runtime.process import ended

Step = Callable[[], Any]
Build = Callable[[], Step]

FEWEST = 3
_MAX_EVENTS = 1_000_000


def compare_steps(
    variants: Mapping[str, Build],
    *,
    steps: int = 10,
    device: torch.device | str | None = None,
    fresh_process: bool = False,
) -> StepComparison:
    """Measure variants of the same training step, each built from scratch.

    The variants run one after the other. An out-of-memory error is a result, and is shown as one; other exceptions end
    the comparison. Times are said to differ only if the middle halves of their steps do not overlap.

    Args:
        variants: By name, functions that build all that a step needs and return the step: a function without arguments
            that returns its loss (a number, a tensor of one element) or None. The others are compared with the first.
            Memory allocated before a variant was built (a data set that all read) is not counted.
        steps: Number of steps of each variant, at least 3. The first two are recorded, for live bytes by torch's own
            allocator; the others are timed, without a recorder.
        device: "cuda" or "cpu"; by default CUDA if there is a device.
        fresh_process: Whether each variant runs in a process of its own, whose growth in resident bytes is measured.
            Its functions have to be importable there: in a module, or in a script that starts its work under
            `if __name__ == "__main__"`.

    Returns:
        A StepComparison: print it, or plot() it.

    Raises:
        ValueError: There are no variants, too few steps, or no such device name.
        TypeError: A variant is not such a function.
        RuntimeError: The device is missing, or a variant cannot be sent to another process.

    Examples:
        >>> def plain():
        ...     model, optimizer = build()
        ...     def step():
        ...         loss = model(x).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         return loss
        ...     return step
        >>> print(memopt.compare_steps({"plain": plain, "checkpointed": checkpointed}))
    """
    if not variants:
        raise ValueError("there is nothing to compare: give variants, a dict of functions by name")
    for name, build in variants.items():
        if not callable(build):
            raise TypeError(f"variant {name!r} is {type(build).__name__}, not a function that builds a step")
    if steps < FEWEST:
        raise ValueError(f"steps={steps}: {RECORDED} steps are recorded, so at least {FEWEST} are needed")
    kind = torch.device(device).type if device is not None else "cuda" if cuda_is_here() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: the CPU and CUDA devices can be measured")
    if kind == "cuda" and not cuda_is_here():
        raise RuntimeError(f"device={device!r}: there is no CUDA device here: leave device out")
    run = measure_in_fresh_process if fresh_process else measure
    settle()
    return StepComparison({name: run(build, steps, kind) for name, build in variants.items()}, steps, kind)


# ---- one variant -----------------------------------------------------------------------------------------------------


def measure(build: Build, steps: int, device: str) -> MeasuredStep:
    """Build a variant, run `steps` steps, and drop everything; settle() comes first.

    device: "cpu" or "cuda". Raises what build and the steps raise, except an out-of-memory error, which is a result."""
    seconds: list[float] = []
    losses: list[float] = []
    watched = _Watched(device)
    failed = ""
    step: Step | None = None
    try:
        step = build()
        if not callable(step):
            raise TypeError(
                f"{_name(build)} gave {type(step).__name__}: a variant must be a function that builds what a step "
                "needs and returns the step, a function without arguments"
            )
        watched.built()
        for _ in range(RECORDED):
            _take(step, losses)
        watched.close()
        for _ in range(steps - RECORDED):
            seconds.append(_timed(step, losses, device))
    except Exception as error:
        found = out_of_memory_in(error)
        if found is None:
            raise
        failed = ". ".join(str(found).split(". ")[:2]) or type(found).__name__
        exceptions.empty_frames(error)  # they hold the step's tensors
    finally:
        watched.close()
        del step
        settle()
    if _simulated(device):
        seconds = []
    return MeasuredStep(
        peak_bytes=watched.peak,
        by_category=watched.by_category,
        building_bytes=watched.building,
        held_bytes=watched.held,
        resident_bytes=None,
        seconds=seconds,
        losses=losses,
        failed=failed,
    )


def settle() -> None:
    """Free unreferenced memory, including cuBLAS's workspaces, which are created once, by the first variant."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class _Watched:
    """A recording from now until close(), of which only blocks allocated in it count."""

    def __init__(self, device: str) -> None:
        self.peak, self.building, self.held = 0, 0, None
        self.by_category = dict.fromkeys(CATEGORIES, 0)
        self._device = device
        running = recorder.active()
        self._own = running is None
        self._recorder: recorder.Recorder | None = running or recorder.start(device, max_events=_MAX_EVENTS)
        self._since = {name: self._recorder.position(name) for name in self._recorder.devices()}
        self._built: dict[str, int] = {}

    def built(self) -> None:
        assert self._recorder is not None
        self._built = {name: self._recorder.position(name) for name in self._recorder.devices()}

    def close(self) -> None:
        running, self._recorder = self._recorder, None
        if running is None:
            return
        try:
            for name in running.devices():
                if name.startswith(self._device):
                    self._read(running, name)
        finally:
            if self._own:
                running.stop()

    def _read(self, running: recorder.Recorder, name: str) -> None:
        since = self._since.get(name, 0)
        found = running.recording(name, since=since)
        if running.position(name) - since > found.events > _MAX_EVENTS // 2:
            raise RuntimeError(
                f"building and {RECORDED} steps make more than {found.events} allocations and frees: too many to record"
            )
        if self._device == "cuda":
            self.held = (self.held or 0) + torch.cuda.max_memory_reserved(name)
        own = _only_new(found)
        live = own.live_bytes()
        built = max(self._built.get(name, since) - since, 0)
        self.building += int(live[: built + 1].max())
        event = int(live[built:].argmax()) + built - 1
        self.peak += int(live[event + 1])
        for category, size in own.by_category(event).items():
            self.by_category[category] += size


def _only_new(recording: Recording) -> Recording:
    new = recording.columns["born"] >= 0
    return replace(recording, columns={name: column[new] for name, column in recording.columns.items()})


def _take(step: Step, losses: list[float]) -> None:
    loss = step()
    if loss is not None:
        losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))


def _timed(step: Step, losses: list[float], device: str) -> float:
    """Return the seconds of a step, with the reading of its loss, which waits for the device."""
    begun = time.perf_counter()
    _take(step, losses)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _simulated(device: str) -> bool:
    sim = sys.modules.get("memopt.sim")
    return device == "cuda" and sim is not None and sim.is_active()


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


# ---- in a fresh process ----------------------------------------------------------------------------------------------


def measure_in_fresh_process(build: Build, steps: int, device: str) -> MeasuredStep:
    """Measure a step in a fresh process, as measure() does here, with `resident`.

    Raises RuntimeError if the function cannot be sent or the process ends without an answer; else what the variant
    raises.
    """
    try:
        pickle.dumps(build)
    except Exception as error:  # whatever a __reduce__ raises
        raise RuntimeError(
            f"{getattr(build, '__qualname__', build)!r} cannot be sent to a fresh process ({error}): define it at the "
            "top level of a module, or leave fresh_process out"
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
            "a script needs `if __name__ == '__main__':` around the code that starts it"
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
        settle()
        counts = reset_peak_resident()  # else the peak may be of before
        before = resident_bytes()
        found: object = measure(build, steps, device)
        assert isinstance(found, MeasuredStep)
        found = replace(found, resident_bytes=max(peak_resident_bytes() - before, 0) if counts else None)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
            found = error
        except Exception:  # an exception that pickle cannot make again goes as its text
            found = RuntimeError(f"{type(error).__name__}: {error}")
    pipe.send(found)
    pipe.close()
