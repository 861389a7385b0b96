"""torch's own allocator on a simulated device, to which recorded requests are put: in a process of its own, since the
one that asks has a device, or ran out of it.

On standard input it is given lines of JSON, [file, settings]: the file has int64 numbers, three an operation: a block's
number, its size (0: it is freed) and its stream; the settings are torch's. It prints a line of JSON for each."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any


def main(memory: int) -> None:
    import memopt.sim

    memopt.sim.activate(memory=memory, blank=True)
    import torch

    torch.cuda.init()
    for line in sys.stdin:
        file, settings = json.loads(line)
        torch.cuda.empty_cache()
        # What is not asked for is as the environment says.
        if "expandable" in settings:
            torch.cuda.memory._set_allocator_settings(settings)
        operations = array("q")
        operations.frombytes(Path(file).read_bytes())
        print(json.dumps(replayed(operations)), flush=True)
        if "expandable" in settings:
            torch.cuda.empty_cache()
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def replayed(operations: array[int]) -> dict[str, Any]:
    """`failed`: the number of the block for which there was no memory, None where there was for all; `peak`: the most
    bytes that were allocated."""
    import torch

    allocate: Any = torch._C._cuda_cudaCachingAllocator_raw_alloc  # type: ignore[attr-defined]
    free: Any = torch._C._cuda_cudaCachingAllocator_raw_delete  # type: ignore[attr-defined]
    torch.cuda.reset_peak_memory_stats()
    streams: dict[int, Any] = {}
    addresses: dict[int, int] = {}
    failed = None
    values = iter(operations)
    for block, size, stream in zip(values, values, values, strict=True):
        if not size:
            free(addresses.pop(block))
            continue
        if stream and stream not in streams:
            streams[stream] = torch.cuda.Stream()
        try:
            addresses[block] = allocate(size, streams[stream].cuda_stream if stream else 0)
        except torch.OutOfMemoryError:
            failed = block
            break
    peak = torch.cuda.max_memory_allocated()
    for address in addresses.values():
        free(address)
    torch.cuda.synchronize()
    return {"failed": failed, "peak": peak}
