"""Parameters in host memory, and how each comes to be where a layer runs: the two carriers of offloaded layers.

DeviceCarrier copies them to a CUDA device, and their gradients back:

    parameter (host) ─ ToHostGrad ─ ToDeviceParam ─ what the layer does (device)

To the device: memory for a copy is taken from the present stream, which had it last; so the copy begins once all is
done that this stream was given before, and what the stream is given after `tensor()` comes after the copy. Freed, the
memory is the present stream's at once: it has been given all that reads it.
To the host: the two nodes' backward brings the gradient there, once. ToDeviceParam's begins the copy, on the device's
thread of autograd, which goes on at once; ToHostGrad's waits for it, on the thread that called backward(), which has
nothing else to do. So hooks of the parameter, accumulation into .grad and torch.autograd.grad find a gradient that is
there. On the device the gradient is held until the present stream waits for the copy, which is when a layer's worth is
on its way; so of gradients there are two layers' at most, those that leave and those that are being made, and the copy
had a layer's time to be made in.

The host waits in two places: in `GradTransfer.wait`, of the thread that is about to read the gradient, and in
`ToDevice.settle`, behind which the program may write to the parameters. The copies are memopt._C's.

PageCarrier is for a model on the CPU whose parameters are in pages of a file: read ahead before their layer runs, and
given back to the system when others want their place. Nothing is copied: what the model computes with is the file's
pages. The system writes changed ones back and reads them again, by itself; here it is only told which will be wanted
(MADV_WILLNEED) and which not (MADV_DONTNEED: of a shared mapping it drops no value)."""

from __future__ import annotations

import mmap
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from memopt import _C
from memopt._checkpoint.stages.costs import block_bytes
from memopt._offload.host_parameters import HostBlock, LockedMemory
from memopt._offload.pinned_memory import FOREVER, CopyIn, dense_bytes
from memopt._runtime.host_memory import resident_bytes
from memopt._runtime.log import logger

MIB = 1 << 20


class ParameterCopy(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def storage(self) -> int: ...

    def holds(self, host: torch.Tensor) -> bool: ...

    def tensor(self) -> torch.Tensor: ...


class Carrier:
    """The way of parameters to where a layer computes, and back.

    copies: whether what is fetched is a copy. typical: a layer's bytes; of copies there are two such at once, where
    there is no budget. planned: bytes of copies that a plan of the model's stages leaves room for beside those in use;
    None: none plans them.
    """

    copies: bool
    planned: int | None = None

    def __init__(self, device: torch.device, typical: int) -> None:
        self.device, self.typical = device, typical

    def plan(self, beside: int | None) -> None:
        """Leave the bytes beside those in use to a plan, or (None) have a say in them again."""

    def travels(self, parameter: torch.Tensor) -> bool:
        raise NotImplementedError

    def fetch(self, parameters: Sequence[torch.Tensor]) -> Sequence[ParameterCopy]:
        raise NotImplementedError

    def stand_in(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Return what stands in the parameter's place while its layer runs."""
        raise NotImplementedError

    def drop(self, copy: Any) -> None:
        """Let a copy go. Its memory goes with it."""

    def settle(self) -> None:
        """Wait, on the host, until parameters may change."""

    def finish(self) -> None:
        """Give what gradients on their way have of the device back to the computation."""

    @property
    def strict(self) -> bool:
        """Return whether not even the next layer may take more than allowance()."""
        return False

    def taken(self, nbytes: int) -> int:
        """Return the bytes that a copy of so many takes, at the most."""
        return nbytes

    def allowance(self, wanted: int) -> int:
        """Return the bytes of copies that there may be beside those in use, of `wanted` bytes."""
        return beside(self.typical) + max(self.typical - wanted, 0)

    def passed(self, grad_mode: bool) -> None:
        """Note that a forward pass begins, with a graph or without."""


def beside(typical: int) -> int:
    """Bytes of copies beside those in use: a layer's, and those of the small ones around it."""
    return typical + typical // 16


class ToDevice:
    """The way to the device. copied: bytes, so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copied = 0
        self._last = 0  # copy that has begun

    def fetch(self, hosts: Sequence[torch.Tensor]) -> list[DeviceCopy]:
        """Begin copies and return them. All memory is allocated before any copy begins, so an error leaves none."""
        tensors = [torch.empty_like(host, device=self.device, requires_grad=False) for host in hosts]
        owner = torch.cuda.current_stream(self.device)
        sources, targets = [], []
        for host, tensor in zip(hosts, tensors, strict=True):
            source = dense_bytes(host.detach())
            if source is None:
                tensor.copy_(host.detach())
            elif host.nbytes:
                sources.append(source)
                targets.append(dense_bytes(tensor))
        ticket = _C.copy_batch(sources, targets, b"\1" * len(sources), None, owner.cuda_stream)
        self._last = ticket or self._last
        self.copied += sum(host.nbytes for host in hosts)
        return [
            DeviceCopy(host, tensor, CopyIn(owner, ticket))
            for host, tensor in zip(hosts, tensors, strict=True)
        ]

    def settle(self) -> None:
        """Wait, on the host, for the copies that have begun: what they read may change."""
        if self._last:
            _C.copy_wait(self.device.index, self._last, FOREVER)
            self._last = 0


class DeviceCopy:
    """A parameter's value on the device, or on its way there."""

    __slots__ = ("_awaited", "_copy", "_tensor", "host", "pointer", "version")

    def __init__(self, host: torch.Tensor, tensor: torch.Tensor, copy: CopyIn) -> None:
        self.host, self._tensor, self._copy = host, tensor, copy
        self.version, self.pointer = host._version, host.data_ptr()
        self._awaited = False

    @property
    def nbytes(self) -> int:
        return int(self._tensor.nbytes)

    @property
    def storage(self) -> int:
        return int(self._tensor.untyped_storage()._cdata)

    def holds(self, host: torch.Tensor) -> bool:
        """Return whether this is the tensor that was copied, and it has not changed since."""
        return host is self.host and host._version == self.version and host.data_ptr() == self.pointer

    def tensor(self) -> torch.Tensor:
        """Return the copy, for the current stream; it is not part of any graph."""
        self._awaited |= self._copy.join(self._tensor)
        return self._tensor.data  # with a version counter of its own

    def __del__(self) -> None:
        # Nobody wanted it: the memory must not be another's while it is being written.
        if not getattr(self, "_awaited", True) and not sys.is_finalizing():
            _C.copy_await(self._tensor.device.index, self._copy.ticket, self._copy.owner.cuda_stream)


class ToHost:
    """The way from the device. most: bytes of gradients that are kept for their copies' sake, the last at least.
    copied: bytes, so far."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.device, self.most = device, most
        self.memory = LockedMemory(device)
        self.copied = 0
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Stream, int]] = deque()
        self._held = 0

    def send(self, gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the gradient on the host, valid when the copy of the returned ticket is over."""
        host = self.memory.lend(gradient)
        source = dense_bytes(gradient)
        if source is None:
            gradient = torch.empty_like(gradient).copy_(gradient)
            source = dense_bytes(gradient)
        owner, ticket = torch.cuda.current_stream(self.device), 0
        if gradient.nbytes:
            ticket = _C.copy_out(source, dense_bytes(host), 0, owner.cuda_stream)
        self._leaving.append((gradient, owner, ticket))
        self._held += gradient.nbytes
        self.copied += gradient.nbytes
        while self._held > self.most and len(self._leaving) > 1:
            self._release()
        return host, ticket

    def finish(self) -> None:
        """Give all gradients' memory back to the computation; the host need not wait."""
        while self._leaving:
            self._release()

    def _release(self) -> None:
        gradient, owner, ticket = self._leaving.popleft()
        self._held -= gradient.nbytes
        _C.copy_await(self.device.index, ticket, owner.cuda_stream)


# ---- in a graph ------------------------------------------------------------------------------------------------------


class GradTransfer:
    """A gradient on its way to the host."""

    __slots__ = ("device", "ticket")

    def __init__(self, device: torch.device) -> None:
        self.device, self.ticket = device, 0

    def wait(self) -> None:
        if self.ticket:
            _C.copy_wait(self.device.index, self.ticket, FOREVER)
            self.ticket = 0


class ToHostGrad(torch.autograd.Function):
    """A host parameter in a graph; its gradient is there when its backward is over."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, transfer: GradTransfer) -> torch.Tensor:
        ctx.transfer = transfer
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.transfer.wait()
        return gradient, None


class ToDeviceParam(torch.autograd.Function):
    """The device copy of a host parameter in a graph; its backward sends the gradient to the host."""

    @staticmethod
    def forward(
        ctx: Any,
        on_host: torch.Tensor,
        copy: torch.Tensor,
        parameter: torch.Tensor,
        transfer: GradTransfer,
        to_host: ToHost,
    ) -> torch.Tensor:
        ctx.host_parameter, ctx.transfer, ctx.to_host = parameter, transfer, to_host
        ctx.set_materialize_grads(False)
        # Not detach(), which makes a view, whose own views without a graph would need no gradient.
        return copy.data

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        if gradient is None:
            on_host = None
        elif torch.is_grad_enabled() or gradient.layout is not torch.strided:
            on_host = gradient.to("cpu")  # differentiable, or of no fixed size
            ctx.to_host.copied += gradient.nbytes if gradient.layout is torch.strided else 0
        else:
            on_host, ctx.transfer.ticket = ctx.to_host.send(gradient)
        return on_host, None, None, None, None


def device_parameter(parameter: torch.Tensor, copy: torch.Tensor, to_host: ToHost) -> torch.Tensor:
    """Return the copy as the parameter's stand-in on the device: gradients of it are the parameter's."""
    if not parameter.requires_grad or torch.is_inference_mode_enabled():
        return copy
    transfer = GradTransfer(copy.device)
    with torch.enable_grad():
        on_host = ToHostGrad.apply(parameter, transfer)
        return ToDeviceParam.apply(on_host, copy, parameter, transfer, to_host)  # type: ignore[no-any-return]


# ---- the carrier of copies -------------------------------------------------------------------------------------------


class DeviceCarrier(Carrier):
    """most: the largest layer's bytes. budget: of live bytes on the device, whatever they are."""

    copies = True

    def __init__(self, device: torch.device, typical: int, most: int, budget: int | None) -> None:
        super().__init__(device, typical)
        self.to_device, self.to_host = ToDevice(device), ToHost(device, most)
        self.most = most
        self._room = _BudgetRoom(device, budget) if budget is not None else None

    def plan(self, beside: int | None) -> None:
        if self._room is not None and (beside is None) != (self.planned is None):
            self._room.forget()
        self.planned = beside
        self.to_host.most = self.most if beside is None else 0

    def travels(self, parameter: torch.Tensor) -> bool:
        return bool(parameter.device.type == "cpu")

    def fetch(self, parameters: Sequence[torch.Tensor]) -> Sequence[DeviceCopy]:
        return self.to_device.fetch(parameters)

    def stand_in(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return device_parameter(parameter, copy, self.to_host)

    def settle(self) -> None:
        self.to_device.settle()

    def finish(self) -> None:
        self.to_host.finish()

    @property
    def strict(self) -> bool:
        return self.planned is not None or self._room is not None

    def taken(self, nbytes: int) -> int:
        """By a plan a block of torch's allocator, which leaves no rest of a large one below a mebibyte."""
        if self.planned is None:
            return nbytes
        block = block_bytes(nbytes, self.device)
        return block + MIB if block > MIB else block

    def allowance(self, wanted: int) -> int:
        if self.planned is not None:
            return self.planned
        return super().allowance(wanted) if self._room is None else self._room.left

    def passed(self, grad_mode: bool) -> None:
        if self._room is not None and self.planned is None:
            self._room.begin(grad_mode)


class _BudgetRoom:
    """The bytes that a budget leaves for copies not in use: the first pass of a kind (with a graph, or without) runs
    with none. Whatever its peak was, so many bytes more at any time stay within the budget."""

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device, self.budget = device, budget
        self.left = 0
        self._least: dict[bool, int] = {}  # the peak with nothing beside what is in use
        self._kind: bool | None = None
        self._warned = False
        torch.cuda.reset_peak_memory_stats(device)

    def forget(self) -> None:
        """Forget the present pass, whose memory shows nothing."""
        self._kind = None
        torch.cuda.reset_peak_memory_stats(self.device)

    def begin(self, grad_mode: bool) -> None:
        """Begin a pass, with the memory of the last one known."""
        if self._kind is not None:
            peak = torch.cuda.max_memory_allocated(self.device)
            self._least[self._kind] = max(self._least.get(self._kind, 0), peak - self.left)
            if peak > self.budget and not self._warned:
                self._warned = True
                logger.warning(
                    "offload_layers: the step took %d bytes of device memory with one layer there at a time, more "
                    "than memory_budget=%d. Use smaller layers (layers=), checkpointing or a smaller batch",
                    peak - self.left,
                    self.budget,
                )
        self._kind = grad_mode
        least = self._least.get(grad_mode)
        self.left = 0 if least is None else max(self.budget - least, 0)


# ---- the carrier of pages --------------------------------------------------------------------------------------------


class MappedCopy:
    """A parameter's pages."""

    __slots__ = ("host",)

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    @property
    def nbytes(self) -> int:
        return int(self.host.nbytes)

    @property
    def storage(self) -> int:
        return int(self.host.untyped_storage()._cdata)

    def holds(self, host: torch.Tensor) -> bool:
        return host is self.host

    def tensor(self) -> torch.Tensor:
        return self.host.detach()


class PageCarrier(Carrier):
    """blocks: the pages, by the address of the parameter's values in them. budget: of the process's memory."""

    copies = False

    def __init__(self, blocks: dict[int, HostBlock], typical: int, budget: int | None) -> None:
        super().__init__(torch.device("cpu"), typical)
        self.blocks, self.budget = blocks, budget
        self._own_budget = budget

    def plan(self, beside: int | None) -> None:
        """By a plan only what mapped_bytes() counts is in memory."""
        self.budget = self._own_budget if beside is None else None

    def travels(self, parameter: torch.Tensor) -> bool:
        return parameter.data_ptr() in self.blocks

    def fetch(self, parameters: Sequence[torch.Tensor]) -> Sequence[MappedCopy]:
        for parameter in parameters:
            self.blocks[parameter.data_ptr()].advise(parameter, mmap.MADV_WILLNEED)
        return [MappedCopy(parameter) for parameter in parameters]

    def stand_in(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return parameter

    def drop(self, copy: MappedCopy) -> None:
        block = self.blocks.get(copy.host.data_ptr())
        if block is not None:
            block.advise(copy.host, mmap.MADV_DONTNEED)

    def allowance(self, wanted: int) -> int:
        if self.budget is None:
            return super().allowance(wanted)
        return max(self.budget - resident_bytes() - wanted, 0)

    def passed(self, grad_mode: bool) -> None:
        """Release the pages that an optimizer has changed."""
        for block in {id(block): block for block in self.blocks.values()}.values():
            block.advise_all(mmap.MADV_DONTNEED)
