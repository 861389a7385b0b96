"""The part `estimate`: a training step's memory as memopt.estimate() predicts it, beside what this device takes.

The prediction is torch's allocator on a simulated device, and a table's bytes for CUDA's context and the libraries. So
the same steps run here and, in another process, on a simulated device of this card's capability, multiprocessors and
memory (it is in the wheel, for memopt.estimate() needs it): its requests must be the card's, one by one, and what is
held after each step. Its addresses need not: where a driver places a segment is the driver's. The context's bytes are
the device's, by NVML, without those that the allocator holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memopt._estimate import cards
from memopt._gpu_check.part_outcome import Figures, PartOutcome, PartRequest, ask_child, run_checks

if TYPE_CHECKING:
    import torch

# A difference from the measured bytes, as a part of these.
ERROR = 0.05
STEPS = 3


def estimate(request: PartRequest) -> PartOutcome:
    import torch

    import memopt

    before = _used_bytes()
    if torch.cuda.is_initialized():
        before = "it was there before"
    elif request.simulated and isinstance(before, int):
        before = 0  # the simulated device has it from the start
    model, sample = _training(request)
    predicted = memopt.estimate(
        model, sample, optimizer=torch.optim.AdamW, steps=STEPS, quick=True, unprotected=True
    )
    here = steps(request)
    after = _used_bytes()
    figures: Figures = {
        "predicted, bytes": predicted.allocated_bytes[1],
        "measured, bytes": here["peak"],
        "predicted by": predicted.method,
    }

    def peak(request: PartRequest, figures: Figures) -> str:
        off = _beyond(predicted.allocated_bytes, here["peak"])
        return f"off by {off:.1%} of the measured one" if off > ERROR else ""

    def simulated_device(request: PartRequest, figures: Figures) -> str:
        there, said = ask_child(request._replace(part="steps", contender=_like_this_card()))
        return said or differences(here, there, figures)

    def context(request: PartRequest, figures: Figures) -> str:
        if isinstance(before, int) and isinstance(after, int):
            figures["needed, predicted, bytes"] = predicted.needed_bytes[1]
            figures["needed, measured, bytes"] = after - before
            return context_bytes(after - before - here["held"][-1], figures)
        figures["context and libraries"] = f"not here: {before if isinstance(before, str) else after}"
        return ""

    checks = {"predicted peak": peak, "simulated device": simulated_device, "context": context}
    return run_checks(checks, request, figures)


def _beyond(stated: tuple[int, int], measured: int) -> float:
    """The distance of a measured figure from a stated range, as a part of the figure."""
    low, high = stated
    return max(low / measured - 1, 1 - high / measured, 0.0)


# ---- the same steps on both ------------------------------------------------------------------------------------------


def _training(request: PartRequest) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and a batch, on the host."""
    import torch

    width = 64 if request.simulated else 2048
    layers = (torch.nn.TransformerEncoderLayer(width, 8, batch_first=True, dropout=0.0) for _ in range(4))
    return torch.nn.Sequential(*layers), torch.randn(4, 128, width)


def steps(request: PartRequest) -> dict[str, Any]:
    """Training steps under torch's allocator: the peak of live bytes, what is held after each step, and of each request
    its bytes and its place, a segment's number and the offset in it."""
    import torch

    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1 << 40)
    model, sample = _training(request)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    on_device = sample.cuda()
    torch.cuda.reset_peak_memory_stats()
    held = []
    for _ in range(STEPS):
        model(on_device).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(torch.cuda.memory_reserved())
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    segments: list[tuple[int, int]] = []
    requests, places = [], []
    for event in history:
        if event["action"] in ("segment_alloc", "segment_map"):
            segments.append((event["addr"], event["size"]))
        elif event["action"] == "alloc":
            requests.append(event["size"])
            places += [
                [number, event["addr"] - start]
                for number, (start, size) in enumerate(segments)
                if start <= event["addr"] < start + size
            ][:1]
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "held": held,
        "requests": requests,
        "places": places,
        "ascending": segments == sorted(segments),
    }


def _like_this_card() -> str:
    """The settings of a simulated device for sim.activate_from()."""
    import torch

    from memopt.sim._activation import settings_of

    card = torch.cuda.get_device_properties(0)
    return settings_of(
        card.total_memory,
        compute_capability=f"{card.major}.{card.minor}",
        multiprocessors=card.multi_processor_count,
        blank=True,
    )


def differences(here: dict[str, Any], there: dict[str, Any], figures: Figures) -> str:
    """The simulated device's steps beside this device's."""
    for name, found in (("this device", here), ("simulated device", there)):
        figures[f"{name}, held after each step, bytes"] = ", ".join(map(str, found["held"]))
        figures[f"{name}, segments in the order of their addresses"] = "yes" if found["ascending"] else "no"
    asked, simulated = here["requests"], there["requests"]
    same = sum(a == b for a, b in zip(here["places"], there["places"], strict=False))
    figures["requests"] = len(asked)
    figures["requests at the simulated device's place"] = same
    if asked != simulated:
        pairs = zip([*asked, None], [*simulated, None], strict=False)
        number, (first, second) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return (
            f"request {number} of {len(asked)} is of {first or 'no'} bytes here, of {second or 'no'} bytes there, of "
            f"{len(simulated)}"
        )
    off = max(abs(b / a - 1) for a, b in zip(here["held"], there["held"], strict=True))
    return f"what is held after a step differs by {off:.1%}" if off > ERROR else ""


# ---- what is no tensor -----------------------------------------------------------------------------------------------


def context_bytes(measured: int, figures: Figures) -> str:
    """The bytes of CUDA's context and the libraries, beside the range that the estimate's table states."""
    low, high = cards.CONTEXT_RANGE
    figures["context and libraries, bytes"] = measured
    figures["context and libraries, assumed, bytes"] = cards.CONTEXT
    if low <= measured <= high:
        return ""
    return f"context and libraries take {measured} bytes, which are not within the assumed {low} to {high}"


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _used_bytes() -> int | str:
    """The bytes of device 0 that all processes use, which need no context of this one; or the reason why not."""
    bus, handle, memory = ctypes.create_string_buffer(64), ctypes.c_void_p(), _MemoryInfo()
    try:
        driver, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    calls: dict[str, Callable[[], int]] = {
        "cuInit": lambda: driver.cuInit(0),
        "cuDeviceGetPCIBusId": lambda: driver.cuDeviceGetPCIBusId(bus, len(bus), 0),
        "nvmlInit": nvml.nvmlInit_v2,
        "nvmlDeviceGetHandleByPciBusId": lambda: nvml.nvmlDeviceGetHandleByPciBusId_v2(
            bus, ctypes.byref(handle)
        ),
        "nvmlDeviceGetMemoryInfo": lambda: nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
    }
    for name, call in calls.items():
        code = call()
        if code:
            return f"{name}: error {code}"
    return int(memory.used)
