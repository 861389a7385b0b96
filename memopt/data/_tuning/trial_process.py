"""The process of a trial: a fork that iterates the loader and tells its parent how it goes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sized
from multiprocessing import forkserver, parent_process, resource_tracker, util
from typing import TYPE_CHECKING, Any

from memopt.data._tuning.loader_settings import Settings, with_settings

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch.utils.data import DataLoader

_TELL_SECONDS = 0.02
_PAGE = 4096


def shares_by_descriptor() -> bool:
    import torch

    return bool(torch.multiprocessing.get_sharing_strategy() == "file_descriptor")


def prepare(loader: DataLoader[Any]) -> None:
    """In the parent: what a process of a trial would leave behind where it is ended is made here, to be cleared away
    with this process."""
    util.get_temp_dir()  # type: ignore[attr-defined]  # of sockets
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # of named semaphores


def tell_accelerator(tell: Connection, unfit: str) -> None:
    import torch

    if torch.cuda._is_in_bad_fork():
        tell.send(unfit)
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    tell.send(found.type if found is not None else None)


def run(
    loader: DataLoader[Any],
    settings: Settings,
    batches: int,
    seconds: float,
    epochs: bool,
    device: str | None,
    tell: Connection,
) -> None:
    import torch

    os.setpgid(0, 0)  # so that one signal reaches the workers too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The threads that OpenMP had in the parent are not here, and it would wait for them for ever.
    torch.set_num_threads(1)
    # The parent's server of forks, if there is one, is not this process's child, and multiprocessing asks it as if.
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]
    try:
        tried = with_settings(loader, settings)
        told = _turn(tried, tell) if epochs else _rate(tried, settings, batches, seconds, device, tell)
        tell.send(("done", told))
    except (ConnectionError, EOFError) as error:
        tell.send(("failed", f"a worker process ended ({_said(error)})"))
    except BaseException as error:
        tell.send(("failed", _said(error)))
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
    batches: int,
    seconds: float,
    device: str | None,
    tell: Connection,
) -> dict[str, Any]:
    """Facts of a trial, by LoaderTrial's names."""
    times = []
    begin = told = time.perf_counter()
    size = 0
    firsts: list[Any] = []
    most = max(batches, 3 * settings.outstanding)
    for batch in itertools.islice(loader, most):
        size = max(size, _touched(batch, device))
        now = time.perf_counter()
        times.append(now)
        if len(firsts) < min(2, settings.num_workers) and _is_stream(loader):
            firsts.append(_digest(batch))
        if len(times) == 1:
            tell.send(("began", now - begin))
        elif now - told > _TELL_SECONDS:
            tell.send(("came", len(times)))
            told = now
        if now - times[0] > seconds:
            break
    # Before that many had come, the workers had made them side by side with the first.
    first = min(settings.outstanding, len(times) // 2)
    elapsed = times[-1] - times[first] if times else 0.0
    rate = (len(times) - 1 - first) / elapsed if elapsed > 0 and len(times) - 1 > first else None
    note = ""
    if len(firsts) == 2 and firsts[0] == firsts[1]:
        note = "the workers give the same batches: each has to take its part of the stream (get_worker_info)"
    problem = None if rate else f"too short to tell: {len(times)} batches came"
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
                tell.send(("began", again) if came == 1 else ("came", came))
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
    """Bytes of a batch's tensors, of which each page was read: a batch that nobody reads takes no memory where it
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
    """A fingerprint that equal batches share."""
    import torch

    found = [(one.shape, one.double().sum().item()) for one in _tensors(batch) if one.dtype != torch.bool]
    return [*found, repr(batch)[:1000]]


def _said(error: BaseException) -> str:
    """One line: DataLoader puts a worker's traceback before what it says."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[-1].strip() if lines else ""
    kind = type(error).__name__
    return text if text.startswith(kind) else f"{kind}: {text}" if text else kind
