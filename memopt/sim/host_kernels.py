"""What cuDNN's and the fused attention's operations compute, on the CPU, which has none of their name.

Each is given the arguments on the CPU, and answers with one value for each result; None leaves what is there (what only
the operation's own backward would read: it computes that anew). Nothing is dropped out: the values are those of a
dropout of 0, forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_aten = torch.ops.aten
_MODES = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}

# Below autograd no graph is made; in a thread of its own this is not below it.
_aside = ThreadPoolExecutor(1, "memopt-host-kernels")


def _weights(q: torch.Tensor, k: torch.Tensor, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: Any) -> Any:
    return (_weights(q, k, bias, causal, scale) @ v.float()).to(q.dtype)


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: Any
) -> list[torch.Tensor]:
    weights, grad = _weights(q, k, bias, causal, scale), grad.float()
    inner = grad @ v.float().transpose(-1, -2)
    scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
    factor = scale or 1 / math.sqrt(q.shape[-1])
    of_q, of_k = scores @ k.float() * factor, scores.transpose(-1, -2) @ q.float() * factor
    return [
        of_q.to(q.dtype),
        of_k.to(k.dtype),
        (weights.transpose(-1, -2) @ grad).to(v.dtype),
        scores.to(q.dtype),
    ]


def _flash(
    q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    return [_attention(q, k, v, None, causal, scale)]


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, scale: Any = None) -> Any:
    # rest: output, logsumexp, two lists of lengths, two maxima, dropout, causal, …
    return _attention_backward(grad, q, k, v, None, rest[7], scale)[:3]


def _efficient(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    logsumexp: Any,
    dropout: Any = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return [_attention(q, k, v, bias, causal, scale)]


def _efficient_backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    # rest: output, logsumexp, seed, offset, dropout, which gradients are wanted, causal
    causal = rest[6] if len(rest) > 6 else False
    found = _attention_backward(grad, q, k, v, bias, causal, scale)
    return found if bias is not None else found[:3]


def _batch_norm(*arguments: Any) -> Any:
    return _aten.native_batch_norm(*arguments)


def _batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_var: Any, eps: float, *_: Any
) -> Any:
    wanted = [True, True, True]
    return _aten.native_batch_norm_backward(
        grad, x, weight, mean, var, saved_mean, saved_var, True, eps, wanted
    )


def _rms_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, wanted: Sequence[bool]
) -> Any:
    dims = tuple(range(-len(shape), 0))
    normal = x.float() * rstd
    scaled = grad.float() if weight is None else grad.float() * weight.float()
    of_x = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    of_weight = (grad.float() * normal).flatten(0, x.dim() - len(shape) - 1).sum(0)
    return [of_x if wanted[0] else None, of_weight if wanted[1] else None]


def _run_rnn(
    x: Any, weights: Sequence[Any], stride: int, hx: Any, cx: Any, mode: int, rest: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """rest: hidden size, projection size, layers, batch first, dropout, train, bidirectional, batch sizes, …"""
    layers, batch_first, train, both_ways, batch_sizes = rest[2], rest[3], rest[5], rest[6], rest[7]
    run = getattr(torch._VF, _MODES[mode])
    state = (hx, cx) if cx is not None else hx
    biases = stride == 4
    if len(batch_sizes):
        sizes = torch.tensor(list(batch_sizes))
        found = run(x, sizes, state, list(weights), biases, layers, 0.0, train, both_ways)
    else:
        found = run(x, state, list(weights), biases, layers, 0.0, train, both_ways, batch_first)
    return tuple(found)


def _rnn(x: Any, weights: Any, stride: int, buffer: Any, hx: Any, cx: Any, mode: int, *rest: Any) -> Any:
    found = _aside.submit(_without_graph, _run_rnn, x, weights, stride, hx, cx, mode, rest).result()
    return found if cx is not None else [*found, None]


def _without_graph(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.no_grad():
        return function(*arguments)


def _rnn_backward(
    x: Any,
    weights: Any,
    stride: int,
    buffer: Any,
    hx: Any,
    cx: Any,
    output: Any,
    grad: Any,
    grad_hy: Any,
    grad_cy: Any,
    mode: int,
    *rest: Any,
) -> Any:
    def differentiate() -> list[torch.Tensor | None]:
        given = [x, hx, cx, *weights]
        leaves = [None if one is None else one.detach().requires_grad_() for one in given]
        outputs = _run_rnn(leaves[0], leaves[3:], stride, leaves[1], leaves[2], mode, rest)
        pairs = [pair for pair in zip(outputs, (grad, grad_hy, grad_cy), strict=False) if pair[1] is not None]
        torch.autograd.backward([one for one, _ in pairs], [each for _, each in pairs])
        return [None if one is None else one.grad for one in leaves]

    return _aside.submit(differentiate).result()


# By operation: its values on the CPU, in the order of its results.
HOST_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.cudnn_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten._cudnn_rnn.default: _rnn,
    _aten._cudnn_rnn_backward.default: _rnn_backward,
}
