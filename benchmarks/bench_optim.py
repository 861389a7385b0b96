"""A whole clipped step of mixed precision: memopt's scaler and optimizers beside torch's GradScaler.unscale_,
clip_grad_norm_ and its fused optimizers.

AdamW in fp32 moves 32 bytes a parameter here: gradients are read for infs and norm, then gradient, parameter and both
moments are read and all but the gradient written. torch's pieces move 48. With states of 8 bits the step alone moves 16
for 28, with states of 4 bits 14; where second moments are factored it reads gradients twice, and moves 18 with first
moments of 8 bits. GB/s are these bytes over the time, and *bound* is torch's own mul_() of parameters,
gradients and moments in place: 32 bytes a parameter, the same memory.

A momentum of 8 bits is timed in SGD's step alone, where it is all, and in Muon's on the matrices of a Llama of 1B at a
quarter of its width, which are a few seconds of matrix products: its peer there is torch.optim.Muon.

The steps of 8 and 4 bits are timed with the best instruction set that the processor has and, in a process of its own,
with AVX2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import Parameter  # noqa: E402

import memopt.amp  # noqa: E402
import memopt.optim  # noqa: E402
from benchmarks import harness, parameter_sets  # noqa: E402
from benchmarks.comparison import Comparison, Figure  # noqa: E402
from benchmarks.environment import isa  # noqa: E402
from benchmarks.parameter_sets import Bound, Shapes, clip_to, count, describe, grads, make  # noqa: E402

CASES = ("adamw", "sgd", "bits8", "momentum")
GOAL = {"gpt": 1.5, "many": 3.5, "tiny": 10.0}  # of the clipped step with AdamW on the CPU
GOAL_CUDA = {"gpt": 1.5}
SHARE, SHARE_CUDA = 0.85, 0.90  # of the bound, of the same step
GOAL_8BIT = {"avx512": 1.4, "avx2": 1.0}
GOAL_4BIT = 1 / 1.2  # of the step of 8 bits
STATE_BYTES = {8: 2.1, 4: 1.06}
MOMENTUM_BYTES = 1.02
GOAL_MUON = 0.95  # of torch's step
STATE_BYTES_FACTORED = 0.55  # with first moments of 4 bits
GOAL_FACTORED = 1 / 1.2  # of the step of 8 bits

ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
SGD = {"lr": 1e-3, "momentum": 0.9}


class Pieces:
    """The step as torch's calls, with torch's classes or memopt's."""

    def __init__(
        self,
        shapes: Shapes,
        device: str,
        optimizer: Callable[[list[Parameter]], Any],
        scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler,
        clip: Callable[[list[Parameter], float], Tensor] = torch.nn.utils.clip_grad_norm_,
    ) -> None:
        self.parameters, self.max_norm, self.clip = make(shapes, device), clip_to(shapes), clip
        self.optimizer = optimizer(self.parameters)
        self.scaler = parameter_sets.scaler(scaler, device)

    def __call__(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip(self.parameters, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class OneCall(Pieces):
    """memopt's single call, on the parameters and states of another contender."""

    def __init__(self, same: Pieces) -> None:
        self.__dict__.update(same.__dict__)

    def __call__(self) -> None:
        self.scaler.step(self.optimizer, max_norm=self.max_norm)
        self.scaler.update()


def states(optimizer: torch.optim.Optimizer, parameters: list[Parameter]) -> list[Tensor]:
    """The tensors that are as long as their parameter."""
    return [
        s
        for p in parameters
        for s in optimizer.state[p].values()
        if isinstance(s, Tensor) and s.shape == p.shape
    ]


def clipped_step(
    report: harness.Report,
    name: str,
    shapes: Shapes,
    kind: str,
    arguments: dict[str, float],
    moved_bytes: tuple[float, float],
    goals: dict[str, float],
    share: float | None,
) -> None:
    theirs, ours = getattr(torch.optim, kind), getattr(memopt.optim, kind)
    torchs = Pieces(shapes, report.device, lambda p: theirs(p, fused=True, **arguments))
    drop_in = Pieces(
        shapes,
        report.device,
        lambda p: ours(p, **arguments),
        memopt.amp.GradScaler,
        memopt.amp.clip_grad_norm_,
    )
    one_call = OneCall(drop_in)
    for step in (torchs, torchs, drop_in, one_call):
        step()
    parameter_sets.assert_equal_work(f"{kind}, {name}", torchs.parameters, drop_in.parameters)
    contenders: dict[str, Callable[[], object]] = {
        "torch": torchs,
        "memopt": one_call,
        "memopt, torch's calls": drop_in,
    }
    fewer, more = moved_bytes
    moved = {"torch": more * count(shapes), "memopt": fewer * count(shapes)}
    moved["memopt, torch's calls"] = moved["torch"]
    if name == "gpt":
        held = touched(drop_in)
        bound = Bound(read_and_write=held)
        contenders["bound"], moved["bound"] = bound, bound.bytes
    goal = {"memopt": goals[name]} if name in goals else None
    found = report.compare(
        f"unscale, clip and {kind}, {describe(shapes)}", contenders, goal=goal, moved=moved
    )
    if "bound" in contenders:
        report.record_share(found, "memopt", "bound", goal=share)


def touched(step: Pieces) -> list[Tensor]:
    """All that a step touches."""
    return [*step.parameters, *grads(step.parameters), *states(step.optimizer, step.parameters)]


def adamw(report: harness.Report, name: str, shapes: Shapes) -> None:
    goals, share = (GOAL_CUDA, SHARE_CUDA) if report.options.cuda else (GOAL, SHARE)
    clipped_step(report, name, shapes, "AdamW", ADAMW, (32.0, 48.0), goals, share)


def sgd(report: harness.Report, name: str, shapes: Shapes) -> None:
    """With momentum: 24 bytes for 40."""
    clipped_step(report, name, shapes, "SGD", SGD, (24.0, 40.0), {}, None)


def bits8(report: harness.Report, name: str, shapes: Shapes) -> None:
    """step() alone, no scaler."""
    parameters = make(shapes, report.device)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "torch, fused": torch.optim.AdamW(make(shapes, report.device), fused=True, **ADAMW),
        "memopt": memopt.optim.AdamW(parameters, **ADAMW),
        "memopt, 8-bit states": memopt.optim.AdamW(parameters, state_bits=8, **ADAMW),
        "memopt, 4-bit states": memopt.optim.AdamW(parameters, state_bits=4, **ADAMW),
        "memopt, 8-bit states, factored": memopt.optim.AdamW(
            parameters, state_bits=8, factored=True, **ADAMW
        ),
        "memopt, 4-bit states, factored": memopt.optim.AdamW(
            parameters, state_bits=4, factored=True, **ADAMW
        ),
        "torch, Adafactor": torch.optim.Adafactor(make(shapes, report.device), lr=1e-3, foreach=True),
    }
    for optimizer in optimizers.values():
        optimizer.step()
    eight, four = "memopt, 8-bit states", "memopt, 4-bit states"
    factored = f"{eight}, factored"
    where = report.device if report.options.cuda else isa()
    goal = None if report.options.cuda else GOAL_8BIT.get(isa())
    n = count(shapes)
    moved = {"torch, fused": 28.0 * n, "memopt": 28.0 * n, eight: 16.0 * n, four: 14.0 * n}
    moved |= {factored: 18.0 * n, f"{four}, factored": 17.0 * n}  # gradients twice
    found = report.compare(
        f"AdamW's step alone, {where}, {describe(shapes)}",
        {contender: optimizer.step for contender, optimizer in optimizers.items()},
        goal=None if goal is None else {eight: goal},
        moved=moved,
    )
    for limit, contender, named in (
        (STATE_BYTES[8], eight, ""),
        (STATE_BYTES[4], four, ", 4 bits"),
        (STATE_BYTES_FACTORED, f"{four}, factored", ", 4 bits and factored"),
    ):
        held = {p: s for p, s in optimizers[contender].state.items() if p.numel() >= 4096}
        nbytes = sum(t.nbytes for s in held.values() for t in s.values() if isinstance(t, Tensor))
        report.record(
            f"goal: bytes of state a parameter, in tensors of 4096 and more, {where}{named}",
            {"limit": limit, contender: nbytes / sum(p.numel() for p in held)},
            unit="bytes",
            peer="limit",
            goal=1.0,
        )
    for contender, least, named in ((four, GOAL_4BIT, ""), (factored, GOAL_FACTORED, ", factored")):
        ratios = [turn.seconds[contender] / turn.seconds[eight] for turn in found.rounds]
        report.record(
            f"goal: time of AdamW's step alone{named}, {where}, {describe(shapes)}",
            {eight: 1.0, contender: statistics.median(ratios)},
            unit="of the step of 8 bits",
            peer=eight,
            goal=least,
        )


def llama(width: int, layers: int) -> Shapes:
    """The matrices of the layers of a Llama 3.2 1B, whose width is 2048."""
    layer = [(width, width), (width // 4, width), (width // 4, width), (width, width)]
    layer += [(4 * width, width), (4 * width, width), (width, 4 * width)]
    return layer * layers


def momentum(report: harness.Report, name: str, shapes: Shapes) -> None:
    """step() alone, no scaler: of SGD on these, of Muon on matrices."""
    matrices = llama(*((64, 1) if report.options.quick else (512, 2)))
    eight = "memopt, 8-bit momentum"
    n = count(shapes)
    moved = {"torch": 20.0 * n, "memopt": 20.0 * n, eight: 14.0 * n}
    where = report.device if report.options.cuda else isa()
    for kind, sizes, options, theirs in (
        ("SGD", shapes, SGD, {"fused": True}),
        ("Muon", matrices, {"lr": 1e-3}, {}),
    ):
        ours = getattr(memopt.optim, kind)
        optimizers: dict[str, torch.optim.Optimizer] = {
            "torch": getattr(torch.optim, kind)(make(sizes, report.device), **options, **theirs),
            "memopt": ours(make(sizes, report.device), **options),
            eight: ours(make(sizes, report.device), state_bits=8, **options),
        }
        for optimizer in optimizers.values():
            optimizer.step()
        report.compare(
            f"{kind}'s step alone, {where}, {describe(sizes)}",
            {contender: optimizer.step for contender, optimizer in optimizers.items()},
            goal={eight: GOAL_MUON} if kind == "Muon" else None,
            moved=moved if kind == "SGD" else {},
        )
        held = {p: s for p, s in optimizers[eight].state.items() if p.numel() >= 4096}
        nbytes = sum(t.nbytes for s in held.values() for t in s.values() if isinstance(t, Tensor))
        report.record(
            f"goal: bytes of {kind}'s momentum a parameter, in tensors of 4096 and more",
            {"limit": MOMENTUM_BYTES, eight: nbytes / sum(p.numel() for p in held)},
            unit="bytes",
            peer="limit",
            goal=1.0,
        )


def with_avx2(report: harness.Report, options: argparse.Namespace) -> None:
    """Has a process of its own do bits8 with MEMOPT_ISA=avx2, and takes over what it finds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "avx2.json"
        command = [sys.executable, __file__, "--only", "bits8", "--sets", "gpt", "-o", str(output), "--json"]
        command += ["--rounds", str(report.rounds), "--threads", str(options.threads)]
        command += ["--quick"] if options.quick else []
        done = subprocess.run(
            command, env={**os.environ, "MEMOPT_ISA": "avx2"}, capture_output=True, text=True
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(
                f"bench_optim with MEMOPT_ISA=avx2 ended with {done.returncode}:\n{done.stderr}"
            )
        found = json.loads(output.read_text())
    report.entries += [Comparison.from_dict(saved) for saved in found["comparisons"]]
    names = [f.name for f in fields(Figure)]
    report.entries += [
        Figure(**{name: saved[name] for name in names})
        for saved in found["figures"]
        if "time" in saved["case"]
    ]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        default=CASES,
        help="clipped steps, the steps of 8 and 4 bits, momentum",
    )
    parser.add_argument("--sets", nargs="+", choices=parameter_sets.SETS, default=list(parameter_sets.SETS))
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (2)")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = parameter_sets.QUICK_SETS if options.quick else parameter_sets.SETS

    report = harness.Report(
        "bench_optim", options, claim="a clipped step of AdamW in 32 bytes a parameter, not 48"
    )
    report.note("threads", options.threads)
    report.note("instruction set", isa())
    for name in options.sets:
        for case, run in (("adamw", adamw), ("sgd", sgd), ("bits8", bits8), ("momentum", momentum)):
            if case in options.only and (case in ("adamw", "sgd") or name == "gpt"):
                run(report, name, sets[name])
                gc.collect()
    if "bits8" in options.only and "gpt" in options.sets and not options.cuda and isa() == "avx512":
        gc.collect()
        with_avx2(report, options)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
