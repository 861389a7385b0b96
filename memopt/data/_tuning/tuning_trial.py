"""One setting of a DataLoader, tried: a fork of this process iterates the loader, and is watched meanwhile.

A fork has the dataset, the sampler, the generators and the random state of this process as copies, so that nothing
that it does to them is seen here; and it can be ended at any moment, with its workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime.host_memory import descendants
from memopt._runtime.process import ended
from memopt.data._tuning import trial_process
from memopt.data._tuning.loader_settings import Settings
from memopt.data._tuning.process_tree_memory import FamilyMemory, Taken, is_running

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch.utils.data import DataLoader

_LOOK_SECONDS = 0.01
_LOOK_SHARE = 4  # a look takes a fifth of the time at most: it holds up the page faults of whom it looks at
_STEPS = 8  # between looks, of which the largest is what may come before the next one
_SECONDS_TO_END = 5.0  # of a child that has said all
_SECONDS_TO_ASK = 120.0  # a driver's start may take long
UNFIT, SILENT = "unfit", "silent"


@dataclass
class LoaderTrial:
    """Measurements of one setting."""

    settings: Settings
    batches: int = 0
    """That came, in all."""
    rate: float | None = None
    """Batches a second, from when all workers were at work; None: there were too few."""
    start: float | None = None
    """Seconds to the first batch, the workers' start included."""
    again: float | None = None
    """Seconds to the first batch of the next epoch; of trials of persistent_workers only."""
    own: int = 0
    """Bytes at most, beyond what this process had: all processes' own and shared memory, batches under way included."""
    file: int = 0
    """Bytes at most of mapped files: page cache, no part of the budget."""
    batch_bytes: int = 0
    """Of one batch's tensors."""
    problem: str | None = None
    """Why it did not go to its end: stopped, failed, or not tried."""
    note: str = ""

    @property
    def complete(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Bounds:
    seconds: float
    batches: int
    startup: float
    budget: int


def measure(
    loader: DataLoader[Any],
    settings: Settings,
    bounds: Bounds,
    *,
    epochs: bool = False,
    device: str | None = None,
) -> LoaderTrial:
    """Never raises for what the loader does. epochs: what the turn from an epoch to the next takes is measured too.
    device: batches are copied there, as a training loop does."""
    trial = LoaderTrial(settings)
    memory = FamilyMemory(by_descriptor=trial_process.shares_by_descriptor())
    ours, theirs = multiprocessing.Pipe(duplex=False)
    trial_process.prepare(loader)
    child = multiprocessing.get_context("fork").Process(
        target=trial_process.run,
        args=(loader, settings, bounds.batches, bounds.seconds, epochs, device, theirs),
        name="memopt tune",
    )
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a fork beside threads; what a child of one may do, trial_process keeps to.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        theirs.close()
        with contextlib.suppress(OSError):  # it has done so itself, or ended
            os.setpgid(child.pid or 0, child.pid or 0)
        _watch(trial, child, ours, memory, bounds)
    finally:
        _end(child)
        ours.close()
    return trial


def accelerator_of_a_fork() -> str | None:
    """The kind of device ("cuda") that a fork of this process can use, None for none, UNFIT where this process has used
    it, SILENT where the fork gave no answer. Asked in a fork: where torch counts the devices, no later fork of that
    process can use them."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as in measure()
        child = multiprocessing.get_context("fork").Process(
            target=trial_process.tell_accelerator, args=(theirs, UNFIT), name="memopt tune"
        )
        child.start()
    theirs.close()
    try:
        found: str | None = ours.recv() if ours.poll(_SECONDS_TO_ASK) else SILENT
    except EOFError:  # it died of the question
        found = SILENT
    finally:
        _end(child)
        ours.close()
    return found


def _watch(trial: LoaderTrial, child: Any, ours: Connection, memory: FamilyMemory, bounds: Bounds) -> None:
    began = time.monotonic()
    stands = trial.settings.num_workers == 0
    last = Taken(0, 0)
    steps = deque([0], maxlen=_STEPS)
    pause = _LOOK_SECONDS
    while True:
        if ours.poll(pause):
            try:
                kind, told = ours.recv()
            except EOFError:
                trial.problem = _death(child)
                return
            _TOLD[kind](trial, told)
            if kind in ("done", "failed"):
                child.join(_SECONDS_TO_END)  # it clears away what its workers had
                return
            pause = 0.0
        looking = time.monotonic()
        now = memory.look(child.pid, stands_for_parent=stands)
        done = time.monotonic()
        pause = max(_LOOK_SECONDS, _LOOK_SHARE * (done - looking))
        trial.own, trial.file = max(trial.own, now.own), max(trial.file, now.file)
        steps.append(now.own - last.own)
        if now.own + max(steps) > bounds.budget:  # what the next look would find
            trial.problem = f"stopped at {_C.format_size(now.own)}: it would go over the budget"
            return
        last = now
        if not trial.batches and done - began > bounds.startup:
            trial.problem = f"stopped: no batch came within {bounds.startup:g} s (startup= waits longer)"
            return
        if trial.start is not None and done - began > bounds.startup + 2 * bounds.seconds + trial.start:
            trial.problem = f"stopped: after batch {trial.batches} none came for too long"
            return


def _began(trial: LoaderTrial, told: Any) -> None:
    trial.batches, trial.start = 1, told


def _came(trial: LoaderTrial, told: Any) -> None:
    trial.batches = told


def _done(trial: LoaderTrial, told: Any) -> None:
    vars(trial).update(told)


def _failed(trial: LoaderTrial, told: Any) -> None:
    trial.problem = f"failed: {told}"


_TOLD: dict[str, Callable[[LoaderTrial, Any], None]] = {
    "began": _began,
    "came": _came,
    "done": _done,
    "failed": _failed,
}


def _death(child: Any) -> str:
    child.join(_SECONDS_TO_END)
    return f"failed: the process that iterated {ended(child.exitcode or 0)}"


def _end(child: Any) -> None:
    """The child and all that it started, at once; what they had is free when this returns."""
    if child.pid is None:
        return
    family = descendants(child.pid)
    child.kill()
    with contextlib.suppress(OSError):  # nobody is left in the group
        os.killpg(child.pid, signal.SIGKILL)
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    child.join()
    child.close()
    until = time.monotonic() + _SECONDS_TO_END
    while any(map(is_running, family)) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
