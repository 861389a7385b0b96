"""Tests of the simulated device, seen from outside its environment: the names come from one `--collect-only` there,
each file then runs in a process of its own there, and what that process reports of a test is its outcome here."""

from __future__ import annotations

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


def pytest_there(config: pytest.Config, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = config.getoption("--sim-python")
    if not Path(python).exists():
        raise RuntimeError(f"there is no {python}: `make test` makes it, `make environments` makes it alone")
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    # What it prints is read: options that are meant for this process would change it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def names_there(config: pytest.Config) -> dict[Path, list[tuple[str, list | None]]]:
    """The tests of tests/sim by file, each with its family (sampling.py), asked once a session."""
    found = config.stash.get(_NAMES, None)
    if found is None:
        found = config.stash[_NAMES] = {}
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as listed:
            done = pytest_there(config, "--collect-only", "-q", "--report-to", listed.name, "tests/sim")
            lines = [json.loads(line) for line in listed]
        if done.returncode != 0:
            raise RuntimeError(
                f"the tests of the simulated device cannot be collected:\n{done.stdout}{done.stderr}"
            )
        for line in lines:
            file, _, name = line["id"].partition("::")
            found.setdefault(ROOT / file, []).append((name, line["family"]))
        if not found:
            raise RuntimeError(f"no test of the simulated device was found:\n{done.stdout}{done.stderr}")
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
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
            done = pytest_there(self.config, "-q", "--report-to", results.name, *wanted)
            lines = [json.loads(line) for line in results]
        reports: dict[str, list[dict]] = {name: [] for name in wanted}
        for line in lines:
            reports[line["id"]].append(line)
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        for said in reports.values():
            if "teardown" not in [r["when"] for r in said]:
                said.append(
                    {"outcome": "failed", "text": f"the process ended in it ({done.returncode}):\n{tail}"}
                )
        if done.returncode not in (0, 1):
            # All passed, and yet the process did not end well: the last test answers for it.
            said = reports[wanted[-1]]
            said.append(
                {"outcome": "failed", "text": f"the process ended with status {done.returncode}:\n{tail}"}
            )
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
