"""The notebooks: each runs from top to bottom, and is kept with the outputs of such a run.

In the short form with fewer steps and without a kernel; the long form executes them as `make notebooks` does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import notebook_pages
import pytest
from environment_python import python_of

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONG = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request) -> Path:
    return request.param


@pytest.mark.sampled("programs of the documentation")
def test_it_runs_from_top_to_bottom(notebook, tmp_path):
    if LONG:
        command = ["tests/tooling/execute_notebook.py", str(notebook), str(tmp_path / notebook.name)]
        more = {}
    else:
        command = ["tests/tooling/run_notebook.py", str(notebook)]
        more = {"MEMOPT_NOTEBOOK_SIZE": "small", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [python_of("notebook"), *command],
        cwd=ROOT,
        env=os.environ | {"JUPYTER_PLATFORM_DIRS": "1"} | more,
        capture_output=True,
        text=True,
        timeout=1200,  # a hang; a busy host may take minutes
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_it_is_kept_with_the_outputs_of_one_run(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    said = "".join("".join(output.get("text", "")) for output in outputs)
    said += "".join(str(output.get("data", {}).get("text/plain")) for output in outputs)
    assert str(ROOT) not in said and "/tmp/" not in said and "site-packages" not in said, said
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
    assert notebook.stat().st_size < 400_000


def test_it_says_what_it_saved_in_a_table_of_the_reporter(notebook):
    if notebook.stem.startswith("01_"):
        pytest.skip("the first look saves nothing")
    cells = json.loads(notebook.read_text())["cells"]
    titles = "\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    ).splitlines()
    assert "## What it saved" in titles and "## When not to" in titles
    tables = [
        "".join(output["data"]["text/html"])
        for cell in cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    assert any("<th>saved</th>" in table for table in tables)


def test_its_page_of_the_site_has_each_cell_and_output_and_loads_nothing(notebook):
    page = notebook_pages.page(notebook)
    cells = json.loads(notebook.read_text())["cells"]
    for cell in cells[1:]:
        assert "".join(cell["source"]).rstrip() in page
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert page.count("data:image/png;base64,") == len(plots)
    assert "<script" not in page and "src='http" not in page and 'src="http' not in page
    assert f"notebooks/{notebook.stem}.md" in (ROOT / "mkdocs.yml").read_text()
