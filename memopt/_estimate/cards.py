"""GPUs by name: the memory that CUDA can use, and the properties by which torch's code chooses its kernels.

`usable` is the total that cudaMemGetInfo reports, as torch prints it in its out-of-memory errors; where drivers differ,
the least that was seen. `context` is memory of a process besides its tensors, the CUDA context and loaded kernels: 0.3
to 0.6 GiB by driver, card and libraries, of which this is a middle value (`memopt gpu-check` measures it).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from memopt._C import format_size, parse_size

GIB = 1 << 30
CONTEXT = 450 << 20
CONTEXT_RANGE = (3 * GIB // 10, 6 * GIB // 10)
NO_LIMIT = 1 << 44  # a card that nothing fills; addresses of a process end at 2^47


@dataclass(frozen=True)
class Card:
    """A GPU, real or hypothetical.

    Attributes:
        name: Name, or the size for a hypothetical one.
        usable: Bytes that CUDA can use.
        compute_capability: Like "8.0".
        multiprocessors: Number of multiprocessors.
        context: Bytes of a process's CUDA context and kernels.
    """

    name: str
    usable: int
    compute_capability: str = "8.0"
    multiprocessors: int = 108
    context: int = CONTEXT

    def __str__(self) -> str:
        return f"{self.name} ({format_size(self.usable)} usable)"


def _card(name: str, usable_gib: float, compute_capability: str, multiprocessors: int) -> Card:
    return Card(name, int(usable_gib * GIB), compute_capability, multiprocessors)


# From the smallest to the largest, so that the first that suffices is the smallest.
CARDS = [
    _card("rtx3070", 7.66, "8.6", 46),
    _card("rtx4060", 7.63, "8.9", 24),
    _card("rtx3080", 9.77, "8.6", 68),
    _card("rtx2080ti", 10.75, "7.5", 68),
    _card("rtx3060", 11.76, "8.6", 28),
    _card("rtx4070", 11.72, "8.9", 46),
    _card("t4", 14.56, "7.5", 40),
    _card("a4000", 15.61, "8.6", 48),
    _card("rtx4080", 15.70, "8.9", 76),
    _card("rtx5080", 15.47, "12.0", 84),
    _card("l4", 22.03, "8.9", 58),
    _card("a10g", 22.05, "8.6", 80),
    _card("rtx3090", 23.68, "8.6", 82),
    _card("rtx4090", 23.64, "8.9", 128),
    _card("rtx5090", 31.36, "12.0", 170),
    _card("a100-40", 39.39, "8.0", 108),
    _card("a40", 44.34, "8.6", 84),
    _card("l40s", 44.39, "8.9", 142),
    _card("a6000", 47.40, "8.6", 84),
    _card("a100-80", 79.15, "8.0", 108),
    _card("h100", 79.10, "9.0", 132),
    _card("h200", 139.80, "9.0", 132),
    _card("b200", 178.35, "10.0", 148),
]
CARDS.sort(key=lambda card: card.usable)
_BY_NAME = {card.name: card for card in CARDS}
_BY_NAME |= {card.name.removeprefix("rtx"): card for card in CARDS}
_BY_NAME |= {"a100": _BY_NAME["a100-40"], "a10": _BY_NAME["a10g"]}


def card(text: str | int, compute_capability: str | None = None, context: int | None = None) -> Card:
    """Return the card of a name ("a100-40", "RTX 4090"), or one with that much memory ("24GiB"), all of it usable.

    A given capability or context replaces the table's.

    Raises:
        ValueError: The text is neither; the message names the nearest cards.
    """
    found = None if isinstance(text, int) else _BY_NAME.get(_plain(text))
    if found is None:
        try:
            size = parse_size(text)
        except ValueError:
            raise ValueError(f"{text!r} is neither a card nor a size: {_meant(str(text))}") from None
        if not size:
            raise ValueError("the card's memory is 0: give a size, such as '24GiB'")
        if size > NO_LIMIT:
            raise ValueError(
                f"{format_size(size)} is too large for a card: at most {format_size(NO_LIMIT)} is possible"
            )
        found = Card(format_size(size), size)
    capability = found.compute_capability if compute_capability is None else compute_capability
    if not re.fullmatch(r"\d+\.\d", capability):
        raise ValueError(f'a compute capability is a string such as "8.0", not {capability!r}')
    taken = found.context if context is None else context
    if taken >= found.usable:
        raise ValueError(f"{found} is too small: a CUDA context alone takes {format_size(taken)}")
    return Card(found.name, found.usable, capability, found.multiprocessors, taken)


def smallest_with(needed: int) -> Card | None:
    """Return the smallest card in the table that can hold so many bytes, the context among them."""
    return next((one for one in CARDS if one.usable >= needed), None)


def _plain(text: str) -> str:
    """A name as in the table: "NVIDIA GeForce RTX 4090" and "rtx-4090" are rtx4090, "A100-SXM4-40GB" is a100-40."""
    name = re.sub(r"nvidia|geforce|tesla|sxm\d?|pcie|gb\b|\s", "", text.strip().lower())
    name = re.sub(r"-+", "-", name.replace("_", "-")).strip("-")
    return name if name in _BY_NAME else name.replace("rtx-", "rtx")


def _meant(text: str) -> str:
    near = difflib.get_close_matches(_plain(text), _BY_NAME, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}write a size, as '24GiB', or one of {', '.join(one.name for one in CARDS)}"
