"""The tables of the reference pages have what the code has, no more and no less."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

from made_recordings import made

import memopt
from memopt import _C
from memopt._estimate.cards import Card
from memopt._estimate.fit import Fit, Row
from memopt._estimate.prediction import SIMULATED, Estimate
from memopt._memory.recording.recording import CATEGORIES
from memopt._memory.recording.recording_file import _columns, _head
from memopt._run.plan import Plan
from memopt._runtime import doctor

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"


def section(page: str, title: str = "") -> str:
    """The text under a title, up to the next one of its level; without a title what is above the first."""
    text = (REFERENCE / page).read_text()
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))[title]


def named(text: str) -> set[str]:
    """Return the names in the first columns of a text's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w[\w.]*)`", cell)}


def read_in(*patterns: str) -> set[str]:
    """The variables of memopt's that source files read from the environment, by name or by a constant of that name."""
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    text = "\n".join(file.read_text() for file in files)
    return set(re.findall(r"""(?:getenv\(|["'])(?:\\?")?(MEMOPT_[A-Z_]+)["']""", text))


def test_each_variable_that_the_package_reads_is_on_the_page() -> None:
    page = "environment.md"
    read = read_in("memopt/**/*.py", "csrc/**/*.c")
    made = {"MEMOPT_VERSION", "MEMOPT_KERNEL_SOURCE_PATH", "MEMOPT_FATBIN_PATH"}  # macros
    build = named(section(page, "Set for the build and the tests"))
    assert named(section(page)) == set(doctor.VARIABLES)
    assert build == doctor._BUILD
    assert named(section(page)) | named(section(page, "Set by memopt")) | build == read - made
    assert read_in("setup.py", "kernels/build_kernels.py") - made == build - {"MEMOPT_SEED", "MEMOPT_SOAK"}


def test_each_public_exception_is_on_the_page() -> None:
    names = ["memopt"] + [found.name for found in pkgutil.iter_modules(memopt.__path__, "memopt.")]
    public = {}
    for module in (importlib.import_module(name) for name in names if "._" not in name and "__" not in name):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, BaseException):
                public.setdefault(value, f"{module.__name__}.{name}")
    rows = re.findall(r"^\| `(memopt\.[\w.]+)` \| `([\w.]+)` \|", section("errors.md"), re.MULTILINE)
    found = {}
    for name, base in rows:
        module, _, attribute = name.rpartition(".")
        found[getattr(importlib.import_module(module), attribute)] = base.rpartition(".")[2]
    assert found == {kind: kind.__bases__[0].__name__ for kind in public}


def test_each_status_that_becomes_an_error_of_memopts_is_on_the_page() -> None:
    listed = re.findall(r"^    X\((MO_\w+)", (ROOT / "csrc/base/status.h").read_text(), re.MULTILINE)
    others = {"MO_OK", "MO_INVALID", "MO_OVERFLOW", "MO_NO_HOST_MEMORY", "MO_IO"}  # module.c has Python's own
    assert named(section("errors.md", "The status of memopt.Error")) == set(listed) - others
    assert issubclass(_C.Error, RuntimeError)


def test_each_entry_of_a_plan_is_on_the_page() -> None:
    assert named(section("files.md", "Plans")) == {field.name for field in dataclasses.fields(Plan)}


def test_each_entry_of_a_recording_is_on_the_page() -> None:
    recording = made()
    text = section("files.md", "Recordings")
    assert named(text) == _head(recording).keys() | _columns(recording).keys()
    numbered = re.search(r"`category` \| (.*) \|", text)
    assert numbered
    assert numbered[1] == ", ".join(f"{number} {name}" for number, name in enumerate(CATEGORIES))


def test_each_entry_of_an_answer_is_on_the_page() -> None:
    estimate = Estimate("train.py", SIMULATED, (1, 1), (1, 1), 0)
    estimates, fits = section("files.md", "Answers as JSON").split("`memopt fit --json`:")
    assert named(estimates) == estimate.as_dict().keys()
    assert named(fits) == Fit(estimate, Card("24GiB", 24 << 30)).as_dict().keys()
    row = re.search(r"^\| `runs` \|.*", fits, re.MULTILINE)
    assert row
    assert set(re.findall(r"`(\w+)`", row[0])) == {"runs", "evidence"} | {
        field.name for field in dataclasses.fields(Row)
    }
