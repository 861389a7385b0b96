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
from memopt._runtime.results import Result

GIB = 1 << 30
CONTEXT = 450 << 20
CONTEXT_RANGE = (3 * GIB // 10, 6 * GIB // 10)
NO_LIMIT = 1 << 44  # a card that nothing fills; addresses of a process end at 2^47


@dataclass(frozen=True, repr=False)
class Card(Result):
    """A GPU, real or hypothetical.

    Attributes:
        name: Name, or the size for a hypothetical one.
        usable_bytes: Bytes that CUDA can use.
        compute_capability: Like "8.0".
        multiprocessors: Number of multiprocessors.
        context_bytes: Bytes of a process's CUDA context and kernels.
    """

    name: str
    usable_bytes: int
    compute_capability: str = "8.0"
    multiprocessors: int = 108
    context_bytes: int = CONTEXT

    def __str__(self) -> str:
        return f"{self.name} ({format_size(self.usable_bytes)} usable)"

    @property
    def rates(self) -> Rates:
        """The rates of its data sheet; of a card that the table lacks, those of the nearest by memory."""
        of = min(CARDS, key=lambda one: (one.name != self.name, abs(one.usable_bytes - self.usable_bytes)))
        return RATES[of.name]


@dataclass(frozen=True)
class Rates:
    """Rates of a data sheet, in operations and bytes a second.

    Attributes:
        of: Name of the card.
        half: Products of fp16 on tensor cores, dense, with sums of fp32; of bf16 too, from compute capability 8.0 on.
        tf32: Products of fp32 as TF32.
        single: Operations of fp32 without tensor cores.
        memory: Bandwidth of the card's memory.
        link: To and from the host, each way: 0.8 of what its PCIe has by name, which is what large copies get.
    """

    of: str
    half: float
    tf32: float
    single: float
    memory: float
    link: float
    bf16: bool = True

    def operations(self, kind: str) -> float:
        """Return the rate of matrix products of "fp16", "bf16", "tf32" or "fp32"."""
        if kind == "fp16" or (kind == "bf16" and self.bf16):
            return self.half
        return self.tf32 if kind == "tf32" else self.single


def _card(
    name: str,
    usable_gib: float,
    compute_capability: str,
    multiprocessors: int,
    teraflops: tuple[float, float, float],
    gigabytes: tuple[float, float],
) -> Card:
    half, tf32, single = (1e12 * rate for rate in teraflops)
    memory, link = (1e9 * rate for rate in gigabytes)
    RATES[name] = Rates(name, half, tf32, single, memory, 0.8 * link, float(compute_capability) >= 8)
    return Card(name, int(usable_gib * GIB), compute_capability, multiprocessors)


RATES: dict[str, Rates] = {}
_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0  # of 16 lanes

# From the smallest to the largest, so that the first that suffices is the smallest. TFLOP/s of fp16 with sums of fp32,
# of TF32 (without it, of fp32) and of fp32, all without sparsity, and GB/s of the memory: NVIDIA's data sheets and, of
# GeForce, the appendices of its architecture white papers (Turing, GA102, Ada, Blackwell). Of several forms, SXM's.
CARDS = [
    _card("rtx3070", 7.66, "8.6", 46, (40.6, 20.3, 20.3), (448, _PCIE4)),
    _card("rtx4060", 7.63, "8.9", 24, (30.2, 15.1, 15.1), (272, _PCIE4 / 2)),
    _card("rtx3080", 9.77, "8.6", 68, (59.5, 29.8, 29.8), (760, _PCIE4)),
    _card("rtx2080ti", 10.75, "7.5", 68, (56.9, 14.2, 14.2), (616, _PCIE3)),
    _card("rtx3060", 11.76, "8.6", 28, (25.5, 12.7, 12.7), (360, _PCIE4)),
    _card("rtx4070", 11.72, "8.9", 46, (58.3, 29.1, 29.1), (504, _PCIE4)),
    _card("t4", 14.56, "7.5", 40, (65, 8.1, 8.1), (320, _PCIE3)),
    _card("a4000", 15.61, "8.6", 48, (76.7, 38.3, 19.2), (448, _PCIE4)),
    _card("rtx4080", 15.70, "8.9", 76, (97.5, 48.7, 48.7), (717, _PCIE4)),
    _card("rtx5080", 15.47, "12.0", 84, (112.6, 56.3, 56.3), (960, _PCIE5)),
    _card("l4", 22.03, "8.9", 58, (121, 60, 30.3), (300, _PCIE4)),
    _card("a10g", 22.05, "8.6", 80, (70, 35, 31.5), (600, _PCIE4)),
    _card("rtx3090", 23.68, "8.6", 82, (71, 35.6, 35.6), (936, _PCIE4)),
    _card("rtx4090", 23.64, "8.9", 128, (165.2, 82.6, 82.6), (1008, _PCIE4)),
    _card("rtx5090", 31.36, "12.0", 170, (209.5, 104.8, 104.8), (1792, _PCIE5)),
    _card("a100-40", 39.39, "8.0", 108, (312, 156, 19.5), (1555, _PCIE4)),
    _card("a40", 44.34, "8.6", 84, (149.7, 74.8, 37.4), (696, _PCIE4)),
    _card("l40s", 44.39, "8.9", 142, (362, 183, 91.6), (864, _PCIE4)),
    _card("a6000", 47.40, "8.6", 84, (154.8, 77.4, 38.7), (768, _PCIE4)),
    _card("a100-80", 79.15, "8.0", 108, (312, 156, 19.5), (2039, _PCIE4)),
    _card("h100", 79.10, "9.0", 132, (989, 494, 67), (3350, _PCIE5)),
    _card("h200", 139.80, "9.0", 132, (989, 494, 67), (4800, _PCIE5)),
    _card("b200", 178.35, "10.0", 148, (2250, 1125, 75), (8000, _PCIE5)),
]
CARDS.sort(key=lambda card: card.usable_bytes)
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
    taken = found.context_bytes if context is None else context
    if taken >= found.usable_bytes:
        raise ValueError(
            f"{found} is too small: a CUDA context alone takes {format_size(taken)}; give bytes, or a size such as "
            "'24GiB'"
        )
    return Card(found.name, found.usable_bytes, capability, found.multiprocessors, taken)


def smallest_with(needed: int) -> Card | None:
    """Return the smallest card in the table that can hold so many bytes, the context among them."""
    return next((one for one in CARDS if one.usable_bytes >= needed), None)


def _plain(text: str) -> str:
    """A name as in the table: "NVIDIA GeForce RTX 4090" and "rtx-4090" are rtx4090, "A100-SXM4-40GB" is a100-40."""
    name = re.sub(r"nvidia|geforce|tesla|sxm\d?|pcie|gb\b|\s", "", text.strip().lower())
    name = re.sub(r"-+", "-", name.replace("_", "-")).strip("-")
    return name if name in _BY_NAME else name.replace("rtx-", "rtx")


def _meant(text: str) -> str:
    near = difflib.get_close_matches(_plain(text), _BY_NAME, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}write a size, as '24GiB', or one of {', '.join(one.name for one in CARDS)}"
