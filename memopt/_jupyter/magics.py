"""The extension, %load_ext memopt: the magics %memopt and %%memopt."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from memopt import _C
from memopt._jupyter import live_view
from memopt._jupyter.traceback_hook import ReleasedFrames, release
from memopt._memory.live import heap_snapshot
from memopt._memory.live.device_bytes import DeviceBytes, blocks_of, split
from memopt._memory.live.growth import Growth, compare
from memopt._memory.live.live_tensors import LiveTensors, described, live_tensors
from memopt._memory.recording import recorder
from memopt._memory.recording.recording import Line
from memopt._memory.recording.user_code import place
from memopt._runtime.switches import disable, enable
from memopt._runtime.table import Facts


@dataclass(frozen=True)
class Status:
    """A bar for each CUDA device in use, and who holds live tensors."""

    devices: list[DeviceBytes]
    live: LiveTensors

    def __str__(self) -> str:
        return "\n".join([*map(str, self.devices), str(self.live)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        held = self.live._repr_html_()
        note = "" if self.live.groups else f"<div>{html.escape(str(self.live))}</div>"
        return "".join(device._repr_html_() for device in self.devices) + held + note


def status(top: int = 10) -> Status:
    taken = heap_snapshot.take()
    try:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [split(i, taken, blocks) for i in range(count) if len((blocks := blocks_of(i)).size)]
        return Status(devices, described(taken, top))
    finally:
        taken.forget()


@magics_class
class MemoptMagics(Magics):  # type: ignore[misc]
    @magic_arguments()  # type: ignore[untyped-decorator]
    @argument("what", nargs="?", choices=["status", "release", "live"], default="status", help="(status)")  # type: ignore[untyped-decorator]
    @argument("state", nargs="?", choices=["off"], help="of live")  # type: ignore[untyped-decorator]
    @argument("--top", type=int, default=10, metavar="N", help="groups of tensors shown (10)")  # type: ignore[untyped-decorator]
    @line_cell_magic  # type: ignore[untyped-decorator]
    def memopt(self, line: str, cell: str | None = None) -> Status | ReleasedFrames | None:
        """%memopt shows each device's memory and the holders of live tensors; %memopt release drops what the last
        exception's frames hold. %memopt live shows the memory while cells run, until %memopt live off. %%memopt runs
        the cell and shows its peak, the lines that allocated it, and what has grown."""
        options = parse_argstring(self.memopt, line)
        shell: Any = self.shell
        if options.state and options.what != "live":
            raise UsageError(f"%memopt {options.what} takes no {options.state!r}")
        if cell is None and options.what == "live":
            if getattr(shell, "kernel", None) is None:
                raise UsageError(
                    "%memopt live needs a notebook: in a terminal, `python -m memopt run --live` shows it"
                )
            live_view.off() if options.state else live_view.on(shell)
            return None
        if cell is None:
            return release() if options.what == "release" else status(options.top)
        # The magic's own line stays one, so that lines are numbered as they are seen.
        report = watch(lambda: shell.run_cell(f"# %%memopt\n{cell}", store_history=False))
        display(report)  # type: ignore[no-untyped-call]
        return None


# ---- the memory of a cell --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellReport:
    """The memory report of a cell.

    `peak`, `before`, `after`: bytes on `device`; `lines`: the peak's contents by the line that allocated them; `grown`:
    memory that has grown since before the cell, by holder.
    """

    device: str
    peak: int
    before: int
    after: int
    categories: dict[str, int]
    lines: list[Line]
    grown: list[Growth]

    def __str__(self) -> str:
        return str(self._facts())

    __repr__ = __str__

    def _facts(self) -> Facts:
        sizes = [_C.format_size(size) for size in (self.peak, self.before, self.after)]
        first = f"memopt: peak {sizes[0]} on {self.device}; {sizes[1]} before the cell, {sizes[2]} after it"
        rows = [
            ("peak of", [f"{name} {_C.format_size(size)}" for name, size in self.categories.items() if size]),
            (
                "top lines",
                [
                    f"{line.name or 'no line of your code'} {_C.format_size(line.bytes)}"
                    for line in self.lines
                ],
            ),
            ("grown", [_grown(growth) for growth in self.grown]),
        ]
        return Facts(first, [(name, ", ".join(said)) for name, said in rows if said])

    def _repr_html_(self) -> str:
        return self._facts().html()


def _grown(growth: Growth) -> str:
    group = growth.group
    said = [f"{group.count} tensors", group.where, f"graph of {group.nodes} nodes" if group.nodes else ""]
    size = _C.format_size(round(growth.nbytes))
    return f"{group.name or 'no variable'} +{size} ({', '.join(filter(None, said))})"


def watch(run: Callable[[], object]) -> CellReport:
    """Run the cell and report. If a recorder runs already, it is used, and continues."""
    earlier = live_tensors(top=0)
    active = recorder.active()
    recording_here = active if active is not None else recorder.start()
    device = recording_here.devices()[0]
    since = recording_here.position(device)
    try:
        run()
        found = recording_here.recording(device, since=since)
    finally:
        if active is None:
            recording_here.stop()
    later = live_tensors(top=0)
    live = found.live_bytes()
    peak, event = found.peak()
    return CellReport(
        device=found.device,
        peak=peak,
        before=int(live[0]),
        after=int(live[-1]),
        categories=found.by_category(event),
        lines=found.by_line(event, lambda frame: place(frame.file, frame.line))[:5],
        grown=[
            growth
            for growth in compare(earlier, later, 1)
            if growth.nbytes > 0 and growth.group.device == found.device
        ][:5],
    )


# ---- the extension ---------------------------------------------------------------------------------------------------


def load(ipython: Any) -> None:
    """Load the extension. Settings come from the environment, unless memopt.enable(...) was called before."""
    from memopt._runtime import enabling

    if enabling.settings() is None:
        enable()
    ipython.register_magics(MemoptMagics)


def unload(ipython: Any) -> None:
    live_view.off()
    disable()
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("memopt", None)
