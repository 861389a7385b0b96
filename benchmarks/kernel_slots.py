"""Issue slots an element of the CUDA kernels, counted in nvcc's PTX without a GPU, beside what memory leaves time for.

nvcc's PTX, executed instruction by instruction on the host (tests/helpers/ptx_to_c.py), is counted in issue slots of a
thread: nine for a division, eight for a root, two for an integer of 64 bits, none for a move, else one. While a GPU's
memory moves an element's bytes, its schedulers have

    budget = bytes an element * (SMs * 4 schedulers * 32 lanes * clock) / bandwidth

slots for it. A kernel that takes fewer waits for memory; one that takes more does not reach its bandwidth. The cards
are A100 SXM, H100 SXM and B200 at their boost clocks. The counts are of PTX, of which ptxas makes the processor's own
instructions: an estimate, for comparing kernels and changes of them.

Bytes are those of the arrays; "in 16" is the share of what is accessed, tables too, that accesses of 16 bytes move.
Registers and spills are ptxas's.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/helpers")]

import kernel_cases as cases  # noqa: E402
from kernel_cases import BF16, F16, F32, SIZE  # noqa: E402
from kernel_library import KernelLibrary, build_kernels  # noqa: E402

ELEMENTS = 1 << 16
THREADS = 256


class Card(NamedTuple):
    """A GPU: its streaming multiprocessors, their clock in Hz, its memory's bytes a second."""

    architecture: str
    multiprocessors: int
    clock: float
    bandwidth: float

    @property
    def name(self) -> str:
        return f"sm_{self.architecture}"

    def budget(self, nbytes: float) -> float:
        """Slots in the time in which so many bytes are moved."""
        return nbytes * self.multiprocessors * 4 * 32 * self.clock / self.bandwidth


CARDS = (
    Card("80", 108, 1.41e9, 2.039e12),
    Card("90", 132, 1.755e9, 3.35e12),
    Card("100", 148, 1.965e9, 8e12),
)


class Launch(NamedTuple):
    """A grid over ELEMENTS elements. moved: bytes an element, of the arrays that it reads and writes."""

    name: str
    argument: Any
    blocks: int
    moved: float


Made = Callable[[KernelLibrary, np.random.Generator], Launch]


# ---- the cases -------------------------------------------------------------------------------------------------------


def gradients(kind: int, passes: int, library: KernelLibrary, rng: np.random.Generator) -> Launch:
    """Two chunks."""
    values = library.buffer("gradients", cases.stored(kind, rng.normal(size=ELEMENTS)))
    half = ELEMENTS // 2
    raw = bytes(16) + b"".join(
        np.uint64(values.address + i * half * SIZE[kind]).tobytes()
        + np.array([half, kind], np.uint32).tobytes()
        for i in range(2)
    )
    table = library.buffer("table", np.frombuffer(raw + bytes(48), np.uint8))
    scalars = [library.buffer(name, np.array([0.5], np.float32)).address for name in "abcde"]
    inv_scale, found_inf, norm, clip, factor = scalars
    argument = cases.Gradients(table.address, inv_scale, found_inf, norm, 0, clip, factor, 1.0, 2, passes)
    return Launch("gradients", argument, 2, SIZE[kind] * (2 if passes & cases.STORE else 1))


def update(
    kind: int,
    library: KernelLibrary,
    rng: np.random.Generator,
    *,
    state_kind: int = F32,
    code_bits: int = 0,
    master: bool = False,
    sgd: bool = False,
    stochastic: bool = False,
    factored: bool = False,
) -> Launch:
    """AdamW, or SGD with momentum, of one parameter in two units; factored: a square matrix."""

    def array(name: str, of: int) -> int:
        return library.buffer(name, cases.stored(of, rng.random(ELEMENTS))).address

    def codes(name: str) -> int:
        raw = rng.integers(0, 256, ELEMENTS * code_bits // 8).astype(np.uint8)
        return library.buffer(name, raw).address

    def ones(name: str, count: int) -> int:
        return library.buffer(name, np.ones(count, np.float32)).address

    states = ("m",) if sgd or factored else ("m", "v")
    row = cases.Parameter(
        p=array("p", kind),
        g=array("g", kind),
        master=array("master", F32) if master else 0,
        step=ones("step", 1),
        count=ELEMENTS,
        kind=kind,
        grad_kind=kind,
        state_kind=state_kind,
        flags=cases.SGD | cases.SGD_MOMENTUM if sgd else cases.DECOUPLED,
        code_bits=code_bits,
    )
    row.flags |= cases.STOCHASTIC * stochastic
    for name in states:
        setattr(row, name, codes(name) if code_bits else array(name, state_kind))
        if code_bits:
            setattr(row, f"{name}_scale", ones(f"{name}_scale", ELEMENTS // 256))
    state = code_bits / 8 + 4 / 256 if code_bits else SIZE[state_kind]
    moved = SIZE[kind] * (2 if master else 3) + SIZE[F32] * 2 * master + 2 * len(states) * state
    if factored:
        row.columns = math.isqrt(ELEMENTS)
        row.row, row.column = ones("row", row.columns), ones("column", row.columns)
        row.inverse = ones("inverse", 1)
    group = cases.Group(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.9, 0, 0, 0, 0)
    units = np.array([(0, 0), (0, 1)], np.uint32)
    table = library.buffer(
        "table", np.frombuffer(bytes(16) + bytes(row) + bytes(group) + units.tobytes(), np.uint8)
    )
    return Launch("update", cases.Update(table.address, 0, 0, 1, 1, 2, ELEMENTS // 2, 0, 0), 2, moved)


def averages(kind: int, library: KernelLibrary, rng: np.random.Generator) -> Launch:
    """Of the rows and columns of a matrix of 256 by 256 gradients: a tile."""
    columns = math.isqrt(ELEMENTS)

    def array(name: str, count: int) -> int:
        return library.buffer(name, np.ones(count, np.float32)).address

    row = cases.Parameter(
        g=library.buffer("g", cases.stored(kind, rng.normal(size=ELEMENTS))).address,
        count=ELEMENTS,
        row=array("row", columns),
        column=array("column", columns),
        sums=array("sums", 2 * columns),
        inverse=array("inverse", 1),
        columns=columns,
        blocks=1,
        grad_kind=kind,
    )
    group = cases.Group(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.9, 0, 0, 0, 0)
    raw = bytes(16) + bytes(row) + bytes(group) + bytes(8)
    table = library.buffer("table", np.frombuffer(raw, np.uint8))
    argument = cases.Update(table.address, 0, 0, 1, 1, 0, ELEMENTS, 0, 0)
    return Launch("factored", argument, 1, SIZE[kind])


def widen(
    source: int,
    kind: int,
    divide: bool,
    library: KernelLibrary,
    rng: np.random.Generator,
    *,
    inner: int = 224 * 224,
) -> Launch:
    """Of an image of 224 x 224 pixels and 3 channels; inner: elements from one channel to the next."""
    dtype = cases.WidenCase.KINDS[source]
    given = library.buffer("source", np.ones(ELEMENTS, dtype))
    target = library.buffer("target", np.zeros(ELEMENTS, cases.DTYPE[kind]))
    table = library.buffer("table", np.ones(6, np.float32))
    argument = cases.Widen(
        table.address,
        given.address,
        target.address,
        ELEMENTS,
        inner,
        3,
        255.0,
        divide,
        True,
        source,
        kind,
    )
    return Launch("widen", argument, ELEMENTS // 8192, dtype().itemsize + SIZE[kind])


def cross_entropy(kind: int, cap: float, library: KernelLibrary, rng: np.random.Generator) -> Launch:
    """Loss and gradient of two rows; the second read is the cache's."""
    logits = library.buffer("logits", cases.stored(kind, rng.normal(size=ELEMENTS)))
    table = library.buffer("table", np.array([0, 0, cap, 1 / cap if cap else 0], np.float32))
    target = library.buffer("target", np.zeros(2, np.int64))
    numbers = [library.buffer(name, np.ones(2, np.float32)).address for name in ("lse", "loss", "scale")]
    half = ELEMENTS // 2
    argument = cases.CrossEntropy(
        table.address, logits.address, target.address, *numbers, half, 0, half, 3, kind
    )
    return Launch("cross_entropy", argument, 2, 2 * SIZE[kind])


def all_cases() -> Iterator[tuple[str, Made]]:
    names = {F32: "fp32", F16: "fp16", BF16: "bf16"}
    for kind, name in names.items():
        for what, passes in (
            ("check, scale, norm", cases.CHECK | cases.STORE | cases.NORM),
            ("check, scale", cases.CHECK | cases.STORE),
            ("check, norm", cases.CHECK | cases.NORM),
        ):
            yield f"gradients {name}: {what}", functools.partial(gradients, kind, passes)
    for what, kind, more in (
        ("AdamW fp32", F32, {}),
        ("AdamW fp32, states of 8 bits", F32, {"code_bits": 8}),
        ("AdamW fp32, states of 4 bits", F32, {"code_bits": 4}),
        ("AdamW bf16, states fp32", BF16, {}),
        ("AdamW bf16, states bf16", BF16, {"state_kind": BF16}),
        ("AdamW bf16, states bf16, stochastic", BF16, {"state_kind": BF16, "stochastic": True}),
        ("AdamW bf16, states of 8 bits", BF16, {"code_bits": 8}),
        ("AdamW bf16, states of 4 bits", BF16, {"code_bits": 4}),
        ("AdamW bf16, master and states fp32", BF16, {"master": True}),
        ("AdamW fp16, states fp16", F16, {"state_kind": F16}),
        ("AdamW fp16, states of 8 bits", F16, {"code_bits": 8}),
        ("AdamW fp32, factored, 8 bits", F32, {"code_bits": 8, "factored": True}),
        ("AdamW bf16, factored, 4 bits", BF16, {"code_bits": 4, "factored": True}),
        ("SGD fp32, momentum", F32, {"sgd": True}),
        ("SGD fp32, momentum of 8 bits", F32, {"sgd": True, "code_bits": 8}),
        ("SGD bf16, momentum bf16", BF16, {"sgd": True, "state_kind": BF16}),
        ("SGD bf16, momentum of 8 bits", BF16, {"sgd": True, "code_bits": 8}),
    ):
        yield f"update {what}", functools.partial(update, kind, **more)
    for kind in (F32, BF16):
        yield f"factored {names[kind]}: averages", functools.partial(averages, kind)
    for source, name in ((0, "uint8"), (4, "fp16")):
        for kind in (F32, F16, BF16):
            for divide in (True, False):
                way = "divide" if divide else "multiply"
                made = functools.partial(widen, source, kind, divide)
                yield f"widen {name} to {names[kind]}: {way}", made
    for kind, name in names.items():
        for cap in (0, 30):
            what = f"cross entropy {name}{', capped' * bool(cap)}"
            yield what, functools.partial(cross_entropy, kind, cap)
    yield "widen uint8 to fp32: divide, channels last", functools.partial(widen, 0, F32, True, inner=1)


# ---- what nvcc makes -------------------------------------------------------------------------------------------------


def resources(folder: Path, architecture: str) -> dict[str, dict[str, int]]:
    """Registers of a thread and bytes that it spills, of each kernel, as ptxas tells them."""
    source = folder / "kernels.cu"
    source.write_text(build_kernels.flatten())
    command = [str(build_kernels.find_nvcc()), "-cubin", "-std=c++17", "-O3", f"-arch=sm_{architecture}"]
    command += ["-Xptxas", "-v", "-o", str(folder / "kernels.cubin"), str(source)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = {}
    for part in told.split("Compiling entry function '")[1:]:
        name, spilled, registers = re.match(
            r"memopt_(\w+)'.*? (\d+) bytes spill stores.*?Used (\d+) registers", part, re.DOTALL
        ).groups()
        found[name] = {"registers": int(registers), "spilled": int(spilled)}
    return found


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    if build_kernels.find_nvcc() is None:
        raise SystemExit("kernel_slots: there is no nvcc; install CUDA's toolkit or name one in MEMOPT_NVCC")
    report = harness.Report(
        "kernel_slots", options, claim="issue slots of the kernels, while memory moves their bytes"
    )
    cards = CARDS[1:2] if options.quick else CARDS
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for card in cards:
            report.note(f"{card.name}: registers, bytes spilled", resources(Path(folder), card.architecture))
            library = KernelLibrary.of_ptx(Path(folder), card.architecture, counted=True)
            for name, make in all_cases():
                rng = np.random.default_rng(1)
                launch = make(library, rng)
                library.work()
                if faults := library.launch(launch.name, launch.argument, launch.blocks, THREADS, rng):
                    raise SystemExit(f"{name}: {faults}")
                slots, accessed, in_vectors = (count / ELEMENTS for count in library.work())
                row = rows.setdefault(
                    name, {"bytes": launch.moved, "accessed": accessed, "in 16": in_vectors / accessed}
                )
                row[card.name] = {"slots": slots, "budget": card.budget(launch.moved)}
    for name, row in rows.items():
        for card in cards:
            slots, budget = row[card.name]["slots"], row[card.name]["budget"]
            report.record(
                f"{name}, {card.name}",
                {"budget": budget, "executed": slots},
                unit="slots/element",
                peer="budget",
            )
    report.note("cases", rows)
    print(table(rows, cards), end="\n\n", file=sys.stderr if options.json else sys.stdout)
    return report.finish()


def table(rows: dict[str, dict[str, Any]], cards: tuple[Card, ...]) -> str:
    """Slots, and their share of the budget: above 1 the kernel does not reach the memory's bandwidth."""
    lines = [f"{'':<46}{'bytes':>7}{'in 16':>7}" + "".join(f"{card.name:>9}{'of it':>7}" for card in cards)]
    for name, row in rows.items():
        found = [
            (row[card.name]["slots"], row[card.name]["slots"] / row[card.name]["budget"]) for card in cards
        ]
        cells = "".join(f"{slots:>9.1f}{share:>7.2f}" for slots, share in found)
        lines.append(f"{name:<46}{row['bytes']:>7.2f}{row['in 16']:>7.0%}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
