"""A script's batch-size option; where it has none, the batch size of every DataLoader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt._estimate.request import Request

# What scripts call it; compared without dashes and underscores.
_USUAL = re.compile(
    r"(train|micro|mini|per_?device|per_?device_?train|per_?gpu|device|local)?_?batch(_?size)?(_?per_?(device|gpu))?|bs|bsz"
)


@dataclass(frozen=True)
class BatchOption:
    """An option for the batch size.

    `at`: index of the argument that has the number (-1: none has, it is appended); `name`: as written there, "" for
    DataLoader's batch_size; `size`: the number that the script was given, None if it is not known.
    """

    name: str
    at: int = -1
    joined: bool = False  # name and number are one argument, with a "=" between
    size: int | None = None

    def __str__(self) -> str:
        return self.name or "the DataLoaders' batch_size"

    def request(self, request: Request, size: int) -> Request:
        if not self.name:
            return replace(request, batch_size=size)
        argv = list(request.argv)
        if self.at >= 0:
            argv[self.at] = f"{self.name}={size}" if self.joined else str(size)
        elif self.joined:
            argv.append(f"{self.name}={size}")
        else:
            argv += [self.name, str(size)]
        return replace(request, argv=argv)


def find(argv: Sequence[str], name: str | None = None) -> BatchOption:
    """Return the option of that name, or the one that looks like a batch size, in a script's arguments.

    argv[0] is the script. Forms are `--batch-size 8`, `--batch-size=8`, `batch_size=8`. A name may be given without its
    dashes. An option that is not there is appended, as `--name 8`, or as `name=8` if the name ends with "="; without a
    name it is DataLoader's. Raises ValueError for an option that is not followed by a number.
    """
    wanted = None if name is None else name.removesuffix("=").lstrip("-")
    if name is not None and not re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*=?", name):
        raise ValueError(
            f"{name!r} is not an option's name: write it as in the script's arguments, such as 'batch-size'"
        )
    for at, argument in enumerate(argv[1:], 1):
        key, equals, value = argument.partition("=")
        if not (key.lstrip("-") == wanted if wanted else _looks_like_one(key, bool(equals))):
            continue
        if wanted and not key.startswith("-") and not equals:
            continue  # a value, or a word by itself
        given = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
        if given.isascii() and given.isdigit() and int(given) > 0:
            return BatchOption(key, at if equals else at + 1, bool(equals), int(given))
        if wanted:
            raise ValueError(f"{key} is followed by {given!r} and not by a batch size")
    if name is None or wanted is None:
        return BatchOption("")
    if name.endswith("="):
        return BatchOption(wanted, joined=True)
    return BatchOption(name if name.startswith("-") else f"--{name}")


def _looks_like_one(key: str, equals: bool) -> bool:
    if not key.startswith("-") and not equals:
        return False
    last = key.lstrip("-").split(".")[-1].replace("-", "_").lower()
    return _USUAL.fullmatch(last) is not None or key in ("-b", "-B")
