"""The device memory of full fine-tuning with AdamW and exact clipping: Llamas of three sizes with memopt's levers one
after another, as `memopt estimate` sees them.

Whole models, checkpointed by block, on a simulated card with torch's own allocator. Memory of the card is what the
process takes where there is plenty: reserved memory and the context. Each model is then run on a card that is said."""

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
FUSED = "--state-bits 8 --fused-head"
LEVERS = {
    "torch": "",
    "8-bit states": "--state-bits 8",
    "and a fused head": FUSED,
    "and gradients on the host": f"{FUSED} --offload-gradients",
    "and states on the host": f"{FUSED} --offload-gradients --offload-states",
    "4-bit states, gradients on the host": "--state-bits 4 --fused-head --offload-gradients",
    "… factored": "--state-bits 4 --factored --fused-head --offload-gradients",
}
HOST = "and states on the host"
LONG = {
    "plain head": "--state-bits 8",
    "fused head": FUSED,
    "and blocks' inputs on the host": f"{FUSED} --offload-activations",
}
MODELS = {  # options, the card in GiB, and with what it is to do
    "1b in mixed precision": ("--model 1b --amp", 12, HOST),
    "7b": ("--model 7b", 24, "4-bit states, gradients on the host"),
    "8b": ("--model 8b", 20, HOST),
}


def estimated(options: str, card: int = 200) -> dict[str, float]:
    """Return GiB: of live bytes at the peak, and of all that the process takes of the card. Ends where it does not
    fit."""
    command = [sys.executable, "-m", "memopt", "estimate", "--quick", "--json", "--gpu", f"{card}GiB"]
    command += [str(ROOT / "benchmarks" / "llama_train.py"), *options.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    answer = json.loads(ended.stdout)
    return {
        "live": answer["allocated_bytes"][0] / GIB,
        "card": (answer["reserved_bytes"][0] + answer["context_bytes"]) / GIB,
    }


def main() -> int:
    parser = harness.parser(__doc__)
    options: argparse.Namespace = parser.parse_args()
    report = harness.Report("bench_large_models", options)

    def record(model: str, found: dict[str, dict[str, float]]) -> None:
        for what, title in (("live", "live bytes at the peak"), ("card", "memory of the card")):
            values = {lever: figures[what] for lever, figures in found.items()}
            report.record(f"{title}, {model}", values, unit="GiB")

    for name, (model, card, levers) in MODELS.items():
        if options.quick and card != 12:
            continue
        record(
            f"a Llama of {name}, 4096 tokens",
            {lever: estimated(f"{model} {more}") for lever, more in LEVERS.items()},
        )
        report.record(
            f"live bytes at the peak on a card of {card} GiB, a Llama of {name}, {levers}",
            {"card": card, "memopt": estimated(f"{model} {LEVERS[levers]}", card)["live"]},
            unit="GiB",
            peer="card",
            goal=1.0,
        )
    if not options.quick:
        long = "--model 8b --length 32768 --offload-gradients --offload-states"
        record(
            "a Llama of 8b, 32768 tokens",
            {lever: estimated(f"{long} {more}") for lever, more in LONG.items()},
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
