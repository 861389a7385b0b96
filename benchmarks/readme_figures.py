"""README's figures, picture and screens, the tables of benchmarks/RESULTS.md and benchmarks/README.md: all from JSON.

    python benchmarks/readme_figures.py            rewrites them (`make bench` ends with it)
    python benchmarks/readme_figures.py --check    exits with 1 if one says anything else than scripts and JSON

A row names a benchmark, a case in its JSON and the contenders; nothing here is a number. A benchmark whose JSON is not
there is said not to have been run in full."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PICTURE = RESULTS / "large_model.svg"


@dataclass(frozen=True)
class Value:
    """A contender of a figure, as it is shown."""

    case: str
    contender: str
    show: Callable[[float], str]
    file: str | None = None  # another than the row's

    def text(self, file: str) -> str:
        (found,) = (f for f in result(self.file or file)["figures"] if f["case"] == self.case)
        return self.show(found["values"][self.contender])


@dataclass(frozen=True)
class Ratio:
    """The speed of a contender as a multiple of the peer's: median, least and greatest of the rounds.

    contender: its name, or how the one begins that says what the peer did in that run, such as its segments.
    """

    case: str
    contender: str

    def text(self, file: str) -> str:
        (found,) = (c for c in result(file)["comparisons"] if c["case"] == self.case)
        names = found["summary"]
        (name,) = {self.contender} & {*names} or (one for one in names if one.startswith(self.contender))
        ratio = names[name]["ratio"]
        text = f"{ratio['median']:.2f}× ({ratio['min']:.2f} to {ratio['max']:.2f})"
        return text if ratio["min"] > 1 or ratio["max"] < 1 else f"{text}, within the noise"


@dataclass(frozen=True)
class Row:
    """A row: the claim, the peer's figure and memopt's. A text holds {} for each of its values."""

    claim: str
    file: str
    beside: str
    ours: str
    values: tuple[Value | Ratio, ...]  # of beside, then of ours

    def cells(self) -> tuple[str, str, str]:
        missing = [name for name in (self.file, *self._others()) if not path(name).exists()]
        if missing:
            return self.claim, "", "not run in full yet"
        texts = [value.text(self.file) for value in self.values]
        count = self.beside.count("{}")
        return self.claim, self.beside.format(*texts[:count]), self.ours.format(*texts[count:])

    def _others(self) -> list[str]:
        return [value.file for value in self.values if isinstance(value, Value) and value.file]


def path(file: str) -> Path:
    return RESULTS / f"{file}.json"


def result(file: str) -> dict:
    return json.loads(path(file).read_text())


def number(digits: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}{unit}"


PEERS = "bench_alloc_train.peers"
NINE = "frontier, mean"
HELD = "held with no limit, mean"
BIG = "98.4M parameters in 148 tensors"
MANY = "50.0M parameters in 5000 tensors"
CHAIN = "a step of a conv chain in 100% of the memory of torch's fastest way"
GPT = "a step of a GPT in 100% of the memory of torch's fastest way"
IN_ITS_MEMORY = "memopt, as much as "  # and the name of torch's way
HISTORY = "share of a step of 50 ms with 2000 allocations"
DIGITS3, COUNT, MIB, PERCENT = number(3), number(0), number(0, " MiB"), number(1, " %")


NEAR = "near: 512MiB, starting at 49152"


def mib_of_bytes(nbytes: float, digits: int = 0) -> str:
    return number(digits, " MiB")(nbytes / 2**20)


def inverse(value: float) -> str:
    return COUNT(1 / value)


def speed(claim: str, file: str, peer: str, case: str, contender: str) -> Row:
    """The speed as a multiple of the peer's."""
    return Row(claim, file, f"{peer} 1", "{}", (Ratio(case, contender),))


def pair(
    claim: str, file: str, case: str, show: Callable[[float], str], peer: tuple[str, str], contender: str
) -> Row:
    """A figure of both. peer: how it is called here, and in the JSON."""
    called, other = peer
    return Row(claim, file, f"{called} {{}}", "{}", (Value(case, other, show), Value(case, contender, show)))


def allocator_rows(mode: str, file: str) -> list[Row]:
    """The means over the nine training loops, in one mode of memopt's allocator."""

    def row(claim: str, case: str) -> Row:
        values = (Value(case, "native", DIGITS3, PEERS), Value(case, "expandable", DIGITS3, PEERS))
        return Row(
            claim, file, "torch {}, expandable segments {}", "{}", (*values, Value(case, "memopt", DIGITS3))
        )

    return [
        row(f"device that nine training loops need, live peak = 1, mean; {mode}", NINE),
        row("… memory held where there is plenty", HELD),
    ]


ROWS = [
    *allocator_rows("simulated, host a step ahead", "bench_alloc_train"),
    *allocator_rows("the same with `double_map=False`", "bench_alloc_train.no_double_map"),
    speed(
        "gradients unscaled and clipped, 98 million, CPU",
        "bench_scaler",
        "torch",
        f"unscale and clip, {BIG}",
        "memopt",
    ),
    speed("… and AdamW's step", "bench_optim", "torch, fused", f"unscale, clip and AdamW, {BIG}", "memopt"),
    speed(
        "… 50 million in 5000 tensors",
        "bench_optim",
        "torch, fused",
        f"unscale, clip and AdamW, {MANY}",
        "memopt",
    ),
    Row(
        "AdamW's states, bytes a parameter",
        "bench_optim",
        "torch 8",
        "{}",
        (
            Value(
                "goal: bytes of state a parameter, in tensors of 4096 and more, avx2",
                "memopt, 8-bit states",
                number(2),
            ),
        ),
    ),
    pair(
        "… loss with them, held out, mean of 5 seeds",
        "convergence_8bit",
        "held-out loss, mean of 5 seeds",
        number(4),
        ("fp32 states", "fp32 states"),
        "memopt, 8-bit states",
    ),
    pair(
        "… with `state_bits=4`, 1.03 bytes a parameter",
        "convergence_8bit",
        "held-out loss, mean of 5 seeds",
        number(4),
        ("fp32 states", "fp32 states"),
        "memopt, 4-bit states",
    ),
    pair(
        "what a checkpointed region of four operations costs",
        "bench_checkpoint",
        "over the plain region: a region of four operations",
        number(0, " µs"),
        ("torch", "torch"),
        "memopt",
    ),
    speed(
        "step of a chain of convolutions in the memory of torch's fastest way of checkpointing",
        "bench_checkpoint",
        "torch",
        CHAIN,
        IN_ITS_MEMORY,
    ),
    speed("… of a GPT", "bench_checkpoint", "torch", GPT, IN_ITS_MEMORY),
    Row(
        "card for AdamW on a Llama of 8 billion parameters in bf16, clipped, 4096 tokens; simulated",
        "bench_large_models",
        "torch {}",
        "{}",
        (
            Value("memory of the card, a Llama of 8b, 4096 tokens", "torch", number(1, " GiB")),
            Value(
                "memory of the card, a Llama of 8b, 4096 tokens", "and states on the host", number(1, " GiB")
            ),
        ),
    ),
    Row(
        "`auto_checkpoint`: live bytes, of 42 runs the one nearest its budget",
        "bench_auto_checkpoint",
        "budget 1",
        "{}",
        (Value("live bytes, the row nearest its budget", "measured", DIGITS3),),
    ),
    Row(
        "… its foretold peak, off by, the median and the worst run",
        "bench_auto_checkpoint",
        "",
        "{}, {}",
        (
            Value("predicted peak, furthest from the measured one: the median row", "measured", PERCENT),
            Value("predicted peak, furthest from the measured one", "measured", PERCENT),
        ),
    ),
    Row(
        "… the seconds of its trial steps beside later ones, the same",
        "bench_auto_checkpoint",
        "",
        "{}, {}",
        (
            Value(
                "seconds of the trial steps, furthest from later ones: the median row", "measured", PERCENT
            ),
            Value("seconds of the trial steps, furthest from later ones", "measured", PERCENT),
        ),
    ),
    Row(
        "schedule of 100 stages; of 200",
        "bench_solver",
        "",
        "{}; {}",
        (
            Value("best of 100 stages, 500 slots, and the limit", "memopt", number(0, " ms")),
            Value("best of 200 stages, 500 slots, and the limit", "memopt", number(0, " ms")),
        ),
    ),
    Row(
        "`memopt estimate`: peak, of ten trainings the one furthest off",
        "bench_estimate",
        "",
        "{}",
        (
            Value(
                "peak allocated of a long training, the script furthest from its computed run",
                "estimate",
                number(2, " %"),
            ),
        ),
    ),
    Row(
        "… seconds of one run at full size, the slowest",
        "bench_estimate",
        "",
        "{}",
        (Value("seconds at full size, a long training, the slowest", "estimate", number(1, " s")),),
    ),
    speed(
        "`memopt.backward` in a step that fits",
        "bench_backward",
        "`loss.backward()`",
        "a step of gpt-small, nothing fails",
        "memopt.backward",
    ),
    pair(
        "`offload_activations`: peak, 12 blocks of width 1024, simulated device",
        "bench_offload_activations",
        "peak, native allocator",
        MIB,
        ("plain", "plain"),
        "offload",
    ),
    Row(
        "`offload_layers`: the same",
        "bench_offload_layers",
        "plain {}",
        "{}",
        (
            Value("peak live bytes of a plain step", "plain", MIB),
            Value("peak live bytes of a step", "memopt", MIB),
        ),
    ),
    Row(
        "largest batch found on a card of 512 MiB; samples run in vain meanwhile",
        "bench_find_batch_size",
        "accelerate {}; {}",
        "{}; {}",
        (
            Value(f"time a sample if steps take the same, {NEAR}", "accelerate", inverse),
            Value(f"samples computed for nothing, {NEAR}", "accelerate", COUNT),
            Value(f"time a sample if steps take the same, {NEAR}", "memopt", inverse),
            Value(f"samples computed for nothing, {NEAR}", "memopt", COUNT),
        ),
    ),
    speed(
        "`Prefetcher`: an epoch of uint8 images, normalised on the device, simulated device",
        "bench_prefetcher",
        "DataLoader, pinned",
        "images, 8 of 64 x 3 x 224 x 224",
        "memopt",
    ),
    speed(
        "… of small token tensors",
        "bench_prefetcher",
        "DataLoader, pinned",
        "as they come: 50 of tokens",
        "memopt",
    ),
    pair(
        "… pinned host memory for it",
        "bench_prefetcher",
        "pinned bytes, images: 64 x 3 x 224 x 224",
        mib_of_bytes,
        ("by hand", "by hand"),
        "memopt",
    ),
    pair(
        "2 million strings and four workers, in all",
        "bench_shared_list",
        "fork: the names in all, parent and 4 workers",
        MIB,
        ("list", "list"),
        "SharedStrings",
    ),
    speed(
        "… read in random order",
        "bench_shared_list",
        "list",
        "500000 names of 2000000, in random order",
        "SharedStrings",
    ),
    speed(
        "a second epoch of decoded JPEGs",
        "bench_cached",
        "DataLoader alone",
        "an epoch of 256 JPEGs of 640 x 480",
        "memopt.data.cached",
    ),
    speed(
        "a shuffled epoch of rows in a file",
        "bench_mapped_dataset",
        "numpy.memmap",
        "a shuffled epoch of 4096 images",
        "MmapDataset, batches",
    ),
    pair(
        "`quantize_` to int8 weights, bytes a parameter",
        "bench_compress",
        "bytes of memory a parameter: quantize_ int8_weight_only",
        number(2),
        ("fp32", "before"),
        "after",
    ),
    speed(
        "… its time, checked and measured",
        "bench_compress",
        "torchao",
        "quantize_ int8_weight_only",
        "memopt",
    ),
    speed(
        "`prune_` whole channels, the same", "bench_compress", "torch-pruning", "prune_ structured", "memopt"
    ),
    Row(
        "a recording, of a step of 50 ms with 2000 allocations",
        "bench_profile",
        "torch's own history {}",
        "{}, under memopt's allocator {}",
        (
            Value(HISTORY, "torch's history", PERCENT),
            Value(HISTORY, "recorded", PERCENT),
            Value(HISTORY, "recorded", PERCENT, "bench_profile.pool"),
        ),
    ),
    Row(
        "the report page of a million events, drawn",
        "bench_report_page",
        "",
        "{}",
        (Value("a million events drawn, the best round, and the limit", "memopt", number(2, " s")),),
    ),
    Row(
        "`import memopt`",
        "bench_import",
        "",
        "{}",
        (Value("added by import memopt, best against best, and the limit", "memopt", number(1, " ms")),),
    ),
]


def table() -> str:
    """Without a GPU: whatever has a time in it was taken on a CPU."""
    lines = ["| | beside | memopt | benchmark |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        script = row.file.partition(".")[0]
        lines.append(f"| {' | '.join(row.cells())} | `{script}.py` |")
    return "\n".join(lines)


# ---- a large model ---------------------------------------------------------------------------------------------------


LARGE = "memory of the card, a Llama of 8b, 4096 tokens"
LEVERS = {  # of the benchmark's: what is written, and what becomes of the results
    "torch": ("`torch.optim.AdamW`, checkpointed blocks, bf16", ""),
    "8-bit states": ("`memopt.optim.AdamW(…, state_bits=8)`", "other numbers, a similar loss"),
    "and a fused head": ("and `memopt.nn.linear_cross_entropy(…)`", "equal to rounding"),
    "and gradients on the host": ("and `offload_gradients=True`", "the same"),
    "and states on the host": ("and `offload_states=True`", "the same"),
}


def _large() -> dict[str, float]:
    (found,) = (f for f in result("bench_large_models")["figures"] if f["case"] == LARGE)
    values: dict[str, float] = found["values"]
    return values


def levers() -> str:
    """The card's memory for a large model, each row with the techniques of those above it."""
    values = _large()
    rows = [f"| {text} | {values[name]:.1f} GiB | {results} |" for name, (text, results) in LEVERS.items()]
    return "\n".join(["| in the script | memory of the card | results |", "| --- | ---: | --- |", *rows])


def picture() -> str:
    """A bar of the large model as it is, one with memopt, and the line of a card of 24 GiB."""
    values = _large()
    bars = (("PyTorch", values["torch"], "#4a5568"), ("memopt", values["and states on the host"], "#276749"))
    left, scale, card = 90, 8.0, 24  # pixels, pixels a GiB, GiB
    line = left + card * scale
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="150" viewBox="0 0 760 150" role="img" '
        'font-family="system-ui, sans-serif" font-size="15">',
        f"<title>{picture_text()}</title>",
        '<rect width="760" height="150" rx="8" fill="#ffffff"/>',
    ]
    for row, (name, size, color) in enumerate(bars):
        top = 20 + 42 * row
        parts += [
            f'<text x="{left - 10}" y="{top + 20}" text-anchor="end" fill="#1a202c">{name}</text>',
            f'<rect x="{left}" y="{top}" width="{size * scale:.0f}" height="30" fill="{color}"/>',
            f'<text x="{left + size * scale - 8:.0f}" y="{top + 20}" text-anchor="end" fill="#ffffff">'
            f"{size:.1f} GiB</text>",
        ]
    parts += [
        f'<line x1="{line:.0f}" y1="10" x2="{line:.0f}" y2="108" stroke="#c53030" stroke-width="2" '
        'stroke-dasharray="6 4"/>',
        f'<text x="{line:.0f}" y="128" text-anchor="middle" fill="#9b2c2c">a card of {card} GiB</text>',
        '<text x="696" y="82" text-anchor="end" fill="#4a5568">8B Llama in full, AdamW, 4096 tokens; simulated</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def picture_text() -> str:
    values = _large()
    return (
        f"Full fine-tuning of a Llama of 8 billion parameters, 4096 tokens: {values['torch']:.1f} GiB with PyTorch, "
        f"{values['and states on the host']:.1f} GiB with memopt (simulated)"
    )


# ---- what commands print ---------------------------------------------------------------------------------------------


def screen(name: str, *left_out: str) -> str:
    """The output of a command, without some of its facts, as a block of text."""
    shown, keeps = [], True
    for row in json.loads((RESULTS / "readme_screens.json").read_text())[name].rstrip().splitlines():
        fact = row[2:13].strip() if row.startswith("  ") else row
        if fact:
            keeps = fact not in left_out
        if keeps:
            shown.append(row)
    return "\n".join(["```", *shown, "```"])


def demo() -> str:
    """The results of `make demo`, from the JSON that `make bench` has it write."""
    if not path("demo").exists():
        return "`make demo` has not been run for this table yet."
    found = result("demo")
    lines = [
        "| | peak | predicted | a step | final loss |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for task in found["tasks"]:
        plain, within = task["plain"], task["within"]
        kept = f"within {mib_of_bytes(task['budget'], 1)}: {'kept' if task['kept'] else 'NOT kept'}"
        for name, run, predicted in (
            (task["about"], plain, ""),
            (kept, within, mib_of_bytes(within["predicted"], 1)),
        ):
            lines.append(
                f"| {name} | {mib_of_bytes(run['peak'], 1)} | {predicted} | {run['seconds'] * 1e3:.0f} ms "
                f"| {run['loss']:.4f} |"
            )
    lines += [
        "",
        f"`make demo` on {found['cores']} cores of a machine without a GPU: {found['seconds']:.0f} s.",
    ]
    return "\n".join(lines)


def scripts() -> str:
    """A row a script: what its docstring says it measures, and its results in JSON with the goals they reach."""
    lines = ["| script | measures | results |", "| --- | --- | --- |"]
    for script in sorted(BENCHMARKS.glob("*.py")):
        text = ast.get_docstring(ast.parse(script.read_text())) or ""
        results = sorted(RESULTS.glob(f"{script.stem}.*json"))
        if not results and not script.name.startswith("bench_"):
            continue  # what the others stand on
        told = ", ".join(
            f"[{one.name}](results/{one.name}){_goals(json.loads(one.read_text()))}" for one in results
        )
        about = " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| `{script.name}` | {about} | {told or 'not run in full yet'} |")
    return "\n".join(lines)


def _goals(found: dict[str, object]) -> str:
    entries = [*_listed(found.get("comparisons")), *_listed(found.get("figures"))]
    met = [entry["goal_met"] for entry in entries if entry["goal_met"] is not None]
    if not met:
        return ""
    missed = [str(entry["case"]).replace("|", "\\|") for entry in entries if entry["goal_met"] is False]
    return f": {sum(met)} of {len(met)} goals" + (f"; missed: {'; '.join(missed)}" if missed else "")


def _listed(entries: object) -> list[dict[str, object]]:
    return entries if isinstance(entries, list) else []


BLOCKS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "picture": lambda: f"![{picture_text()}]({PICTURE.relative_to(ROOT)})",
        "estimate": lambda: screen("estimate", "modules", "allocators", "source"),
        "fit": lambda: screen("fit", "not enough", "fails", "assumed", "covered", "took"),
        "out of memory": lambda: screen("out of memory", "Top lines"),
        "levers": levers,
    },
    BENCHMARKS / "RESULTS.md": {"demo": demo, "figures": table},
    BENCHMARKS / "README.md": {"scripts": scripts},
}


def rewritten(file: Path, text: str) -> str:
    for name, write in BLOCKS[file].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, begins, rest = text.partition(begin)
        _, ends, after = rest.partition(end)
        if not begins or not ends:
            raise SystemExit(f"{file.name} has no {begin} … {end}")
        text = f"{before}{begin}\n{write()}\n{end}{after}"
    return text


def main() -> int:
    stale = PICTURE.read_text() != picture() if PICTURE.exists() else True
    if sys.argv[1:] != ["--check"]:
        PICTURE.write_text(picture())
        stale = False
    for file in BLOCKS:
        text = file.read_text()
        wanted = rewritten(file, text)
        if sys.argv[1:] != ["--check"]:
            file.write_text(wanted)
        elif text != wanted:
            print(f"{file.relative_to(ROOT)} is not what benchmarks/readme_figures.py writes: run it")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
