"""The commands of `python -m memopt`, one module each, with NAME, HELP, add_arguments(parser) and run(options) -> exit
code. A command's docstring is its description.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from memopt import _C


def check_writable(path: str | Path, force: bool) -> None:
    """Raise OSError, before any work, if the file exists and -f was not given, or its folder does not exist.

    A path that is not a regular file, such as /dev/stdout, is accepted.
    """
    if Path(path).is_dir():
        raise OSError(f"{path} is a folder: name a file in it")
    if Path(path).is_file() and not force:
        raise OSError(f"{path} exists: name another file, or -f to write over it")
    if not Path(path).resolve().parent.is_dir():
        raise OSError(f"{path}: there is no such folder")


def write(text: str, output: str | None) -> None:
    """A command's answer, to the file that -o names or to the screen."""
    if output:
        Path(output).write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")


def size_argument(text: str) -> int:
    """Parse a number of bytes: "8GiB", or digits."""
    try:
        return _C.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_argument(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `least`."""

    def parsed(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number: write an integer, {least} or more")
        return int(text)

    return parsed
