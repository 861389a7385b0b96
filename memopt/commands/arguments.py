"""Types of the commands' arguments: text in, a value out, argparse's error where it is none."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from memopt import _C


def size(text: str) -> int:
    """Bytes: "8GiB", or a number of them."""
    try:
        return _C.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(least: int) -> Callable[[str], int]:
    """Of integers, `least` or more."""

    def parsed(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number: write an integer, {least} or more")
        return int(text)

    return parsed
