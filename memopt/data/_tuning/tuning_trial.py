"""One setting of a DataLoader, tried: a fork of this process iterates the loader, and is watched meanwhile.

A fork has the dataset, the sampler, the generators and the random state of this process as copies, so that nothing
that it does to them is seen here; and it can be ended at any moment, with its workers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from multiprocessing import forkserver, parent_process, resource_tracker, util
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt._runtime.host_memory import descendants
from memopt._runtime.process import ended
from memopt._runtime.results import Result
from memopt.data._tuning.worker_watch import FamilyMemory, Taken, is_running

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch.utils.data import DataLoader


class Settings(NamedTuple):
    """DataLoader's arguments of these names. Without workers prefetch_factor is None and persistent_workers False, as
    DataLoader has them."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Settings:
        return cls(loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers)

    def with_workers(self, num_workers: int) -> Settings:
        """Return these settings with workers, and DataLoader's default of 2 batches ahead if there were no workers
        before."""
        ahead = self.prefetch_factor or 2
        return self._replace(
            num_workers=num_workers,
            prefetch_factor=ahead if num_workers else None,
            persistent_workers=self.persistent_workers and num_workers > 0,
        )

    @property
    def outstanding(self) -> int:
        """The number of batches that are in progress or ready at any time."""
        return self.num_workers * (self.prefetch_factor or 0)

    def __str__(self) -> str:
        named = {name: value for name, value in self._asdict().items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in named.items())


def with_settings(loader: DataLoader[Any], settings: Settings) -> DataLoader[Any]:
    """Return a loader of the same class over the same objects: dataset, sampler, generator and the rest."""
    made = copy.copy(loader)
    # Past DataLoader's __setattr__, which refuses some of these: it guards a loader that is in use, and this is none.
    state: dict[str, Any] = made.__dict__
    state.update(settings._asdict())
    state.update(_iterator=None, _IterableDataset_len_called=None)
    if not settings.num_workers:
        state["timeout"] = 0  # of waiting for workers; iterating without any refuses one
    return made


# ---- the parent: a trial is watched ----------------------------------------------------------------------------------


_LOOK_SECONDS = 0.01
_LOOK_SHARE = 4  # a look takes a fifth of the time at most: it holds up the page faults of whom it looks at
_STEPS = 8  # between looks, of which the largest is what may come before the next one
_SECONDS_TO_END = 5.0  # of a child that has said all
_SECONDS_TO_ASK = 120.0  # a driver's start may take long
UNFIT, SILENT = "unfit", "silent"


@dataclass
class LoaderTrial(Result):
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
    own_bytes: int = 0
    """Bytes at most, beyond what this process had: all processes' own and shared memory, batches under way included."""
    file_bytes: int = 0
    """Bytes at most of mapped files: page cache, no part of the budget."""
    batch_bytes: int = 0
    """Of one batch's tensors."""
    problem: str | None = None
    """The reason that it did not go to its end: stopped, failed, or not tried."""
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
    """Run a trial.

    Never raises for what the loader does. epochs: whether the transition between epochs is measured too. device:
    batches are copied there, as in a training loop."""
    trial = LoaderTrial(settings)
    memory = FamilyMemory(by_descriptor=_shares_by_descriptor())
    ours, theirs = multiprocessing.Pipe(duplex=False)
    _prepare_fork(loader)
    child = multiprocessing.get_context("fork").Process(
        target=_run_trial,
        args=(loader, settings, bounds, epochs, device, theirs),
        name="memopt tune",
    )
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of a fork beside threads; what a child of one may do, _run_trial keeps to.
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
            target=_tell_accelerator, args=(theirs,), name="memopt tune"
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
                is_last, told = ours.recv()
            except EOFError:
                trial.problem = _death(child)
                return
            vars(trial).update(told)
            if is_last:
                child.join(_SECONDS_TO_END)  # it clears away what its workers had
                return
            pause = 0.0
        looking = time.monotonic()
        now = memory.look(child.pid, stands_for_parent=stands)
        done = time.monotonic()
        pause = max(_LOOK_SECONDS, _LOOK_SHARE * (done - looking))
        trial.own_bytes, trial.file_bytes = max(trial.own_bytes, now.own), max(trial.file_bytes, now.file)
        steps.append(now.own - last.own)
        if now.own + max(steps) > bounds.budget:  # what the next look would find
            trial.problem = f"stopped at {_C.format_size(now.own)}: it would exceed the budget"
            return
        last = now
        if not trial.batches and done - began > bounds.startup:
            trial.problem = f"stopped: no batch came within {bounds.startup:g} s (startup= waits longer)"
            return
        if trial.start is not None and done - began > bounds.startup + 2 * bounds.seconds + trial.start:
            trial.problem = f"stopped: after batch {trial.batches} none came within the time limit"
            return


def _death(child: Any) -> str:
    child.join(_SECONDS_TO_END)
    return f"failed: the process that iterated {ended(child.exitcode or 0)}"


def _end(child: Any) -> None:
    """End the child and all processes that it started; their memory is free when this returns."""
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


# ---- the child: the loader is iterated -------------------------------------------------------------------------------


_TELL_SECONDS = 0.02
_PAGE = 4096


def _shares_by_descriptor() -> bool:
    import torch

    return bool(torch.multiprocessing.get_sharing_strategy() == "file_descriptor")


def _prepare_fork(loader: DataLoader[Any]) -> None:
    """Prepare the parent: resources that a trial's process would leave behind when it is ended are created here, so
    that they are cleared away with this process."""
    util.get_temp_dir()  # type: ignore[attr-defined]  # of sockets
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # of named semaphores


def _tell_accelerator(tell: Connection) -> None:
    import torch

    if torch.cuda._is_in_bad_fork():
        tell.send(UNFIT)
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    tell.send(found.type if found is not None else None)


def _run_trial(
    loader: DataLoader[Any],
    settings: Settings,
    bounds: Bounds,
    epochs: bool,
    device: str | None,
    tell: Connection,
) -> None:
    """Run the trial, telling facts of it by LoaderTrial's names, each with whether it is the last."""
    import torch

    os.setpgid(0, 0)  # so that one signal reaches the workers too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The threads that OpenMP had in the parent are not here, and it would wait for them for ever.
    torch.set_num_threads(1)
    # The parent's server of forks, if there is one, is not this process's child, and multiprocessing asks it as if.
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
    try:
        try:
            tried = with_settings(loader, settings)
            told = _turn(tried, tell) if epochs else _rate(tried, settings, bounds, device, tell)
        except (ConnectionError, EOFError) as error:
            told = {"problem": f"failed: a worker process ended ({_said(error)})"}
        except BaseException as error:
            told = {"problem": f"failed: {_said(error)}"}
        tell.send((True, told))
    except RuntimeError as error:
        # Of DataLoader's handler of SIGCHLD, which raises while another error is told, too.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tell.send((True, {"problem": f"failed: {_said(error)}"}))
    finally:
        tell.close()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os.killpg(0, signal.SIGKILL)


def _rate(
    loader: DataLoader[Any],
    settings: Settings,
    bounds: Bounds,
    device: str | None,
    tell: Connection,
) -> dict[str, Any]:
    """Return facts of a trial, by LoaderTrial's names."""
    times = []
    begin = told = time.perf_counter()
    size = 0
    firsts: list[Any] = []
    most = max(bounds.batches, 3 * settings.outstanding)
    for batch in itertools.islice(loader, most):
        size = max(size, _touched(batch, device))
        now = time.perf_counter()
        times.append(now)
        if len(firsts) < min(2, settings.num_workers) and _is_stream(loader):
            firsts.append(_digest(batch))
        if len(times) == 1:
            tell.send((False, {"batches": 1, "start": now - begin}))
        elif now - told > _TELL_SECONDS:
            tell.send((False, {"batches": len(times)}))
            told = now
        if now - times[0] > bounds.seconds:
            break
    # Before that many had come, the workers had made them side by side with the first.
    first = min(settings.outstanding, len(times) // 2)
    elapsed = times[-1] - times[first] if times else 0.0
    rate = (len(times) - 1 - first) / elapsed if elapsed > 0 and len(times) - 1 > first else None
    note = ""
    if len(firsts) == 2 and firsts[0] == firsts[1]:
        note = "the workers return the same batches: each must take its part of the stream (get_worker_info)"
    problem = None if rate else f"too short to measure: {len(times)} batches came"
    return {"batches": len(times), "rate": rate, "batch_bytes": size, "note": note, "problem": problem}


def _turn(loader: DataLoader[Any], tell: Connection) -> dict[str, Any]:
    """The same of two epochs, and the seconds to the second's first batch. Epochs of a map-style dataset are cut to
    what the workers have under way; a stream's is left in its midst, and what is under way is waited for."""
    most = Settings.of(loader).outstanding + 1
    if not _is_stream(loader):
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        loader.__dict__[name] = _First(getattr(loader, name), most)
    came = size = 0
    again = None
    for _ in range(2):
        begin, again = time.perf_counter(), None
        for batch in itertools.islice(loader, most):
            size = max(size, _touched(batch, None))
            came += 1
            if again is None:
                again = time.perf_counter() - begin
                tell.send((False, {"batches": came, "start": again} if came == 1 else {"batches": came}))
    problem = None if again is not None else "the second epoch had no batches"
    return {"batches": came, "again": again, "batch_bytes": size, "problem": problem}


class _First:
    """The first of a sampler's, read as they are asked for."""

    def __init__(self, sampler: Any, most: int) -> None:
        self.sampler, self.most = sampler, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.most)

    def __len__(self) -> int:
        return min(self.most, len(self.sampler)) if isinstance(self.sampler, Sized) else self.most


def _is_stream(loader: DataLoader[Any]) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _tensors(batch: Any) -> Iterator[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _tensors(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from _tensors(one)


def _touched(batch: Any, device: str | None) -> int:
    """Return the bytes of a batch's tensors, after reading each page: a batch that is not read takes no memory where it
    arrives, and no time."""
    import torch

    total = 0
    for tensor in _tensors(batch):
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            content[::_PAGE].sum()
            total += content.numel()
            if device is not None:
                tensor.to(device, non_blocking=True)
    if device is not None:
        torch.accelerator.synchronize()
    return total


def _digest(batch: Any) -> list[Any]:
    """Return a fingerprint that equal batches share."""
    import torch

    found = [(one.shape, one.double().sum().item()) for one in _tensors(batch) if one.dtype != torch.bool]
    return [*found, repr(batch)[:1000]]


def _said(error: BaseException) -> str:
    """Return the last line of an error: DataLoader puts a worker's traceback before it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[-1].strip() if lines else ""
    kind = type(error).__name__
    return text if text.startswith(kind) else f"{kind}: {text}" if text else kind
