"""memopt-demo.html: the report page of the GPT's last steps, plain and within the budget, side by side."""

from __future__ import annotations

from pathlib import Path

from memopt.demo.results import DemoResult
from memopt.demo.screen import text
from memopt.demo.trainings import recording_of
from memopt.pages import report_page
from memopt.profiling import recording_file


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
