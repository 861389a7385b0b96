"""What memopt.enable() installs, and memopt.disable() removes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memopt import _C
from memopt.cuda import torch_names
from memopt.cuda.current_allocator import allocator
from memopt.log import logger
from memopt.profiling.recorder import cuda_is_here


class Settings(NamedTuple):
    backend: str
    memory_budget: int | None
    on_oom: str


_settings: Settings | None = None
_growth: Any = None  # the watch
_fractions: dict[int, float] = {}  # of each device, before memory_budget


def settings() -> Settings | None:
    """Those of the last enable(); None where it was not called, or undone."""
    return _settings


def install(chosen: Settings) -> None:
    global _settings, _growth
    if chosen.backend == "pool":
        _take_pool(chosen.memory_budget)
    elif torch_names.is_ours():
        raise _C.Error(
            "torch allocates through memopt already, and knows no way back: backend='pool' it stays"
        )
    elif chosen.memory_budget is not None:
        _limit(chosen.memory_budget)
    from memopt.oom import observer, uncaught
    from memopt.owners.growth import GrowthWatch

    if chosen.on_oom == "report":
        if cuda_is_here():
            observer.listen()
        uncaught.install()
    else:
        observer.ignore()
        uncaught.remove()
    from memopt.notebooks import exceptions

    exceptions.install()
    if _growth is None:
        _growth = GrowthWatch()
        _growth.start()
    _settings = chosen
    logger.info("enabled: %s", chosen)


def remove() -> None:
    global _settings, _growth
    if _settings is None:
        return
    from memopt.notebooks import exceptions

    exceptions.remove()
    _growth.stop()
    _growth = None
    from memopt.oom import observer, uncaught

    observer.ignore()
    uncaught.remove()
    for device, fraction in _fractions.items():
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    _fractions.clear()
    _settings = None


def _take_pool(budget: int | None) -> None:
    if torch_names.is_ours():
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
        torch_names.remove()
        raise _C.Error(
            f"backend='pool' comes too late: torch refuses to change its allocator ({error}). Call "
            "memopt.enable(backend='pool') before CUDA is used"
        ) from error


def _limit(budget: int) -> None:
    """torch's own allocator knows a part of a device. Not the device's initialisation: that is the program's."""

    def set_fractions() -> None:
        for device in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(device).total_memory
            _fractions.setdefault(device, torch.cuda.get_per_process_memory_fraction(device))
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)

    if cuda_is_here():
        torch.cuda._lazy_call(set_fractions)  # type: ignore[no-untyped-call]
