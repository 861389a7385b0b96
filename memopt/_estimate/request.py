"""Request to an estimate's child process: a script, a device, the limits of the run, and another batch size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from memopt._estimate.cards import Card
from memopt._estimate.protection import Protection
from memopt._run.plan import BACKENDS, KEEPS

SHORTEN = ("all", "training", "none")  # of a script's loops


@dataclass(frozen=True)
class Request:
    """argv: a script, or where `module` is set a module, and its arguments. The device has `memory` bytes, of which a
    context takes `context`; each cuDNN plan asks for `cudnn_workspace`. fraction: the part of an unknown mask that
    holds (host_reads.Guesses). steps: of an optimizer, after which its loops end, and the script where `shorten` says
    none; 0: it does not train. seconds: after which the script ends. backend: which allocator. batch_size: of each
    DataLoader, instead of the script's. protection, share_memory: of the user's files, protection.py's; the answer's
    folder is private, and is for what the script writes too. compute: every operation is computed, so nothing is
    guessed: for sizes that the host can hold. ranks: of a job in which it is number `rank`, 0 for none; spread: how a
    script that knows of one device is spread over them ("ddp", "fsdp", "tp"). techniques: of _run/plan.py's, which the
    script is run with; keeps, host_memory: as a plan has them. timed: the answer has the operators of one step.
    rates_of: the card by whose data sheet stages are timed, "" for this machine's time. record: what lived when, the
    last `events` births and deaths of it. answer, recording: files to write."""

    argv: list[str]
    answer: str
    memory: int
    module: bool = False
    compute_capability: str = "8.0"
    multiprocessors: int = 108
    devices: int = 1
    context: int = 0
    cudnn_workspace: int = 0
    fraction: float = 1.0
    steps: int | None = None
    shorten: str = "all"
    seconds: float | None = None
    backend: str = "native"
    batch_size: int | None = None
    record: bool = False
    events: int = 1_000_000
    recording: str | None = None
    timed: bool = False
    rates_of: str = ""
    protection: str = "redirect"
    share_memory: bool = True
    compute: bool = False
    ranks: int = 0
    rank: int = 0
    spread: str | None = None
    techniques: list[str] = field(default_factory=list)
    keeps: list[str] = field(default_factory=lambda: [*KEEPS])
    host_memory: int | None = None

    def like(self, card: Card) -> Request:
        """Return it with the properties of a card, but for its memory."""
        return replace(
            self,
            context=card.context_bytes,
            compute_capability=card.compute_capability,
            multiprocessors=card.multiprocessors,
            rates_of=card.rates.of,
        )

    def protected(self, by: Protection) -> Request:
        return replace(self, protection=by.way, share_memory=by.share_memory)

    def protection_of(self) -> Protection:
        return Protection(self.protection, self.share_memory)


def read(path: str) -> Request:
    given = json.loads(Path(path).read_text())
    unknown = sorted(set(given) - {one.name for one in fields(Request)})
    if unknown:
        raise ValueError(f"{path} has unknown settings: {', '.join(unknown)}")
    request = Request(**given)
    if not request.argv:
        raise ValueError(f"{path} names no script: argv is empty")
    if request.backend not in BACKENDS:
        raise ValueError(f"{path}: backend must be one of {', '.join(BACKENDS)}, not {request.backend!r}")
    if request.shorten not in SHORTEN:
        raise ValueError(f"{path}: shorten must be one of {', '.join(SHORTEN)}, not {request.shorten!r}")
    return request


# ---- the batch-size option of a script -------------------------------------------------------------------------------


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
        return replace(request, argv=self.with_size(request.argv, size))

    def with_size(self, argv: Sequence[str], size: int) -> list[str]:
        """Return a script's arguments with another number for the option."""
        argv = list(argv)
        if self.at >= 0:
            argv[self.at] = f"{self.name}={size}" if self.joined else str(size)
        elif self.joined:
            argv.append(f"{self.name}={size}")
        else:
            argv += [self.name, str(size)]
        return argv


def find_batch_option(argv: Sequence[str], name: str | None = None) -> BatchOption:
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
            raise ValueError(f"{key} is followed by {given!r}, which is not a batch size")
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
