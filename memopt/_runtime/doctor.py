"""Diagnosis of memopt on this machine: `memopt.doctor()`, `python -m memopt doctor`."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

from memopt import _C
from memopt._runtime import torch_version
from memopt._runtime.log import LEVELS, logger
from memopt._runtime.results import Result
from memopt._runtime.table import folded_lines, line_width

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """A finding of the doctor: the topic, its state, a text, and a remedy if something should be done.

    state: 'ok'; 'absent' (not here, and memopt works without it); 'broken' (somebody should do something).
    """

    topic: str
    state: State
    text: str
    mend: str = ""


# What this version reads from the environment, and what it means.
VARIABLES = {
    "MEMOPT_BACKEND": "allocator that memopt.enable() chooses: native, pool",
    "MEMOPT_BUDGET": "bytes that memopt.enable() lets the allocator hold on each device",
    "MEMOPT_DISABLE": "1: memopt.enable() does nothing",
    "MEMOPT_ISA": "instruction set of the CPU kernels: generic, avx2, avx512",
    "MEMOPT_LOG": f"what the memopt logger shows: {', '.join(LEVELS)}",
    "MEMOPT_ON_OOM": "what memopt.enable() does on an out-of-memory error: report, raise",
    "MEMOPT_REPORT": "file for the report of an out-of-memory error, appended; a page if its name ends in .html",
    "MEMOPT_NVRTC": "path of the run-time compiler, if it is not the one of torch's wheel",
}


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of memopt.doctor(). str() has each finding, with its remedy.

    Attributes:
        findings: The findings, each with topic, state ("ok", "absent" or "broken") and text.
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Return whether nothing is broken; things that are merely absent do not count."""
        return all(finding.state != "broken" for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Return the findings as plain values: {"healthy": bool, "findings": [{"topic", "state", "text", …}, …]}."""
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        mark = {"ok": "ok    ", "absent": "-     ", "broken": "BROKEN"}
        column, width = max(len(finding.topic) for finding in self.findings) + 10, line_width()
        lines = []
        for finding in self.findings:
            begin = f"{mark[finding.state]}  {finding.topic}".ljust(column)
            lines += folded_lines(finding.text, width, begin, " " * column)
            if finding.mend:
                longest = max(map(len, folded_lines(finding.mend, 1)))  # of what is not divided
                indent = " " * (column if column + 3 + longest <= width else 8)
                lines += folded_lines(finding.mend, width, f"{indent}-> ", f"{indent}   ")
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Check everything that memopt can use on this machine.

    It checks Python and torch, the CUDA driver and its devices, the kernels, the simulated device and the environment
    variables. It creates no context on a device, and never raises for what it finds.

    Returns:
        A Diagnosis: print it, or read .findings and .healthy.
    """
    found = [_memopt(), _python()]
    for look, topic in (
        (_torch, "torch"),
        (_driver, "the CUDA driver and its devices"),
        (_allocator, "the allocator"),
        (_enabled, "what is enabled"),
        (_kernels, "the kernels"),
        (_cpu_kernels, "the processor"),
        (_simulated_device, "the simulated device"),
        (_variables, "the environment"),
    ):
        logger.info("looking at %s", topic)
        said = look()
        found += said if isinstance(said, list) else [said]
    return Diagnosis(found)


def _memopt() -> Finding:
    compiler = str(_C.build["compiler"]).strip()  # clang's version ends in a space
    text = f"{_C.__version__}, built with {compiler}, assertions: level {_C.build['level']}"
    return Finding("memopt", "ok", text)


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", "ok", text)


def _torch() -> Finding:
    version = torch_version.installed()
    if version is None:
        return Finding(
            "torch",
            "absent",
            "not installed; functions that need it raise an error",
            "pip install 'torch>=2.10'",
        )
    if torch_version.too_old(version):
        return Finding("torch", "broken", f"{version} is older than 2.10", "pip install -U torch")
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises is what there is to report
        if _lacks_nvidia_alone(error):
            return Finding(
                "torch",
                "absent",
                f"{version} without NVIDIA's libraries ({error}): it runs on the simulated device alone",
                "memopt.sim.activate() before `import torch`; for a GPU: pip install torch with all its dependencies",
            )
        return Finding(
            "torch",
            "broken",
            f"{version} cannot be imported: {error}",
            "reinstall torch; a CUDA build needs NVIDIA's packages or memopt.sim",
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{version}, {build}")


def _lacks_nvidia_alone(error: Exception) -> bool:
    """Return whether torch only lacks a library of NVIDIA's, which the simulated device would replace."""
    from memopt import sim
    from memopt.sim._coverage import NVIDIA_SONAME

    # The linker names the library; torch, where it looks for it itself, the pattern: "libcublasLt.so.*[0-9] not found".
    named = str(error).replace("*[0-9]", "0")
    if not isinstance(error, (OSError, ImportError, ValueError)) or NVIDIA_SONAME.match(named) is None:
        return False
    try:
        sim.readiness()
    except (RuntimeError, OSError):
        return False
    return True


def _driver() -> list[Finding]:
    from memopt.sim._activation import stands_in

    try:
        driver = _C.cuda_driver()
    except _C.Error as error:
        if error.status == "MO_NO_DEVICE" and stands_in():
            text = "none: memopt's libraries replace the driver and NVIDIA's other libraries, with no device"
            return [Finding("cuda driver", "absent", text)]
        state: State = "absent" if error.status in ("MO_NO_LIBRARY", "MO_NO_DEVICE") else "broken"
        remedy = "" if state == "absent" else "update the NVIDIA driver"
        return [Finding("cuda driver", state, str(error), remedy)]
    lacking = f", lacks {', '.join(driver['lacking'])}" if driver["lacking"] else ""
    found = [Finding("cuda driver", "ok", f"CUDA {driver['version']}{lacking}")]
    for i, device in enumerate(driver["devices"]):
        virtual = "" if device["virtual_memory"] else ", no virtual memory management"
        total = _C.format_size(device["total_bytes"])
        text = f"{device['name']}, compute capability {device['compute_capability']}, {total}{virtual}"
        found.append(Finding(f"device {i}", "ok", text))
    return found


def _allocator() -> list[Finding]:
    from memopt.cuda import _allocator as current_allocator

    return [
        current_allocator.finding(),
        *current_allocator.double_map_findings(),
        *current_allocator.nccl_findings(),
    ]


def _enabled() -> Finding:
    """Report on memopt.enable(). In the command's own process nothing is enabled: it reports what a call would do."""
    enabling = sys.modules.get("memopt._runtime.enabling")
    settings = enabling.settings() if enabling is not None else None
    if settings is None:
        return Finding("oom report", "absent", "off: memopt.enable() was not called", "memopt.enable()")
    state: State = "ok" if settings.on_oom == "report" else "absent"
    return Finding("oom report", state, f"memopt.enable() chose {', '.join(map(str, settings))}")


def _kernels() -> Finding:
    from memopt._runtime import kernels

    return kernels.finding()


def _cpu_kernels() -> Finding:
    wanted = os.environ.get("MEMOPT_ISA")
    try:
        isa = _C.cpu_isa(wanted)
    except (ValueError, _C.Error) as error:
        return Finding("cpu kernels", "broken", str(error), "unset MEMOPT_ISA")
    chosen = f"{isa} by MEMOPT_ISA" if wanted else f"{isa}, the best of this processor"
    return Finding("cpu kernels", "ok", chosen)


def _simulated_device() -> Finding:
    """Report whether memopt.sim.activate() would succeed in a fresh process with this torch."""
    from memopt import sim

    topic = "simulated device"
    if sim.is_active():
        return Finding(
            topic, "ok", "active in this process: the driver and devices reported here are the simulated ones"
        )
    try:
        readiness = sim.readiness()
    except (RuntimeError, OSError) as error:
        text, _, remedy = str(error).partition(": ")
        return Finding(topic, "absent", text, remedy)
    return Finding(topic, "ok", readiness)


def _variables() -> list[Finding]:
    found = [
        Finding("environment", "ok", f"{name}={os.environ[name]} ({VARIABLES[name]})")
        for name in VARIABLES
        if name in os.environ
    ]
    found += [
        Finding(
            "environment",
            "broken",
            f"{name} is set, but memopt does not know it",
            f"one of: {', '.join(VARIABLES)}",
        )
        for name in sorted(os.environ)
        if name.startswith("MEMOPT_") and name not in {*VARIABLES, *_BUILD}
    ]
    level = os.environ.get("MEMOPT_LOG", "")
    if level and level.lower() not in LEVELS:
        remedy = f"one of: {', '.join(LEVELS)}"
        found = [f for f in found if not f.text.startswith("MEMOPT_LOG=")]
        found.append(Finding("environment", "broken", f"MEMOPT_LOG={level} is not a level", remedy))
    found += _allocator_settings()
    return found


# Read by setup.py and by the tests, not by the package.
_BUILD = {"MEMOPT_CUDA", "MEMOPT_LEVEL", "MEMOPT_WERROR", "MEMOPT_NVCC", "MEMOPT_SEED", "MEMOPT_SOAK"}


def _allocator_settings() -> list[Finding]:
    """Report the two variables with settings for torch's own allocator.

    torch obeys the older one where they disagree. memopt's allocator, once it is installed, ignores both.
    """
    old, new = os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), os.environ.get("PYTORCH_ALLOC_CONF")
    if old and new and old != new:
        return [
            Finding(
                "environment",
                "broken",
                f"PYTORCH_CUDA_ALLOC_CONF={old} and PYTORCH_ALLOC_CONF={new} conflict: torch uses the former",
                "unset one of them",
            )
        ]
    return [
        Finding("environment", "ok", f"{name}={value}: for torch's own allocator, no effect on memopt's")
        for name, value in (("PYTORCH_CUDA_ALLOC_CONF", old), ("PYTORCH_ALLOC_CONF", new))
        if value
    ]
