"""The commands of `python -m memopt`, one module each, with NAME, HELP, add_arguments(parser) and run(options) -> exit
code. A command's docstring is its description."""

from __future__ import annotations

import sys
from pathlib import Path


def write(text: str, output: str | None) -> None:
    """A command's answer, to the file that -o names or to the screen."""
    if output:
        Path(output).write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")
