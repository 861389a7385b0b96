"""The source line that allocated a block of memory, where a recorder in this process has noted it."""

from __future__ import annotations

import bisect
import sys
from typing import Any

from memopt._memory.live.source_location import is_users, place


class Creators:
    """The allocating lines of the blocks that are live now. Empty, and cheap, where nothing is recorded."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], list[tuple[int, str]]]] = {}
        torch = sys.modules["torch"]
        if torch.cuda.is_available() and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
            self._read(torch._C._cuda_memorySnapshot(None)["segments"])

    def _read(self, segments: list[dict[str, Any]]) -> None:
        blocks: dict[str, list[tuple[int, int, str]]] = {}
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                at = block.get("address", address)
                if block["state"] == "active_allocated" and block.get("frames"):
                    line = user_line(block["frames"])
                    blocks.setdefault(f"cuda:{segment['device']}", []).append((at, at + block["size"], line))
                address += block["size"]
        for device, found in blocks.items():
            found.sort()
            self._blocks[device] = [at for at, _, _ in found], [(end, line) for _, end, line in found]

    def place(self, device: str, address: int) -> str:
        """Return the line that allocated the block, such as "train.py:41", or ""."""
        starts, ends = self._blocks.get(device, ([], []))
        i = bisect.bisect_right(starts, address) - 1
        return ends[i][1] if i >= 0 and address < ends[i][0] else ""


def user_line(frames: list[dict[str, Any]]) -> str:
    """The innermost line of the user's in a stack as torch has it."""
    for frame in frames:
        if frame["filename"] and is_users(frame["filename"]):
            return place(frame["filename"], frame["line"])
    return ""
