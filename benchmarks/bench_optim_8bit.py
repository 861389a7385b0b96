"""Training with optimizer states of 8 bits: the final loss beside fp32 states, and the bytes that the states take.

AdamW on the character GPT and on the digits CNN, the same weights and batches for both; learning rate by a cosine to 0,
gradients clipped to norm 1. Held-out loss at the end, mean of three seeds; the claim is within 1 % of fp32 states.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import harness
import tasks
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import memopt.optim

LOSS = 1.01
BYTES = 2.1


def train(task: tasks.Task, steps: int, seed: int, device: str, **options: int) -> tuple[float, float]:
    """The held-out loss after so many steps, and bytes of state a parameter, of those that are large enough."""
    task = replace(task, seed=seed)
    model = task.build_model(device)
    optimizer = memopt.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for batch in task.batches(steps, device):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    large = [p for p in model.parameters() if p.numel() >= 4096]
    taken = sum(v.nbytes for p in large for v in optimizer.state[p].values())
    return task.evaluate(model, 16)["loss"], taken / sum(p.numel() for p in large)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, help="steps of each run (GPT 1000, CNN 400; 60 with --quick)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=["gpt", "cnn"], help="one of the two")
    options = parser.parse_args()
    report = harness.Report("bench_optim_8bit", options, claim="8-bit states learn as fp32 states do")
    for kind, usual in (("cnn", 400), ("gpt", 1000)):
        if options.task not in (None, kind) or (options.quick and kind == "gpt"):
            continue
        task, steps = tasks.get(kind), options.steps or (60 if options.quick else usual)
        found: dict[str, list[tuple[float, float]]] = {"fp32": [], "8 bits": []}
        for seed in range(options.seeds):
            for name, bits in (("fp32", 32), ("8 bits", 8)):
                found[name].append(train(task, steps, seed, report.device, state_bits=bits))
        losses = {name: sum(loss for loss, _ in runs) / len(runs) for name, runs in found.items()}
        case = f"held-out loss of {task.name}, {steps} steps, mean of {options.seeds} seeds"
        report.record(case, losses, unit="nats", peer="fp32", goal=1 / LOSS)
        report.record(
            f"state of {task.name}, parameters of 4096 elements and more",
            {name: runs[0][1] for name, runs in found.items()},
            unit="bytes/parameter",
            peer="fp32",
            goal=8 / BYTES,
        )
        report.note(task.name, {"task": task.metadata(), "steps": steps, "runs": found})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
