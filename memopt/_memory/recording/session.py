"""memopt.profile(): a recording of a program section's memory."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from memopt._memory.recording import exports, leaks, recorder, recording_file, summary
from memopt._memory.recording.cpu_recorders import unrecorded
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recorder import MAX_EVENTS, Recorder
from memopt._memory.recording.recording import Line, Recording
from memopt._runtime.results import Result

_P = ParamSpec("_P")
_R = TypeVar("_R")


def profile(
    device: torch.device | str | int | None = None, *, modules: bool = True, max_events: int = MAX_EVENTS
) -> Profile:
    """Record the memory of the code that runs within the context.

    Where a recorder runs already (`python -m memopt run`) it is used, and continues afterwards.

    Args:
        device: A CUDA device for all CUDA devices, or "cpu" for torch's host memory; by default CUDA if there is a
            device, else the CPU.
        modules: Whether memory is attributed to modules.
        max_events: Number of allocations and frees that are kept, the most recent ones.

    Returns:
        A Profile, to be used with `with`.

    Raises:
        RuntimeError: On entry: there is no such device.
        ValueError: On entry: the device cannot be recorded, or max_events is below 1.

    Examples:
        >>> with memopt.profile() as prof:
        ...     train_one_epoch()
        >>> print(prof)  # the peak by category, line and module, and leaks
        >>> prof.save("report.html")  # or .mopt, .pickle (memory_viz), .json, .trace.json (Perfetto)
    """
    return Profile(device, modules, max_events)


def _unseen(read: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep tensors that a method of a recording makes out of the memory that is recorded."""

    @functools.wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with unrecorded():
            return read(*args, **kwargs)

    return reading


class Profile(Result):
    """The result of memopt.profile(). Figures can be read within its context, then those so far, and after it."""

    def __init__(self, device: torch.device | str | int | None, modules: bool, max_events: int) -> None:
        self._wanted = device, modules, max_events
        self._recorder: Recorder | None = None
        self._own = False
        self._since: dict[str, int] = {}
        self._recordings: list[Recording] = []
        self._leaks: list[Leak] | None = None
        self._boards: list[exports.TensorBoard] = []

    def __enter__(self) -> Profile:
        if self._recorder is not None:
            raise RuntimeError("this profile is already running: each `with` needs its own memopt.profile()")
        device, modules, max_events = self._wanted
        running = recorder.active()
        self._own = running is None
        self._recordings, self._leaks = [], None
        if running is None:
            running = recorder.start(device, modules=modules, max_events=max_events)
        self._since = {name: running.position(name) for name in running.devices()}
        self._recorder = running
        return self

    def __exit__(self, *exception: object) -> None:
        running = self._recorder
        if running is None:
            return
        try:
            self._recordings = self._so_far(running)
            for board in self._boards:
                board.close()
        finally:
            self._boards.clear()
            self._recorder = None
            if self._own:
                running.stop()
        # Now, while what lives still does.
        self._leaks = (
            leaks.with_holders(self.recording, leaks.find(self.recording)) if self._recordings else []
        )

    def _so_far(self, running: Recorder) -> list[Recording]:
        return [running.recording(name, since=self._since.get(name, 0)) for name in running.devices()]

    def step(self) -> None:
        """Mark the end of a training step, where no optimizer's step marks it."""
        if self._recorder is not None:
            self._recorder.mark("step")
            for board in self._boards:
                board.count_step()

    def tensorboard(self, target: Any) -> exports.TensorBoard:
        """Write scalars of each step for TensorBoard: peak, peak by category, memory left after the step, memory held.

        Each call of the returned object writes the steps since the last; the end of the profile writes the rest, so it
        works without torch.profiler too.

        Args:
            target: A folder for the event file, or a SummaryWriter of the program's own.

        Returns:
            A callable, for torch.profiler's on_trace_ready.

        Raises:
            RuntimeError: Called outside the `with` block.
            ImportError: TensorBoard is missing (pip install "memopt[tensorboard]").

        Examples:
            >>> with memopt.profile() as memory, torch.profiler.profile(
            ...     schedule=torch.profiler.schedule(wait=0, warmup=1, active=10),
            ...     on_trace_ready=memory.tensorboard("runs/one"),
            ... ) as prof:
            ...     for batch in loader:
            ...         train(batch)
            ...         prof.step()
        """
        if self._recorder is None:
            raise RuntimeError(
                "tensorboard() needs a running profile: call it within `with memopt.profile()`"
            )
        if not hasattr(target, "add_scalar"):
            exports.summary_writer()
        self._boards.append(exports.TensorBoard(self._recorder, self._since, target))
        return self._boards[-1]

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    @_unseen
    def recordings(self) -> list[Recording]:
        """Recordings of the devices that were used, the current device's first."""
        return self._so_far(self._recorder) if self._recorder is not None else self._recordings

    @property
    @_unseen
    def recording(self) -> Recording:
        """The recording of the device with the highest peak.

        Raises:
            RuntimeError: No device was used.
        """
        found = self.recordings
        if not found:
            raise RuntimeError(
                "nothing was recorded: no device was used within `with memopt.profile() as prof:`"
            )
        return max(found, key=lambda recording: recording.peak()[0])

    @property
    @_unseen
    def peak_bytes(self) -> int:
        """Return the most bytes that were alive at once."""
        return self.recording.peak()[0]

    @_unseen
    def by_category(self) -> dict[str, int]:
        """Return the bytes of each category at the peak; they add up to it."""
        return self.recording.by_category()

    @_unseen
    def by_line(self, top: int | None = None) -> list[Line]:
        """Return the memory at the peak by the innermost line of the user's own code, largest first.

        Args:
            top: Number of lines; None for all.
        """
        return self.recording.by_line()[:top]

    @_unseen
    def by_module(self, top: int | None = None) -> list[Line]:
        """Return the memory at the peak by the module whose forward was running, largest first.

        Args:
            top: Number of modules; None for all.
        """
        return self.recording.by_module()[:top]

    @_unseen
    def leaks(self) -> list[Leak]:
        """Return likely leaks, each with the variable that holds it.

        Leaks are lines whose memory grows from step to step, and blocks of an earlier step that are alive at the peak.
        Needs three steps of an optimizer, or calls of step().
        """
        if self._leaks is not None:
            return self._leaks
        recording = self.recording
        return leaks.with_holders(recording, leaks.find(recording))

    @_unseen
    def __str__(self) -> str:
        found = sorted(self.recordings, key=lambda recording: -recording.peak()[0])
        if not found:
            return "memopt profile: nothing was recorded"
        texts = [summary.text(found[0], self.leaks()), *map(summary.text, found[1:])]
        return "memopt profile of " + "\n".join(texts)

    def __repr__(self) -> str:
        if self._recorder is not None:
            return "<memopt.profile, running>"
        return str(self) if self._recordings else "<memopt.profile>"

    @_unseen
    def _repr_html_(self) -> str:
        found = sorted(self.recordings, key=lambda recording: -recording.peak()[0])
        if not found:
            return "<p>memopt profile: nothing was recorded</p>"
        return summary.as_html(found[0], self.leaks()) + "".join(map(summary.as_html, found[1:]))

    # ---- giving away --------------------------------------------------------------------------------------------

    @_unseen
    def to_snapshot(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the recordings in the format of torch.cuda.memory._snapshot().

        Args:
            path: A file to write it to as well, a pickle that memory_viz opens.
        """
        if path is not None:
            exports.write_torch_snapshot(self.recordings, path)
        return exports.as_torch_snapshot(self.recordings)

    @_unseen
    def as_dict(self) -> dict[str, Any]:
        """Return everything that print() shows, complete, as JSON-able values."""
        return summary.as_dict(self.recording, self.leaks())

    def to_dict(self) -> dict[str, Any]:
        """Return as_dict(), under its earlier name."""
        warnings.warn("Profile.to_dict() is now named as_dict()", DeprecationWarning, stacklevel=2)
        return self.as_dict()

    @_unseen
    def save(self, path: str | Path) -> None:
        """Write the recordings to a file, in the format of its extension.

        Args:
            path: A name that ends in .html (a self-contained page), .mopt (for `python -m memopt report` and `diff`),
                .pickle (torch's snapshot format), .trace.json (Perfetto), or .json (as_dict()).

        Raises:
            ValueError: The extension is unknown, or no device was used.
        """
        recordings = self.recordings
        write(recordings, path, leaks=self.leaks() if recordings else [])


def write(
    recordings: list[Recording],
    path: str | Path,
    *,
    leaks: list[Leak] | None = None,
    title: str | None = None,
) -> None:
    """Write recordings in the format of the file's extension. Raise ValueError for an unknown one.

    title: of a page; by default the recorded command.
    """
    name = Path(path).name.lower()
    if not recordings:
        raise ValueError("there is nothing to save: no device was used")
    if name.endswith((".html", ".htm")):
        from memopt._memory.html import report_page

        report_page.write(recordings, path, title=title or _title(recordings[0]), leaks=leaks or ())
    elif name.endswith(".mopt"):
        recording_file.save(recordings, path)
    elif name.endswith((".pickle", ".pkl")):
        exports.write_torch_snapshot(recordings, path)
    elif name.endswith(".trace.json"):
        exports.write_chrome_trace(recordings, path)
    elif name.endswith(".json"):
        found = max(recordings, key=lambda recording: recording.peak()[0])
        Path(path).write_text(json.dumps(summary.as_dict(found, leaks or []), indent=2) + "\n")
    else:
        raise ValueError(f"{path}: the name must end in .html, .mopt, .pickle, .trace.json or .json")


def _title(recording: Recording) -> str:
    command = recording.facts.get("command")
    return " ".join(map(str, command)) if isinstance(command, list) and command else "memory"
