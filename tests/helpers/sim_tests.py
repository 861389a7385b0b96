"""Tests of the simulated device, seen from outside its environment: the names come from one `--collect-only` there,
each file then runs in a process of its own there, and what that process reports of a test is its outcome here.

Most of these processes are forks of one that has imported torch, which takes longer than many a file. `python
sim_tests.py` is that one: it gets the arguments of each pytest, with a file for its output, as a line of JSON, and
answers with its exit status."""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def in_sim_environment() -> bool:
    mark = Path(sys.prefix) / "memopt-environment"
    return mark.exists() and mark.read_text().split()[0] == "sim"


def constants(file: Path) -> dict[str, object]:
    """SIM and ENVIRONMENT of a test file, without importing it."""
    found = {}
    for statement in ast.parse(file.read_text()).body:
        name = getattr(statement.targets[0], "id", "") if isinstance(statement, ast.Assign) else ""
        if name in ("SIM", "ENVIRONMENT"):
            found[name] = ast.literal_eval(statement.value)
    return found


def pytest_there(config: pytest.Config, *arguments: str, forked: bool = False) -> tuple[int, str]:
    """Run pytest in that environment, and return its exit status and its output."""
    python = config.getoption("--sim-python")
    if not Path(python).exists():
        raise RuntimeError(f"there is no {python}: `make test` makes it, `make environments` makes it alone")
    arguments = ("-p", "no:cacheprovider", *arguments)
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        if forked:
            server = _server(python)
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write(json.dumps([output.name, *arguments]) + "\n")
            server.stdin.flush()
            ended = server.stdout.readline()
            if not ended:
                raise RuntimeError(f"the process whose forks run tests/sim ended with {server.wait()}")
            status = int(ended)
        else:
            status = subprocess.run(
                [python, "-m", "pytest", *arguments],
                cwd=ROOT,
                env=_environment(),
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
            ).returncode
        return status, output.read()


def _environment() -> dict[str, str]:
    """Return this process's environment without options for its own pytest: the other one's output is read."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}


@functools.cache
def _server(python: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, __file__],
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> int:
    sys.path[0] = str(ROOT)
    from memopt.sim import _activation

    gc.disable()  # nothing of what is imported is garbage
    _activation.load()
    import torch._dynamo  # noqa: F401  # an optimizer's first step imports it

    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, file in enumerate((os.devnull, output, output)):
                os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
            return pytest.main(arguments)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return 0


def names_there(config: pytest.Config) -> dict[Path, list[tuple[str, list | None]]]:
    """The tests of tests/sim by file, each with its family (sampling.py), asked once a session."""
    found = config.stash.get(_NAMES, None)
    if found is None:
        found = config.stash[_NAMES] = {}
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as listed:
            arguments = ("--collect-only", "-q", "--report-to", listed.name, "tests/sim")
            status, said = pytest_there(config, *arguments)
            lines = [json.loads(line) for line in listed]
        if status != 0:
            raise RuntimeError(f"the tests of the simulated device cannot be collected:\n{said}")
        for line in lines:
            file, _, name = line["id"].partition("::")
            found.setdefault(ROOT / file, []).append((name, line["family"]))
        if not found:
            raise RuntimeError(f"no test of the simulated device was found:\n{said}")
    return found


_NAMES: pytest.StashKey[dict[Path, list[tuple[str, list | None]]]] = pytest.StashKey()


class SimFile(pytest.File):
    def collect(self):
        for name, family in names_there(self.config).get(self.path, []):
            item = SimItem.from_parent(self, name=name)
            if family:
                item.add_marker(pytest.mark.sampled(family[1], family=family[0]))
            yield item

    @cached_property
    def reports(self) -> dict[str, list[dict]]:
        """The reports of the process on each test, phase by phase. Asked for by the first test of the file that
        runs."""
        wanted = [item.id_there for item in self.session.items if item.parent is self]
        of_file = constants(self.path)
        forked = of_file.get("SIM", {}) is not None and not of_file.get("ENVIRONMENT")
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
            arguments = ("-q", "--report-to", results.name, *wanted)
            status, text = pytest_there(self.config, *arguments, forked=forked)
            lines = [json.loads(line) for line in results]
        reports: dict[str, list[dict]] = {name: [] for name in wanted}
        for line in lines:
            reports[line["id"]].append(line)
        tail = "\n".join(text.splitlines()[-60:])
        for said in reports.values():
            if "teardown" not in [r["when"] for r in said]:
                said.append({"outcome": "failed", "text": f"the process ended in it ({status}):\n{tail}"})
        if status not in (0, 1):
            # All passed, and yet the process did not end well: the last test answers for it.
            said = reports[wanted[-1]]
            said.append({"outcome": "failed", "text": f"the process ended with status {status}:\n{tail}"})
        return reports


class SimItem(pytest.Item):
    @property
    def id_there(self) -> str:
        return f"{self.path.relative_to(ROOT)}::{self.name}"

    def runtest(self) -> None:
        reports = self.parent.reports[self.id_there]
        for report in reports:
            if report["outcome"] == "failed":
                raise AssertionError(report["text"] + "\n" + report.get("output", ""))
        for report in reports:
            if report["outcome"] == "skipped":
                pytest.skip(report["text"])

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, AssertionError | RuntimeError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, 0, f"{self.path.name}::{self.name}"


if __name__ == "__main__":
    sys.exit(_serve())
