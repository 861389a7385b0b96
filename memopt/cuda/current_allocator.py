"""memopt's allocator as torch's current one: what it is given, and what it gives back."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C, torch_version
from memopt.cuda import misuse, torch_names
from memopt.cuda.device_index import device_index
from memopt.finding import Finding
from memopt.log import logger

if TYPE_CHECKING:
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator

_SLACK = 0.02


class _Settings(NamedTuple):
    memory_budget: int
    slack: float
    double_map: bool
    recall: bool
    preallocate: int


_allocator: CUDAPluggableAllocator | None = None
_settings: _Settings | None = None


def allocator(
    *,
    memory_budget: int | str | None = None,
    slack: float | None = None,
    double_map: bool | None = None,
    recall: bool | None = None,
    preallocate: int | str | None = None,
) -> CUDAPluggableAllocator:
    """memopt's allocator, for `torch.cuda.memory.change_current_allocator`:

        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

    It must come before the first CUDA allocation of the process, and cannot be undone: torch's rules (in a CUDA build
    of torch even training on the CPU counts, where it pins memory or runs autograd). A request that does not fit raises
    torch.OutOfMemoryError, whose text says what would help.

    memory_budget: physical bytes ("8GiB" too) that memopt holds at most on each device; by default what the device has.
    slack: memory beyond the live peak so far that is created before free memory is moved to where it is needed, as a
    part of that peak; 0.02 by default. Less holds less and moves more.
    double_map: memory may be mapped at its new place while queued work still uses the old one, so that nothing waits.
    By default only on the simulated device: that hardware allows it is not proved yet. recall: a step that repeats is
    placed as it was the last time, without a call of the driver; True by default. preallocate: bytes that each device's
    pool holds from its first use on, instead of growing.

    Returns a torch.cuda.memory.CUDAPluggableAllocator, the same one each time. The settings are chosen by the first
    call; one that asks for others later raises ValueError, and so does a setting that makes no sense. Raises
    ImportError without PyTorch >= 2.10, memopt.Error naming what the driver lacks; torch is as it was then."""
    global _allocator, _settings
    asked: dict[str, Any] = {
        "memory_budget": None if memory_budget is None else _C.parse_size(memory_budget),
        "slack": slack,
        "double_map": double_map,
        "recall": recall,
        "preallocate": None if preallocate is None else _C.parse_size(preallocate),
    }
    if _allocator is not None and _settings is not None:
        _refuse_other_settings(asked, _settings)
    else:
        chosen = _chosen(asked)
        _allocator, _settings = _made(chosen), chosen
    torch_names.install(_allocator.allocator())
    misuse.warn()
    return _allocator


def budget() -> int:
    """Bytes that memopt holds at most on each device, 0 where none was set."""
    return _settings.memory_budget if _settings is not None else 0


def _chosen(asked: dict[str, Any]) -> _Settings:
    """The settings, complete; ValueError for what makes no sense."""
    if asked["memory_budget"] == 0:
        raise ValueError("memory_budget=0 leaves nothing to allocate: leave it out for no budget")
    default = _Settings(0, _SLACK, _on_the_simulated_device(), True, 0)
    chosen = default._replace(**{name: value for name, value in asked.items() if value is not None})
    if not (math.isfinite(chosen.slack) and 0 <= chosen.slack <= 1000):
        raise ValueError(f"slack={chosen.slack!r} is a part of the live peak, such as {_SLACK}")
    if chosen.memory_budget and chosen.preallocate > chosen.memory_budget:
        raise ValueError(
            f"preallocate ({_C.format_size(chosen.preallocate)}) is more than "
            f"memory_budget ({_C.format_size(chosen.memory_budget)})"
        )
    return chosen


def _on_the_simulated_device() -> bool:
    sim = sys.modules.get("memopt.sim")
    return sim is not None and bool(sim.is_active())


def _refuse_other_settings(asked: dict[str, Any], settings: _Settings) -> None:
    for name, value in asked.items():
        if value is not None and value != getattr(settings, name):
            raise ValueError(
                f"memopt.cuda.allocator() was made with {name}={getattr(settings, name)!r} and cannot change to "
                f"{value!r}: its first call in a process chooses"
            )


def _made(settings: _Settings) -> CUDAPluggableAllocator:
    torch_version.require("memopt.cuda.allocator()")
    from torch.cuda.memory import CUDAPluggableAllocator

    lacking = _C.allocator_prepare()
    if lacking:
        logger.warning("an out of memory will be a plain RuntimeError: %s", lacking)
    if not _C.cuda_driver()["devices"]:
        raise _C.Error("memopt.cuda.allocator() needs a CUDA device, and the driver sees none")
    _C.allocator_configure(
        settings.memory_budget,
        round(settings.slack * 1000),
        settings.double_map,
        settings.recall,
        settings.preallocate,
    )
    made = CUDAPluggableAllocator(_C.__file__, "memopt_malloc", "memopt_free")
    for setter, address in _C.allocator_hooks().items():
        getattr(made.allocator(), setter)(address)
    logger.info("allocator: hooks of %s, %s", _C.__file__, settings)
    return made


def trim(device: torch.device | str | int | None = None, keep: int | str = 0) -> int:
    """Gives memory that no tensor uses back to a device, until `keep` bytes ("1GiB" too) are held or none is free.
    device: as torch.cuda takes it, the current one by default. Waits for the work that used that memory.
    torch.cuda.empty_cache() does the same on all devices.

    Returns the bytes given back: 0 where memopt's allocator was never used. Raises ValueError for what is no CUDA
    device or no size, memopt.Error where the driver fails."""
    size = _C.parse_size(keep)
    misuse.warn()
    return 0 if _allocator is None and device is None else _C.allocator_trim(device_index(device), size)


def finding() -> Finding:
    """What the doctor says of the allocator."""
    topic, counts = "allocator", _C.allocator_misuse()
    refused = misuse.text(counts)
    if refused:
        mend = "look for code that frees device memory by its address, or uses memory of another library as torch's"
        return Finding(topic, "broken", f"refused {refused}", mend)
    if not _C.allocator_is_current():
        return Finding(
            topic, "absent", "torch uses its own", "change_current_allocator(memopt.cuda.allocator())"
        )
    lacking = _C.allocator_prepare()
    if lacking:
        return Finding(
            topic, "broken", f"an out of memory is a plain RuntimeError: {lacking}", "update memopt"
        )
    return Finding(topic, "ok", "torch uses memopt's")
