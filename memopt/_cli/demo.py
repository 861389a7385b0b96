"""Train two real models on real data, a character GPT on the source of Python's standard library and a CNN on
scikit-learn's digits: first as an ordinary script does, then within half of the memory that took. Each training runs in
a process of its own. On a machine with a GPU they train there, under memopt's allocator; without one on the CPU, and a
short run on a simulated GPU, where torch is a CUDA build. Prints the measurements and writes memopt-demo.html. Exits
with 1 if a budget was not kept or a loss is off."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from memopt._cli import check_writable, write
from memopt._runtime.torch_version import require

NAME = "demo"
HELP = "train two models in half the memory"
PAGE = "memopt-demo.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="train smaller models for under 40 s")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--page", metavar="FILE", help=f"the page to write ({PAGE}, which is overwritten each time)")
    add("--no-page", action="store_true", help="write no page")
    add("--sim-python", metavar="PYTHON", help="a Python whose torch is a CUDA build, for the simulated GPU")


def _terminated(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def run(options: argparse.Namespace) -> int:
    if options.page:
        check_writable(options.page, options.force)
    require("memopt demo")
    try:
        from memopt._demo import page, results, trainings
    except ImportError as error:
        raise OSError(error) from error
    signal.signal(signal.SIGTERM, _terminated)
    path = Path(options.page or PAGE)
    size = trainings.quick() if options.quick else trainings.full()
    try:
        with tempfile.TemporaryDirectory(prefix="memopt-demo-") as folder:
            with trainings.ProgressBars() as bars:
                result = trainings.run(size, Path(folder), bars, options.sim_python)
            shown: str | None = None
            if not options.no_page and result.tasks:
                page.write_page(result, Path(folder), path)
                shown = str(path)
    except trainings.DemoFailed as error:
        raise OSError(error) from error
    except KeyboardInterrupt:
        print("memopt demo: interrupted; no files were left behind", file=sys.stderr)
        return 130
    told = json.dumps(result.as_dict(), indent=2) if options.json else results.text(result, shown)
    write(told, options.output)
    return 1 if result.wrong() else 0
