"""States of 8 and 4 bits in training: the loss of AdamW with fp32 states, with memopt's of 8 and of 4 bits, and with
the 8-bit map that bitsandbytes uses, at the end of the same training with the same data, for several seeds.

The task is gpt-small (tasks.py), at its learning rate falling to 0 by a cosine. The map is "dynamic tree quantization"
from "8-bit Optimizers via Block-wise Quantization" (Dettmers, Lewis, Shleifer, Zettlemoyer, 2021): codes of a sign, an
exponent of ten in unary, and a fraction; scaled by the largest magnitude of each 256 elements, and rounded to the
nearest. As there, and as in memopt, tensors under 4096 elements keep fp32 states.

Muon is trained too, with fp32 and with 8-bit momentum, for fewer seeds: its products in bf16 take a CPU long. It has
the matrices of the blocks, at AdamW's learning rate (`match_rms_adamw`); AdamW has the rest.

With `--resume` finished trainings are kept on disk, and a run that was cut off goes on after them. `--cuda` trains on
the GPU; the losses are of another machine then, but to be compared in the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import memopt.optim  # noqa: E402
from benchmarks import harness, tasks  # noqa: E402
from benchmarks.round_log import LineLog  # noqa: E402

BLOCK, MIN_SIZE = 256, 4096
BETAS, EPS = (0.9, 0.999), 1e-8
WITHIN = 0.01  # of the loss with fp32 states
WITHIN_4BIT = 0.002  # nats
FP32, OURS, FOUR, PEER = "fp32 states", "memopt, 8-bit states", "memopt, 4-bit states", "dynamic map"
MUON, MUON8 = "Muon, fp32 momentum", "Muon, 8-bit momentum"
MUON_SEEDS = 2  # at the most
FACTORED, FOUR_FACTORED = "memopt, factored", "memopt, 4-bit states, factored"


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of a code, ascending: 0, 1, and in each of seven powers of ten the middles of 1, 2, 4 … 64 equal
    parts of [0.1, 1] (twice as many without a sign)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (i + 0.5) / parts) for i in range(parts)]
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


class Coded:
    """A tensor kept as codes of a map and the largest magnitude of each block."""

    def __init__(self, n: int, codebook: Tensor) -> None:
        self.n, self.codebook = n, codebook
        self.middles = (codebook[1:] + codebook[:-1]) / 2
        self.codes, self.scales = self.encode(torch.zeros(n, device=codebook.device))

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = torch.nn.functional.pad(values, (0, -self.n % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True)
        codes = torch.bucketize(blocks / scales.where(scales > 0, 1), self.middles)
        return codes.to(torch.uint8), scales

    def decode(self) -> Tensor:
        return (self.codebook[self.codes.int()] * self.scales).flatten()[: self.n]


class DynamicMapAdamW(torch.optim.Optimizer):
    """AdamW whose moments pass through the map from step to step. Plain operations: its speed is nobody's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group["lr"], group["weight_decay"])

    def _update(self, p: Tensor, state: dict[str, Any], lr: float, weight_decay: float) -> None:
        coded = p.numel() >= MIN_SIZE
        if not state:
            state["step"], state["moments"] = 0, [torch.zeros(p.numel(), device=p.device) for _ in BETAS]
            if coded:
                maps = [dynamic_map(signed).to(p.device) for signed in (True, False)]
                state["moments"] = [Coded(p.numel(), codebook) for codebook in maps]
        state["step"] += 1
        m, v = (kept.decode() if coded else kept for kept in state["moments"])
        grad = p.grad.flatten()
        m.lerp_(grad, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        corrections = [1 - beta ** state["step"] for beta in BETAS]
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + EPS)
        p.mul_(1 - lr * weight_decay).add_(update.view_as(p), alpha=-lr)
        if coded:
            for kept, values in zip(state["moments"], (m, v), strict=True):
                kept.codes, kept.scales = kept.encode(values)


def with_muon(model: torch.nn.Module, lr: float, **options: int) -> list[torch.optim.Optimizer]:
    hidden = {p for p in model.get_submodule("blocks").parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if p in hidden]
    rest = [p for p in model.parameters() if p not in hidden]
    return [
        memopt.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(rest, lr=lr, fused=True),
    ]


def with_adamw(model: torch.nn.Module, lr: float, **options: Any) -> list[torch.optim.Optimizer]:
    return [memopt.optim.AdamW(model.parameters(), lr=lr, **options)]


OPTIMIZERS: dict[str, Callable[[torch.nn.Module, float], list[torch.optim.Optimizer]]] = {
    FP32: lambda model, lr: [torch.optim.AdamW(model.parameters(), lr=lr, fused=True)],
    OURS: partial(with_adamw, state_bits=8),
    FOUR: partial(with_adamw, state_bits=4),
    FACTORED: partial(with_adamw, factored=True),
    FOUR_FACTORED: partial(with_adamw, state_bits=4, factored=True),
    PEER: lambda model, lr: [DynamicMapAdamW(model.parameters(), lr)],
    MUON: with_muon,
    MUON8: partial(with_muon, state_bits=8),
}


def train(task: tasks.Task, name: str, steps: int, device: str) -> dict[str, float]:
    """The held-out loss after the last step, and the mean loss of the last tenth of the steps."""
    model = task.build_model(device)
    optimizers = OPTIMIZERS[name](model, task.learning_rate)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, steps) for one in optimizers]
    losses, began = [], time.perf_counter()
    for batch in task.batches(steps, device):
        model.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, steps // 10) :]).mean().item()
    seconds = time.perf_counter() - began
    held_out = task.evaluate(model, steps=16)["loss"]
    if not math.isfinite(held_out):
        raise RuntimeError(f"{name}, seed {task.seed}: the loss is {held_out} after {steps} steps")
    return {"held-out loss": held_out, "training loss": last, "seconds a step": seconds / steps}


class Trainings:
    """Trains, or finds a training that an earlier run finished: in `path`, if there is one."""

    def __init__(self, path: Path | None, task: tasks.Task, steps: int, device: str) -> None:
        self.task, self.steps, self.device = task, steps, device
        self.log: LineLog | None = None
        if path is not None:
            key = {
                "task": task.metadata(),
                "steps": steps,
                "threads": torch.get_num_threads(),
                "device": device,
            }
            self.log = LineLog(path, json.loads(json.dumps(key)))
            if not self.log.header:
                self.log.begin()

    def result(self, name: str, seed: int) -> dict[str, float]:
        for line in self.log.lines if self.log else []:
            if (line["states"], line["seed"]) == (name, seed):
                found: dict[str, float] = line["result"]
                return found
        result = train(dataclasses.replace(self.task, seed=seed), name, self.steps, self.device)
        if self.log:
            self.log.add({"states": name, "seed": seed, "result": result})
        return result


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="of each training (400; 20 with --quick, of a model of 70,000 parameters)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (5)")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (2)")
    options: argparse.Namespace = parser.parse_args()
    steps = options.steps or (20 if options.quick else 400)
    torch.set_num_threads(options.threads)
    task = tasks.get("gpt", "small")
    if options.quick:
        shape = {"length": 32, "dim": 64, "layers": 1, "heads": 2}
        task = dataclasses.replace(task, batch_size=4, shape=tuple(shape.items()))
    report = harness.Report(
        "convergence_8bit",
        options,
        claim=f"8-bit states end within {WITHIN:.0%} of the loss with fp32 states, 4-bit ones within {WITHIN_4BIT}",
    )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in OPTIMIZERS}
    kept = harness.RESULTS / "rounds" / f"{report.name}.trainings.jsonl"
    trainings = Trainings(kept if options.resume else None, task, steps, report.device)
    for seed in range(options.seeds):
        for name, finished in runs.items():
            if name in (MUON, MUON8) and seed >= MUON_SEEDS:
                continue
            finished.append(trainings.result(name, seed))
            loss = finished[-1]["held-out loss"]
            print(f"seed {seed}, {name}: {loss:.4f}, {finished[-1]['seconds a step']:.3f} s a step",
                  file=sys.stderr)  # fmt: skip
    report.note("task", task.metadata())
    report.note("steps", steps)
    report.note("runs", runs)
    for figure in ("held-out loss", "training loss"):
        for seed in range(options.seeds):
            values = {name: finished[seed][figure] for name, finished in runs.items() if seed < len(finished)}
            report.record(f"{figure}, seed {seed}, after {steps} steps", values, unit="nats", peer=FP32)
        for peer, names in ((FP32, (FP32, OURS, FOUR, PEER)), (MUON, (MUON, MUON8))):
            means = {name: statistics.mean(run[figure] for run in runs[name]) for name in names}
            report.record(f"{figure}, mean of {len(runs[peer])} seeds{', Muon' * (peer == MUON)}", means,
                          unit="nats", peer=peer)  # fmt: skip
    # Of the held-out loss: 1 / 1.01 by ratio.
    means = {
        name: statistics.mean(run["held-out loss"] for run in finished) for name, finished in runs.items()
    }
    limit = {"limit": means[FP32] * (1 + WITHIN), OURS: means[OURS]}
    report.record("goal: mean held-out loss", limit, unit="nats", peer="limit", goal=1.0)
    limit = {"limit": means[FP32] + WITHIN_4BIT, FOUR: means[FOUR]}
    report.record("goal: mean held-out loss, 4 bits", limit, unit="nats", peer="limit", goal=1.0)
    limit = {"limit": means[MUON] * (1 + WITHIN), MUON8: means[MUON8]}
    report.record("goal: mean held-out loss, Muon", limit, unit="nats", peer="limit", goal=1.0)
    for name in (FACTORED, FOUR_FACTORED):
        limit = {"limit": means[FP32] + WITHIN_4BIT, name: means[name]}
        report.record(f"goal: mean held-out loss, {name}", limit, unit="nats", peer="limit", goal=1.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
