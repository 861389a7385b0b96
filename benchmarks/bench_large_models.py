"""The device memory of full fine-tuning with AdamW and exact clipping: Llamas of three sizes with memopt's levers one
after another, as `memopt estimate` sees them.

Whole models in bf16, checkpointed by block, on a simulated card with torch's own allocator. A card's goal is what the
whole process takes there: reserved memory and the context."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402

GIB = 1 << 30
LEVERS = {
    "torch": "",
    "8-bit states": "--state-bits 8",
    "and a fused head": "--state-bits 8 --fused-head",
    "and gradients on the host": "--state-bits 8 --fused-head --offload-gradients",
    "and states on the host": "--state-bits 8 --fused-head --offload-gradients --offload-states",
}
CARDS = {"1b": 12, "7b": 24, "8b": 24}  # GiB


def taken(model: str, levers: str, length: int = 4096) -> dict[str, float]:
    """Return GiB: of live bytes at the peak, and of all that the process takes of the card."""
    script = str(ROOT / "benchmarks" / "llama_train.py")
    command = [sys.executable, "-m", "memopt", "estimate", "--quick", "--json", "--gpu", "200GiB", script]
    command += ["--model", model, "--length", str(length), *levers.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    answer = json.loads(ended.stdout)
    return {
        "live": answer["peak_allocated"] / GIB,
        "card": (answer["peak_reserved"] + answer["context"]) / GIB,
    }


def main() -> int:
    parser = harness.parser(__doc__)
    options: argparse.Namespace = parser.parse_args()
    report = harness.Report("bench_large_models", options)
    for model, card in CARDS.items():
        if options.quick and model != "1b":
            continue
        found = {name: taken(model, levers) for name, levers in LEVERS.items()}
        for what in ("live", "card"):
            values = {name: figures[what] for name, figures in found.items()}
            title = "live bytes at the peak" if what == "live" else "memory of the card"
            report.record(f"{title}, a Llama of {model}, 4096 tokens", values, unit="GiB")
        report.record(
            f"memory of the card, a Llama of {model}, all levers",
            {"card": card, "memopt": found["and states on the host"]["card"]},
            unit="GiB",
            peer="card",
            goal=1.0,
        )
    if not options.quick:
        plain, fused = (taken("8b", levers, 32768)["live"] for levers in ("--state-bits 8 --offload-gradients "
                        "--offload-states", LEVERS["and states on the host"]))  # fmt: skip
        report.record(
            "live bytes at the peak, a Llama of 8b, 32768 tokens",
            {"plain head": plain, "fused head": fused},
            unit="GiB",
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
