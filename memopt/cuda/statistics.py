"""What memopt's allocator knows of a device's memory: counters, fragmentation, and a list of all that it holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt.cuda import misuse
from memopt.cuda.device_index import device_index

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
    """What memopt's allocator did on a device so far, in this process. device: as torch.cuda takes it, the current one
    by default. Sizes are bytes.

    allocations, frees: requests that succeeded, and frees; live_blocks, live_bytes, peak_bytes: what was asked for and
    not yet freed, and the most of it at any time; held_bytes, peak_held_bytes: physical memory behind it.
    out_of_memory: requests that failed for want of memory; alloc_retries: those that succeeded only after memory was
    waited for or given back.
    granules_moved: pieces of physical memory that were mapped where they were needed, by a call of the driver;
    granules_switched: those that went back to a place where they were still mapped, without a call; stitches: requests
    that made granules move; recalled: requests that were placed where the same step had put them before.
    events_recorded, stream_waits, host_waits: what ordering streams took; driver_calls: calls that reach memory.
    double_frees, foreign_frees, foreign_streams: misuse, refused; failed_frees: frees that were refused, of these and
    by the driver.

    All 0 where the allocator was never used, and in a forked child. torch.cuda.reset_peak_memory_stats() and
    reset_accumulated_memory_stats() reset these too: peaks become what is current, the rest 0. Raises ValueError for
    what is no CUDA device."""
    misuse.warn()
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
    """How well the memory that memopt holds on a device is used. device: as torch.cuda takes it, the current one by
    default. Bytes, but for the last three, which are parts of 1:

    held_bytes: physical memory; live_bytes: in live blocks, each rounded up to 512; requested_bytes: what was asked for
    of them; free_bytes: held - live.
    largest_free: the largest free run as it lies; largest_allocatable: with free granules moved together and what the
    budget still allows, so the largest request that would succeed.
    pending_bytes: free, but some stream may still use it; stale_bytes: addresses that still map a granule which lives
    elsewhere by now (no memory of their own).

    external = 1 - largest_allocatable / (free_bytes + what the budget still allows): free memory that no single request
    could have. internal = 1 - requested_bytes / live_bytes: lost to rounding. unused_at_peak = 1 - the most that was
    requested at once / the most that was held: what the device had to have beyond what the tensors needed.

    All 0 where memopt's allocator was never used, and in a forked child. Raises ValueError for what is no CUDA
    device."""
    return _C.allocator_fragmentation(_index(device))


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """All memory that memopt's allocator holds, on all devices, as torch.cuda.memory_snapshot() lists it: segments by
    address, each with its blocks. mempool_id: one pool's alone, such as torch.cuda.graph_pool_handle() gives.

    A segment here is a run of addresses with memory behind it, and grows and shrinks; its stream is that of its first
    block. Empty where memopt's allocator was never used, and in a forked child."""
    from memopt.cuda import history

    found = []
    for device in range(_device_count()):
        segments = _C.allocator_segments(device, mempool_id, history.frames(device))
        found += sorted(segments, key=lambda segment: segment["address"])
    return found


def _index(device: torch.device | str | int | None) -> int:
    """Where torch is not there, nothing was allocated on any device."""
    return 0 if device is None and "torch" not in sys.modules else device_index(device)


def _device_count() -> int:
    return int(sys.modules["torch"].cuda.device_count()) if "torch" in sys.modules else 0


# ---- in torch's form -------------------------------------------------------------------------------------------------


def torch_statistics(device: int, version: tuple[int, int]) -> dict[str, Any]:
    """What torch._C._cuda_memoryStats gives in that version of torch, of memopt's allocator."""
    stats = accelerator_statistics(device)
    if version >= (2, 12):
        stats["num_oom_rejections"] = 0  # torch's own policy rejects requests, memopt's never
        stats["reserved_bytes_by_private_pools"] = _C.allocator_private_pools(device)
    return stats


def accelerator_statistics(device: int) -> dict[str, Any]:
    """What torch._C._accelerator_getDeviceStats gives."""
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
