"""Bytes that a device's allocator has given out, now and at the peak, kernels' temporaries and workspaces included."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memopt import _C

ROUNDED_TO = 512  # bytes: each block of a CUDA device's allocator begins at such an address


def block_bytes(nbytes: int, device: torch.device) -> int:
    """Return the bytes of the block that the device's allocator gives for so many, if it splits a larger one for it."""
    return -(-nbytes // ROUNDED_TO) * ROUNDED_TO if device.type == "cuda" else nbytes


class AllocatorBytes:
    """Figures of a device's allocator. This base class has none: for a device whose allocator cannot be asked.

    restart() begins a new peak; both calls return (bytes now, peak since restart() before this call).
    """

    def start(self) -> None:
        """Begin, before the first restart()."""

    def stop(self) -> None:
        """End, after the last answer."""

    def restart(self) -> tuple[int, int]:
        return 0, 0

    def now_and_peak(self) -> tuple[int, int]:
        return 0, 0

    def of_storages(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Return the bytes of the blocks that these lie in."""
        return sum(block_bytes(one.nbytes(), one.device) for one in storages)


class CudaBytes(AllocatorBytes):
    """Figures of the CUDA allocator's own statistics, whose peak restart() resets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> tuple[int, int]:
        answer = self.now_and_peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        return answer

    counted = "requested_bytes"

    def now_and_peak(self) -> tuple[int, int]:
        statistics = torch.cuda.memory_stats(self.device)
        return statistics[f"{self.counted}.all.current"], statistics[f"{self.counted}.all.peak"]


class CudaBlocks(CudaBytes):
    """The same in whole blocks, as torch.cuda.max_memory_allocated() has them: one that is not split, as it is hardly
    larger than what was asked for, counts in full."""

    counted = "allocated_bytes"

    def of_storages(self, storages: Iterable[torch.UntypedStorage]) -> int:
        sizes = {
            block["address"]: block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.device.index
            for block in segment["blocks"]
        }
        return sum(
            sizes.get(one.data_ptr(), block_bytes(one.nbytes(), one.device)) if one.nbytes() else 0
            for one in storages
        )


class CpuBytes(AllocatorBytes):
    """Figures of torch's CPU allocator, watched from start() to stop(), for all threads.

    They are zeros if the allocator is not as expected. If a recording watches it already, that one's figures are used.
    """

    def start(self) -> None:
        try:
            _C.cpu_log_start(1)
            _C.cpu_log_no_stacks()
            self.own = True
        except RuntimeError:  # memopt.Error is one
            self.own = False

    def stop(self) -> None:
        if self.own:
            _C.cpu_log_stop()

    def restart(self) -> tuple[int, int]:
        return _C.cpu_log_live(True)

    def now_and_peak(self) -> tuple[int, int]:
        return _C.cpu_log_live(False)


def allocator_bytes(device: torch.device | None, *, blocks: bool = False) -> AllocatorBytes:
    """Return the figures of the device's allocator. blocks: of the allocator's whole blocks, not of requested bytes."""
    if device is not None and device.type == "cuda":
        return CudaBlocks(device) if blocks else CudaBytes(device)
    return CpuBytes() if device is not None and device.type == "cpu" else AllocatorBytes()
