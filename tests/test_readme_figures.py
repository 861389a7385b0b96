"""README's figures are those of benchmarks/results; benchmarks/README.md knows every benchmark and every result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import readme_figures

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def test_readme_says_what_the_json_says():
    readme = readme_figures.README.read_text()
    assert readme_figures.rewritten(readme) == readme


def test_a_figure_that_changed_changes_readme(monkeypatch):
    def other(file):
        found = original(file)
        for figure in found.get("figures", []):
            figure["values"] = {name: value * 3 for name, value in figure["values"].items()}
        return found

    original = readme_figures.result
    monkeypatch.setattr(readme_figures, "result", other)
    readme = readme_figures.README.read_text()
    assert readme_figures.rewritten(readme) != readme


def test_what_was_not_run_is_said_to_be_so(monkeypatch, tmp_path):
    monkeypatch.setattr(readme_figures, "RESULTS", tmp_path)
    assert readme_figures.table().count("not run in full yet") == len(readme_figures.ROWS)


def test_a_readme_without_the_markers_is_refused():
    with pytest.raises(SystemExit, match="demo: begin"):
        readme_figures.rewritten("# memopt\n")


def test_every_benchmark_has_its_claim():
    claims = (BENCHMARKS / "README.md").read_text()
    missing = [path.name for path in BENCHMARKS.glob("bench_*.py") if path.name not in claims]
    assert missing == []


def test_every_result_that_is_named_is_one_that_a_script_writes():
    claims = (BENCHMARKS / "README.md").read_text()
    lines = [line for line in claims.splitlines() if line.startswith("|")]
    gone = [
        name
        for line in lines
        for name in re.findall(r"results/([\w.]+\.(?:json|svg|png))", line)
        if not (BENCHMARKS / "results" / name).exists() and "not there until" not in line
    ]
    assert gone == []
