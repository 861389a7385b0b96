"""The memory of a running script, as a line on the terminal below what the script writes.

The script gets a pseudo-terminal in the place of the terminal, so that what it writes, and whatever it starts, comes
through one thread that draws the line, too.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime.host_memory import limit_of
from memopt._runtime.terminal_line import TerminalLine

if TYPE_CHECKING:
    from memopt._run.parent import MemoryCurve

FILE = "live.json"  # in a run's folder: the figures, which the script's process writes
_REDRAWN, _LAST = 0.25, 0.05  # seconds; the second: in which the last of the output arrives


class LiveView:
    """A context; within it begin() draws what the figures of a folder say, until the block ends.

    Attributes:
        streams: Arguments of subprocess.Popen for a script whose output the view is to show.
    """

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / FILE
        self._line = TerminalLine()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._limit = limit_of().size or 0
        self._leader, self._follower = os.openpty()
        settings = termios.tcgetattr(self._follower)
        settings[1] &= ~termios.OPOST  # the terminal itself turns ends of lines into what it needs
        termios.tcsetattr(self._follower, termios.TCSANOW, settings)
        self._keep_size()
        same = sys.stdout.isatty() and os.fstat(1).st_rdev == os.fstat(2).st_rdev
        self.streams: dict[str, Any] = {"stderr": self._follower} | (
            {"stdout": self._follower} if same else {}
        )

    def __enter__(self) -> LiveView:
        return self

    def begin(self, curve: MemoryCurve) -> None:
        """Begin to draw: the script has been started. curve: the host memory of its processes."""
        self._curve = curve
        os.close(self._follower)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            os.close(self._follower)
            os.close(self._leader)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._show()
        except OSError:  # the terminal has gone, and the script hears of it as if it had had that
            pass
        finally:
            os.close(self._leader)

    def _show(self) -> None:
        poll = select.poll()
        poll.register(self._leader, select.POLLIN)
        due = 0.0
        while True:
            last = self._ended.is_set()
            wait = _LAST if last else max(0.0, due - time.monotonic())
            if poll.poll(1000 * wait):
                if data := self._read():
                    self._line.write(data)
                else:
                    poll.unregister(self._leader)
            elif last:
                break
            else:
                self._keep_size()
                self._line.draw(self._text())
                due = time.monotonic() + _REDRAWN
        self._line.draw("")

    def _read(self) -> bytes:
        try:
            return os.read(self._leader, 1 << 16)
        except OSError:  # nobody has the other end any more
            return b""

    def _keep_size(self) -> None:
        size = termios.tcgetwinsize(sys.stderr.fileno())
        if size != termios.tcgetwinsize(self._leader):
            termios.tcsetwinsize(self._leader, size)

    def _text(self) -> str:
        found = json.loads(self._file.read_text()) if self._file.exists() else {}
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        samples = self._curve.samples
        host = samples[-1].total if samples else 0, self._curve.peak
        return figures_line(found, host, self._limit, columns - 1)


def figures_line(found: dict[str, Any], host: tuple[int, int], limit: int, room: int) -> str:
    """Return the figures of a device, or the host's, as text; what has no room is left out.

    found: figures as the script's process writes them. host: resident bytes of its processes, and their peak. limit: of
    the host's memory, 0 where none is known. room: characters."""
    size = _C.format_size
    device, live, peak = found.get("device", "cpu"), found.get("live", 0), found.get("peak", 0)
    parts = [f"step {found['steps']}"] if found.get("steps") else []
    if device != "cpu":
        used = f"{device} {_of(found['used'], found['total'])}"
        parts += [f"live {size(live)}", f"peak {size(peak)}", f"reserved {size(found['reserved'])}", used]
    elif peak:
        parts += [f"live {size(live)}", f"peak {size(peak)}", f"host {_of(host[0], limit)}"]
    else:
        parts += [f"host {_of(host[0], limit)}", f"peak {size(host[1])}"]
    least = [part for word in ("reserved", "step", "peak") for part in parts if part.startswith(word)]
    while len(", ".join(parts)) > room and least:
        parts.remove(least.pop(0))
    line = ", ".join(parts)
    return f"memopt: {line}" if len(line) + len("memopt: ") <= room else line


def _of(part: int, total: int) -> str:
    """Return "5.20/24.0 GiB"."""
    if not total:
        return _C.format_size(part)
    (number, unit), (_, unit_of_total) = _C.format_size(part).split(), _C.format_size(total).split()
    first = number if unit == unit_of_total else f"{number} {unit}"
    return f"{first}/{_C.format_size(total)}"
