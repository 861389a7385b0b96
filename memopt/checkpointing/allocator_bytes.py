"""What a device's allocator has given, kernels' temporaries and workspaces among it: bytes now, and at the most."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memopt import _C

ROUNDED_TO = 512  # bytes: each block of a CUDA device's allocator begins at such an address


def block_bytes(nbytes: int, device: torch.device) -> int:
    """Bytes of the block that the device's allocator gives for so many, where it splits a larger one for it."""
    return -(-nbytes // ROUNDED_TO) * ROUNDED_TO if device.type == "cuda" else nbytes


class AllocatorBytes:
    """restart() begins to look for the most; both answer (bytes now, the most since restart() before this call).

    This one knows nothing: of a device whose allocator cannot be asked."""

    def start(self) -> None:
        """Before the first restart()."""

    def stop(self) -> None:
        """After the last answer."""

    def restart(self) -> tuple[int, int]:
        return 0, 0

    def now_and_peak(self) -> tuple[int, int]:
        return 0, 0

    def of_storages(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Bytes of the blocks that these lie in."""
        return sum(block_bytes(one.nbytes(), one.device) for one in storages)


class CudaBytes(AllocatorBytes):
    """By the allocator's own statistics, whose peak restart() resets."""

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
    """By watching torch's allocator from start() to stop(), whatever thread asks it. Zeros where it is not as it is
    known; where a recording watches it already, by that one's watch."""

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
    """blocks: in the allocator's whole blocks, not in the bytes that were asked for."""
    if device is not None and device.type == "cuda":
        return CudaBlocks(device) if blocks else CudaBytes(device)
    return CpuBytes() if device is not None and device.type == "cpu" else AllocatorBytes()
