"""The picture of the report page in the README: steps of the demo task, recorded on the simulated device.

    python benchmarks/report_page_picture.py        # writes benchmarks/results/report_page.png

It records in a process of its own, in an environment with torch's CUDA build (.venv/sim), whose device is blank:
PyTorch's CUDA code and allocator are the real ones, and nothing is computed. The picture is Chromium's."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

TASK = "gpt"
SIZE = "medium"
STEPS = 3


def record(path: Path) -> None:
    from memopt import sim

    sim.activate(memory="1GiB", blank=True)
    sys.argv = ["train.py"]  # as the page has it
    import memopt
    from benchmarks import tasks

    task = tasks.get(TASK, SIZE)
    batches = list(task.batches(STEPS))
    with memopt.profile("cuda") as prof:
        model = task.build_model("cuda")
        optimizer = task.optimizer(model)
        for x, y in batches:
            loss = task.loss(model, (x.cuda(), y.cuda()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    prof.save(path)


def picture(recording: Path, to: Path) -> None:
    import chromium

    page = recording.with_suffix(".html")
    title = f"{STEPS} steps of a {SIZE} GPT, batch 16, AdamW"
    command = [sys.executable, "-m", "memopt", "report", str(recording), "-o", str(page), "--title", title]
    subprocess.run([*command, "--force", "--quiet"], cwd=ROOT, check=True)
    with chromium.running() as browser:
        tab = browser.tab(width=1100)
        tab.open(page)
        bottom = int(tab.evaluate("document.querySelector('#addresses').getBoundingClientRect().bottom"))
        tab.resize(1100, bottom + 12)
        tab.evaluate("memopt.redraw()")
        to.write_bytes(tab.screenshot(whole=False))
    print(f"{to}: {to.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recording and the page there")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/report_page.png")
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    python = ROOT / ".venv/sim/bin/python"
    if not python.exists():
        raise SystemExit("there is no .venv/sim: make it with `python3 tests/environments.py sim`")
    with tempfile.TemporaryDirectory() as scratch:
        recording = (options.keep or Path(scratch)) / "gpt.mopt"
        subprocess.run([str(python), __file__, "--record", str(recording)], check=True)
        picture(recording, options.output)


if __name__ == "__main__":
    main()
