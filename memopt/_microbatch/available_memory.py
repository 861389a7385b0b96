"""The memory that there is for a step, and the memory that there would have to be."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch

from memopt import _C
from memopt._memory.oom.exceptions import bytes_asked
from memopt._runtime.host_memory import address_space_bytes, available


def of(devices: Iterable[torch.device]) -> int:
    """Bytes that a step can have: of the device that has least, or of the host where there is no other."""
    cuda = [device for device in devices if device.type == "cuda"]
    return min(_of_device(device) for device in cuda) if cuda else _of_host()


class StepMemory(NamedTuple):
    """The memory of the CUDA devices together, since before().

    live: bytes in tensors then; retries: how often the allocator had had to empty its cache to serve a request, which
    precedes an out-of-memory error and makes a step slow.
    """

    live: int
    retries: int


def before(devices: Iterable[torch.device]) -> StepMemory | None:
    """None where no allocator counts: without CUDA, or under one that keeps no statistics."""
    stats = _statistics(devices)
    if not stats:
        return None
    live = sum(one.get("allocated_bytes.all.current", 0) for one in stats)
    return StepMemory(live, sum(one.get("num_alloc_retries", 0) for one in stats))


def after(devices: Iterable[torch.device], then: StepMemory) -> StepMemory:
    """The bytes held beyond the live ones of before(), and the retries in between.

    The bytes are what the steps in between have taken if nothing was cached then.
    """
    stats = _statistics(devices)
    held = sum(one.get("reserved_bytes.all.current", 0) for one in stats)
    return StepMemory(held - then.live, sum(one.get("num_alloc_retries", 0) for one in stats) - then.retries)


def _statistics(devices: Iterable[torch.device]) -> list[dict[str, int]]:
    found = []
    for device in devices:
        if device.type == "cuda" and _has_statistics():
            found.append(torch.cuda.memory_stats(device))
    return found


def _has_statistics() -> bool:
    """A pluggable allocator that is not memopt's has none."""
    return torch.cuda.memory.get_allocator_backend() != "pluggable" or _C.allocator_is_current()


def _of_device(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    if not _has_statistics():
        return int(free)
    reserved, live = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    limit = _limit(device, total)
    return int(min(free, limit - reserved) + reserved - live)


def _limit(device: torch.device, total: int) -> int:
    """The bytes that this process may have of the device."""
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # young
    if fraction is None or torch.cuda.memory.get_allocator_backend() == "pluggable":
        return total
    return int(fraction(device) * total)


def _of_host() -> int:
    """The bytes that are free for this process, within its cgroup and its limit of address space."""
    found = [size for size in (available(swap=False), _address_room()) if size is not None]
    return min(found, default=sys.maxsize)


def _address_room() -> int | None:
    limit = _address_limit()
    return None if limit is None else limit - address_space_bytes()


def _address_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def least(error: BaseException, devices: Iterable[torch.device]) -> str:
    """Called while the failed call's tensors are alive: the bytes that would have let the request pass."""
    asked = bytes_asked(error) or 0
    for device in devices:
        if device.type == "cuda":
            return _least_of_device(device, asked)
    if (limit := _address_limit()) is not None:
        needed = address_space_bytes() + asked
        return (
            f"at least {_C.format_size(max(needed, limit + 1))} of address space ({max(needed, limit + 1)} bytes; the "
            f"limit, ulimit -v, is {_C.format_size(limit)})"
        )
    return f"at least {_C.format_size(_of_host() + asked)} of host memory beyond what is in use"


def _least_of_device(device: torch.device, asked: int) -> str:
    free, total = torch.cuda.mem_get_info(device)
    needed = total - free + asked
    if needed > total:
        return (
            f"at least {_C.format_size(needed)} of device memory ({needed} bytes: {total - free} in use, of all "
            f"processes, and {asked} for the request that failed), and {device} has {_C.format_size(total)}"
        )
    if not _has_statistics():
        return f"more of {device} than this process may have, by {_C.format_size(asked)}"
    held = torch.cuda.memory_reserved(device)
    return (
        f"at least {_C.format_size(held + asked)} for this process alone ({held + asked} bytes: {held} held and "
        f"{asked} for the request that failed); a limit below the {_C.format_size(total)} of {device} is set"
    )
