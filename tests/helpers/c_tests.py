"""C tests as pytest items: a file's names are its TEST(name)s, its binary is started once for all that were selected,
and each line it prints ("ok name", "not ok name: why", "skip name: why") is an outcome. `make` builds the binaries of
all selected files at once, on all cores, when the first of them is wanted."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str | None:
    """The output of a make that fails. Of two at once, the second waits and then finds it done: at work beside it, it
    could build anew what the first has just built and now runs."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/c.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(["make", "-s", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if made.returncode == 0 else f"make failed:\n{made.stdout}{made.stderr}"


def build_failures(session: pytest.Session) -> dict[str, str | None]:
    """Of each selected file's binary."""
    found = session.stash.get(_FAILURES, None)
    if found is None:
        binaries = {item.parent.binary: None for item in session.items if isinstance(item, CItem)}
        if make("-k", f"-j{os.cpu_count()}", *binaries):
            found = {binary: make(binary) for binary in binaries}
        else:
            found = binaries
        session.stash[_FAILURES] = found
    return found


# What runs a variant's binaries.
_UNDER = {
    "valgrind": ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"],
    "aarch64": ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
}
# The compiler of libraries that tests make, and the simulated device, for another machine.
_ENVIRONMENT = {
    "aarch64": {
        "CC": "aarch64-linux-gnu-gcc",
        "MEMOPT_TEST_LIBCUDA": "build/c/aarch64/libraries/cu13/sim_cuda.so",
    }
}
_FAILURES: pytest.StashKey[dict[str, str | None]] = pytest.StashKey()


def tests_of(file: Path) -> list[str]:
    """Names of the tests in a file and in the headers beside it that it includes, in their order."""
    found: list[str] = []
    pattern = r'^(?:TEST\((\w+)\)|TEST_EACH_ISA\((\w+)\)|#include "(\w+\.h)")'
    for name, of_each, header in re.findall(pattern, file.read_text(), re.M):
        if name:
            found.append(name)
        elif of_each:
            found += [f"{of_each}_{isa}" for isa in ("generic", "avx2", "avx512")]
        elif (beside := file.parent / header).exists():
            found += tests_of(beside)
    return found


class Skip(NamedTuple):
    """Something that a test needs is missing."""

    why: str


class CFile(pytest.File):
    @property
    def binary(self) -> str:
        variant = self.config.getoption("--c-variant")
        kind = "plain" if variant == "valgrind" else variant
        return f"build/c/{kind}/{self.path.relative_to(ROOT / 'tests/c').with_suffix('')}"

    def collect(self):
        names = tests_of(self.path)
        if not names:
            raise self.CollectError(f"{self.path.name} has no TEST(name), nor has what it includes")
        for name in names:
            yield CItem.from_parent(self, name=name)

    @cached_property
    def outcomes(self) -> dict[str, str | Skip | None]:
        """A name's failure, None where it passed. Asked for by the first test of the file that runs."""
        variant = self.config.getoption("--c-variant")
        binary = self.binary
        names = [item.name for item in self.session.items if item.parent is self]
        if failure := build_failures(self.session)[binary]:
            return dict.fromkeys(names, failure)
        command = [*_UNDER.get(variant, ()), str(ROOT / binary), *names]
        environment = os.environ | _ENVIRONMENT.get(variant, {})
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
        )
        result: dict[str, str | Skip | None] = {}
        for line in done.stdout.splitlines():
            if said := re.match(r"(ok|not ok|skip) (\w+)(?:: )?(.*)", line):
                failed = f"{said[2]}: {said[3]}"
                result[said[2]] = {"ok": None, "not ok": failed, "skip": Skip(said[3])}[said[1]]
        talk = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        if done.returncode != 0 and not any(isinstance(why, str) for why in result.values()):
            # It died, or a sanitizer spoke at the end: nothing that it said before counts.
            return dict.fromkeys(names, f"{binary} ended with status {done.returncode}:\n{talk}")
        return {name: result.get(name, f"{binary} says nothing of it:\n{talk}") for name in names}


class CItem(pytest.Item):
    def runtest(self) -> None:
        outcome = self.parent.outcomes[self.name]
        if isinstance(outcome, Skip):
            pytest.skip(outcome.why)
        if outcome:
            raise AssertionError(outcome)

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, 0, f"{self.path.name}::{self.name}"
