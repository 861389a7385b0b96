"""The demo's page: what half the memory changes, at a glance, then all figures, then the report of both trainings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from memopt._demo import results
from memopt._demo.results import DemoResult, TaskResult
from memopt._memory.html import report_page
from memopt._memory.html.peak_words import share_text, size_text
from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import Recording


def write_page(result: DemoResult, folder: Path, path: Path) -> None:
    """Write the page; its report is of the last steps of the first task, plain and within the budget, side by side."""
    task = result.tasks[0]
    names = [
        which for which in ("plain", "within") if results.recording_of(folder, task.name, which).exists()
    ]
    recordings = [recording_file.load(results.recording_of(folder, task.name, which)) for which in names]
    path.write_text(html(result, recordings), encoding="utf-8")


def html(result: DemoResult, recordings: Sequence[Recording]) -> str:
    """Return the page. recordings: of the first task's plain training, and of the one within the budget if it ran."""
    for recording in recordings:
        recording.facts["command"] = ["memopt", "demo"]
    first = ""
    if wrong := result.wrong():
        failed = "".join(f"<li>{escape(line)}</li>" for line in wrong)
        first = report_page.section("Failed checks", f'<ul class="leaks">{failed}</ul>', 'class="trouble"')
    first += "".join(map(_at_a_glance, result.tasks))
    rows = [row for task in result.tasks for row in _rows(task)]
    about = f"Trained on {result.device} (torch {result.torch}) in {result.seconds:.0f} s."
    first += report_page.section(
        "All figures",
        f'<p class="quiet">{escape(about)}</p>{report_page.folding_table(("training", *results.HEADS[1:]), rows)}'
        + report_page.folding_lines("\n".join(results.words(result))),
    )
    return report_page.html(
        recordings, title=_title(result), names=["plain", "within the budget"][: len(recordings)], first=first
    )


def _title(result: DemoResult) -> str:
    task = result.tasks[0]
    if result.wrong():
        return "memopt demo: a check failed"
    return f"The same training in {share_text(task.within['peak'], task.plain['peak'])} of the memory"


def _rows(task: TaskResult) -> list[tuple[str, ...]]:
    """Return the rows of the screen; the first says whose they are."""
    (name, *cells), *others = results.rows(task)
    return [
        (f"{task.name}: {name.strip()}", *cells),
        *((name.strip() or "difference", *row) for name, *row in others),
    ]


def _at_a_glance(task: TaskResult) -> str:
    trained = {"plain": task.plain} | ({"memopt": task.within} if "peak" in task.within else {})
    most = max(one["peak"] for one in trained.values())
    bars = "".join(_bar(name, one, most) for name, one in trained.items())
    kinds = [
        kind for kind in report_page.STACKED if any(one["by_category"].get(kind) for one in trained.values())
    ]
    keys = "".join(f'<li><span class="swatch {kind}"></span>{kind}</li>' for kind in kinds)
    return report_page.section(
        task.about[:1].upper() + task.about[1:],
        f'<p class="summary">{escape(_sentence(task))}</p>'
        f'<div class="glance"><div><h3>Peak memory</h3>{bars}<ul class="legend">{keys}</ul></div>'
        f"<div><h3>Loss</h3>{_curves({name: one['losses'] for name, one in trained.items()})}</div></div>",
    )


def _sentence(task: TaskResult) -> str:
    if "peak" not in task.within:
        return f"No schedule fits within {size_text(task.budget)}."
    plain, within, percent = task.plain, task.within, round(100 * task.slower)
    time = f"{abs(percent)}\u00a0% {'more' if percent > 0 else 'less'} time" if percent else "the same time"
    return (
        f"{size_text(within['peak'])} instead of {size_text(plain['peak'])}: the final loss is {within['loss']:.3f}, "
        f"that of plain training {plain['loss']:.3f}, and a step takes {time}."
    )


def _bar(name: str, trained: dict[str, Any], most: int) -> str:
    parts = [(kind, size) for kind in report_page.STACKED if (size := trained["by_category"].get(kind, 0))]
    spans = "".join(
        f'<span class="{kind}" style="flex: {size}" title="{kind} {size_text(size)}"></span>'
        for kind, size in parts
    )
    told = ", ".join(f"{kind} {size_text(size)}" for kind, size in parts)
    size = size_text(trained["peak"])
    return (
        f'<div class="compared"><span>{name}</span><span><span class="whole" role="img" '
        f'style="width: {100 * trained["peak"] / most:.1f}%" aria-label="Peak memory of {name}: {size}; {told}">{spans}'
        f"</span></span><b>{size}</b></div>"
    )


def _curves(losses: dict[str, list[float]]) -> str:
    every = [loss for of in losses.values() for loss in of if loss == loss]
    low, high = min(every, default=0.0), max(every, default=1.0)
    steps = max(map(len, losses.values()))

    def path(of: list[float]) -> str:
        points = (
            f"{100 * n / max(1, steps - 1):.2f},{100 - 100 * (loss - low) / ((high - low) or 1):.2f}"
            for n, loss in enumerate(of)
            if loss == loss
        )
        return f"M{'L'.join(points)}"

    drawn = "".join(f'<path class="curve {name}" d="{path(of)}"/>' for name, of in losses.items())
    told = "; ".join(f"{name} from {of[0]:.3f} to {of[-1]:.3f}" for name, of in losses.items())
    keys = "".join(f'<li><span class="line curve-{name}"></span>{name}</li>' for name in losses)
    return (
        f'<ul class="legend">{keys}</ul><div class="curves"><span>{high:.2f}</span>'
        f'<svg role="img" aria-label="Loss over {steps} steps: {told}" viewBox="0 0 100 100" '
        f'preserveAspectRatio="none">{drawn}</svg><span>{low:.2f}</span>'
        f"<span>step 1</span><span>step {steps}</span></div>"
    )
