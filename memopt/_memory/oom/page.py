"""The report of an out-of-memory error as a page: the recording, or else the memory that was live at that moment.

It is written to a file of its own while the exception propagates, within some seconds, and does not change it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from memopt._memory.recording import recorder
from memopt._runtime.log import logger

if TYPE_CHECKING:
    from memopt._memory.oom.report import OomReport
    from memopt._memory.recording.recording import Recording

SUFFIXES = (".html", ".htm")
_SECONDS = 20.0  # a device that waits for another rank's would be waited for for ever
_MOST_EVENTS = 200_000  # some 2 s; of a longer recording the end is on the page


def free_path(wanted: str, rank: str) -> Path:
    """Return an unused path for each rank, so that nothing is overwritten. `rank`: as in the report, "rank 3 of 8"."""
    path = Path(wanted)
    if rank:
        path = path.with_stem(f"{path.stem}.rank{rank.split()[1]}")
    return path.with_stem(f"{path.stem}.{os.getpid()}") if path.exists() else path


def write(report: OomReport, path: Path) -> str:
    """Write the page and return "", or the reason why it could not be written."""
    failure = [f"it was not done after {_SECONDS:.0f} s"]

    def work() -> None:
        part = path.with_name(f".{path.name}.part")
        try:
            from memopt._memory.html import report_page

            text = report_page.html(_recordings(report), title="CUDA out of memory", note=str(report))
            part.write_text(text, encoding="utf-8")
            part.replace(path)
            failure[0] = ""
        except Exception as error:
            logger.info("the page of an out-of-memory error failed", exc_info=True)
            failure[0] = f"{type(error).__name__}: {error}"
            part.unlink(missing_ok=True)

    thread = threading.Thread(target=work, name="memopt-oom-page", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return failure[0]


def _recordings(report: OomReport) -> list[Recording]:
    active = recorder.active()
    device = report.bytes.device
    if active is None or device not in active.devices():
        return [report.contents]
    recording = active.recording(device)
    return [recording.since(recording.events - 1 - _MOST_EVENTS) if recording.blocks else report.contents]
