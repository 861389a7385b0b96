"""Tensors of a CUDA device kept in pinned host memory until they are wanted again."""

from __future__ import annotations

import torch


class Offload:
    """Copies of one forward run, on a stream of its own beside the computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def keep(self, tensor: torch.Tensor) -> OnHost | None:
        """A copy of the tensor on the host, its own memory free to go as soon as the copy is made; None where there is
        nothing to gain: it is not on a CUDA device, or is not plain memory."""
        if type(tensor) is not torch.Tensor or not tensor.is_cuda or tensor.layout is not torch.strided:
            return None
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = _stream_of(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            return OnHost(host, tensor.device, stream.record_event())

    def finish(self) -> None:
        """What is queued from here on may overwrite what was kept."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._streams.clear()


class OnHost:
    """A tensor on the host, and when it is whole there."""

    def __init__(self, host: torch.Tensor, device: torch.device, copied: torch.cuda.Event) -> None:
        self.host, self.device, self.copied = host, device, copied

    def back(self) -> torch.Tensor:
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.host.to(self.device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
