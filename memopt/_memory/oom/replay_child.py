"""torch's own allocator on a simulated device, for recorded requests, in a process of its own.

The process that asks has a device, or ran out of its memory. Its first request is the device's bytes, each further one
[file, settings]: the file has int64 numbers, three for each operation: a block's number, its size (0: it is freed) and
its stream; the settings are torch's.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from memopt._runtime import process


def main() -> None:
    import memopt.sim

    asked = process.requests()
    memopt.sim.activate(memory=next(asked), blank=True)
    import torch

    torch.cuda.init()
    for file, settings in asked:
        torch.cuda.empty_cache()
        # What is not asked for is as the environment says.
        if "expandable" in settings:
            torch.cuda.memory._set_allocator_settings(settings)
        operations = array("q")
        operations.frombytes(Path(file).read_bytes())
        process.tell("replayed", **replayed(operations))
        if "expandable" in settings:
            torch.cuda.empty_cache()
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def replayed(operations: array[int]) -> dict[str, Any]:
    """Replay the operations and return the failed block's number (None if all fit) and the peak of allocated bytes."""
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


if __name__ == "__main__":
    main()
