"""memopt.nn.linear_cross_entropy beside torch: its chunked F.linear_cross_entropy, and the plain head.

Times are of forward and backward. Live bytes and errors are of bf16, 4096 rows of 128 features and 4000 classes:
bytes beside what was alive before and the gradient of hidden, errors in the 2-norm against the plain head in fp64.

Goals: no slower than torch's chunked op; five times as fast with 90 % of the rows ignored; live bytes within a
chunk, the weight's gradient, three numbers a row and what torch's matrix products of such chunks allocate; that
gradient's error within the plain head's, and a loss within 1e-4, at each size of chunk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import memopt  # noqa: E402
from benchmarks import harness  # noqa: E402

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def head(rows: int, features: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (rows,))


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def chunked(rows: int | None = None) -> Loss:
    options = LinearCrossEntropyOptions(batch_chunk_size=rows)
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


def ours(chunk_bytes: int | str = "64MiB") -> Loss:
    return lambda *tensors: memopt.nn.linear_cross_entropy(*tensors, chunk_bytes=chunk_bytes)


def step(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tensors[0].grad = tensors[1].grad = None
    result = loss(*tensors)
    result.backward()
    return result


def peak(run: Callable[[], object]) -> int:
    """Return the most bytes alive at once beside those that are alive now."""
    with memopt.profile("cpu") as empty:
        pass
    with memopt.profile("cpu") as profile:
        run()
    return profile.peak_bytes - empty.peak_bytes


def allowed(hidden: Tensor, weight: Tensor, chunk: int) -> float:
    """Return the bytes of a chunk, of the weight's gradient, of a row's numbers, and of torch's matrix products."""
    x, w = hidden.detach(), weight.detach()
    logits = x.new_empty(chunk // (len(w) * w.element_size()), len(w))
    block = x.new_empty(len(x), chunk // (len(x) * w.element_size()))
    rows, classes = x[: len(logits)], w[: block.shape[1]]
    results = torch.empty_like(rows), torch.empty_like(classes)

    def products() -> None:
        torch.mm(rows, w.t(), out=logits)
        torch.mm(logits, w, out=results[0])
        torch.mm(x, classes.t(), out=block)
        torch.mm(block.t(), x, out=results[1])

    return float(chunk + weight.nbytes + 3 * 4 * len(x) + peak(products))


def times(report: harness.Report) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = head(1024, 256, 16000, dtype)
        name = f"1024 x 256 to 16000, {str(dtype).removeprefix('torch.')}"
        contenders = {
            "torch chunked": chunked(),
            "torch plain": plain,
            "memopt": ours(),
            "8 MiB": ours("8MiB"),
        }
        report.compare(
            name,
            {key: partial(step, loss, tensors) for key, loss in contenders.items()},
            goal={"memopt": 1.0} if dtype == torch.float32 else None,
        )
    hidden, weight, target = head(1024, 256, 16000, torch.float32)
    ignoring = target.clone()
    ignoring[torch.arange(1024) % 10 != 0] = -100
    tensors = hidden, weight, ignoring
    contenders = {"torch chunked": chunked(), "torch plain": plain, "memopt": ours()}
    report.compare(
        "1024 x 256 to 16000, float32, 90 % of rows ignored",
        {key: partial(step, loss, tensors) for key, loss in contenders.items()},
        goal={"memopt": 5.0},
    )


def errors_and_bytes(report: harness.Report) -> None:
    tensors = hidden, weight, target = head(4096, 128, 4000, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = step(plain, (exact[0], exact[1], target))
    gradient = exact[1].grad
    assert gradient is not None

    def measured(loss: Loss) -> tuple[float, float, int]:
        results = []
        hidden.grad = weight.grad = None
        live = peak(lambda: results.append(step(loss, tensors))) - hidden.nbytes
        assert weight.grad is not None
        error = (weight.grad.double() - gradient).norm() / gradient.norm()
        return error.item(), abs(results[0].item() - expected.item()), live

    first = measured(plain)
    for rows in (64, 256, 1024):
        chunk = rows * 4000 * weight.element_size()
        found = {"plain": first, "torch chunked": measured(chunked(rows)), "memopt": measured(ours(chunk))}
        case = f"bf16, {rows} rows a chunk"
        errors = {key: value[0] for key, value in found.items()}
        both = {key: errors[key] for key in ("plain", "memopt")}
        report.record(f"error of dW: {case}", both, unit="relative", goal=1.0)
        report.note(f"error of dW: {case}", errors)
        losses = {"limit": 1e-4, **{key: value[1] for key, value in found.items()}}
        report.record(
            f"error of the loss: {case}", {k: losses[k] for k in ("limit", "memopt")}, goal=1.0, unit=""
        )
        report.note(f"error of the loss: {case}", losses)
        live = {"allowed": allowed(hidden, weight, chunk), "memopt": float(found["memopt"][2])}
        report.record(f"live bytes: {case}", live, unit="bytes", goal=1.0)
        report.note(f"live bytes: {case}", {key: value[2] for key, value in found.items()})


def default_bytes(report: harness.Report) -> None:
    tensors = hidden, weight, _ = head(4096, 128, 32000, torch.bfloat16)
    live = {"allowed": allowed(hidden, weight, 64 << 20)}
    live["memopt"] = float(peak(lambda: step(ours(), tensors)) - hidden.nbytes)
    report.record("live bytes: bf16, 4096 x 128 to 32000, default", live, unit="bytes", goal=1.0)


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_loss_head", options, claim=__doc__ or "")
    errors_and_bytes(report)
    default_bytes(report)
    times(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
