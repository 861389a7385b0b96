"""CPU implementations of cuDNN's operations, fused cells and fused attention that the CPU lacks.

Each is given the arguments on the CPU and returns one value for each result; None leaves a result as it is (one that
only the operation's own backward would read, which computes it anew). Dropout is not applied: forward and backward
values are those of dropout 0.
"""

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


def _softmax(softmax: Callable[..., Any]) -> Callable[..., Any]:
    def computed(x: Any, dim: int, half_to_float: bool) -> Any:
        return softmax(x.float() if half_to_float else x, dim, False)

    return computed


def _softmax_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    def computed(grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
        return backward(grad, output, dim, grad.dtype).to(dtype)

    return computed


def _ctc_loss(
    log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, blank: int, _: bool, zero_infinity: bool
) -> Any:
    """Compute the loss and its gradient, which cuDNN computes in the same call."""
    given = log_probs, targets, lengths, target_lengths
    loss, alpha = _aten._ctc_loss(*given, blank, zero_infinity)
    of_each = torch.ones_like(loss)
    return [loss, _aten._ctc_loss_backward(of_each, *given, loss, alpha, blank, zero_infinity)]


def _sum_of(*terms: Any) -> torch.Tensor:
    return sum(term for term in terms if term is not None)  # type: ignore[return-value]


def _lstm_cell(
    of_input: Any, of_hidden: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    gates = _sum_of(of_input, of_hidden, input_bias, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return [o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)]


def _lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any, biased: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    after, zeros = cy.tanh(), torch.zeros_like(cx)
    of_hy = zeros if grad_hy is None else grad_hy
    of_cy = of_hy * o * (1 - after * after) + (zeros if grad_cy is None else grad_cy)
    gates = [
        of_cy * g * i * (1 - i),
        of_cy * cx * f * (1 - f),
        of_cy * i * (1 - g * g),
        of_hy * after * o * (1 - o),
    ]
    made = torch.cat(gates, 1)
    return [made, of_cy * f, made.sum(0) if biased else None]


def _gru_cell(of_input: Any, of_hidden: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    ir, iz, new = _sum_of(of_input, input_bias).chunk(3, 1)
    hr, hz, hn = _sum_of(of_hidden, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return [n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)]


def _gru_cell_backward(grad_hy: Any, workspace: Any, biased: bool) -> Any:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_z, of_r = grad_hy * (hx - n) * z * (1 - z), of_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    biases = [of_input.sum(0), of_hidden.sum(0)] if biased else [None, None]
    return [of_input, of_hidden, grad_hy * z, *biases]


def _grid_sampler(x: Any, grid: Any) -> Any:
    return _aten.grid_sampler_2d(x, grid, 0, 0, True)


def _grid_sampler_backward(x: Any, grid: Any, grad: Any) -> Any:
    return _aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True])


def _product_as(product: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """A matrix product whose result has another type than its arguments."""

    def computed(*arguments: Any, **factors: Any) -> Any:
        return product(*(one.to(arguments[tensors]) for one in arguments[:tensors]), **factors)

    return computed


def _weights(q: torch.Tensor, k: torch.Tensor, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1)


def _heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values that a group of q's heads shares, once for each head."""
    groups = q.shape[-3] // x.shape[-3]
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def _summed(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of such."""
    groups = x.shape[-3] // like.shape[-3]
    return x if groups == 1 else x.unflatten(-3, (-1, groups)).sum(-3)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: Any) -> Any:
    return (_weights(q, _heads(k, q), bias, causal, scale) @ _heads(v, q).float()).to(q.dtype)


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool, scale: Any
) -> list[torch.Tensor]:
    each_k, each_v = _heads(k, q), _heads(v, q)
    weights, grad = _weights(q, each_k, bias, causal, scale), grad.float()
    inner = grad @ each_v.float().transpose(-1, -2)
    scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
    factor = scale or 1 / math.sqrt(q.shape[-1])
    of_q, of_k = scores @ each_k.float() * factor, scores.transpose(-1, -2) @ q.float() * factor
    return [
        of_q.to(q.dtype),
        _summed(of_k, k).to(k.dtype),
        _summed(weights.transpose(-1, -2) @ grad, v).to(v.dtype),
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
    *_: Any,
    scale: Any = None,
) -> Any:
    return [_attention(q, k, v, bias, causal, scale)]


def _efficient_backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    # rest: output, logsumexp, seed, offset, dropout, which gradients are wanted, causal
    causal = rest[6] if len(rest) > 6 else False
    found = _attention_backward(grad, q, k, v, bias, causal, scale)
    return found if bias is not None else found[:3]


def _cudnn_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, scale: Any = None) -> Any:
    # rest: output, logsumexp, seed, offset, bias, two lists of lengths, two maxima, dropout, causal
    bias = rest[4] if rest[4] is not None and rest[4].numel() else None
    return _attention_backward(grad, q, k, v, bias, rest[10], scale)[:3]


def _batch_norm(*arguments: Any) -> Any:
    """Run batch norm. In evaluation the CPU saves nothing where the device's kernels have a result."""
    found = _aten.native_batch_norm(*arguments)
    return found if arguments[5] else found[:1]


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
    """Run an RNN.

    rest: hidden size, projection size, layers, batch first, dropout, train, bidirectional, batch sizes, ….
    """
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
    _aten._softmax.default: _softmax(_aten._softmax),
    _aten._softmax_backward_data.default: _softmax_backward(_aten._softmax_backward_data),
    _aten._log_softmax.default: _softmax(_aten._log_softmax),
    _aten._log_softmax_backward_data.default: _softmax_backward(_aten._log_softmax_backward_data),
    _aten._cudnn_ctc_loss.default: _ctc_loss,
    _aten._cudnn_ctc_loss.Tensor: _ctc_loss,
    _aten._thnn_fused_lstm_cell.default: _lstm_cell,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    _aten.cudnn_grid_sampler.default: _grid_sampler,
    _aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
    _aten.mm.dtype: _product_as(_aten.mm.default, 2),
    _aten.bmm.dtype: _product_as(_aten.bmm.default, 2),
    _aten.addmm.dtype: _product_as(_aten.addmm.default, 3),
    _aten.baddbmm.dtype: _product_as(_aten.baddbmm.default, 3),
    _aten._scaled_dot_product_cudnn_attention.default: _efficient,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten._cudnn_rnn.default: _rnn,
    _aten._cudnn_rnn_backward.default: _rnn_backward,
}
