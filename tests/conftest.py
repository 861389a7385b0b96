"""One pytest over three kinds of test, so that its closing line speaks for all of them:

* `tests/unit`, `tests/integration` and `tests/tooling` run here;
* `tests/c/**/test_*.c` are binaries: built by make, started once each, a test an item (c_tests.py);
* `tests/sim/test_*.py` need PyTorch's CUDA build on the simulated device, which has to be activated before torch is
  imported: each file runs in a process of its own under `.venv/sim` (sim_tests.py).

`make test` runs them under pytest-xdist, each file whole in one worker: tests of one file never run
at the same time, those of two files may. Of families marked `sampled` it runs some (sampling.py), `make soak` all.

Which environment this process is in, its own file `memopt-environment` says."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "helpers"), str(HERE / "tooling")]

import sampling  # noqa: E402
from c_tests import CFile  # noqa: E402
from sim_tests import SimFile, in_sim_environment  # noqa: E402

# The files that take longest, longest first: what comes last should be short, so that all cores are busy to the end.
LONGEST_FIRST = (HERE / "longest_first.txt").read_text().split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sim-python",
        default=str(HERE.parent / ".venv/sim/bin/python"),
        metavar="PATH",
        help="Python of the simulated device's environment (default: .venv/sim)",
    )
    parser.addoption(
        "--c-variant",
        default="plain",
        choices=["plain", "asan", "ubsan", "tsan", "bench", "valgrind", "aarch64"],
        help="how the C tests are built or run",
    )
    parser.addoption(
        "--report-to", metavar="FILE", help="write each test's outcome to FILE, a JSON line a phase"
    )
    parser.addoption(
        "--record-screens",
        action="store_true",
        help="write tests/screens/*.txt anew (tests/unit/cli/test_screens.py)",
    )


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """A collection goes over what a file's tests make, not over torch and all tests, which takes 0.3 s: each
    out-of-memory error and each plan for a model begins with one. No garbage of other files is left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def first_backward_pass() -> None:
    """Before any FakeTensorMode: the first one after that starts threads where torch is a CUDA build, and torch refuses
    backward passes in forks of such a process, which several tests have."""
    if "torch" in sys.modules and not in_sim_environment():
        sys.modules["torch"].zeros((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """After each test, take back what a command that ran in this process has done to memopt's log."""
    logger = logging.getLogger("memopt")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, level = before
    logger.setLevel(level)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Operations on small tensors are no faster on more, and far slower where the cores are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_report_header(config: pytest.Config) -> str:
    form = "long" if os.environ.get("MEMOPT_SOAK") == "1" else "short"
    return f"memopt: MEMOPT_SEED={os.environ['MEMOPT_SEED']}, {form} form"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".c" and file_path.name.startswith("test_"):
        return CFile.from_parent(parent, path=file_path)
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.parent == HERE / "sim" and not in_sim_environment():
        return SimFile.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The other half of sim_tests.py: this process is the one that was started there."""
    target = _config.getoption("--report-to")
    if target and not hasattr(
        _config, "workerinput"
    ):  # a worker's reports come here by way of the first process
        line = {
            "id": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "text": report.longreprtext,
            "seconds": report.duration,
            "output": report.capstdout + report.capstderr,
        }
        if report.skipped and isinstance(report.longrepr, tuple):
            line["text"] = str(report.longrepr[2])
        with open(target, "a") as file:
            file.write(json.dumps(line) + "\n")


_config: pytest.Config


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    # Threads that wait for others while those have no core would keep it from them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.pop("COLUMNS", None)  # texts are folded to it; xdist's workers say 80
    os.environ.setdefault("MEMOPT_SEED", str(int.from_bytes(os.urandom(4), "big") | 1))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Workers agree on what there is by name."""
    if re.search(r" at 0x[0-9a-f]{6}", item.nodeid):
        raise pytest.UsageError(
            f"{item.nodeid}: an address, another in each process; give the parameters ids="
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is imported here is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The process of a file of tests/sim is told by name what to run.
    if os.environ.get("MEMOPT_SOAK") != "1" and not in_sim_environment():
        sampling.sample(config, items)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left"] = config.stash[sampling.LEFT]
    places = {str(HERE / file): place for place, file in enumerate(LONGEST_FIRST)}
    rooms = {
        "c": 0,
        "sim": 1,
    }  # in these a test is part of a program that is started once; then the others by name

    def place(item: pytest.Item) -> tuple[int, int, str]:
        room = item.path.relative_to(HERE).parts[0]
        return (
            places.get(str(item.path), len(places)),
            rooms.get(room, 2),
            item.path.name if room not in rooms else "",
        )

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Names for sim_tests.py, each with its family."""
    target = session.config.getoption("--report-to")
    if target and session.config.option.collectonly:
        lines = [{"id": item.nodeid, "family": sampling.family_of(item)} for item in session.items]
        Path(target).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of xdist, in the first process: each worker has collected the same."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        _config.stash[sampling.LEFT] = left


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left := sampling.summary(_config.stash.get(sampling.LEFT, {})):
        terminalreporter.write_line(left)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available() or torch.cuda.get_device_name(0).lower().startswith("simulated"):
            pytest.skip("needs a real GPU")
