"""`memopt fit` on twelve training scripts and four cards each: what its plans take and cost, on the simulated card.

A card has 80, 60, 40 or 25 % of the tensors that the script has at its peak, and the context. Each plan is then applied
to the script by `memopt run --fit --sim`, with each operation computed: the peak of that run is beside the planned one,
and the losses beside those of the plain script. With --headlines, large Llamas are
planned, which no host computes.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402

SCRIPTS = ROOT / "benchmarks" / "scripts"
SHARES = (0.8, 0.6, 0.4, 0.25)
CONTEXT = 450 << 20
MIB = 1 << 20
TOLERANCE = {"free": 0.0, "bit-equal": 0.0, "equal to rounding": 2e-3, "other numbers": 5e-2}

CASES = {
    "GPT": "nanogpt.py --batch-size 8 --block-size 128 --layers 6 --width 256 --vocabulary 2000",
    "GPT-2 (transformers)": "hf_gpt2.py --batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 8000",
    "BERT (transformers)": "hf_bert.py --batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 8000",
    "T5 (transformers)": "hf_t5.py --batch-size 4 --length 128 --layers 4 --width 256 --vocabulary 4000",
    "Llama with LoRA": "lora.py --batch-size 4 --length 256 --width 512 --layers 6 --vocabulary 4000",
    "mixture of experts": "moe.py --rows 2048 --width 256 --experts 4",
    "ViT (torchvision)": "vision.py --model vit_b_16 --batch-size 4 --image 96",
    "ResNet-50 (torchvision)": "vision.py --model resnet50 --batch-size 8 --image 96",
    "ConvNeXt (torchvision)": "vision.py --model convnext_tiny --batch-size 4 --image 96",
    "diffusion U-Net": "diffusion_unet.py --batch-size 8 --image 32 --width 64",
    "distillation": "distillation.py --batch-size 32 --image 64",
    "LSTM": "lstm.py --batch-size 16 --longest 64 --width 256 --vocabulary 4000",
}
HEADLINES = {
    "a Llama of 1B in mixed precision, 4096 tokens": ("llama_train.py --model 1b --amp", "12GiB", ""),
    "a Llama of 7B in bf16, 4096 tokens": ("llama_train.py --model 7b", "24GiB", "8bit,4bit"),
    "a Llama of 8B in bf16, 4096 tokens": ("llama_train.py --model 8b", "24GiB", "8bit,4bit"),
    "a Llama of 8B in bf16, 32768 tokens": ("llama_train.py --model 8b --length 32768", "24GiB", "8bit,4bit"),
}


@dataclass
class Tried:
    """A plan. peak: as planned, of `room` bytes for tensors; measured: that of the computed run, 0 where nothing
    fits."""

    tier: str
    techniques: list[str]
    room: int
    peak: int
    measured: int
    loss: float
    took: float
    runs: int


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
    return [float(found) for found in re.findall(r"loss (\S+?),?(?:\s|$)", text)]


def peak_of(python: str, call: list[str]) -> int:
    told = command(python, "-m", "memopt", "estimate", "--quick", "--json", "--gpu", "64GiB", *call)
    peak: int = json.loads(told.stdout)["peak_allocated"]
    return peak


def planned(
    python: str, call: list[str], card: str, plan: Path, *options: str
) -> tuple[dict[str, Any], float]:
    begun = time.perf_counter()
    arguments = ("-m", "memopt", "fit", "-f", "--json", "-o", str(plan), "--gpu", card, *options, *call)
    found: dict[str, Any] = json.loads(command(python, *arguments, ok=(0, 1)).stdout)
    return found, time.perf_counter() - begun


def tried(python: str, call: list[str], share: float, peak: int, plain: list[float], folder: Path) -> Tried:
    room = int(share * peak)
    card, plan, recording = str(CONTEXT + room), folder / "a.fit.json", folder / "a.mopt"
    found, took = planned(python, call, card, plan)
    if not found["fits"]:
        return Tried("nothing fits", [], room, 0, 0, 0.0, took, found["simulations"])
    run = ("-m", "memopt", "run", "-f", "-o", str(recording), "--fit", str(plan), "--sim", card)
    ended = command(python, *run, *call)
    told = json.loads(command(sys.executable, "-m", "memopt", "report", "--json", str(recording)).stdout)
    reports = told if isinstance(told, list) else [told]
    measured = max(one["peak_allocated"] for one in reports)
    pairs = zip(plain, losses(ended.stdout), strict=True)
    loss = max((abs(mine - other) / max(abs(mine), 1e-9) for mine, other in pairs), default=0.0)
    return Tried(
        found["tier"],
        found["plan"]["techniques"],
        room,
        found["plan"]["peak"],
        measured,
        loss,
        took,
        found["simulations"],
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--python", default=sys.executable, help="with PyTorch's CUDA build and the packages")
    parser.add_argument("--only", help="a case")
    parser.add_argument("--headlines", action="store_true", help="large Llamas alone")
    options: argparse.Namespace = parser.parse_args()
    report = harness.Report("bench_fit_headlines" if options.headlines else "bench_fit_scripts", options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.headlines:
            for what, (script, card, allow) in HEADLINES.items():
                call = [str(ROOT / "benchmarks" / script.split()[0]), *script.split()[1:]]
                allowed = ("--allow", allow) if allow else ()
                found, took = planned(options.python, call, card, folder / "a.fit.json", *allowed)
                report.note(what, found | {"seconds": took})
                print(what, card, found["fits"], found["tier"], found["plan"], f"{took:.0f} s")
            return report.finish()
        rows: list[dict[str, Any]] = []
        for what, script in CASES.items():
            if options.only not in (None, what):
                continue
            call = script.split()
            peak = peak_of(options.python, call)
            run = ("-m", "memopt", "run", "--no-record", "--sim", "16GiB")
            plain = losses(command(options.python, *run, *call).stdout)
            for share in SHARES:
                one = tried(options.python, call, share, peak, plain, folder)
                rows.append({"what": what, "share": share} | vars(one))
                said = f"{what:24} {share:.0%}: {one.tier}"
                if one.measured:
                    said += (
                        f", {one.measured / one.room:.1%} of the room, planned {one.peak / one.measured - 1:+.2%}, "
                        f"loss {one.loss:.1e}: {' + '.join(one.techniques)}"
                    )
                print(f"{said} ({one.took:.0f} s, {one.runs} runs)", file=sys.stderr, flush=True)
    report.note("plans", rows)
    fits = [row for row in rows if row["measured"]]
    errors = [abs(row["peak"] / row["measured"] - 1) for row in fits]
    report.record("plans that fit, of all", {"all": len(rows), "memopt": len(fits)}, unit="plans")
    over = sum(row["measured"] > row["room"] for row in fits)
    wrong = sum(row["loss"] > TOLERANCE[row["tier"]] for row in fits)
    report.record("plans over the room", {"memopt": over}, unit="plans")
    report.record("plans whose losses are not as their tier says", {"memopt": wrong}, unit="plans")
    report.record(
        "planned peak beside the computed run's",
        {"in the median": 100 * statistics.median(errors), "at worst": 100 * max(errors)},
        unit="%",
    )
    report.record("a fit", {"in the median": statistics.median(row["took"] for row in rows)}, unit="s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
