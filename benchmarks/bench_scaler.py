"""Unscaling and clipping of gradients: memopt.amp beside torch's GradScaler.unscale_, the op that it calls, and
clip_grad_norm_.

Gradients are unscaled and clipped in 12 bytes an fp32 element: read once for infs and norm, then read and written.
torch's pieces move 20: read and written, read, read and written. GB/s are those bytes over the time, and *bound* is a
pass over the same gradients that moves 12 by torch's own sum() and mul_(). What is timed is what a training loop calls,
update() included; see parameter_sets.py for the gradients.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import memopt.amp  # noqa: E402
from benchmarks import environment, harness, parameter_sets  # noqa: E402
from benchmarks.parameter_sets import Bound, Shapes, clip_to, count, describe, grads, make  # noqa: E402

CASES = ("both", "unscale", "clip")
GOAL = {"gpt": 3.3}  # of unscaling and clipping on the CPU
GOAL_CUDA = {"gpt": 1.5}
LOSS = 0.99  # of the norm with each call, where clipping alone is timed: so that every one clips


Clip = Callable[[list[torch.nn.Parameter], float], Tensor]


class Stock:
    """unscale_() and clip_grad_norm_(), of torch or with torch's signatures."""

    def __init__(
        self,
        shapes: Shapes,
        device: str,
        scaler: type[torch.amp.GradScaler] = torch.amp.GradScaler,
        clip: Clip = torch.nn.utils.clip_grad_norm_,
    ) -> None:
        self.parameters, self.max_norm = make(shapes, device), clip_to(shapes)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.scaler = parameter_sets.scaler(scaler, device)
        self.clip = clip

    def __call__(self) -> None:
        self.scaler.unscale_(self.optimizer)
        self.clip(self.parameters, self.max_norm)
        self.scaler.update()


class OneCall(Stock):
    """memopt's single call, on the gradients of another contender."""

    def __init__(self, same: Stock, device: str) -> None:
        self.parameters, self.max_norm, self.optimizer = same.parameters, same.max_norm, same.optimizer
        self.scaler = parameter_sets.scaler(memopt.amp.GradScaler, device)

    def __call__(self) -> None:
        self.scaler.unscale_and_clip_(self.optimizer, self.max_norm)
        self.scaler.update()


def unscale_and_clip(report: harness.Report, name: str, shapes: Shapes) -> None:
    device, n = report.device, count(shapes)
    torchs = Stock(shapes, device)
    drop_in = Stock(shapes, device, memopt.amp.GradScaler, memopt.amp.clip_grad_norm_)
    ours = OneCall(drop_in, device)
    torchs()
    ours()
    parameter_sets.assert_equal_work(name, grads(torchs.parameters), grads(ours.parameters))
    contenders: dict[str, Callable[[], object]] = {
        "torch": torchs,
        "memopt": ours,
        "memopt, torch's calls": drop_in,
    }
    moved = {"torch": 20.0 * n, "memopt": 12.0 * n, "memopt, torch's calls": 20.0 * n}
    if name == "gpt":
        held = grads(ours.parameters)
        bound = Bound(held, held)
        contenders["bound"], moved["bound"] = bound, bound.bytes
    goal = (GOAL_CUDA if report.options.cuda else GOAL).get(name)
    found = report.compare(
        f"unscale and clip, {describe(shapes)}",
        contenders,
        goal=None if goal is None else {"memopt": goal},
        moved=moved,
    )
    if "bound" in contenders:
        report.record_share(found, "memopt", "bound")


class Passes:
    """The op alone, by 2 and then by 1/2."""

    def __init__(self, op: Callable[..., None], shapes: Shapes, device: str) -> None:
        self.op, self.grads = op, grads(make(shapes, device))
        self.found_inf = torch.zeros((), device=device)
        self.factors = [torch.tensor(value, device=device) for value in (2.0, 0.5)]

    def __call__(self) -> None:
        for factor in self.factors:
            self.op(self.grads, self.found_inf, factor)


def unscale(report: harness.Report, name: str, shapes: Shapes) -> None:
    torchs = Passes(torch._amp_foreach_non_finite_check_and_unscale_, shapes, report.device)
    ours = Passes(memopt.amp.foreach_unscale_, shapes, report.device)
    contenders: dict[str, Callable[[], object]] = {"torch": torchs, "memopt": ours}
    moved = dict.fromkeys(contenders, 16.0 * count(shapes))
    if name == "gpt":
        bound = Bound(read_and_write=ours.grads * 2)
        contenders["bound"], moved["bound"] = bound, bound.bytes
    found = report.compare(f"foreach_unscale_, two passes, {describe(shapes)}", contenders, moved=moved)
    if name == "gpt":
        report.record_share(found, "memopt", "bound")


class Clipping:
    """clip_grad_norm_ to a norm that falls from call to call, or to one that gradients never reach."""

    def __init__(self, clip: Clip, shapes: Shapes, device: str, dtype: torch.dtype, clips: bool) -> None:
        self.parameters, self.clip = make(shapes, device, dtype), clip
        self.max_norm, self.loss = (clip_to(shapes), LOSS) if clips else (4 * clip_to(shapes), 1.0)

    def __call__(self) -> None:
        self.max_norm *= self.loss
        self.clip(self.parameters, self.max_norm)


def clip(report: harness.Report, name: str, shapes: Shapes) -> None:
    functions: dict[str, Clip] = {
        "torch": torch.nn.utils.clip_grad_norm_,
        "memopt": memopt.amp.clip_grad_norm_,
    }
    for dtype, clips in (
        (torch.float32, True),
        (torch.float32, False),
        (torch.float16, True),
        (torch.bfloat16, True),
    ):
        size = count(shapes) * dtype.itemsize
        made = {who: Clipping(f, shapes, report.device, dtype, clips) for who, f in functions.items()}
        contenders: dict[str, Callable[[], object]] = {**made}
        moved = {"torch": 3.0 * size, "memopt": (3.0 if clips else 1.0) * size}
        if dtype is torch.float32:
            held = grads(made["memopt"].parameters)
            bound = Bound(held, held if clips else ())
            contenders["bound"], moved["bound"] = bound, bound.bytes
        kind = str(dtype).removeprefix("torch.")
        report.compare(
            f"clip_grad_norm_ that {'clips' if clips else 'need not clip'}, {kind}, {describe(shapes)}",
            contenders,
            moved=moved,
            calls=1 if clips else None,
        )
        del made, contenders
        gc.collect()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=CASES, help="unscaling and clipping, one alone"
    )
    parser.add_argument("--sets", nargs="+", choices=parameter_sets.SETS, default=list(parameter_sets.SETS))
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU (2)")
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = parameter_sets.QUICK_SETS if options.quick else parameter_sets.SETS

    report = harness.Report(
        "bench_scaler", options, claim="gradients are unscaled and clipped in 12 bytes, not 20"
    )
    report.note("threads", options.threads)
    report.note("instruction set", environment.isa())
    for name in options.sets:
        for case, run in (("both", unscale_and_clip), ("unscale", unscale), ("clip", clip)):
            if case in options.only and (case != "clip" or name == "gpt"):
                run(report, name, sets[name])
                gc.collect()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
