"""Installation and removal of everything that memopt.enable() switches on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memopt import _C
from memopt._memory.recording.recorder import cuda_is_here
from memopt._runtime.log import logger
from memopt.cuda import _torch_patches
from memopt.cuda._allocator import allocator


class EnableSettings(NamedTuple):
    backend: str
    memory_budget: int | None
    on_oom: str


_settings: EnableSettings | None = None
_growth: Any = None  # the watch
_fractions: dict[int, float] = {}  # of each device, before memory_budget


def settings() -> EnableSettings | None:
    """Return the settings of the last enable(), None if it was not called or was undone."""
    return _settings


def install(chosen: EnableSettings) -> None:
    global _settings, _growth
    if chosen.backend == "pool":
        _take_pool(chosen.memory_budget)
    elif _torch_patches.is_ours():
        raise _C.Error(
            "memopt's allocator is already active, and torch cannot switch back: use backend='pool'"
        )
    elif chosen.memory_budget is not None:
        _limit(chosen.memory_budget)
    from memopt._memory.live.growth import GrowthWatch
    from memopt._memory.oom import observer

    if chosen.on_oom == "report":
        if cuda_is_here():
            observer.listen()
        observer.install_hooks()
    else:
        observer.ignore()
        observer.remove_hooks()
    from memopt._jupyter import traceback_hook

    traceback_hook.install()
    if _growth is None:
        _growth = GrowthWatch()
        _growth.start()
    _settings = chosen
    logger.info("enabled: %s", chosen)


def remove() -> None:
    global _settings, _growth
    if _settings is None:
        return
    from memopt._jupyter import traceback_hook

    traceback_hook.remove()
    _growth.stop()
    _growth = None
    from memopt._memory.oom import observer

    observer.ignore()
    observer.remove_hooks()
    for device, fraction in _fractions.items():
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    _fractions.clear()
    _settings = None


def _take_pool(budget: int | None) -> None:
    if _torch_patches.is_ours():
        allocator(memory_budget=budget)  # refuses what is another budget
        return
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0:
        raise _C.Error(
            "backend='pool' comes too late: this process has CUDA memory from torch's allocator. Call "
            "memopt.enable(backend='pool') before anything is put on the device"
        )
    ours = allocator(memory_budget=budget)  # says what is missing where there is no device
    try:
        torch.cuda.memory.change_current_allocator(ours)
    except RuntimeError as error:  # torch's word for it
        _torch_patches.remove()
        raise _C.Error(
            f"backend='pool' comes too late: torch refuses to change its allocator ({error}). Call "
            "memopt.enable(backend='pool') before CUDA is used"
        ) from error


def _limit(budget: int) -> None:
    """Limit torch's own allocator to a fraction of each device, once the program initializes the devices."""

    def set_fractions() -> None:
        for device in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(device).total_memory
            _fractions.setdefault(device, torch.cuda.get_per_process_memory_fraction(device))
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)

    if cuda_is_here():
        torch.cuda._lazy_call(set_fractions)  # type: ignore[no-untyped-call]
