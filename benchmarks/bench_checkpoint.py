"""What a checkpointed region costs over the plain one, beside torch.utils.checkpoint: forward and backward on the CPU.

The regions are tiny, so that what is timed is bookkeeping; a second run of the function is part of it, for both. The
microseconds over the plain region are taken within a round, as the ratios are. Gradients are compared before anything
is timed."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.checkpoint as torchs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402
from memopt import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

GOAL = 110 / 30  # torch's microseconds on an idle machine over what memopt's are to be

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


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    if options.cuda:
        raise SystemExit("bench_checkpoint times the host's bookkeeping: leave --cuda out")
    torch.set_num_threads(1)
    report = harness.Report("bench_checkpoint", options)
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
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
