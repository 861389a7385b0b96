"""The part `kernels`: the optimizers' and the scaler's kernels beside the CPU's loops, by each way of loading them."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._gpu_check import processes
from memopt._gpu_check.part_outcome import Figures, PartOutcome, PartRequest, ask_child, run_checks
from memopt._runtime import process

if TYPE_CHECKING:
    import torch

# Relative: of the norm of all gradients, whose sum the device makes in another order.
NORM_ERROR = 1e-6
NORM_RUNS = 100
SEED = 20
# Where no address in 32 bits reaches, in elements and in bytes of each.
LARGE_COUNT = 3 << 30
SANITIZER = "compute-sanitizer"


def kernels(request: PartRequest) -> PartOutcome:
    checks = {
        "first load": first_load,
        "values": values,
        "repeated norm": repeated_norm,
        "large tensor": large_tensor,
        "ways to load": ways_to_load,
        SANITIZER: sanitizer,
    }
    return run_checks(checks, request, {})


def first_load(request: PartRequest, figures: Figures) -> str:
    """The kernels are loaded while a graph is captured, whose replays give the right values."""
    import torch

    from memopt import amp

    if _C.kernel_status()["origin"] != "not loaded":
        figures["first load in a graph capture"] = "not here: they were loaded before"
        return ""
    gradient, found_inf = torch.full((1000,), 3.0).cuda(), torch.zeros(()).cuda()
    half = torch.tensor(0.5).cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amp.foreach_unscale_([gradient], found_inf, half)
    for _ in range(2):
        graph.replay()
    figures["first load in a graph capture"] = "yes"
    right = bool((gradient.cpu() == 0.75).all())
    return "" if right else "the captured launch computes other values"


def values(request: PartRequest, figures: Figures) -> str:
    """The optimizers' kernels equal the CPU's loops in bits, whatever the sizes and alignments; the norm is right."""
    import torch

    from memopt import amp, optim

    draw = random.Random(SEED)
    cases: list[tuple[str, Callable[[Any], torch.optim.Optimizer]]] = [
        ("AdamW", lambda params: optim.AdamW(params, lr=1e-2)),
        ("AdamW, 8-bit states", lambda params: optim.AdamW(params, lr=1e-2, state_bits=8)),
        ("AdamW, 4-bit states", lambda params: optim.AdamW(params, lr=1e-2, state_bits=4)),
        ("SGD, momentum", lambda params: optim.SGD(params, lr=1e-2, momentum=0.9)),
        (
            "SGD, 8-bit momentum",
            lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, state_bits=8),
        ),
    ]
    compared, furthest = 0, 0.0
    for number in range(1 if request.simulated else 4 if request.quick else 40):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            drawn = [_drawn(draw, SEED + number + i) for i in range(6)]
            for name, make in cases:
                here, there = (_trained(make, drawn, dtype, device) for device in ("cpu", "cuda"))
                compared += sum(tensor.numel() for tensor in here)
                if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(here, there, strict=True)):
                    return f"{name}, {dtype}, seed {SEED + number}: other bits than the CPU's loops"
            params = [torch.nn.Parameter(value.to("cuda", dtype)) for value in drawn]
            for param, value in zip(params, drawn, strict=True):
                param.grad = value.to("cuda", dtype)
            norm = float(amp.clip_grad_norm_(params, math.inf))
            right = math.sqrt(sum(float(value.to(dtype).double().square().sum()) for value in drawn))
            furthest = max(furthest, abs(norm - right) / right)
    state = _C.kernel_status()
    figures |= {
        "values compared": compared,
        "largest relative error of the norm": furthest,
        "kernels from": state["origin"],
        "architecture": state["architecture"],
        "note": state["note"],
    }
    if furthest > NORM_ERROR:
        return f"the gradients' norm is off by {furthest:.1e} of itself"
    return ""


def _drawn(draw: random.Random, seed: int) -> torch.Tensor:
    """Values on the CPU: a view that begins anywhere in its storage."""
    import torch

    size, before = int(2 ** draw.uniform(0, 15)), draw.randrange(8)
    return torch.randn(before + size, generator=torch.Generator().manual_seed(seed))[before:]


def _trained(
    make: Callable[[Any], torch.optim.Optimizer], drawn: list[torch.Tensor], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """The parameters and their states after three steps, on the CPU."""
    import torch

    params = []
    for value in drawn:
        storage = torch.empty(value.storage_offset() + value.numel(), dtype=dtype, device=device)
        part = storage[value.storage_offset() :]
        part.copy_(value.to(dtype))
        params.append(torch.nn.Parameter(part))
    optimizer = make(params)
    for step in range(3):
        for param, value in zip(params, drawn, strict=True):
            param.grad = (value * (0.1 + step)).to(dtype).to(device)
        optimizer.step()
    states = [
        s
        for param in params
        for _, s in sorted(optimizer.state[param].items())
        if isinstance(s, torch.Tensor)
    ]
    return [tensor.detach().cpu() for tensor in (*params, *states)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def repeated_norm(request: PartRequest, figures: Figures) -> str:
    """The norm of the same gradients is the same in bits, in whatever order the device runs its blocks."""
    import torch

    from memopt import amp

    count = 1 << (12 if request.simulated else 24)
    param = torch.nn.Parameter(torch.zeros(count, device="cuda"))
    param.grad = torch.randn(count, generator=torch.Generator().manual_seed(SEED)).cuda()
    norms = torch.stack([amp.clip_grad_norm_([param], math.inf) for _ in range(NORM_RUNS)]).cpu()
    different = len(norms.view(torch.int32).unique())
    figures["different norms of the same gradients"] = f"{different} in {NORM_RUNS} runs"
    return "" if different == 1 else f"{different} different norms in {NORM_RUNS} runs on the same gradients"


def large_tensor(request: PartRequest, figures: Figures) -> str:
    """A tensor that no index in 32 bits reaches: what is at its ends is updated, unscaled and found."""
    import torch

    from memopt import amp, optim

    count, dtype = LARGE_COUNT, torch.bfloat16
    needed = 3 * count * dtype.itemsize  # parameter, gradient, and a comparison's result
    if request.quick or request.simulated:
        count = 3 << (10 if request.simulated else 20)
    elif torch.cuda.mem_get_info()[0] < needed:
        figures["large tensor"] = f"not here: {needed >> 30} GiB are not free"
        return ""
    places = [0, count // 3 + 1, 2 * count // 3 + 5, count - 1]
    param = torch.nn.Parameter(torch.zeros(count, dtype=dtype, device="cuda"))
    param.grad = torch.zeros(count, dtype=dtype, device="cuda")
    param.grad[places] = 2.0
    optim.SGD([param], lr=0.5).step()
    found_inf, half = torch.zeros(()).cuda(), torch.tensor(0.5).cuda()
    norm = float(amp.clip_grad_norm_([param], math.inf))
    amp.foreach_unscale_([param.grad], found_inf, half)
    param.grad[places[-1]] = math.inf
    finite = not bool(found_inf)
    amp.foreach_unscale_([param.grad[places[-1] :]], found_inf, half)
    updated = param.detach()
    figures["large tensor, elements"] = count
    wrong = {
        "norm": norm != 4.0,
        "update": any(float(updated[place]) != -1.0 for place in places) or int(updated.count_nonzero()) != 4,
        "unscaling": any(float(param.grad[place]) != 1.0 for place in places[:-1]),
        "search for inf": not finite or not bool(found_inf),
    }
    named = ", ".join(name for name, bad in wrong.items() if bad)
    return f"wrong with {count} elements: {named}" if named else ""


# ---- ways to load ----------------------------------------------------------------------------------------------------

EMBEDDED, COMPILED, CACHED, JIT = (
    "embedded",
    "compiled by NVRTC",
    "from the cache",
    "embedded PTX, by the driver",
)


def ways_to_load(request: PartRequest, figures: Figures) -> str:
    """Each way in a process of its own, with a cache of its own: the kernels load and compute the right values."""
    state = _C.kernel_status()
    figures[EMBEDDED] = "yes" if state["origin"] == EMBEDDED else f"not here: {state['note']}"
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for way in (COMPILED, CACHED, JIT):
            if way == JIT and (request.simulated or not state["embedded_bytes"]):
                why = (
                    "the simulated device has no compiler of PTX"
                    if request.simulated
                    else "nothing is embedded"
                )
                figures[way] = f"not here: {why}"
                continue
            environment = {"CUDA_FORCE_PTX_JIT": "1"} if way == JIT else {}
            child = request._replace(part="load", contender=way, folder=folder)
            found, said = ask_child(child, environment)
            figures[way] = said or found["answer"]
            if said or found["answer"] not in ("yes", "not here: no NVRTC is installed"):
                wrong.append(f"{way}: {figures[way]}")
            elif way == COMPILED and found["answer"] != "yes":
                figures[CACHED] = found["answer"]
                break
    return "; ".join(wrong)


def only_loads(request: PartRequest) -> bool:
    """Return whether no values are computed: on the simulated device all images run the same text on the host."""
    return request.simulated and (request.part, request.contender) == ("load", CACHED)


def load(request: PartRequest) -> dict[str, Any]:
    """The kernels loaded in the way that is asked for, first in a capture, and their values beside the CPU's."""
    from memopt._runtime import kernels as kernel_files

    kernel_files.prepare()
    if request.contender in (COMPILED, CACHED):
        _C.kernels_configure(kernel_files.nvrtc_candidates(), request.folder, False)
    try:
        if only_loads(request):
            _C.kernel_status(0, True)
            wrong = ""
        else:
            wrong = first_load(request, {})
            if not wrong and request.contender != JIT:  # torch's own kernels have no PTX for most GPUs
                wrong = values(request, {})
    except _C.Error as error:
        return {
            "answer": "not here: no NVRTC is installed" if error.status == "MO_NO_LIBRARY" else str(error)
        }
    origin = _C.kernel_status()["origin"]
    expected = {COMPILED: "compiled", CACHED: "cached"}.get(request.contender, EMBEDDED)
    if not wrong and origin != expected:
        wrong = f"they were {origin}, not {expected}: {_C.kernel_status()['note']}"
    return {"answer": wrong or "yes"}


def sanitizer(request: PartRequest, figures: Figures) -> str:
    """The kernels under CUDA's compute-sanitizer, where it is installed."""
    tool = shutil.which(SANITIZER)
    if tool is None or request.quick:
        figures[SANITIZER] = "not here: not installed" if tool is None else "installed; --full runs it"
        return ""
    wrong = []
    asked = json.dumps(request._replace(part="load", contender=EMBEDDED, quick=True)._asdict())
    for check in ("memcheck", "racecheck", "initcheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", *process.command(None, processes.MODULE)]
        done = subprocess.run(command, input=asked + "\n", capture_output=True, text=True, timeout=900)
        figures[f"{SANITIZER}, {check}"] = "clean" if not done.returncode else "errors"
        if done.returncode:
            last = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line][-1:]
            wrong.append(f"{check}: {''.join(last) or process.ended(done.returncode)}")
    return "; ".join(wrong)
