"""Tests on the simulated device: PyTorch's real CUDA build, no GPU.

The device must be there before torch is imported, and a process has one for life. So each file runs in a process of its
own (sim_tests.py), and says at its top, in literals, what it wants:

    SIM = {"memory": "1GiB"}                                        arguments of memopt.sim.activate; None: no device
    ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  set before torch is imported

This file reads them from the source text and activates before pytest imports the module."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sim_tests import constants, in_sim_environment

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    if not in_sim_environment():
        return  # the tests run in another process, which is
    files = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if config.option.collectonly:
        activate({})  # names are wanted, of all files at once; nothing runs
        return
    if len(files) != 1 or not next(iter(files)).is_file():
        raise pytest.UsageError("tests/sim runs one file a process: name one, or use `make test-sim`")
    wanted = constants(files.pop())
    os.environ.update(wanted.get("ENVIRONMENT") or {})
    if wanted.get("SIM", {}) is not None:
        activate(wanted.get("SIM", {}))
        # What CPython 3.14 starts by default would be a process without the device.
        multiprocessing.set_start_method("fork")


def activate(settings: dict[str, object]) -> None:
    import memopt.sim

    memopt.sim.activate(**settings)


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    """Each test begins with nothing cached, no fault planned and eager work, and leaves the same."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    import memopt.sim

    def clean() -> None:
        memopt.sim.fail_clear()
        memopt.sim.lazy(False)
        torch.cuda.synchronize()
        if torch.cuda.memory.get_allocator_backend() == "pluggable":
            return  # it has no cache, and no statistics that torch would give
        if torch.cuda.memory_allocated() > 0:
            gc.collect()  # 0.1 s with all of torch loaded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()

    if memopt.sim.is_active():
        clean()
    yield
    if memopt.sim.is_active():
        clean()


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python source in a fresh interpreter of this environment, with memopt importable."""

    def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        path = os.pathsep.join([environment.pop("FIRST_ON_PATH", str(tmp_path)), str(ROOT)])
        return subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": path} | environment,
            capture_output=True,
            text=True,
            timeout=600,  # a hang; a busy host may take minutes
        )

    return run


MIB = 1 << 20


@pytest.fixture
def fill() -> Callable[[int], list]:
    """Allocates blocks of so many MiB until out of memory, and returns them."""
    import torch

    def allocate(mib: int) -> list:
        blocks = []
        with pytest.raises(torch.OutOfMemoryError):
            while True:
                blocks.append(torch.empty(mib * MIB, dtype=torch.uint8, device="cuda"))
        return blocks

    return allocate
