"""The cost of memopt.backward in a step that fits, and of a step in micro-batches.

On the CPU (with --cuda on a GPU): a step of the demo task with loss.backward() and with memopt.backward, in turns in
one process, nothing failing; and memopt.backward's own time, by a loss that takes none, beside a hundredth of the step.
Then the same step in two pieces, by memopt.backward that knows its size and by the loop that one would write by hand,
which halves the batch, weights the losses and accumulates; and the step in which each of them runs out of memory,
planted in the middle of the backward pass.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import memopt  # noqa: E402
from benchmarks import harness, tasks  # noqa: E402

OVERHEAD = 0.01  # of a step


class Limit(torch.autograd.Function):
    """Runs out of memory in the backward pass of more samples than that, as long as it is armed."""

    most: int | None = None

    @staticmethod
    def forward(ctx, x):
        ctx.samples = len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Limit.most is not None and ctx.samples > Limit.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Planted.")
        return grad


class Limited(nn.Module):
    """A model that runs out of memory in the middle of its backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        middle = model.blocks[len(model.blocks) // 2]
        middle.register_forward_hook(lambda module, args, out: Limit.apply(out))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def by_hand(
    loss_of: Callable[[tasks.Batch], torch.Tensor], model: nn.Module, batch: tasks.Batch, size: int
) -> int:
    """The loop as one writes it; returns the size that did."""
    while True:
        try:
            for part in zip(*(tensor.split(size) for tensor in batch), strict=True):
                (loss_of(part) * (len(part[0]) / len(batch[0]))).backward()
            return size
        except torch.OutOfMemoryError:
            size //= 2
            failed = True
        if failed:
            model.zero_grad()


def own_seconds(model: nn.Module, batch: tasks.Batch, calls: int) -> float:
    """Of this thread, a call: with a loss that is one parameter's element, less what that takes; the least of five."""
    parameter = next(model.parameters()).flatten()[0].detach().requires_grad_()

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return parameter * 1.0

    def seconds(run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            for _ in range(calls):
                run()
            best = min(best, (time.thread_time() - start) / calls)
        return best

    plain = seconds(lambda: compute(*batch).backward())
    return seconds(lambda: memopt.backward(compute, *batch, model=model, exact=False)) - plain


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_backward", options)
    torch.set_num_threads(1)  # on a machine that does other things too, two wait for each other
    task = tasks.get("gpt", "small")
    model = Limited(task.build_model(report.device))
    optimizer = task.optimizer(model)
    batch = next(task.batches(1, report.device))
    samples = len(batch[0])

    def loss_of(part: tasks.Batch) -> torch.Tensor:
        return task.loss(model, part)

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return task.loss(model, (inputs, targets))

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        loss_of(batch).backward()
        finish()

    known = model  # what is remembered of a step is the module's

    def ours() -> None:
        memopt.backward(compute, *batch, model=known)
        finish()

    def hand(size: int) -> None:
        by_hand(loss_of, model, batch, size)
        finish()

    def unlimited() -> None:
        nonlocal known
        Limit.most, known = None, nn.ModuleList([model])
        ours()

    def limited() -> None:
        Limit.most = samples // 2

    def knowing() -> None:
        """Its size, and the checks of the first steps in pieces are over."""
        nonlocal known
        known = nn.ModuleList([model])
        limited()
        for _ in range(5):
            ours()

    def new() -> None:
        unlimited()
        limited()

    counts = {"calls": 1 if options.quick else 4}
    plain()
    unlimited()
    found = report.compare(
        f"a step of {task.name}, nothing fails",
        {"loss.backward()": plain, "memopt.backward": ours},
        peer="loss.backward()",
        **counts,
    )
    report.record(
        "what memopt.backward does beside forward and backward, and a hundredth of the step",
        {
            "limit": OVERHEAD * found.seconds("loss.backward()").best * 1e6,
            "memopt": own_seconds(model, batch, 50 if options.quick else 500) * 1e6,
        },
        unit="us",
        peer="limit",
        goal=1.0,
    )
    knowing()
    report.compare(
        f"a step of {task.name} in two pieces, the size known",
        {"by hand": lambda: hand(samples // 2), "memopt.backward": ours},
        peer="by hand",
        **counts,
    )
    report.compare(
        f"a step of {task.name} that runs out of memory halfway through its backward pass",
        {
            "by hand": harness.Contender(lambda: hand(samples), limited),
            "memopt.backward": harness.Contender(ours, new),
        },
        peer="by hand",
    )
    Limit.most = None
    report.note("task", task.metadata())
    report.note("samples", samples)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
