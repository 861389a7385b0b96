"""The loss head: checks, and what autograd sees. The chunks are in _head_chunks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memopt._runtime import arguments
from memopt.nn._head_chunks import Head

_REDUCTIONS = ("mean", "sum", "none")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_bytes: int | str = "64MiB",
) -> Tensor:
    """Compute the cross entropy of a linear layer's outputs, which never exist whole.

    The result and its gradients are those of `F.cross_entropy(F.linear(hidden, weight, bias), target, …)`. The logits
    come in chunks of at most `chunk_bytes`; beside one chunk, only gradients and a few numbers a row are alive. Rows
    whose target is `ignore_index` are left out before the first matrix product; a copy of the others is alive then.

    Gradients of "mean" and "sum" are computed with the loss; backward multiplies them by the gradient that comes in.
    With reduction "none", in float16 (whose range needs the gradient scaler's factor inside), and in a second backward
    of one graph, backward computes the logits again. A 16-bit gradient of the weight is made block by block of the
    vocabulary over all rows, from logits computed once more: each of its elements is one sum, rounded once, as in
    the plain head, whatever the chunks. (A factor of the loss that is no power of 2 rounds it once more, but not under
    autocast.)

    Softmax, loss and gradient of a chunk are one pass of C on the CPU, one kernel on a CUDA device, and in float64
    torch's operations. The host waits for a device once, to count ignored rows and wrong targets. Under `torch.compile`
    the call is a graph break. There is no second derivative. Under autocast the matrix products are in autocast's type,
    and no copy of the weight in it is kept for backward. A weight under memopt.offload_layers() is on the device while
    its own module is called: call this there, or use memopt.nn.fuse_loss_head(), which does.

    Args:
        hidden: The layer's inputs, (..., features), of float32, float16, bfloat16 or float64.
        weight: (classes, features), of hidden's type and device; it may be an embedding's, too.
        target: A class a row, of int64, in hidden's leading shape (...).
        bias: (classes,), or None.
        reduction: "mean" over the rows that are not ignored, "sum", or "none": a loss a row.
        ignore_index: The target of rows that have no part in loss and gradients.
        label_smoothing: The share of the target that is spread over all classes, in [0, 1].
        softcap: Replaces each logit x by softcap * tanh(x / softcap), as Gemma 2 does (arXiv 2408.00118); None: no cap.
        chunk_bytes: The most bytes of logits at a time (in float64 with their copies), as a number or text
            such as "64MiB"; at least one row, or one class over all rows, is taken. The workspace of torch's matrix
            products comes on top, as in the plain head: up to 1 MiB for bfloat16 on the CPU, more for float16.

    Returns:
        The loss, of no dimension, or with "none" in target's shape; float64 for float64, else float32, which 16-bit
        logits need (torch rounds their loss to 16 bits).

    Raises:
        TypeError: An argument is no plain tensor, or of a type that is not taken.
        ValueError: Shapes or devices that do not fit, a target that is no class, an option out of its range.
        RuntimeError: A second derivative was asked for (`create_graph=True`).

    Examples:
        >>> hidden = torch.randn(8, 16, requires_grad=True)
        >>> weight = torch.randn(100, 16, requires_grad=True)
        >>> target = torch.randint(100, (8,))
        >>> loss = memopt.nn.linear_cross_entropy(hidden, weight, target, chunk_bytes="1KiB")
        >>> loss.backward()
    """
    size = _check(
        hidden, weight, target, bias, reduction, ignore_index, label_smoothing, softcap, chunk_bytes
    )
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    elif not dtype == weight.dtype == (dtype if bias is None else bias.dtype):
        raise TypeError(
            f"hidden of {dtype}, weight of {weight.dtype}{'' if bias is None else f', bias of {bias.dtype}'}: "
            "expected one type: convert hidden with .to(weight.dtype), or call under torch.autocast"
        )
    labels = target.reshape(-1)
    rows = _kept_rows(labels, weight.shape[0], ignore_index)
    labels = (labels if rows is None else labels[rows]).contiguous()
    head = Head(labels, rows, weight.shape[0], dtype, float(label_smoothing), float(softcap or 0), size)
    with torch.autocast(kind, enabled=False):
        loss = _LinearCrossEntropy.apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, head, reduction, torch.is_grad_enabled()
        )
    assert isinstance(loss, Tensor)
    return loss.view(target.shape) if reduction == "none" else loss


def _kept_rows(labels: Tensor, classes: int, ignore_index: int) -> Tensor | None:
    """Return the rows that are not ignored, None for all of them. The host waits for the device once."""
    if isinstance(labels, FakeTensor):
        return None
    kept = labels != ignore_index
    wrong = kept & ((labels < 0) | (labels >= classes))
    # Both counts in one number that is read once. An estimate without values reads 0: all are kept, none is wrong.
    base = labels.numel() + 1
    counts = int((kept.logical_not().long().sum() + wrong.long().sum() * base).item())
    ignored = counts % base
    if counts >= base:
        found = labels[wrong]
        raise ValueError(
            f"target: {counts // base} of classes from {int(found.min())} to {int(found.max())}: expected 0 to "
            f"{classes - 1}, the weight's rows, or ignore_index ({ignore_index})"
        )
    if not ignored:
        return None
    return torch.nonzero_static(kept, size=labels.numel() - ignored).view(-1)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    chunk_bytes: int | str,
) -> int:
    """Return chunk_bytes as a number."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(
            tensor, FakeTensor
        ):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, whose operations are its own: expected a plain tensor (of a "
                "DTensor its .full_tensor())"
            )
        if name != "target" and tensor.dtype not in _FLOATS:
            raise TypeError(f"{name} of {tensor.dtype}: expected float32, float16, bfloat16 or float64")
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name} of layout {tensor.layout}: expected a dense tensor: convert it with .to_dense()"
            )
    if target.dtype != torch.int64:
        raise TypeError(f"target of {target.dtype}: expected classes as int64: convert it with .long()")
    if weight.dim() != 2 or not weight.shape[0]:
        raise ValueError(f"weight of shape {tuple(weight.shape)}: expected (classes, features)")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)}: expected (..., {weight.shape[1]}), the weight's features"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target of shape {tuple(target.shape)}: expected {tuple(hidden.shape[:-1])}, a class a row of hidden"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)}: expected ({weight.shape[0]},), a number a class"
        )
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device}, hidden on {hidden.device}: move it there; a layer under "
                "memopt.offload_layers has its parameters on the device only while its own forward runs: call this "
                "there, or use memopt.nn.fuse_loss_head(model)"
            )
    if hidden.device.type not in ("cpu", "cuda"):
        raise ValueError(f"hidden is on {hidden.device}: expected the CPU or a CUDA device")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction {reduction!r}: expected 'mean', 'sum' or 'none'")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index {ignore_index!r}: expected an int")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing {label_smoothing}: expected a number from 0 to 1")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap {softcap}: expected a positive number, or None for no cap")
    size = arguments.size(chunk_bytes, "chunk_bytes")
    if size < 1:
        raise ValueError(f"chunk_bytes {chunk_bytes!r}: expected at least 1 byte")
    return size


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients that the forward made leave with the first backward, so that they need no copy to be scaled."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, reduction: str, grad: bool
    ) -> Tensor:
        needed = tuple(ctx.needs_input_grad[:3]) if grad else (False, False, False)
        early = any(needed) and reduction != "none" and head.dtype != torch.float16
        count = head.target.numel()
        scale = 1.0 if reduction != "mean" else 1.0 / max(count, 1)
        losses, lse, ctx.gradients = head.forward(hidden, weight, bias, scale, needed if early else None)
        if any(needed):
            ctx.save_for_backward(hidden, weight, bias, lse)
            ctx.head, ctx.reduction, ctx.scale = head, reduction, scale
            ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        if reduction == "none":
            return head.scattered(losses, hidden.shape[0])
        total = losses.sum(dtype=torch.float64)
        return (total / count if reduction == "mean" else total).to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "memopt.nn.linear_cross_entropy has no second derivative (create_graph=True): for one, use "
                "torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias), target)"
            )
        (incoming,) = outputs
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden, weight, bias, lse = ctx.saved_tensors
            head = ctx.head
            if ctx.reduction == "none":
                scale = head.gathered(incoming.reshape(-1)).to(lse.dtype)
            else:
                scale = (incoming.to(lse.dtype) * ctx.scale).expand(lse.shape)
            gradients = head.gradients(
                hidden, weight, bias, scale.contiguous(), lse, ctx.needs_input_grad[:3]
            )
            incoming = None
        parts = zip(gradients, ctx.dtypes, strict=True)
        return (*(_scaled(gradient, incoming, dtype) for gradient, dtype in parts), None, None, None)


def _scaled(gradient: Tensor | None, factor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return gradient times factor in dtype; its memory is taken."""
    if gradient is None:
        return None
    gradient = gradient.to(dtype)
    return gradient if factor is None else gradient.mul_(factor)
