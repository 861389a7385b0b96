"""What a device's allocator has given, kernels' temporaries and workspaces among it: bytes now, and at the most."""

from __future__ import annotations

import torch

from memopt import _C


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


class CudaBytes(AllocatorBytes):
    """By the allocator's own statistics, whose peak restart() resets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> tuple[int, int]:
        answer = self.now_and_peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        return answer

    def now_and_peak(self) -> tuple[int, int]:
        statistics = torch.cuda.memory_stats(self.device)
        return statistics["requested_bytes.all.current"], statistics["requested_bytes.all.peak"]


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


def allocator_bytes(device: torch.device | None) -> AllocatorBytes:
    if device is not None and device.type == "cuda":
        return CudaBytes(device)
    return CpuBytes() if device is not None and device.type == "cpu" else AllocatorBytes()
