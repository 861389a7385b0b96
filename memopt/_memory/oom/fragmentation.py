"""Detection of requests that failed although enough memory was free, in separate ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memopt import _C
from memopt._memory.live.device_bytes import AllocatorBlocks
from memopt._memory.recording import snapshot_file

_MOST_EVENTS = 100_000  # that are replayed: some 0.3 s, most of it in reading torch's history


@dataclass(frozen=True)
class Fragmentation:
    """Fragmentation that made a request fail.

    `largest_free`: the largest range that the allocator, or the driver, could have given. `pinned_by`: the blocks that
    share a segment with free ranges, and the holder of most of their bytes; `how`: the method that decided.
    """

    fragmented: bool
    largest_free: int
    free_in_cache: int
    free_on_device: int
    pinning_blocks: int
    pinned_by: str
    how: str

    def __str__(self) -> str:
        text = (
            f"{'yes' if self.fragmented else 'no'}. Largest free run {_C.format_size(self.largest_free)}, "
            f"free in cache {_C.format_size(self.free_in_cache)}"
        )
        if self.pinning_blocks and self.free_in_cache:
            text += f", pinned by {self.pinning_blocks} block{'s' * (self.pinning_blocks > 1)}"
            text += f" from {self.pinned_by}" if self.pinned_by else ""
        return f"{text} (by {self.how})"


def decide(
    device: int, asked: int, free: int, blocks: AllocatorBlocks, names: list[tuple[int, str]]
) -> Fragmentation:
    """Decide whether the request failed because of fragmentation.

    `free`: free bytes of the device that this process may have; `names`: addresses of tensors and their holders.
    torch's recorded history is replayed on a device of as much memory. Without one, sizes decide: fragmented is a
    request that would fit into all free memory together.
    """
    largest = _largest_run(blocks)
    enough = blocks.cached + free >= asked
    how = "the sizes of what is free"
    if enough:
        replayed = _replay(device, asked, blocks.reserved + free)
        if replayed is not None:
            enough, how = replayed, "a replay of what was recorded"
    pinning = _pinning(blocks)
    return Fragmentation(
        enough,
        max(largest, free),
        blocks.cached,
        free,
        int(pinning.sum()),
        _holder(blocks, pinning, names),
        how,
    )


def _largest_run(blocks: AllocatorBlocks) -> int:
    """Return the largest free range; free neighbours in one segment are one range."""
    if not len(blocks.size):
        return 0
    # A run ends with a live block, and where a segment ends.
    first = torch.ones_like(blocks.live)
    first[1:] = blocks.live[1:] | blocks.live[:-1] | (blocks.segment[1:] != blocks.segment[:-1])
    run = first.cumsum(0) - 1
    sums = torch.zeros(int(run[-1]) + 1, dtype=torch.int64, device="cpu")
    sums.index_add_(0, run, torch.where(blocks.live, 0, blocks.size))
    return int(sums.max())


def _pinning(blocks: AllocatorBlocks) -> torch.Tensor:
    """The live blocks that have free ones in their segment."""
    count = int(blocks.segment.max()) + 1 if len(blocks.segment) else 0
    free = torch.zeros(count, dtype=torch.bool, device="cpu")
    free[blocks.segment[~blocks.live]] = True
    return blocks.live & free[blocks.segment]


def _holder(blocks: AllocatorBlocks, pinning: torch.Tensor, names: list[tuple[int, str]]) -> str:
    known = [(address, name) for address, name in names if name]
    where = blocks.containing(torch.tensor([at for at, _ in known], dtype=torch.int64, device="cpu"))
    sums: dict[str, int] = {}
    for block, (_, name) in zip(where.tolist(), known, strict=True):
        if block >= 0 and pinning[block]:
            sums[name] = sums.get(name, 0) + int(blocks.size[block])
    return max(sums, key=lambda name: sums[name], default="")


def _replay(device: int, asked: int, capacity: int) -> bool | None:
    """Whether the recorded requests and then this one complete on a device of that capacity under memopt's allocator.

    None where nothing is recorded, or too much to be read at once.
    """
    if not torch._C._cuda_isHistoryEnabled():
        return None
    snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot(None)
    history = snapshot["device_traces"][device]
    if not history or len(history) > _MOST_EVENTS:
        return None
    traces = [entries if i == device else [] for i, entries in enumerate(snapshot["device_traces"])]
    try:
        trace = snapshot_file.as_trace({**snapshot, "device_traces": traces})
        trace += f"a {1 << 60} {asked} 0 {device}\n".encode()
        run: Any = _C.replay(trace, capacity, 20, 0, True, True, False, False, device, False)
    except (ValueError, _C.Error):  # history that does not fit together, as where it was switched on and off
        return None
    return bool(run["completed"])
