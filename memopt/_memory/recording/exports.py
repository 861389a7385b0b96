"""A recording for other tools: counters for Perfetto, a snapshot for torch's memory_viz, scalars for TensorBoard."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt._memory.recording.cpu_recorders import unrecorded
from memopt._memory.recording.recording import CATEGORIES, Recording, Stack

if TYPE_CHECKING:
    from memopt._memory.recording.recorder import Recorder

# ---- Perfetto (ui.perfetto.dev) and chrome://tracing -----------------------------------------------------------------


_POINTS = 100_000  # of one counter; of more events the highest of each stretch is shown


def write_chrome_trace(recordings: Sequence[Recording], path: str | Path) -> None:
    Path(path).write_text(json.dumps(as_chrome_trace(recordings)))


def as_chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for number, recording in enumerate(recordings):
        process = {"pid": recording.facts.get("pid", number), "tid": number}
        name = {"name": f"{recording.device}: {recording.source}"}
        events.append({"ph": "M", "name": "thread_name", "args": name} | process)
        events += _counters(recording, process) if recording.events else []
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(recording: Recording, process: dict[str, int]) -> list[dict[str, Any]]:
    by_category = torch.stack([recording.live_bytes(n)[1:] for n in range(len(CATEGORIES))])
    shown = highest(by_category.sum(0), _POINTS)
    times = recording.times_us[shown].tolist()

    found: list[dict[str, Any]] = [
        {
            "ph": "C",
            "name": f"memory of {recording.device}",
            "ts": time,
            "args": dict(zip(CATEGORIES, row, strict=True)),
        }
        | process
        for time, row in zip(times, by_category[:, shown].t().tolist(), strict=True)
    ]
    held = zip(
        recording.times_us[recording.reserved_events.clamp(min=0)].tolist(),
        recording.reserved_bytes.tolist(),
        strict=True,
    )
    found += [
        {"ph": "C", "name": f"held on {recording.device}", "ts": time, "args": {"bytes": size}} | process
        for time, size in held
    ]
    for mark in recording.marks:
        at = int(recording.times_us[min(max(mark.event, 0), recording.events - 1)])
        found.append(
            {"ph": "i", "s": "p", "name": mark.kind, "ts": at, "args": {"text": mark.text}} | process
        )
    return found


def highest(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return indices of at most about `most` values, in order: all, or of each stretch the highest and the last."""
    count = len(values)
    if count <= most:
        return torch.arange(count)
    width = -(-2 * count // most)
    padded = torch.full((-(-count // width) * width,), torch.iinfo(torch.int64).min)
    padded[:count] = values
    starts = torch.arange(0, len(padded), width)
    peaks = starts + padded.view(-1, width).argmax(1)
    return torch.cat((peaks, (starts + width - 1).clamp(max=count - 1))).unique()


# ---- memory_viz ------------------------------------------------------------------------------------------------------


_PROTOCOL = 4  # memory_viz shows nothing of a file in protocol 5


def write_torch_snapshot(recordings: Sequence[Recording], path: str | Path) -> None:
    Path(path).write_bytes(pickle.dumps(as_torch_snapshot(recordings), protocol=_PROTOCOL))


def as_torch_snapshot(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return these recordings in the format of torch.cuda.memory._snapshot(); a CPU counts as device 0.

    Segments are not known here: each block that is alive at the end becomes one.
    """
    devices = {_device(recording): recording for recording in recordings}
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(devices, default=-1) + 1)]
    segments: list[dict[str, Any]] = []
    for device, recording in devices.items():
        trace, live = _history(recording, device)
        traces[device] = trace
        segments += live
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _device(recording: Recording) -> int:
    _, _, index = recording.device.partition(":")
    return int(index) if index.isdecimal() else 0


def _history(recording: Recording, device: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    frames = list(map(_frames_of, recording.stacks))
    events = recording.events
    times = recording.times_us.tolist()
    at: list[list[dict[str, Any]]] = [[] for _ in range(events)]
    segments = []
    columns = ("born", "died", "address", "size", "stream", "stack", "module")
    for born, died, address, size, stream, stack, module in zip(
        *(recording.columns[name].tolist() for name in columns), strict=True
    ):
        entry = {"addr": address, "size": size, "stream": stream, "pool_id": (0, 0), "frames": frames[stack]}
        entry |= {"compile_context": "N/A", "user_metadata": recording.modules[module]}
        if born >= 0:
            at[born].append(entry | {"action": "alloc", "time_us": times[born]})
        if died < events:
            for action in ("free_requested", "free_completed"):
                at[died].append(entry | {"action": action, "time_us": times[died]})
        else:
            segments.append(_segment(device, address, size, stream, frames[stack]))
    return [entry for entries in at for entry in sorted(entries, key=_frees_first)], segments


def _frees_first(entry: dict[str, Any]) -> bool:
    return bool(entry["action"] == "alloc")


def _frames_of(stack: Stack) -> list[dict[str, Any]]:
    return [{"filename": frame.file, "line": frame.line, "name": frame.function} for frame in stack]


def _segment(
    device: int, address: int, size: int, stream: int, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    block = {"address": address, "size": size, "requested_size": size, "frames": frames}
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": stream,
        "segment_type": "large" if size > 1 << 20 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block | {"state": "active_allocated"}],
    }


# ---- numbers for each step, for a curve over the training ------------------------------------------------------------


class StepScalars(NamedTuple):
    """Bytes in one step.

    `peak`: most alive at once; `categories`: the peak by category; `after`: alive when the step has ended; `held`: most
    held by the allocator, None if not known. `event`: the last of the step; `time_us`: of its end.
    """

    event: int
    time_us: int
    peak: int
    categories: dict[str, int]
    after: int
    held: int | None


def step_scalars(recording: Recording) -> list[StepScalars]:
    """Return the scalars of the steps that have ended, each from the end of the one before it.

    A step without a birth or a death has the values that the one before left.
    """
    ends = [mark.event for mark in recording.marks if mark.kind == "step"]
    if not ends or not recording.events:
        return []
    by_category = torch.stack([recording.live_bytes(n) for n in range(len(CATEGORIES))])
    live = by_category.sum(0)
    found = []
    begin = -1
    for end in ends:
        at = begin + 1 + int(live[begin + 1 : end + 2].argmax())  # live[n + 1] is what lives after event n
        found.append(
            StepScalars(
                event=end,
                time_us=int(recording.times_us[max(end, 0)]),
                peak=int(live[at]),
                categories=dict(zip(CATEGORIES, by_category[:, at].tolist(), strict=True)),
                after=int(live[end + 1]),
                held=_held(recording, begin, end),
            )
        )
        begin = end
    return found


def _held(recording: Recording, begin: int, end: int) -> int | None:
    """Return the most bytes held during a step, those at its beginning included."""
    upto = int(torch.searchsorted(recording.reserved_events, end, right=True))
    since = int(torch.searchsorted(recording.reserved_events, begin, right=True))
    chosen = recording.reserved_bytes[max(since - 1, 0) : upto]
    return int(chosen.max()) if len(chosen) else None


# ---- TensorBoard, beside the scalars that torch.profiler writes ------------------------------------------------------


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
                raise RuntimeError("its memopt.profile() has ended, and its recording is already written")
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
