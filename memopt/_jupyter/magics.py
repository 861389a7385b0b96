"""%memopt and %%memopt."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from memopt._jupyter import cell as cells
from memopt._jupyter.release import ReleasedFrames, release
from memopt._memory.live import heap_snapshot
from memopt._memory.live.device_bytes import DeviceBytes, blocks_of, split
from memopt._memory.live.live_tensors import LiveTensors, described


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
    @argument("what", nargs="?", choices=["status", "release"], default="status", help="(status)")  # type: ignore[untyped-decorator]
    @argument("--top", type=int, default=10, metavar="N", help="groups of tensors shown (10)")  # type: ignore[untyped-decorator]
    @line_cell_magic  # type: ignore[untyped-decorator]
    def memopt(self, line: str, cell: str | None = None) -> Status | ReleasedFrames | None:
        """%memopt shows each device's memory and the holders of live tensors; %memopt release drops what the last
        exception's frames hold. %%memopt runs the cell and shows its peak, the lines that allocated it, and what has
        grown."""
        options = parse_argstring(self.memopt, line)
        if cell is None:
            return release() if options.what == "release" else status(options.top)
        shell: Any = self.shell
        # The magic's own line stays one, so that lines are numbered as they are seen.
        report = cells.watch(lambda: shell.run_cell(f"# %%memopt\n{cell}", store_history=False))
        display(report)  # type: ignore[no-untyped-call]
        return None
