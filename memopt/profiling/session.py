"""memopt.profile(): what a piece of a program does with memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from memopt.profiling import (
    chrome_trace,
    leaks,
    recorder,
    recording_file,
    summary,
    tensorboard,
    torch_snapshot,
)
from memopt.profiling.leaks import Leak
from memopt.profiling.recorder import MAX_EVENTS, Recorder
from memopt.profiling.recording import Line, Recording
from memopt.profiling.unrecorded import unrecorded

_P = ParamSpec("_P")
_R = TypeVar("_R")


def profile(
    device: torch.device | str | int | None = None, *, modules: bool = True, max_events: int = MAX_EVENTS
) -> Profile:
    """Records the memory of what runs within it:

        with memopt.profile() as prof:
            train_one_epoch()
        print(prof)                         # the peak by category, line and module, and what leaks
        prof.save("report.html")            # or .mopt, .pickle (memory_viz), .json, .trace.json (Perfetto)

    device: all CUDA devices, or "cpu": torch's memory of the host; by default CUDA where there is a device, else the
    CPU. modules: attribute memory to modules. max_events: births and deaths of blocks that are kept, the last ones.
    Where a recorder runs already (`python -m memopt run`) it is used, and goes on.

    Raises RuntimeError where there is no such device, ValueError for what cannot be recorded."""
    return Profile(device, modules, max_events)


def _unseen(read: Callable[_P, _R]) -> Callable[_P, _R]:
    """What is worked out on tensors of a recording is none of the memory that is recorded."""

    @functools.wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with unrecorded():
            return read(*args, **kwargs)

    return reading


class Profile:
    """What memopt.profile() gives. Figures can be read within and after it; within, they are those so far."""

    def __init__(self, device: torch.device | str | int | None, modules: bool, max_events: int) -> None:
        self._wanted = device, modules, max_events
        self._recorder: Recorder | None = None
        self._own = False
        self._since: dict[str, int] = {}
        self._recordings: list[Recording] = []
        self._leaks: list[Leak] | None = None
        self._boards: list[tensorboard.TensorBoard] = []

    def __enter__(self) -> Profile:
        if self._recorder is not None:
            raise RuntimeError("this profile runs already: each `with` needs a memopt.profile() of its own")
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
        """Says that a step ends here, where no optimizer's step says so."""
        if self._recorder is not None:
            self._recorder.mark("step")
            for board in self._boards:
                board.count_step()

    def tensorboard(self, target: Any) -> tensorboard.TensorBoard:
        """Scalars of each step, for TensorBoard: the peak, what it was by category, what was left after the step, what
        the allocator held. target: a folder for the event file, or a SummaryWriter of the program's own.

            with memopt.profile() as memory, torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=10),
                on_trace_ready=memory.tensorboard("runs/one"),
            ) as prof:
                for batch in loader:
                    train(batch)
                    prof.step()

        Each call of what it gives writes the steps since the last; the profile's end writes the rest, so that it is of
        use without torch.profiler, too. Raises RuntimeError outside of `with`, ImportError without TensorBoard
        (pip install "memopt[tensorboard]")."""
        if self._recorder is None:
            raise RuntimeError(
                "tensorboard() is for a profile that runs: call it within `with memopt.profile()`"
            )
        if not hasattr(target, "add_scalar"):
            tensorboard.summary_writer()
        self._boards.append(tensorboard.TensorBoard(self._recorder, self._since, target))
        return self._boards[-1]

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    @_unseen
    def recordings(self) -> list[Recording]:
        """One a device that was used, the current one first."""
        return self._so_far(self._recorder) if self._recorder is not None else self._recordings

    @property
    @_unseen
    def recording(self) -> Recording:
        """Of the device with the highest peak."""
        found = self.recordings
        if not found:
            raise RuntimeError(
                "nothing was recorded: no device was used within `with memopt.profile() as prof:`"
            )
        return max(found, key=lambda recording: recording.peak()[0])

    @property
    @_unseen
    def peak(self) -> int:
        """Bytes."""
        return self.recording.peak()[0]

    @_unseen
    def by_category(self) -> dict[str, int]:
        """Bytes of each category at the peak; they add up to it."""
        return self.recording.by_category()

    @_unseen
    def by_line(self, top: int | None = None) -> list[Line]:
        """At the peak, by the innermost line of the user's own code; the largest first."""
        return self.recording.by_line()[:top]

    @_unseen
    def by_module(self, top: int | None = None) -> list[Line]:
        """At the peak, by the module whose forward was running; the largest first."""
        return self.recording.by_module()[:top]

    @_unseen
    def leaks(self) -> list[Leak]:
        """What stays without being wanted: lines whose memory grows from step to step, and what is kept from an earlier
        step at the peak, each with the variable that holds it. Needs three steps of an optimizer (or step())."""
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
        """As torch.cuda.memory._snapshot() gives it; to a file too, a pickle that memory_viz opens."""
        if path is not None:
            torch_snapshot.write(self.recordings, path)
        return torch_snapshot.as_snapshot(self.recordings)

    @_unseen
    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what print() shows, complete."""
        return summary.as_dict(self.recording, self.leaks())

    @_unseen
    def save(self, path: str | Path) -> None:
        """By the file's name: .html, a page by itself; .mopt, for `python -m memopt report` and `diff`; .pickle, a
        snapshot as torch writes them; .trace.json, for Perfetto; .json, to_dict()."""
        recordings = self.recordings
        write(recordings, path, leaks=self.leaks() if recordings else [])


def write(recordings: list[Recording], path: str | Path, *, leaks: list[Leak] | None = None) -> None:
    """Recordings in the form that the file's name asks for. Raises ValueError for one that is not known."""
    name = Path(path).name.lower()
    if not recordings:
        raise ValueError("there is nothing to save: no device was used")
    if name.endswith((".html", ".htm")):
        from memopt.pages import report_page

        report_page.write(recordings, path, title=_title(recordings[0]))
    elif name.endswith(".mopt"):
        recording_file.save(recordings, path)
    elif name.endswith((".pickle", ".pkl")):
        torch_snapshot.write(recordings, path)
    elif name.endswith(".trace.json"):
        chrome_trace.write(recordings, path)
    elif name.endswith(".json"):
        found = max(recordings, key=lambda recording: recording.peak()[0])
        Path(path).write_text(json.dumps(summary.as_dict(found, leaks or []), indent=2) + "\n")
    else:
        raise ValueError(f"{path}: the name has to end in .html, .mopt, .pickle, .trace.json or .json")


def _title(recording: Recording) -> str:
    command = recording.facts.get("command")
    return " ".join(map(str, command)) if isinstance(command, list) and command else "memory"
