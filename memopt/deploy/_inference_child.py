"""The process in which an exported file is run, so that nothing but this is measured.

What has grown when the file is loaded, and at the peak of running it, is told by the kernel: resident bytes of the
process; live ones by torch's allocator.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from memopt._runtime import process
from memopt._runtime.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes

RUNS = 3  # the first has what is done once: kernels are chosen, pools are filled


def main() -> None:
    asked = next(process.requests())
    if asked["simulated"]:
        import memopt.sim

        memopt.sim.activate()
    import torch

    torch.set_num_threads(asked["threads"])
    process.tell("measured", **_measured(asked))


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    import memopt
    from memopt.deploy._formats import FORMATS

    format = FORMATS[asked["format"]]
    call = torch.load(asked["sample"], weights_only=False)
    devices = {leaf.device for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)}
    device = next((one for one in devices if one.type == "cuda"), torch.device("cpu"))
    onnx = asked["format"] == "onnx"
    for name in asked["modules"]:
        importlib.import_module(name)
    format.prepare()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    imports = resident_bytes()
    reset_peak_resident()
    counted = memopt.profile("cpu", modules=False) if not onnx and device.type == "cpu" else nullcontext()
    with torch.inference_mode(), counted:
        run = format.load(Path(asked["path"]))
        loaded = resident_bytes()
        seconds = min(_timed(run, call, device) for _ in range(RUNS))
        peak = peak_resident_bytes()
    live = torch.cuda.max_memory_allocated(device) if device.type == "cuda" and not onnx else None
    if counted is not None and hasattr(counted, "peak"):
        live = counted.peak
    return {
        "live": live,
        "loaded": loaded - imports,
        "resident": peak - imports,
        "imports": imports,
        "seconds": seconds,
        "where": f"{'cpu' if onnx else device}, by {_runtime(asked['format'])}",
    }


def _timed(run: Callable[[Any], Any], call: Any, device: Any) -> float:
    import torch

    begun = time.perf_counter()
    run(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _runtime(format: str) -> str:
    from memopt.deploy._inference_memory import runtime

    return runtime(format)


if __name__ == "__main__":
    main()
