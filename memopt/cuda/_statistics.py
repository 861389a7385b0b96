"""Statistics of memopt's allocator for a device: counters, fragmentation, and a snapshot of all its blocks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt.cuda import _misuse
from memopt.cuda._device_index import device_index

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
    _misuse.warn()
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
