"""The conditions that a figure was measured under: machine, versions, commit, and whether the device was real."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cpu_model() -> str:
    """The CPU's own name for itself; the architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def commit() -> dict[str, object]:
    """{"hash", "dirty"}: dirty when tracked files differ from the commit. Both None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # The benchmarks write results themselves: one finished does not make the checkout dirty for the next.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return {"hash": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"hash": None, "dirty": None}


def simulated() -> bool:
    """Return whether memopt's simulated CUDA device is active in this process."""
    sim = sys.modules.get("memopt.sim")
    return sim is not None and sim.is_active()


def driver_version() -> str | None:
    """The NVIDIA kernel driver's first line, or None where there is none."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return None


@functools.cache
def doctor() -> dict[str, str]:
    """The findings of `python -m memopt doctor`, by topic. It imports torch: hence a process of its own."""
    command = [sys.executable, "-m", "memopt", "doctor", "--json"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # 1: something is broken
    try:
        return {found["topic"]: found["text"] for found in json.loads(asked.stdout)["findings"]}
    except ValueError:
        raise RuntimeError(f"memopt's doctor failed:\n{asked.stderr}") from None


def compiler() -> str:
    """The compiler of memopt's extension."""
    found = re.search(r"built with (.+), assertions", doctor()["memopt"])
    assert found is not None, doctor()["memopt"]
    return found[1]


def isa() -> str:
    """The instruction set of memopt's CPU kernels; MEMOPT_ISA may ask for less than the processor has."""
    found = re.match(r"generic|avx2|avx512", doctor()["cpu kernels"])
    if found is None:
        raise RuntimeError(f"memopt has no CPU kernels: {doctor()['cpu kernels']}")
    return found[0]


def _torch(cuda: bool) -> dict[str, object]:
    """The build of torch, if it has been imported; the harness itself does not need it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"torch": None}
    found: dict[str, object] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
    }
    if cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "device_memory": properties.total_memory,
            "driver": driver_version(),
            "allocator": torch.cuda.memory.get_allocator_backend(),
        }
    return found


def describe(*, cuda: bool = False) -> dict[str, object]:
    """This process's surroundings, ready for JSON. `cuda=True` adds the device, and makes a context on it.

    Not in it: host name, user, paths. Results are published.
    """
    memopt = sys.modules.get("memopt")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "memopt": getattr(memopt, "__version__", None),
        "memopt_compiler": compiler() if memopt else None,
        **_torch(cuda),
        "simulated": simulated(),
    }
