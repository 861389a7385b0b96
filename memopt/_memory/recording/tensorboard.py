"""Memory by step as TensorBoard scalars, beside those that torch.profiler writes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt._memory.recording.step_scalars import StepScalars, step_scalars
from memopt._memory.recording.unrecorded import unrecorded

if TYPE_CHECKING:
    from memopt._memory.recording.recorder import Recorder

_MIB = 1 << 20


class TensorBoard:
    """A callable that writes the steps that have ended since the last call.

    torch.profiler calls it as its on_trace_ready, or the program does. Tags are "memory_MiB/cuda_0/peak",
    ".../parameters" and the other categories at the peak, which add up to it, ".../after_step", ".../held"; their step
    is the number of optimizer steps before it.
    """

    def __init__(self, recorder: Recorder, since: dict[str, int], target: Any) -> None:
        self._recorder: Recorder | None = recorder
        self._since = dict(since)
        self._target = target  # a folder, or a writer
        self._writer: Any = None
        self._lock = threading.Lock()  # torch.profiler may call from a thread of its own
        self._steps = 0
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._steps += 1

    def count_step(self) -> None:
        """Count a step that no optimizer takes."""
        self._steps += 1

    def __call__(self, profiler: Any = None) -> None:
        with self._lock:
            if self._recorder is None:
                raise RuntimeError("its memopt.profile() has ended: what it recorded is written already")
            with unrecorded():  # a recorder of the CPU would see what is worked out here
                for device in self._recorder.devices():
                    self._write(self._recorder, device)
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Write the remaining steps; a writer that was given stays open."""
        try:
            self()
        finally:
            self._hook.remove()
            self._recorder = None
            if self._writer is not None and self._writer is not self._target:
                self._writer.close()

    def _write(self, recorder: Recorder, device: str) -> None:
        since = self._since.get(device, 0)
        recording = recorder.recording(device, since=since)
        steps = step_scalars(recording)
        # Of a long stretch the recorder may keep the end alone, so the last step is the one that is known by number.
        for number, step in enumerate(steps, self._steps - len(steps)):
            self._add(device, number, step)
        if steps:
            begins = max(since, int(recording.facts.get("events_lost", 0)))
            self._since[device] = begins + steps[-1].event + 1

    def _add(self, device: str, number: int, step: StepScalars) -> None:
        if self._writer is None:
            self._writer = self._target if hasattr(self._target, "add_scalar") else _writer(self._target)
        sizes: dict[str, int] = {"peak": step.peak, **step.categories, "after_step": step.after}
        if step.held is not None:
            sizes["held"] = step.held
        for name, size in sizes.items():
            tag = f"memory_MiB/{device.replace(':', '_')}/{name}"
            self._writer.add_scalar(tag, size / _MIB, number, walltime=step.time_us / 1e6)


def _writer(folder: str | Path) -> Any:
    writer: Any = summary_writer()
    return writer(log_dir=str(folder))


def summary_writer() -> Any:
    """Return torch's SummaryWriter class. Raise ImportError, with the remedy, if TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard's writer cannot be imported ({error}): pip install 'memopt[tensorboard]'"
        ) from error
    return SummaryWriter
