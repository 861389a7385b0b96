"""Checkpointing beside torch.utils.checkpoint on the CPU: what a region costs over the plain one, and what a step costs
in the same memory.

Regions: they are tiny, so that what is timed is bookkeeping; a second run of the function is part of it, for both. The
microseconds over the plain region are taken within a round, as the ratios are.

Steps (a chain of convolutions, a GPT, a ViT; two threads): torch's ways are checkpoint_sequential at every number of
segments, a region for every k blocks, and selective checkpointing of each block. A peak is that of live bytes,
what kernels take to work in among them, measured in a step. A first pass times each way twice; one that another beats
in less memory is left out of the rounds. memopt.auto_checkpoint has each other's measured peak for its budget, and 85 %
of it, and is timed with them by turns.

Gradients are compared before anything is timed."""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.utils.checkpoint as torchs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import checkpoint_models, checkpoint_peers, harness, scatter  # noqa: E402
from benchmarks.checkpoint_models import Work  # noqa: E402
from benchmarks.comparison import Comparison, Round  # noqa: E402
from memopt import auto_checkpoint, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from memopt.chain import InfeasibleBudget  # noqa: E402

GOAL = 110 / 30  # torch's microseconds on an idle machine over what memopt's are to be

STEPS = ("conv chain", "GPT", "ViT")
FASTER = {"conv chain": 1.15, "GPT": 1.05}  # than torch's best way, in its memory
LESS = 0.85  # of that memory, in which a GPT's step is to take no longer
MIB = 1 << 20

Function = Callable[[torch.Tensor], torch.Tensor]


def four_operations() -> tuple[Function, torch.Tensor]:
    """Five tensors saved."""
    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    return lambda a: torch.sin(torch.tanh(a @ w) * a).sum(), x


def block(dim: int, tokens: int) -> tuple[Function, torch.Tensor]:
    """A transformer's, of which one forward and backward pass takes a millisecond or more."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
    return lambda a: layer(a).sum(), torch.randn(1, tokens, dim, requires_grad=True)


def ways(function: Function, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    def selective(contexts: Callable[..., object]) -> Callable[..., object]:
        return functools.partial(contexts, [torch.ops.aten.mm.default])

    def of(call: Callable[..., torch.Tensor], **options: object) -> Callable[[], torch.Tensor]:
        return lambda: call(function, x, **options)

    return {
        "plain": lambda: function(x),
        "torch": of(torchs.checkpoint, use_reentrant=False),
        "memopt": of(checkpoint, use_reentrant=False),
        "torch, reentrant": of(torchs.checkpoint, use_reentrant=True),
        "memopt, reentrant": of(checkpoint, use_reentrant=True),
        "torch, selective": of(
            torchs.checkpoint,
            use_reentrant=False,
            context_fn=selective(torchs.create_selective_checkpoint_contexts),
        ),
        "memopt, selective": of(
            checkpoint, use_reentrant=False, context_fn=selective(create_selective_checkpoint_contexts)
        ),
    }


def check_equal_work(forwards: dict[str, Callable[[], torch.Tensor]], x: torch.Tensor) -> None:
    gradients = {}
    for name, forward in forwards.items():
        x.grad = None
        torch.manual_seed(1)
        forward().backward()
        gradients[name] = x.grad
    for name, gradient in gradients.items():
        if not torch.equal(gradient, gradients["plain"]):
            raise SystemExit(f"bench_checkpoint: the gradients of {name!r} are not the plain run's")


def regions(report: harness.Report) -> None:
    torch.set_num_threads(1)
    cases = {
        "a region of four operations": four_operations(),
        "a block of a transformer, 64 wide, 16 tokens": block(64, 16),
    }
    for case, (function, x) in cases.items():
        forwards = ways(function, x)
        check_equal_work(forwards, x)
        runs = {name: (lambda forward=forward: forward().backward()) for name, forward in forwards.items()}
        done = report.compare(case, runs, peer="torch")
        for kind in ("", ", reentrant", ", selective"):
            over = {
                who: statistics.median(
                    turn.seconds[f"{who}{kind}"] - turn.seconds["plain"] for turn in done.rounds
                )
                for who in ("torch", "memopt")
            }
            report.record(
                f"over the plain region{kind}: {case}",
                {who: seconds * 1e6 for who, seconds in over.items()},
                unit="µs",
                peer="torch",
                goal=GOAL if not kind and "four" in case else None,
            )


# ---- steps --------------------------------------------------------------------------------------------------------


def gradients(work: Work) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    work.step()
    return [parameter.grad for parameter in work.model.parameters()]


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work.step()
    return time.perf_counter() - start


def check(name: str, found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    pairs = zip(found, expected, strict=True)
    if not all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    ):
        raise SystemExit(f"bench_checkpoint: the gradients of {name!r} are not the plain run's")


def undominated(peaks: dict[str, int], times: dict[str, float]) -> list[str]:
    """Without those that another, the plain step maybe, beats by 3 % in no more memory."""
    return [a for a in peaks if not any(peaks[b] <= peaks[a] and times[b] < 0.97 * times[a] for b in peaks)]


def steps(report: harness.Report, family: str, *, small: bool) -> scatter.Panel:
    torch.set_num_threads(2)
    plain = checkpoint_models.make(family, small=small)
    expected = gradients(plain)
    stock = {name: checkpoint_peers.work_by(plain, way) for name, way in checkpoint_peers.ways(plain).items()}
    for name, work in stock.items():
        check(name, gradients(work), expected)
    peaks = {name: work.live_peak() for name, work in stock.items()}
    first = {name: min(seconds(work), seconds(work)) for name, work in stock.items()}
    peaks = {"plain": plain.live_peak(), **peaks}
    first["plain"] = min(seconds(plain), seconds(plain))
    chosen = [name for name in undominated(peaks, first) if peaks[name] < peaks["plain"]]
    works = {"plain": plain, **{name: stock[name] for name in chosen}}
    ours: dict[tuple[str, float], str] = {}
    for name in chosen:
        for share in (1.0, LESS):
            work = replace(plain, model=copy.deepcopy(plain.model))
            try:
                auto_checkpoint(
                    work.model, work.sample, memory_budget=int(share * peaks[name]), loss=work.loss
                )
            except InfeasibleBudget:
                continue
            label = f"memopt, {'as much as' if share == 1 else f'{share:.0%} of'} {name}"
            check(label, gradients(work), expected)
            works[label], peaks[label] = work, work.live_peak()
            ours[name, share] = label
            if peaks[label] > share * peaks[name]:
                raise SystemExit(f"bench_checkpoint: {label} peaks at {peaks[label]} bytes, above its budget")
    case = f"a step of a {family}"
    done = report.compare(case, {name: work.step for name, work in works.items()}, peer="plain", calls=1)
    report.record(
        f"measured peak of {case}", {name: peaks[name] / MIB for name in works}, unit="MiB", peer="plain"
    )
    report.note(
        f"{family}: seconds and peak bytes of all of torch's ways, best of two",
        {n: [first[n], peaks[n]] for n in first},
    )
    pair_up(report, family, done, chosen, ours)
    middle = {name: done.seconds(name).median for name in works}
    return scatter.Panel(
        f"{family}: seconds a step, MiB",
        [
            scatter.Series(
                label,
                [(peaks[n] / MIB, middle[n]) for n in works if n.startswith(start)],
                line=start == "memopt",
            )
            for label, start in (
                ("plain", "plain"),
                ("checkpoint_sequential", "checkpoint_sequential"),
                ("checkpoint, every k blocks", "checkpoint,"),
                ("selective", "selective"),
                ("memopt.auto_checkpoint", "memopt"),
            )
        ],
    )


def pair_up(
    report: harness.Report,
    family: str,
    done: Comparison,
    chosen: list[str],
    ours: dict[tuple[str, float], str],
) -> None:
    """Each of torch's ways beside memopt in its memory, round by round; the goal is asked of the fastest one."""
    candidates = [n for n in chosen if family != "conv chain" or n.startswith("checkpoint_sequential")]
    best = min(candidates, key=lambda name: done.seconds(name).median)
    scores = []
    for (name, share), label in ours.items():
        if share != 1 and name != best:
            continue
        which = "torch's fastest way" if name == best else "another of torch's"
        rounds = [
            Round(
                [n for n in turn.order if n in (name, label)],
                {n: turn.seconds[n] for n in (name, label)},
                turn.load,
            )
            for turn in done.rounds
        ]
        pair = Comparison(
            f"a step of a {family} in {share:.0%} of the memory of {which}",
            name,
            done.clock,
            {name: 1, label: 1},
            rounds,
            done.load_before,
            goal=FASTER["conv chain"] if family == "conv chain" and name == best and share == 1 else None,
        )
        report.entries.append(pair)
        if name == best:
            ratio = statistics.median(pair.ratios(label))
            scores.append(ratio / FASTER["GPT"] if share == 1 else ratio)
    if family == "GPT" and scores:
        report.record(
            "a step of a GPT: 5 % faster in the same memory, or as fast in 85 % of it, the better of the two",
            {best: max(scores), "memopt": 1.0},
            unit="of the goal",
            goal=1.0,
        )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--only", choices=("regions", *STEPS), help="run one part; results are not kept but by -o"
    )
    options: argparse.Namespace = parser.parse_args()
    if options.cuda:
        raise SystemExit("bench_checkpoint runs on the CPU: leave --cuda out")
    small = options.quick
    if options.only and not small:
        options.quick, options.rounds = True, options.rounds or 7  # not kept
    report = harness.Report("bench_checkpoint", options)
    if options.only in (None, "regions"):
        regions(report)
    panels = [steps(report, family, small=small) for family in STEPS if options.only in (None, family)]
    target = options.output or (None if options.quick else harness.RESULTS / "bench_checkpoint.json")
    if panels and target:
        target.with_suffix(".svg").write_text(scatter.svg(panels))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
