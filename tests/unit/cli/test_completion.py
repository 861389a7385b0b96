"""Completion by the shell: argcomplete asks memopt, and is given its parser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import ROOT

STAND_IN = """
import sys
def autocomplete(parser):
    (commands,) = (one.choices for one in parser._actions if one.dest == "command")
    print(*commands, "--live" in commands["run"].format_help())
    sys.exit(0)
"""


def test_the_parser_of_all_commands_is_given_to_argcomplete_if_the_shell_asks(tmp_path: Path):
    (tmp_path / "argcomplete.py").write_text(STAND_IN)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-m", "memopt", "version"]
    asked = subprocess.run(command, env=environment | {"_ARGCOMPLETE": "1"}, capture_output=True, text=True)
    assert asked.stdout.split()[:3] == ["demo", "run", "estimate"] and asked.stdout.split()[-1] == "True"
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.startswith(
        "memopt 0"
    )
