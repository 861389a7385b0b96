"""The auto_checkpoint plan of a recorded step, as a part of a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from memopt._memory.html.summary import seconds, size


def plan_table(plan: Mapping[str, Any] | str) -> str:
    """Return the table of a `Plan.as_dict()`, or of a plan's text."""
    head = '<div class="head"><h2>The plan of auto_checkpoint</h2></div>'
    if isinstance(plan, str):
        return f'<section id="plan">{head}<pre>{escape(plan)}</pre></section>'
    words = (
        f"{len(plan['stages']) - 1} stages within {size(plan['memory_budget'])}: "
        f"<strong>{size(plan['peak_bytes'])}</strong> and {seconds(plan['seconds'])} a step, where keeping everything "
        f"takes {size(plan['plain_bytes'])} and {seconds(plan['plain_seconds'])}. {size(plan['fixed_bytes'])} of it "
        "lives however the stages are run."
    )
    rows = "".join(
        f"<tr><td>{escape(stage['name'])}</td>"
        f'<td class="number">{size(stage["saved_bytes"])}</td><td class="number">{size(stage["output_bytes"])}</td>'
        f'<td class="number">{seconds(stage["forward_seconds"])}</td>'
        f'<td class="number">{seconds(stage["backward_seconds"])}</td>'
        f'<td class="number">{stage["runs"]}</td><td>{escape(stage["keeps"])}</td></tr>'
        for stage in plan["stages"]
    )
    names = ("Stage", "Saves", "Output", "Forward", "Backward", "Runs", "At first keeps")
    header = "".join(
        f'<th scope="col"{"" if n in (0, 6) else chr(32) + "class=number"}>{name}</th>'
        for n, name in enumerate(names)
    )
    return (
        f'<section id="plan">{head}<p class="summary">{words}</p><div class="plan"><table class="contents">'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )
