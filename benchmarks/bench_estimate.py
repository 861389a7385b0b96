"""memopt's estimate of what a script needs, against the same script with every operation computed.

Ten scripts as users write them (benchmarks/scripts), each in processes of its own: estimated, where nothing computes
and what the host reads is known or guessed; and on the simulated device with each operation really computed, at sizes
that the host can do. Both at no limit, and on a device of nine tenths of the peak, where they have to run out of memory
at the same line. The same ten as long trainings, whose loops an estimate ends after three steps as the command's does.
Three more scripts, whose shapes the model decides, have to come out as a range around the computed run's peak. At full
size, which no host computes: the seconds of an estimate, of few steps and of the long training, and the host memory it
takes.

With --cuda: the estimate at full size against what the GPU at hand measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402

SCRIPTS = ROOT / "benchmarks" / "scripts"
MIB = 1 << 20
GIB = 1 << 30
PERCENT, SECONDS, HOST_MORE, PERCENT_OF_A_GPU = 1.0, 30.0, GIB, 5.0
FOR_LONG_ONES = 2  # times as many seconds and bytes may a long training's estimate take
STEPS = 3  # after which the command ends a script's loops


@dataclass(frozen=True)
class Case:
    """A script; `small`: arguments for a size that can be computed; `long`: for a training that its loops are ended
    of; `needs`: a package besides torch; `weights_on_host`: the script makes its weights there, which is the script's
    own memory."""

    name: str
    small: str
    long: str = "--steps 40"
    needs: str | None = None
    weights_on_host: bool = True


CASES = [
    Case(
        "nanogpt", "--batch-size 2 --block-size 64 --layers 2 --width 128 --vocabulary 500", "--iterations 40"
    ),
    # So many steps, for the first ones may overflow half precision: then the computed run leaves them out.
    Case("resnet", "--batch-size 4 --image 32 --width 8 --classes 10 --steps 8"),
    Case(
        "encoder_classifier",
        "--batch-size 4 --longest 64 --width 64 --layers 2 --texts 16 --workers 0",
        "--texts 160",
    ),
    Case(
        "hf_gpt2", "--batch-size 2 --length 64 --layers 2 --width 128 --vocabulary 500", needs="transformers"
    ),
    Case(
        "hf_bert", "--batch-size 2 --length 64 --layers 2 --width 128 --vocabulary 500", needs="transformers"
    ),
    Case("diffusion_unet", "--batch-size 2 --image 16 --width 16"),
    Case("lstm", "--batch-size 4 --longest 24 --width 32 --vocabulary 200"),
    Case("gnn", "--nodes 500 --edges 3000 --width 16", "--epochs 40"),
    Case("lora", "--batch-size 2 --length 64 --width 128 --layers 2 --vocabulary 300", weights_on_host=False),
    Case("distillation", "--batch-size 4 --image 32 --teacher 16 --student 8"),
]
DECIDED = [
    Case("moe", "--rows 256 --width 32 --experts 4"),
    Case("nms_mask", "--images 2 --size 32 --width 16"),
    Case("early_exit", "--rows 256 --width 64 --stages 4"),
]


def run(case: Case, arguments: str, **request: Any) -> dict[str, Any]:
    """The answer of an estimate's child process; SystemExit where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        answer, asked = Path(folder, "answer.json"), Path(folder, "request.json")
        argv = [str(SCRIPTS / f"{case.name}.py"), *arguments.split()]
        asked.write_text(json.dumps({"argv": argv, "answer": str(answer), "memory": 8 * GIB} | request))
        command = [sys.executable, "-m", "memopt._estimate.script_process", str(asked)]
        path = {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=os.environ | path, capture_output=True, text=True)
        if not answer.exists():
            raise SystemExit(
                f"{case.name} {arguments}: no answer\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        found: dict[str, Any] = json.loads(answer.read_text())
    if found["error"] and not found["oom"]:
        raise SystemExit(f"{case.name} {arguments}: {found['error']}\n{done.stderr[-4000:]}")
    return found


def line_of(answer: dict[str, Any]) -> str:
    """The line that ran out of memory."""
    oom = answer["oom"]
    return f"{Path(oom['file']).name}:{oom['line']}" if oom else "no out-of-memory error"


def by_file_name(guesses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the folder, which is another on every machine."""
    return [guess | {"where": Path(guess["where"]).name} for guess in guesses]


def computed(case: Case) -> dict[str, Any]:
    """A script at its small size: estimated and computed, at no limit and at nine tenths of the peak."""
    estimate, real = run(case, case.small), run(case, case.small, compute=True)
    tight = int(0.9 * real["peak_allocated"])
    lines = [line_of(run(case, case.small, memory=tight, compute=how)) for how in (False, True)]
    return {
        "script": case.name,
        "estimated": estimate["peak_allocated"],
        "computed": real["peak_allocated"],
        "reserved": [estimate["peak_reserved"], real["peak_reserved"]],
        "off": 100 * abs(estimate["peak_allocated"] / real["peak_allocated"] - 1),
        "out_of_memory": lines,
        "guesses": by_file_name(estimate["guesses"]),
    }


def lengthy(case: Case) -> dict[str, Any]:
    """A long training at its small size: estimated as the command does, and computed to its end."""
    arguments = f"{case.small} {case.long}"
    estimate, real = run(case, arguments, steps=STEPS), run(case, arguments, compute=True)
    return {
        "script": case.name,
        "estimated": estimate["peak_allocated"],
        "computed": real["peak_allocated"],
        "off": 100 * abs(estimate["peak_allocated"] / real["peak_allocated"] - 1),
        "steps": [estimate["steps"], real["steps"]],
        "covered": estimate["covered"],
    }


def ranged(case: Case) -> dict[str, Any]:
    """A script whose shapes the model decides: from none to all of what its masks may select."""
    peaks = [run(case, case.small, fraction=fraction)["peak_allocated"] for fraction in (0.0, 0.5, 1.0)]
    real = run(case, case.small, compute=True)["peak_allocated"]
    return {
        "script": case.name,
        "estimated": peaks,
        "computed": real,
        "contained": min(peaks) <= real <= max(peaks),
    }


def full(case: Case, arguments: str = "", **request: Any) -> dict[str, Any]:
    found = run(case, arguments, memory=80 * GIB, record=True, **request)
    weights = found["by_category"]["parameters"] if case.weights_on_host else 0
    return {
        "script": case.name,
        "allocated": found["peak_allocated"],
        "reserved": found["peak_reserved"],
        "by_category": found["by_category"],
        "seconds": found["seconds"],
        "host": found["host_peak"],
        "host_less_weights": found["host_peak"] - weights,
        "guesses": by_file_name(found["guesses"]),
    }


def can_run(case: Case) -> bool:
    return case.needs is None or importlib.util.find_spec(case.needs) is not None


def against_the_host(report: harness.Report, chosen: list[Case]) -> None:
    rows, long_rows, ranges, sizes, long_sizes = [], [], [], [], []
    for case in chosen:
        if case in DECIDED:
            ranges.append(ranged(case))
        else:
            rows.append(computed(case))
            long_rows.append(lengthy(case))
        report._progress(f"{case.name}: computed")
    for case in [] if report.options.quick else chosen:
        sizes.append(full(case))
        if case not in DECIDED:
            long_sizes.append(full(case, case.long, steps=STEPS))
        report._progress(f"{case.name}: full size")
    report.note("computed", rows)
    report.note("computed, long trainings", long_rows)
    report.note("ranges", ranges)
    report.note("full", sizes)
    report.note("full, long trainings", long_sizes)
    if rows:
        report.record(
            "peak allocated, the script furthest from its computed run",
            {"allowed": PERCENT, "estimate": max(row["off"] for row in rows)},
            unit="%",
            goal=1.0,
        )
        unread = [row["off"] == 0 for row in rows if not row["guesses"]]
        right = [row["out_of_memory"][0] == row["out_of_memory"][1] for row in rows]
        all_of(report, "peak allocated, equal where no value is read on the host", unread)
        all_of(report, "out of memory at nine tenths of the peak, at the computed run's line", right)
        report.record(
            "peak allocated of a long training, the script furthest from its computed run",
            {"allowed": PERCENT, "estimate": max(row["off"] for row in long_rows)},
            unit="%",
            goal=1.0,
        )
    if ranges:
        inside = [row["contained"] for row in ranges]
        all_of(report, "shapes that the model decides, the computed run's peak within the range", inside)
    costs(report, sizes, "at full size", 1)
    costs(report, long_sizes, "at full size, a long training", FOR_LONG_ONES)
    shown = text(rows, ranges, sizes) + text(long_rows, [], long_sizes, "a long training")
    print(shown, end="\n\n", file=sys.stderr if report.options.json else sys.stdout)


def costs(report: harness.Report, sizes: list[dict[str, Any]], which: str, times: int) -> None:
    if sizes:
        report.record(
            f"seconds {which}, the slowest",
            {"allowed": times * SECONDS, "estimate": max(size["seconds"] for size in sizes)},
            unit="s",
            goal=1.0,
        )
        report.record(
            f"host memory {which}, without the weights that a script makes there, the most",
            {
                "allowed": times * HOST_MORE / MIB,
                "estimate": max(size["host_less_weights"] for size in sizes) / MIB,
            },
            unit="MiB",
            goal=1.0,
        )


def all_of(report: harness.Report, case: str, scripts: list[bool]) -> None:
    """The goal is met when it holds of each."""
    if scripts:
        report.record(case, {"it holds": sum(scripts), "of": len(scripts)}, unit="scripts", goal=1.0)


def text(
    rows: list[dict[str, Any]], ranges: list[dict[str, Any]], sizes: list[dict[str, Any]], of: str = ""
) -> str:
    lines = [
        f"{of:<20}{'estimated':>11}{'computed':>11}{'off':>8}   (MiB) {'' if of else 'out of memory at 90 %'}"
    ]
    for row in rows:
        if "steps" in row:
            where = "{} steps of {}".format(*row["steps"])
        else:
            both = row["out_of_memory"]
            where = both[0] if both[0] == both[1] else f"{both[0]}, computed {both[1]}"
        lines.append(
            f"{row['script']:<20}{row['estimated'] / MIB:>11.2f}{row['computed'] / MIB:>11.2f}"
            f"{row['off']:>7.3f}%   {where}"
        )
    for row in ranges:
        low, high = min(row["estimated"]) / MIB, max(row["estimated"]) / MIB
        inside = "inside" if row["contained"] else "OUTSIDE"
        lines.append(
            f"{row['script']:<20}{low:>11.2f}{row['computed'] / MIB:>11.2f}{'':8}   {inside}, up to {high:.2f}"
        )
    if sizes:
        lines.append(
            f"\n{'at full size':<20}{'allocated':>11}{'reserved':>11}{'host':>8}{'less weights':>14}{'seconds':>9}"
        )
    for size in sizes:
        lines.append(
            f"{size['script']:<20}{size['allocated'] / MIB:>11.0f}{size['reserved'] / MIB:>11.0f}"
            f"{size['host'] / MIB:>8.0f}{size['host_less_weights'] / MIB:>14.0f}{size['seconds']:>9.1f}"
        )
    return "\n".join(lines) + "\n"


# ---- a GPU ---------------------------------------------------------------------------------------------------------

MEASURED = """
import json, runpy, sys
import torch
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
stats = torch.cuda.memory_stats()
print("\\n" + json.dumps({name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}))
"""


def against_a_gpu(report: harness.Report, chosen: list[Case]) -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    card = {
        "memory": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }
    rows = []
    for case in chosen:
        script = str(SCRIPTS / f"{case.name}.py")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", MEASURED, script]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{case.name} on the GPU: {done.stderr[-4000:]}")
        measured = json.loads(done.stdout.splitlines()[-1])["allocated"]
        estimated = [run(case, "", **card, cudnn_workspace=size)["peak_allocated"] for size in (0, 256 * MIB)]
        if case in DECIDED:
            estimated += [run(case, "", **card, fraction=part)["peak_allocated"] for part in (0.0, 0.5)]
        low, high = min(estimated), max(estimated)
        off = 100 * max(low / measured - 1, 1 - high / measured, 0.0)
        rows.append({"script": case.name, "measured": measured, "estimated": estimated, "off": off})
    report.note("card", card)
    report.note("measured", rows)
    report.record(
        "measured peak, the furthest outside of the estimate's range",
        {"allowed": PERCENT_OF_A_GPU, "estimate": max(row["off"] for row in rows)},
        unit="%",
        goal=1.0,
    )


def main() -> int:
    parser = harness.parser(__doc__)
    names = [case.name for case in CASES + DECIDED]
    parser.add_argument("--scripts", nargs="+", choices=names, default=names, help="some of the scripts")
    options: argparse.Namespace = parser.parse_args()
    chosen = [case for case in CASES + DECIDED if case.name in options.scripts]
    left_out = [case for case in chosen if not can_run(case)]
    for case in left_out:
        print(f"{case.name}: not run, {case.needs} is not installed here", file=sys.stderr)
    chosen = [case for case in chosen if case not in left_out]
    report = harness.Report("bench_estimate", options, claim="what a script needs, before it runs on a GPU")
    report.note("left_out", [case.name for case in left_out])
    (against_a_gpu if options.cuda else against_the_host)(report, chosen)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
