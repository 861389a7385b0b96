"""Types of the commands' arguments: text in, a value out, argparse's error where it is none."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from memopt import _C


def size(text: str) -> int:
    """Parse a number of bytes: "8GiB", or digits."""
    try:
        return _C.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `least`."""

    def parsed(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number: write an integer, {least} or more")
        return int(text)

    return parsed
