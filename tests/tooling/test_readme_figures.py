"""README's figures are those of benchmarks/results; benchmarks/README.md knows every benchmark and every result."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import readme_figures

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize("file", readme_figures.BLOCKS, ids=str)
def test_each_table_says_what_scripts_and_json_say(file):
    text = file.read_text()
    assert readme_figures.rewritten(file, text) == text


def test_a_figure_that_changed_changes_readme(monkeypatch):
    def other(file):
        found = original(file)
        for figure in found.get("figures", []):
            figure["values"] = {name: value * 3 for name, value in figure["values"].items()}
        return found

    original = readme_figures.result
    monkeypatch.setattr(readme_figures, "result", other)
    readme = readme_figures.README.read_text()
    assert readme_figures.rewritten(readme_figures.README, readme) != readme


def test_the_picture_says_what_json_says():
    assert readme_figures.PICTURE.read_text() == readme_figures.picture()


def test_what_was_not_run_is_said_to_be_so(monkeypatch, tmp_path):
    monkeypatch.setattr(readme_figures, "RESULTS", tmp_path)
    assert readme_figures.table().count("not run in full yet") == len(readme_figures.ROWS)


def test_a_readme_without_the_markers_is_refused():
    with pytest.raises(SystemExit, match="picture: begin"):
        readme_figures.rewritten(readme_figures.README, "# memopt\n")
