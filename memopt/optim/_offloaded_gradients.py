"""Gradients that wait for their step in the host's memory: on the device are never more than two of the largest.

As a parameter's gradient is complete, its norm is taken and its bytes leave, beside the backward pass; a HostGradient
takes its place in .grad. A further backward pass brings it back, adds to it, and it leaves again, all beside that pass.
The step brings all back, in turns (_turns.py). The host waits for none of this.

    .grad      HostGradient: bytes in pinned memory (memopt._offload.transfers), norm64 on the device, factors
    factors    what unscaling and clipping multiply by. Each is noted, and done when the gradient is back, in the order
               in which they were asked for: the roundings are those of gradients that never left

So the norm of all is that of the vector of their norms, and one of these is not finite where an element is not.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memopt import _C
from memopt._offload.pinned_memory import CopyIn, dense_bytes, host_memory, index_of
from memopt._offload.transfers import PinnedTransfer
from memopt._runtime import kernels
from memopt.optim._gradient_hooks import EndOfPass, GradientHooks, StandIn

LEAVING = 256 << 20  # bytes of gradients that are kept on the device for their copies' sake: 10 ms at 25 GB/s
aten = torch.ops.aten


class HostGradient(StandIn):
    """A gradient of a parameter on a CUDA device, whose elements are in the host's memory.

    It has the gradient's shape, dtype and device, adds up as gradients do, and goes where zero_grad() sets None. cpu()
    returns the elements. Any other operation is refused: what it was to read or change is elsewhere.
    """

    _transfer: PinnedTransfer
    _norm64: Tensor
    _factors: tuple[Tensor, ...]
    _way: _WayToHost

    def __init__(self, _: Tensor, transfer: PinnedTransfer, norm64: Tensor, way: _WayToHost) -> None:
        self._transfer, self._norm64, self._factors, self._way = transfer, norm64, (), way

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.add_.Tensor and not kwargs and type(args[0]) is cls:
            args[0]._add(args[1])
            return args[0]
        if func is aten._foreach_add_.List and not kwargs and all(type(one) is cls for one in args[0]):
            for one, other in zip(*args, strict=True):
                one._add(other)
            return None
        if func is aten.detach.default:
            return args[0]
        if (
            func is aten._to_copy.default
            and torch.device((kwargs or {}).get("device") or "cuda").type == "cpu"
        ):
            return func(args[0].on_device(), **((kwargs or {}) | {"non_blocking": False}))
        if func is aten.add.Tensor and not kwargs and type(args[0]) is cls:  # with create_graph=True
            return args[0].on_device() + args[1]
        raise RuntimeError(
            f"{func} of a gradient that offload_gradients=True keeps in the host's memory: read grad.cpu(), clip with "
            "memopt.amp.clip_grad_norm_, unscale with memopt.amp.GradScaler, and drop gradients with "
            "zero_grad(set_to_none=True)"
        )

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, other: Tensor) -> None:
        if other is not self:
            raise RuntimeError(
                "a model moves or changes its type, and offload_gradients=True keeps gradients in the host's memory: "
                "drop them before with zero_grad(set_to_none=True)"
            )

    @property
    def norm64(self) -> Tensor:
        """Its norm of order 2, one fp64 on the device."""
        self._way.settle(0)
        norm = self._norm64
        for factor in self._factors:
            norm = norm * factor.abs()
        return norm

    def multiply(self, factor: Tensor) -> None:
        """Multiply it in place, each product rounded. factor: one fp32 on its device."""
        self._factors += (factor,)

    def begin_return(self, grad: Tensor, after: int = 0, first: int = 0) -> CopyIn:
        """Begin to copy it into a tensor like it, which later work may use after end_return(); or its elements in
        memory, from the first on, into a row.

        after: the ticket of a copy out that it comes behind.
        """
        flat = dense_bytes(grad)
        assert flat is not None
        return self._transfer.copy_to(flat, after, first * self.itemsize)

    def end_return(self, grad: Tensor, copy: CopyIn) -> None:
        copy.join(grad)
        for factor in self._factors:
            _C.Gradients([grad]).multiply(index_of(self.device), factor)

    def on_device(self) -> Tensor:
        """Return it as a tensor of its own, for later work of the current stream."""
        grad = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device)
        self.end_return(grad, self.begin_return(grad))
        return grad

    def _add(self, other: Tensor) -> None:
        self._way.settle(max(0, self._way.most - 2 * self.nbytes))  # room for the sum and for what is added
        self._way.end.enter()
        with self._way.beside():
            total = self.on_device()
            total += other.on_device() if isinstance(other, HostGradient) else other
            left = self._way.leave(total, other)
        if left is None:
            raise MemoryError(
                f"the host cannot lock {total.nbytes} more bytes for a gradient that adds up: raise `ulimit -l` or the "
                "memory limit of the container"
            )
        in_backward = torch._C._current_graph_task_id() != -1
        self._way.settle(self._way.most if in_backward else 0)
        self._transfer, self._norm64, self._factors = left._transfer, left._norm64, ()


class _WayToHost:
    """The way of gradients from one device. most: bytes of those that are kept there for their copies' sake."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.most = device, 0
        self._leaving: deque[tuple[PinnedTransfer, Tensor, Tensor | None]] = deque()
        self._held = 0
        self._side: torch.cuda.Stream | None = None
        self.end = EndOfPass(device, lambda: self.settle(0))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Have the block's work done behind what the present stream has been given, beside what it is given next."""
        self._side = self._side or torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def leave(self, grad: Tensor, other: Tensor | None = None) -> HostGradient | None:
        """Begin the copy and return what stands for it; None for what is not plain memory or finds no room.

        other: what was added to it.
        """
        flat = dense_bytes(grad) if grad.numel() else None
        gradients = _C.Gradients([grad])
        if flat is None or gradients.others:
            return None
        room = host_memory(self.device).take(flat.numel())
        if room is None:
            return None
        kernels.prepare()
        norm64 = torch.empty((), dtype=torch.float64, device=self.device)
        gradients.run(index_of(self.device), norm64=norm64)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        transfer = PinnedTransfer(flat, room, stream)
        self._leaving.append((transfer, grad, other))
        self._held += grad.nbytes if other is None else 2 * grad.nbytes
        return HostGradient(grad, transfer, norm64, self)

    def settle(self, most: int) -> None:
        """Give memory back to the present stream, but for the last one's or so many bytes; the host need not wait."""
        while self._held > most and (len(self._leaving) > 1 or not most):
            transfer, grad, other = self._leaving.popleft()
            self._held -= grad.nbytes if other is None else 2 * grad.nbytes
            transfer.settle()


class GradientOffload(GradientHooks):
    """The hooks that send the gradients of an optimizer's parameters to the host as they are made."""

    option = "offload_gradients"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._ways: dict[torch.device, _WayToHost] = {}
        self._warned = False

    def _complete(self, p: Tensor) -> None:
        grad = p.grad
        if grad is None or grad.device.type != "cuda" or grad.layout is not torch.strided:
            return
        way = self._ways.get(grad.device)
        if way is None:
            way = self._ways[grad.device] = _WayToHost(grad.device)
        way.most = min(LEAVING, self._largest)
        self._refuse_ranks()
        way.end.enter()
        if type(grad) is Tensor and not grad.requires_grad:  # with create_graph=True it has a graph
            left = way.leave(grad)
            way.settle(way.most)
            if left is not None:
                p.grad = left
            elif grad.numel():
                self._warn(grad)

    def settle(self) -> None:
        for way in self._ways.values():
            way.settle(0)

    def _warn(self, grad: Tensor) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"offload_gradients=True: a gradient of shape {tuple(grad.shape)} and {grad.dtype} stays on the "
                "device, since it has gaps or a type without kernels, or the host can lock no more memory "
                "(`ulimit -l`)",
                stacklevel=2,
            )


def sends_to_host(hook: Any) -> bool:
    """Return whether a parameter's hook only sends its gradient to the host."""
    return isinstance(getattr(hook, "__self__", None), GradientOffload)


# ---- what reads gradients, wherever they are -------------------------------------------------------------------------


def any_offloaded(parameters: Iterable[Any]) -> bool:
    """Return whether the gradient of one of these is in the host's memory."""
    return any(type(getattr(p, "grad", None)) is HostGradient for p in parameters)


def norms_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of order 2 of each gradient, fp64, on the first one's device."""
    norms = [grad.norm64 if isinstance(grad, HostGradient) else _norm64(grad) for grad in grads]
    return torch.stack([_on(norms[0].device, norm) for norm in norms])


def multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one fp32 of a device."""
    for grad in grads:
        there = _on(grad.device, factor)
        if isinstance(grad, HostGradient):
            grad.multiply(there)
        else:
            grad *= there


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=device.type == "cuda")  # the host would read what has not come


def _norm64(grad: Tensor) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(values.detach(), dtype=torch.float64)
