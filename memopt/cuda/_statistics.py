"""Statistics and traces of memopt's allocator for a device.

Counters, fragmentation, a snapshot of all its blocks, and the trace of its requests for `python -m memopt replay`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._runtime import torch_version
from memopt._runtime.log import stacklevel

if TYPE_CHECKING:
    import torch

# torch's names for what a pool counts in three columns; the first four are missing from nothing that torch ever gave.
_KINDS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_NO_SUCH_THING = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Return counters of memopt's allocator for a device, since the start of this process.

    torch.cuda.reset_peak_memory_stats() and reset_accumulated_memory_stats() reset these too: peaks become the current
    values, the rest 0.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.

    Returns:
        A dict, all 0 where the allocator was never used, and in a forked child; sizes are bytes:
            allocations, frees: Requests that succeeded, and frees.
            live_blocks, live_bytes, peak_bytes: Requested and not yet freed, and the most bytes of it at any time.
            held_bytes, peak_held_bytes: Physical memory behind it.
            out_of_memory: Requests that failed for lack of memory.
            alloc_retries: Requests that succeeded only after memory was waited for or given back.
            granules_moved: Granules (units of physical memory) that a driver call mapped at a new address.
            granules_switched: Granules that went back to an address where they were still mapped, without a driver
                call.
            stitches: Requests that made granules move.
            recalled: Requests that were placed where the same step had put them before.
            events_recorded, stream_waits, host_waits: Cost of ordering streams.
            driver_calls: Driver calls on memory.
            double_frees, foreign_frees, foreign_streams: Misuse that was refused.
            failed_frees: Frees that were refused, by these checks or by the driver.

    Raises:
        ValueError: device is not a CUDA device.
    """
    warn_of_misuse()
    known = _C.allocator_statistics(_index(device))
    blocks, asked, held = (known[kind]["all"] for kind in ("allocation", "requested_bytes", "reserved_bytes"))
    return {
        "allocations": blocks["allocated"],
        "frees": blocks["freed"],
        "live_blocks": blocks["current"],
        "live_bytes": asked["current"],
        "peak_bytes": asked["peak"],
        "held_bytes": held["current"],
        "peak_held_bytes": held["peak"],
        "out_of_memory": known["num_ooms"],
        "alloc_retries": known["num_alloc_retries"],
        "host_waits": known["num_sync_all_streams"],
        "failed_frees": known["double_frees"] + known["foreign_frees"] + known["failed_releases"],
        **{
            name: known[name]
            for name in (
                "granules_moved",
                "granules_switched",
                "stitches",
                "recalled",
                "events_recorded",
                "stream_waits",
                "driver_calls",
                "double_frees",
                "foreign_frees",
                "foreign_streams",
            )
        },
    }


def fragmentation(device: torch.device | str | int | None = None) -> dict[str, int | float]:
    """Return the fragmentation of the memory that memopt holds on a device.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.

    Returns:
        A dict, all 0 where memopt's allocator was never used, and in a forked child; sizes are bytes, ratios lie in [0,
            1]:
            held_bytes: Physical memory.
            live_bytes: In live blocks, each rounded up to 512.
            requested_bytes: Requested for live blocks.
            free_bytes: held_bytes - live_bytes.
            largest_free: The largest free range as it lies.
            largest_allocatable: The largest request that would succeed: free granules are moved together, and what the
                budget still allows is added.
            pending_bytes: Free memory that some stream may still use.
            stale_bytes: Addresses that still map a granule which is in use elsewhere by now; they hold no memory of
                their own.
            external: 1 - largest_allocatable / (free_bytes + rest of the budget): free memory that no single request
                could have.
            internal: 1 - requested_bytes / live_bytes: lost to rounding.
            unused_at_peak: 1 - most requested at once / most held: memory that the device needed beyond the tensors.

    Raises:
        ValueError: device is not a CUDA device.
    """
    return _C.allocator_fragmentation(_index(device))


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Return all memory that memopt's allocator holds, on all devices, in the format of torch.cuda.memory_snapshot().

    A segment here is a range of addresses with memory behind it, which grows and shrinks; its stream is that of its
    first block.

    Args:
        mempool_id: Restricts the list to one pool, such as torch.cuda.graph_pool_handle() returns.

    Returns:
        Segments by address, each with its blocks; empty where memopt's allocator was never used, and in a forked child.
    """
    from memopt.cuda import _history

    found = []
    for device in range(_device_count()):
        segments = _C.allocator_segments(device, mempool_id, _history.frames(device))
        found += sorted(segments, key=lambda segment: segment["address"])
    return found


def _index(device: torch.device | str | int | None) -> int:
    """Return the device index; 0 where torch is not loaded, because nothing was allocated on any device."""
    return 0 if device is None and "torch" not in sys.modules else device_index(device)


def _device_count() -> int:
    return int(sys.modules["torch"].cuda.device_count()) if "torch" in sys.modules else 0


# ---- in torch's form -------------------------------------------------------------------------------------------------


def torch_statistics(device: int, version: tuple[int, int]) -> dict[str, Any]:
    """Return the keys of torch._C._cuda_memoryStats in that version of torch, with memopt's figures."""
    stats = accelerator_statistics(device)
    if version >= (2, 12):
        stats["num_oom_rejections"] = 0  # torch's own policy rejects requests, memopt's never
        stats["reserved_bytes_by_private_pools"] = _C.allocator_private_pools(device)
    return stats


def accelerator_statistics(device: int) -> dict[str, Any]:
    """Return the keys of torch._C._accelerator_getDeviceStats, with memopt's figures."""
    known = _C.allocator_statistics(device)
    return {
        "num_alloc_retries": known["num_alloc_retries"],
        "num_ooms": known["num_ooms"],
        "max_split_size": -1,  # any block may be split
        "num_sync_all_streams": known["num_sync_all_streams"],
        "num_device_alloc": known["num_device_alloc"],
        "num_device_free": known["num_device_free"],
        **{kind: known[kind] for kind in _KINDS},
        "oversize_allocations": dict(_NO_SUCH_THING),
        "oversize_segments": dict(_NO_SUCH_THING),
    }


# ---- traces ----------------------------------------------------------------------------------------------------------


_CAPACITY = 1_000_000  # events, 64 bytes each


def record_trace(
    *,
    capacity: int = _CAPACITY,
    stacks: bool = False,
    clear: bool = True,
    device: torch.device | str | int | None = None,
) -> None:
    """Record the last events of memopt's allocator on a device from now on.

    Args:
        capacity: Number of events that are kept, 64 bytes of host memory each; at most 2**28. Another capacity than
            before drops the events kept so far.
        stacks: Whether to record the Python stack of each request, for all devices. This takes the GIL at every
            request, and some microseconds.
        clear: Whether to drop the events kept so far.
        device: A CUDA device, as torch takes it; by default the current one.

    Raises:
        memopt.Error: There is no such device.
        ValueError: The capacity is out of range.
    """
    _C.trace_start(device_index(device), capacity, stacks, clear)


def stop_trace(device: torch.device | str | int | None = None) -> None:
    """Stop recording events; those kept so far can still be saved.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.
    """
    _C.trace_stop(device_index(device))


def trace_step() -> None:
    """Mark the end of a training step, so that a replay can report figures for each step."""
    _C.trace_step()


def save_trace(path: str | Path, device: torch.device | str | int | None = None) -> None:
    """Write the recorded events in the text format that `python -m memopt replay` reads.

    Blocks that were live before the oldest kept event come first.

    Args:
        path: The file to write.
        device: A CUDA device, as torch takes it; by default the current one.
    """
    Path(path).write_bytes(_C.trace_text(device_index(device)))


# ---- misuse that was refused in torch's destructors, where no exception can be raised --------------------------------


_MISUSE = {
    "double_frees": "frees of memory that was already free",
    "foreign_frees": "frees of addresses that memopt never allocated",
    "foreign_streams": "record_stream() of addresses that memopt never allocated",
    "unbalanced_pools": "ends of private pools that were not begun",
    "failed_releases": "pieces of memory that the driver refused to free",
}
_told = dict.fromkeys(_MISUSE, 0)


def misuse_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[name]} {what}" for name, what in _MISUSE.items() if counts[name])


def warn_of_misuse() -> None:
    """Warn of misuse that was refused since the last warning. Called by every function that reads the allocator."""
    counts = _C.allocator_misuse()
    fresh = {name: max(0, counts[name] - _told[name]) for name in _MISUSE}
    if any(fresh.values()):
        _told.update({name: counts[name] for name in _MISUSE})
        warnings.warn(
            f"memopt's allocator refused {misuse_text(fresh)}", RuntimeWarning, stacklevel=stacklevel()
        )


# ---- devices ---------------------------------------------------------------------------------------------------------


def device_index(device: torch.device | str | int | None) -> int:
    """Return the ordinal of a device, as torch.cuda takes it; None is the current one.

    It initialises nothing: where CUDA was never used, or cannot be (a forked child), the current device is the first.

    Raises:
        ValueError: It is not a CUDA device.
    """
    if isinstance(device, int):
        return device
    torch_version.require("memopt.cuda")
    import torch

    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"device {device!r} is not a CUDA device")
    if chosen.index is not None:
        return int(chosen.index)
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
