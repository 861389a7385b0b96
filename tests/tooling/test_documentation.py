"""The pages of the documentation: their links lead somewhere, and their commands are memopt's. Their programs are run
by tests/sim/test_how_to.py and test_readme.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memopt import __main__ as program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
COMMANDS = [
    (page, found)
    for page in PAGES
    for found in re.findall(
        r"^    (?:python|torchrun .*) -m memopt (.*?)(?:  #.*)?$", page.read_text(), re.MULTILINE
    )
]


def name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=name)
def test_a_command_of_a_page_has_the_options_that_it_names(page: Path, command: str) -> None:
    words = shlex.split(command.partition(" > ")[0])
    options = program.parser().parse_args(program.in_words(words))
    assert options.command == words[0]
    script = getattr(options, "script", None)
    assert not script or not script[0].startswith("-"), f"{script[0]} is no script"
