"""C tests as pytest items: a file's names are its TEST(name)s, its binary is built by `make` and started once for
all that were selected, and each line it prints ("ok name", "not ok name: why") is an outcome."""

from __future__ import annotations

import re
import subprocess
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class CFile(pytest.File):
    def collect(self):
        for name in re.findall(r"^TEST\((\w+)\)", self.path.read_text(), re.M):
            yield CItem.from_parent(self, name=name)

    @cached_property
    def outcomes(self) -> dict[str, str | None]:
        """A name's failure, None where it passed. Asked for by the first test of the file that runs."""
        variant = self.config.getoption("--c-variant")
        kind = "plain" if variant == "valgrind" else variant
        binary = f"build/c/{kind}/{self.path.relative_to(ROOT / 'tests/c').with_suffix('')}"
        made = subprocess.run(["make", "-s", binary], cwd=ROOT, capture_output=True, text=True)
        names = [item.name for item in self.session.items if item.parent is self]
        if made.returncode != 0:
            return dict.fromkeys(names, f"make {binary} failed:\n{made.stdout}{made.stderr}")
        memcheck = ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]
        command = [*(memcheck if variant == "valgrind" else []), str(ROOT / binary), *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        result: dict[str, str | None] = {}
        for line in done.stdout.splitlines():
            if said := re.match(r"(not )?ok (\w+)(.*)", line):
                result[said[2]] = said[2] + said[3] if said[1] else None
        talk = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        if done.returncode != 0 and not any(result.values()):
            # It died, or a sanitizer spoke at the end: nothing that it said before counts.
            return dict.fromkeys(names, f"{binary} ended with status {done.returncode}:\n{talk}")
        return {name: result.get(name, f"{binary} says nothing of it:\n{talk}") for name in names}


class CItem(pytest.Item):
    def runtest(self) -> None:
        if failure := self.parent.outcomes[self.name]:
            raise AssertionError(failure)

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, 0, f"{self.path.name}::{self.name}"
