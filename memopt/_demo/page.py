"""memopt-demo.html: the report page of the GPT's last steps, plain and within the budget, side by side."""

from __future__ import annotations

from pathlib import Path

from memopt._demo.results import DemoResult
from memopt._demo.screen import text
from memopt._demo.trainings import recording_of
from memopt._memory.html import report_page
from memopt._memory.recording import recording_file


def write(result: DemoResult, folder: Path, path: Path) -> None:
    """Raises ImportError where plotly is missing."""
    task = result.tasks[0]
    names = [which for which in ("plain", "within") if recording_of(folder, task.name, which).exists()]
    recordings = [recording_file.load(recording_of(folder, task.name, which)) for which in names]
    for recording in recordings:
        recording.facts["command"] = ["memopt", "demo"]
    page = report_page.html(
        recordings,
        title=f"memopt demo: {task.about}",
        names=["plain", "within the budget"][: len(recordings)],
        note=text(result, None),
    )
    path.write_text(page, encoding="utf-8")
