"""Whether a request failed although there was memory enough, in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memopt import _C, snapshot_file
from memopt.owners.device_bytes import Blocks

_MOST_EVENTS = 100_000  # that are replayed: some 0.3 s, most of it in reading torch's history


@dataclass(frozen=True)
class Fragmentation:
    """`largest_free`: the largest run that the allocator could have given, or the driver. `pinned_by`: the blocks, and
    who holds most of their bytes, that lie in one segment with free pieces; `how`: what decided."""

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


def decide(device: int, asked: int, free: int, blocks: Blocks, names: list[tuple[int, str]]) -> Fragmentation:
    """`free`: of the device, as far as this process may have it; `names`: addresses of tensors and who holds them.
    What torch has recorded is replayed on a device of as much memory; where nothing is, the sizes decide: fragmented is
    what would have fit into all that is free."""
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


def _largest_run(blocks: Blocks) -> int:
    """Neighbours of one segment that are free are one run."""
    if not len(blocks.size):
        return 0
    # A run ends with a live block, and where a segment ends.
    first = torch.ones_like(blocks.live)
    first[1:] = blocks.live[1:] | blocks.live[:-1] | (blocks.segment[1:] != blocks.segment[:-1])
    run = first.cumsum(0) - 1
    sums = torch.zeros(int(run[-1]) + 1, dtype=torch.int64, device="cpu")
    sums.index_add_(0, run, torch.where(blocks.live, 0, blocks.size))
    return int(sums.max())


def _pinning(blocks: Blocks) -> torch.Tensor:
    """The live blocks that have free ones in their segment."""
    count = int(blocks.segment.max()) + 1 if len(blocks.segment) else 0
    free = torch.zeros(count, dtype=torch.bool, device="cpu")
    free[blocks.segment[~blocks.live]] = True
    return blocks.live & free[blocks.segment]


def _holder(blocks: Blocks, pinning: torch.Tensor, names: list[tuple[int, str]]) -> str:
    known = [(address, name) for address, name in names if name]
    where = blocks.containing(torch.tensor([at for at, _ in known], dtype=torch.int64, device="cpu"))
    sums: dict[str, int] = {}
    for block, (_, name) in zip(where.tolist(), known, strict=True):
        if block >= 0 and pinning[block]:
            sums[name] = sums.get(name, 0) + int(blocks.size[block])
    return max(sums, key=lambda name: sums[name], default="")


def _replay(device: int, asked: int, capacity: int) -> bool | None:
    """Whether the recorded requests and then this one complete on a device of so many bytes, where memory moves to
    where it is needed. None where nothing is recorded, or too much to be read at once."""
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
