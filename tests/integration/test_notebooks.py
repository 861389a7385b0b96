"""memopt in a notebook: a real kernel, on the simulated device."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from environment_python import python_of

ROOT = Path(__file__).resolve().parents[2]

CELLS = {
    "begin": """
import memopt.sim
memopt.sim.activate(memory="256MiB", context="8MiB")
import torch
from torch import nn
%load_ext memopt
""",
    "model": """
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]).cuda()
outputs = []
""",
    "grows": """%%memopt
for _ in range(3):
    outputs.append(model(torch.ones(1024, 256, device="cuda")))
del _
""",
    "status": "%memopt --top 4",
    "fails": """
def fails():
    held = torch.zeros(40 << 20, dtype=torch.uint8, device="cuda")
    raise ValueError("of the cell")
fails()
""",
    "kept": "memopt.live_tensors()",
    "release": "%memopt release",
    "out of memory": """
def step():
    held = torch.zeros(60 << 20, dtype=torch.uint8, device="cuda")
    return torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
step()
""",
    "after": "torch.cuda.memory_allocated() < 60 << 20",
    "interrupt": """
def waits():
    held = torch.zeros(50 << 20, dtype=torch.uint8, device="cuda")
    raise KeyboardInterrupt
waits()
""",
    "live": "%memopt live",
    "works": """
import threading, time
held = torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
while "memopt live" not in (names := [thread.name for thread in threading.enumerate()]):
    time.sleep(0.01)
names.count("memopt live")
""",
    "not live": """
%memopt live off
[thread.name for thread in threading.enumerate() if "memopt" in thread.name]
""",
    "later": "more = torch.zeros(20 << 20, dtype=torch.uint8, device='cuda')",
    "wrong": "%memopt release off",
    "end": """
%unload_ext memopt
get_ipython().showtraceback.__func__.__qualname__.partition(".")[0], get_ipython().find_cell_magic("memopt")
""",
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[dict[str, object]]]:
    """Outputs of each cell."""
    done = subprocess.run(
        [python_of("notebook"), str(ROOT / "tests/tooling/run_cells.py")],
        input=json.dumps([cell.strip() for cell in CELLS.values()]),
        env=os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CELLS, json.loads(done.stdout), strict=True))


def text(outputs: list[dict[str, object]]) -> str:
    """All that a cell shows, as a terminal would."""
    found = []
    for output in outputs:
        if output["output_type"] == "stream":
            found.append(str(output["text"]))
        elif output["output_type"] == "error":
            found.append("\n".join(output["traceback"]))
        else:
            found.append(output["data"]["text/plain"])
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(found))


def test_a_cells_peak_its_lines_and_what_grew(said):
    shown = text(said["grows"])
    number = re.search(r"In\[(\d+)\]:3", shown)
    assert number, shown
    assert shown.startswith("memopt: peak ") and "on cuda:0" in shown
    # A step's input and four outputs, 1 MiB each, stay; three steps.
    assert re.search(
        rf"grown +outputs\[\*\] \+15.0 MiB \(15 tensors, In\[{number[1]}\]:3, graph of \d+ nodes\)", shown
    )
    assert re.search(rf"top lines +In\[{number[1]}\]:3 2\d\.\d MiB", shown)
    html = next(o["data"]["text/html"] for o in said["grows"] if "text/html" in o.get("data", {}))
    assert "<script" not in html and "outputs[*]" in html


def test_the_status_is_a_bar_and_the_holders(said):
    shown = text(said["status"])
    # Together, or apart where NVML tells one from the other.
    assert "cuda:0: 256 MiB = " in shown and re.search(r"8\.00 MiB context( and other processes)?", shown)
    assert "outputs[*]" in shown and "model" in shown
    html = said["status"][0]["data"]["text/html"]
    assert html.count("width:") >= 4 and "<table>" in html


def test_a_traceback_that_holds_tensors_is_named_with_its_line(said):
    assert "ValueError: of the cell" in text(said["fails"])
    shown = text(said["kept"])
    assert re.search(
        r"40.0 MiB +inputs +held +In\[\d+\]:2, in the traceback of an exception, in fails", shown
    ), shown


def test_release_frees_what_the_frames_held_and_leaves_the_text(said):
    assert re.match(
        r"memopt: freed 40.0 MiB on cuda:0 that ValueError's frames held; live: ", text(said["release"])
    )


def test_an_out_of_memory_is_reported_shown_and_released(said):
    shown = text(said["out of memory"])
    report = shown[shown.index("memopt: CUDA out of memory at In[") :]
    assert re.match(r"memopt: CUDA out of memory at In\[\d+\]:3 \(return torch.zeros\(1 << 30", report), (
        report
    )
    assert "60 inputs" in report
    assert "memopt: freed 60.0 MiB on cuda:0 that OutOfMemoryError's frames held" in shown
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB." in shown
    assert text(said["after"]) == "True"


def test_an_interrupt_frees_too(said):
    shown = text(said["interrupt"])
    assert "KeyboardInterrupt" in shown and "memopt: freed 50.0 MiB on cuda:0" in shown


def test_a_live_view_follows_the_cells_until_it_is_off(said):
    assert (text(said["works"]), text(said["not live"])) == ("1", "[]")
    (shown,) = said["live"]
    # Of the cell that turned it off: with what the cell before has taken, without what came later.
    live = re.search(r"= ([\d.]+) MiB live \+ .* free$", shown["data"]["text/plain"])
    assert live and 30 <= float(live[1]) < 50, shown["data"]["text/plain"]
    html = shown["data"]["text/html"]
    assert "<svg" in html and "<script" not in html and f"{live[1]} MiB" in html and "peak" in html
    assert said["later"] == [] and "takes no 'off'" in text(said["wrong"])


def test_unloaded_nothing_is_left(said):
    assert text(said["end"]) == "('InteractiveShell', None)"
