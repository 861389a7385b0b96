"""The part `environment`: driver, devices, and what of memopt works there."""

from __future__ import annotations

import os
import platform
from typing import Any

from memopt import _C
from memopt._gpu_check.driver_calls import Driver
from memopt._gpu_check.part_outcome import Figures, PartOutcome, PartRequest

# cuda.h's CU_DEVICE_ATTRIBUTE_…
ATTRIBUTES = {
    "virtual memory management": 102,
    "handles for other processes": 103,  # HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    "fabric handles": 128,
    "GPUDirect RDMA": 116,
    "GPUDirect RDMA of mapped memory": 110,
    "multicast": 132,
    "MPS": 133,
    "integrated": 18,
    "ECC": 32,
}
GRANULE = 2 << 20  # of which memopt's are multiples


def environment(request: PartRequest) -> PartOutcome:
    try:
        driver = _C.cuda_driver()
    except _C.Error as error:
        return PartOutcome("not here", str(error))
    if not driver["devices"]:
        return PartOutcome("not here", "the CUDA driver sees no GPU")
    import torch

    from memopt._runtime.doctor import doctor

    built = torch.version.cuda or "none"
    older = built != "none" and _numbers(driver["version"]) < _numbers(built)
    found: Figures = {
        "torch": torch.__version__,
        "torch's CUDA": built,
        "driver's CUDA": driver["version"],
        "driver older than torch's CUDA": _word(older),
        "WSL": _word("microsoft" in platform.release().lower()),
    }
    if driver["lacking"]:
        found["functions that the driver lacks"] = ", ".join(driver["lacking"])
    calls = Driver()
    wrong = []
    for number, device in enumerate(driver["devices"]):
        name = f"device {number}"
        found[name] = f"{device['name']}, compute capability {device['compute_capability']}"
        found[f"{name}, bytes"] = device["total_bytes"]
        slice_of = "MIG" in device["name"] or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
        found[f"{name}, MIG slice"] = _word(slice_of)
        for what, attribute in ATTRIBUTES.items():
            found[f"{name}, {what}"] = _word(calls.attribute(attribute, number))
        if device["virtual_memory"]:
            smallest, advised = calls.granularity(number, 0), calls.granularity(number, 1)
            found[f"{name}, granularity"] = f"{smallest} bytes, {advised} recommended"
            if not smallest or GRANULE % smallest:
                wrong.append(f"{name} maps memory by {smallest} bytes, of which {GRANULE} is no multiple")
        for peer in range(len(driver["devices"])):
            if peer != number:
                found[f"{name}, reaches device {peer}"] = _word(calls.reaches(number, peer))
    calls.close()
    if not torch.cuda.is_available():
        why = (
            f"the driver's CUDA {driver['version']} is older than torch's {built}: update the NVIDIA driver"
            if older
            else "is it a CPU build?"
        )
        return PartOutcome("wrong", f"torch sees no GPU although the driver does: {why}", found)
    wrong += [
        f"{finding.topic}: {finding.text}" for finding in doctor().findings if finding.state == "broken"
    ]
    return PartOutcome("wrong" if wrong else "ok", "; ".join(wrong), found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _word(value: Any) -> str:
    return "unknown" if value is None else "yes" if value else "no"
