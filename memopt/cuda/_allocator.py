"""memopt's allocator as torch's current allocator: its creation, settings and trimming."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from memopt import _C
from memopt._runtime import arguments, kernels, torch_version
from memopt._runtime.doctor import Finding
from memopt._runtime.log import logger, stacklevel
from memopt.cuda import _statistics, _torch_patches
from memopt.cuda._statistics import device_index

if TYPE_CHECKING:
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator

_SLACK = 0.02
_MOST_DEVICES = 64  # MO_MAX_DEVICES in csrc/driver/driver.h


class _Settings(NamedTuple):
    memory_budget: int
    slack: float
    double_map: bool | None  # None: as the test of each device says
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
    """Return memopt's allocator, for `torch.cuda.memory.change_current_allocator`.

    It must be set before the first CUDA allocation of the process, and cannot be unset: these are torch's rules. (In a
    CUDA build of torch even training on the CPU counts, if it pins memory or runs autograd.) A request that does not
    fit raises torch.OutOfMemoryError, whose text names remedies.

    Args:
        memory_budget: Most physical bytes ("8GiB" too) that memopt holds on each device; by default all that the device
            has.
        slack: Memory that may be created beyond the live peak so far before free memory is remapped instead, as a
            fraction of that peak; 0.02 by default. With less slack less memory is held and more is remapped.
        double_map: Whether memory may be mapped at its new address while queued work still uses the old one, so that
            nothing waits. By default each device is tested at its first use (some milliseconds): it is on if what is
            written through one of two addresses is read through the other. Otherwise it is off, with a warning, and
            memopt.doctor() says why. Set False for programs with kernels that are on the device while others write
            what they will read: persistent kernels, and programmatic dependent launch without
            griddepcontrol.wait.
        recall: Whether a step that repeats gets the same placement as the last time, without driver calls; True by
            default.
        preallocate: Bytes that the pool of each device holds from its first use on, instead of growing.

    Returns:
        A torch.cuda.memory.CUDAPluggableAllocator, the same one each time. The first call decides its settings.

    Raises:
        ValueError: A setting makes no sense, or differs from the first call's.
        ImportError: PyTorch >= 2.10 is missing.
        memopt.Error: The driver lacks a required function; the message names it, and torch is unchanged.

    Examples:
        >>> torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    """
    global _allocator, _settings
    asked: dict[str, Any] = {
        "memory_budget": None if memory_budget is None else arguments.size(memory_budget, "memory_budget"),
        "slack": slack,
        "double_map": double_map,
        "recall": recall,
        "preallocate": None if preallocate is None else arguments.size(preallocate, "preallocate"),
    }
    if _allocator is not None and _settings is not None:
        _refuse_other_settings(asked, _settings)
    else:
        chosen = _chosen(asked)
        _allocator, _settings = _made(chosen), chosen
    _torch_patches.install(_allocator.allocator())
    _statistics.warn_of_misuse()
    return _allocator


def budget() -> int:
    """Return the most bytes that memopt holds on each device, 0 if no budget was set."""
    return _settings.memory_budget if _settings is not None else 0


def _chosen(asked: dict[str, Any]) -> _Settings:
    """Return the complete settings. Raise ValueError for one that makes no sense."""
    if asked["memory_budget"] == 0:
        raise ValueError("memory_budget=0 leaves nothing to allocate: leave it out for no budget")
    default = _Settings(0, _SLACK, True if _on_a_blank_device() else None, True, 0)
    chosen = default._replace(**{name: value for name, value in asked.items() if value is not None})
    if not (math.isfinite(chosen.slack) and 0 <= chosen.slack <= 1000):
        raise ValueError(f"slack={chosen.slack!r} must be a share of the live peak, such as {_SLACK}")
    if chosen.memory_budget and chosen.preallocate > chosen.memory_budget:
        raise ValueError(
            f"preallocate ({_C.format_size(chosen.preallocate)}) is more than "
            f"memory_budget ({_C.format_size(chosen.memory_budget)})"
        )
    return chosen


def _on_a_blank_device() -> bool:
    """Return whether this process has a simulated device that keeps no bytes, on which the test would prove nothing."""
    activation = sys.modules.get("memopt.sim._activation")
    return activation is not None and activation.is_active() and "blank=1" in activation.active_settings()


def _refuse_other_settings(asked: dict[str, Any], settings: _Settings) -> None:
    for name, value in asked.items():
        if value is not None and value != getattr(settings, name):
            raise ValueError(
                f"memopt.cuda.allocator() was made with {name}={getattr(settings, name)!r} and cannot change to "
                f"{value!r}: the first call in a process determines the settings"
            )


def _made(settings: _Settings) -> CUDAPluggableAllocator:
    torch_version.require("memopt.cuda.allocator()")
    from torch.cuda.memory import CUDAPluggableAllocator

    lacking = _C.allocator_prepare()
    if lacking:
        logger.warning("an out-of-memory error will be a plain RuntimeError: %s", lacking)
    if not _C.cuda_driver()["devices"]:
        raise _C.Error("memopt.cuda.allocator() needs a CUDA device, and the driver sees none")
    if settings.double_map is None:
        kernels.prepare()  # the test runs one
    _C.allocator_configure(
        settings.memory_budget,
        round(settings.slack * 1000),
        settings.double_map,
        settings.recall,
        settings.preallocate,
        _warn_of_aliases,
    )
    made = CUDAPluggableAllocator(_C.__file__, "memopt_malloc", "memopt_free")
    for setter, address in _C.allocator_hooks().items():
        getattr(made.allocator(), setter)(address)
    logger.info("allocator: hooks of %s, %s", _C.__file__, settings)
    return made


_warned: set[int] = set()  # devices


def _warn_of_aliases() -> None:
    """Warn of each device on which the test of aliased memory has turned double_map off, once."""
    for device, (on, tested, why) in _double_maps().items():
        if tested and not on and device not in _warned:
            _warned.add(device)
            warnings.warn(
                f"memopt's allocator: double_map is off on device {device}, so memory moves only when the work that "
                f"used it is over: {why}",
                RuntimeWarning,
                stacklevel=stacklevel(),
            )


def _double_maps() -> dict[int, tuple[bool, bool, str]]:
    """Return by device in use: whether double_map is on, whether a test decided, and why it is off if it did."""
    found = {device: _C.allocator_double_map(device) for device in range(_MOST_DEVICES)}
    return {device: how for device, how in found.items() if how is not None}


def trim(device: torch.device | str | int | None = None, keep: int | str = 0) -> int:
    """Give memory that no tensor uses back to a device.

    It waits for the work that used that memory. torch.cuda.empty_cache() does the same on all devices.

    Args:
        device: A CUDA device, as torch takes it; by default the current one.
        keep: Bytes ("1GiB" too) that may stay held.

    Returns:
        The bytes given back, 0 where memopt's allocator was never used.

    Raises:
        ValueError: device is not a CUDA device, or keep is not a size.
        memopt.Error: The driver failed.
    """
    size = arguments.size(keep, "keep")
    _statistics.warn_of_misuse()
    return 0 if _allocator is None and device is None else _C.allocator_trim(device_index(device), size)


def finding() -> Finding:
    """Return memopt.doctor()'s finding about the allocator."""
    topic, counts = "allocator", _C.allocator_misuse()
    refused = _statistics.misuse_text(counts)
    if refused:
        remedy = "look for code that frees device memory by its address, or passes another library's memory to torch"
        return Finding(topic, "broken", f"refused {refused}", remedy)
    if not _C.allocator_is_current():
        return Finding(
            topic, "absent", "torch uses its own", "change_current_allocator(memopt.cuda.allocator())"
        )
    lacking = _C.allocator_prepare()
    if lacking:
        return Finding(
            topic, "broken", f"an out-of-memory error is a plain RuntimeError: {lacking}", "update memopt"
        )
    return Finding(topic, "ok", "torch uses memopt's")


_NOT_COVERED = (
    "double_map=False where kernels stay on the device while others write what they will read: persistent kernels, "
    "programmatic dependent launch without griddepcontrol.wait"
)


def nccl_findings() -> list[Finding]:
    """Return memopt.doctor()'s finding about NCCL's registration of captured buffers, where that is switched on.

    NCCL registers a buffer by the one handle that is mapped there, and a tensor of this allocator, as one of torch's
    expandable segments, is mapped by several.
    """
    if not _C.allocator_is_current() or os.environ.get("NCCL_GRAPH_REGISTER", "0") == "0":
        return []
    text = (
        "NCCL_GRAPH_REGISTER is set, but memopt maps a large tensor by several handles, which NCCL cannot register: "
        "collectives in captured graphs may fail"
    )
    return [Finding("nccl", "broken", text, "set NCCL_GRAPH_REGISTER=0, as for torch's expandable segments")]


def double_map_findings() -> list[Finding]:
    """Return memopt.doctor()'s findings about double_map, one for each device that the allocator has used."""
    found = []
    for device, (on, tested, why) in _double_maps().items():
        if on:
            how = "it passed the test of aliased memory" if tested else "by double_map=True, untested"
            found.append(Finding("double_map", "ok", f"on for device {device}: {how}", _NOT_COVERED))
        elif tested:
            text = f"off for device {device}, by the test of aliased memory: {why}"
            remedy = "memopt works without it; double_map=False leaves out the test and its warning"
            found.append(Finding("double_map", "absent", text, remedy))
        else:
            found.append(Finding("double_map", "ok", f"off for device {device}, untested"))
    return found
