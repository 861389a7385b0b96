"""RESULTS.md's table of what to do when memory runs out is that of the kept results; its lines are memopt's names."""

from __future__ import annotations

import json
import re

import pytest

import memopt
from benchmarks import decision_page

RESULT = json.loads(decision_page.RESULT.read_text())


def test_the_page_has_the_table_of_the_results():
    page = decision_page.PAGE.read_text()
    assert decision_page.rewritten(page, decision_page.render(RESULT)) == page


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["technique"][:30])
def test_a_line_is_of_names_that_there_are(row):
    names = re.findall(r"memopt((?:\.\w+)+)", row["line"])
    assert names
    for name in names:
        found = memopt
        for part in name[1:].split("."):
            found = getattr(found, part)


def row(**more):
    return {
        "before": 100,
        "after": 60,
        "what": "it",
        "timed": True,
        "time_ratio": 1.25,
        "loss_difference": 0.0,
    } | more


def test_what_is_said_of_a_row():
    assert decision_page.saving(row()) == "40% of it"
    assert decision_page.saving(row(after=100)) == "0% of it" == decision_page.saving(row(after=100.3))
    assert decision_page.saving(row(after=110)) == "-10% of it"
    assert decision_page.cost(row()) == "1.25 x the time, the same loss"
    assert decision_page.cost(row(time_ratio=None, loss_difference=-0.01)) == (
        "time within the noise, loss -0.01"
    )
    assert decision_page.cost(row(timed=False, time_ratio=None, loss_difference=None)) == "simulated"


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="decisions: begin"):
        decision_page.rewritten("# memopt\n", "| table |")
    marked = f"a\n{decision_page.BEGIN}\nold\n{decision_page.END}\nb\n"
    assert decision_page.rewritten(marked, "new") == marked.replace("old", "new")
