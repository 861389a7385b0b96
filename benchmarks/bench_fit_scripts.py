"""`memopt fit` on twelve training scripts and four cards each: what its plans take and cost, on the simulated card.

A card has 80, 60, 40 or 25 % of the tensors that the script has at its peak, and the context. Each plan is then applied
to the script in a process of its own, on such a card, whose kernels compute nothing: the peak there is beside the
planned one. With --losses each script is made small, planned on 60 % of its peak, and run with each operation computed
(`memopt run --fit --sim`): its losses are beside those of the plain script. With --headlines, large Llamas are planned.
Rows are kept case by case, those of other cases beside them; each row has the commit that it was run at.

The scripts need the packages named beside them: --python names a Python that has them and PyTorch's CUDA build."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import environment, harness  # noqa: E402

SCRIPTS = ROOT / "benchmarks" / "scripts"
SHARES = (0.8, 0.6, 0.4, 0.25)
CONTEXT = 450 << 20
GIB = 1 << 30
TOLERANCE = {"free": 0.0, "bit-equal": 0.0, "equal to rounding": 2e-3, "other numbers": 5e-2}

# By what is trained: the script with its arguments, and those that make it small.
CASES = {
    "GPT": ("nanogpt.py", "--batch-size 8 --block-size 128 --layers 6 --width 256 --vocabulary 2000"),
    "GPT-2 (transformers)": (
        "hf_gpt2.py --one-length",
        "--batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 8000",
    ),
    "BERT (transformers)": (
        "hf_bert.py",
        "--batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 8000",
    ),
    "T5 (transformers)": (
        "hf_t5.py",
        "--batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 4000",
    ),
    "Llama with LoRA": (
        "lora.py",
        "--batch-size 4 --length 256 --width 512 --layers 6 --vocabulary 4000",
    ),
    "mixture of experts": ("moe.py", "--rows 2048 --width 256 --experts 4"),
    "ViT (torchvision)": ("vision.py --model vit_b_16", "--batch-size 4 --image 96"),
    "ResNet-50 (torchvision)": ("vision.py --model resnet50", "--batch-size 8 --image 96"),
    "ConvNeXt (torchvision)": ("vision.py --model convnext_tiny", "--batch-size 4 --image 96"),
    "diffusion U-Net": ("diffusion_unet.py", "--batch-size 8 --image 32 --width 64"),
    "distillation": ("distillation.py", "--batch-size 32 --image 64"),
    "LSTM": ("lstm.py", "--batch-size 16 --longest 64 --width 256 --vocabulary 4000"),
}
HEADLINES = {
    "a Llama of 1B in mixed precision, 4096 tokens": ("llama_train.py --model 1b --amp", "12GiB", ""),
    "a Llama of 7B in bf16, 4096 tokens": ("llama_train.py --model 7b", "24GiB", "8bit,4bit"),
    "a Llama of 8B in bf16, 4096 tokens": ("llama_train.py --model 8b", "24GiB", "8bit,4bit"),
    "a Llama of 8B in bf16, 32768 tokens": ("llama_train.py --model 8b --length 32768", "24GiB", "8bit,4bit"),
    "a Llama of 8B in bf16, 131072 tokens": (
        "llama_train.py --model 8b --length 131072",
        "24GiB",
        "8bit,4bit",
    ),
}


# A script by a plan on a card whose memory has no contents.
APPLIED = """
import os, runpy, sys, tempfile
from pathlib import Path

import memopt.sim
from memopt._run import plan as plans

path, card, context, *sys.argv = sys.argv[1:]
plan = plans.read(path)
os.environ.update(plans.allocator_environment(plan.backend, os.environ))
memopt.sim.activate(memory=int(card), context=int(context), blank=True)
import torch
from memopt._estimate import values
from memopt._estimate.cards import Card
from memopt._estimate.host_reads import Guesses
from memopt._estimate.roofline_clock import RooflineClock
from memopt._run.peaks import Peaks
from memopt._run.techniques import PLANNING, Techniques
from memopt._runtime import device_clock

with tempfile.TemporaryDirectory() as folder:
    device_clock.use(RooflineClock(Path(folder), Card("", plan.card_bytes).rates))
    peaks = Peaks()
    planning = lambda kind: peaks.leave_out_planning(kind == PLANNING)
    applied = Techniques(plan.techniques, planning, plan.keeps)
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    guessed = values.Values(Guesses())
    values.install(guessed)
    with guessed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    peaks.note()
    print("peak", peaks.allocated, peaks.reserved)
"""


def command(python: str, *arguments: str, ok: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=SCRIPTS, env=environment, check=False
    )
    if ended.returncode not in ok:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
    return ended


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:loss|perplexity) (\S+?),?(?:\s|$)", text)]


def peak_of(python: str, call: list[str]) -> int:
    told = command(python, "-m", "memopt", "estimate", "--quick", "--json", "--gpu", "64GiB", *call)
    peak: int = json.loads(told.stdout)["allocated_bytes"][0]
    return peak


def planned(
    python: str, call: list[str], card: str, plan: Path, *options: str
) -> tuple[dict[str, Any], float]:
    begun = time.perf_counter()
    arguments = ("-m", "memopt", "fit", "-f", "--json", "-o", str(plan), "--gpu", card, *options, *call)
    found: dict[str, Any] = json.loads(command(python, *arguments, ok=(0, 1)).stdout)
    if found["plan"]:
        found["plan"]["script"] = os.path.relpath(found["plan"]["script"], ROOT)
    return found, time.perf_counter() - begun


def row(python: str, script: str, share: float, peak: int, folder: Path) -> dict[str, Any]:
    """Return what a plan takes: its tensors, planned and measured, and what the allocator holds for them, of the room
    for tensors; none of it where nothing fits."""
    room, plan = int(share * peak), folder / "a.fit.json"
    card = str(CONTEXT + room)
    call = script.split()
    found, took = planned(python, call, card, plan)
    told = {
        "share": share,
        "room": room,
        "seconds": took,
        "runs": found["simulations"],
        "fits": found["fits"],
    }
    if not found["fits"]:
        return told | {"least": found["smallest_card"]["bytes"]}
    ended = command(python, "-c", APPLIED, str(plan), card, str(CONTEXT), *call)
    measured, held = map(int, ended.stdout.split()[-2:])
    return told | {
        "tier": found["tier"],
        "techniques": found["runs"][0]["techniques"],
        "planned": found["plan"]["peak_bytes"],
        "measured": measured,
        "held": held,
        "slowdown": found["plan"]["step_seconds"] / found["step_seconds"] if found["step_seconds"] else 0.0,
    }


def loss_row(python: str, script: str, folder: Path) -> dict[str, Any]:
    """Return how far the losses of a plan's run are from the plain script's, each operation computed."""
    call, plan = script.split(), folder / "a.fit.json"
    run = ("-m", "memopt", "run", "--no-record")
    plain = losses(command(python, *run, "--sim", "16GiB", *call).stdout)
    card = str(CONTEXT + int(0.6 * peak_of(python, call)))
    found, took = planned(python, call, card, plan)
    if not found["fits"]:
        return {"fits": False, "seconds": took}
    ended = command(python, *run, "--fit", str(plan), "--sim", "16GiB", *call)
    pairs = [*zip(plain, losses(ended.stdout), strict=True)]
    if not pairs:
        raise SystemExit(f"{script} prints no loss")
    return {
        "fits": True,
        "seconds": took,
        "tier": found["tier"],
        "techniques": found["runs"][0]["techniques"],
        "losses": pairs,
        "off": max(abs(mine - other) / max(abs(mine), 1e-9) for mine, other in pairs),
    }


def headlines(options: argparse.Namespace, report: harness.Report, folder: Path) -> None:
    done: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for what, (script, card, allow) in HEADLINES.items():
        if options.only not in (None, what):
            continue
        name, *arguments = script.split()
        call = [str(ROOT / "benchmarks" / name), *arguments]
        allowed = ("--allow", allow) if allow else ()
        found, took = planned(options.python, call, card, folder / "a.fit.json", *allowed)
        done.append({"what": what} | found | {"seconds": took})
        rows = keep(report, "headlines", done)
        said = (
            f"{found['plan']['peak_bytes'] / GIB:.2f} GiB: {' + '.join(found['runs'][0]['techniques'])}"
            if found["fits"]
            else ""
        )
        print(
            f"{what}, {card}: {found['tier'] or 'nothing fits'} {said} ({took:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    report.note("load", os.getloadavg())
    report.record("headlines that fit", {"memopt": sum(one["fits"] for one in rows)}, unit="plans")


def rows_of(python: str, what: str, script: str, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    peak = peak_of(python, script.split())
    folder.mkdir()
    for share in SHARES:
        one = {"what": what} | row(python, script, share, peak, folder)
        rows.append(one)
        said = (
            f"{one['measured'] / one['room']:.1%}, held {one['held'] / one['room']:.1%}, "
            f"planned {one['planned'] / one['measured'] - 1:+.2%}, "
            f"{one['slowdown']:.2f} times the time: {one['tier']}: {' + '.join(one['techniques'])}"
            if one["fits"]
            else f"nothing fits; a card of {one['least'] / GIB:.2f} GiB would"
        )
        print(
            f"{what:24} {share:.0%} of {peak / GIB:5.2f} GiB: {said} ({one['seconds']:.0f} s, {one['runs']} runs)",
            file=sys.stderr,
            flush=True,
        )
    return rows


def plans(options: argparse.Namespace, report: harness.Report, folder: Path) -> None:
    chosen = {what: script for what, (script, _) in CASES.items() if options.only in (None, what)}
    done: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [
            pool.submit(rows_of, options.python, what, script, folder / str(number))
            for number, (what, script) in enumerate(chosen.items())
        ]
        for made in as_completed(asked):
            done += made.result()
            rows = keep(report, "plans", done)
    report.note("load", os.getloadavg())
    fits = [one for one in rows if one["fits"]]
    report.record("plans that fit, of all", {"all": len(rows), "memopt": len(fits)}, unit="plans")
    over = sum(max(one["measured"], one.get("held", 0)) > one["room"] for one in fits)
    report.record("plans over the room", {"memopt": over}, unit="plans")
    budgeted = [one for one in fits if "held" in one and any(":" in name for name in one["techniques"])]
    for what in ("measured", "held"):
        if used := [100 * one[what] / one["room"] for one in budgeted]:
            values = {"in the median": statistics.median(used), "at least": min(used)}
            report.record(f"the room that plans with a budget use, {what}", values, unit="%")
    errors = [100 * abs(one["planned"] / one["measured"] - 1) for one in fits]
    report.record(
        "planned peak beside that of a run by the plan",
        {"in the median": statistics.median(errors), "at worst": max(errors)},
        unit="%",
    )
    report.record("a fit", {"in the median": statistics.median(one["seconds"] for one in rows)}, unit="s")


def keep(report: harness.Report, part: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the rows at once, each with this commit, beside those that were kept of other cases. Return them all."""
    path, now = harness.RESULTS / f"{report.name}.json", environment.commit()["hash"]
    kept = json.loads(path.read_text())["notes"].get(part, []) if path.exists() else []
    mine = {one["what"] for one in rows}
    known = [*CASES, *HEADLINES]
    others = [one for one in kept if one["what"] not in mine and one["what"] in known]
    every = sorted(others + [{"commit": now} | one for one in rows], key=lambda one: known.index(one["what"]))
    report.note(part, every)
    if not report.options.quick:
        path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    return every


def all_losses(options: argparse.Namespace, report: harness.Report, folder: Path) -> None:
    done: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for what, (script, small) in CASES.items():
        if options.only not in (None, what):
            continue
        one = {"what": what} | loss_row(options.python, f"{script} {small}", folder)
        done.append(one)
        rows = keep(report, "losses", done)
        said = (
            f"off by {one['off']:.1e}: {one['tier']}: {' + '.join(one['techniques'])}"
            if one["fits"]
            else "nothing fits"
        )
        print(f"{what:24} {said} ({one['seconds']:.0f} s)", file=sys.stderr, flush=True)
    wrong = sum(one["off"] > TOLERANCE[one["tier"]] for one in rows if one["fits"])
    report.record("plans whose losses are not as their tier says", {"memopt": wrong}, unit="plans")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--python", default=sys.executable, help="with PyTorch's CUDA build and the packages")
    parser.add_argument("--only", help="a case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--headlines", action="store_true", help="large Llamas alone")
    parts.add_argument("--losses", action="store_true", help="small scripts, computed, alone")
    options: argparse.Namespace = parser.parse_args()
    part, name = plans, "bench_fit_scripts"
    if options.headlines:
        part, name = headlines, "bench_fit_scripts.headlines"
    elif options.losses:
        part, name = all_losses, "bench_fit_scripts.losses"
    report = harness.Report(name, options)
    with tempfile.TemporaryDirectory() as folder:
        part(options, report, Path(folder))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
