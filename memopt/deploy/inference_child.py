"""The process in which an exported file is run, so that nothing but this is measured.

    python -m memopt.deploy.inference_child REQUEST.json

What has grown when the file is loaded, and at the peak of running it, is told by the kernel: resident bytes of the
process; live ones by torch's allocator."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

RUNS = 3  # the first has what is done once: kernels are chosen, pools are filled


def resident(which: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {which}")


def forget_peak() -> None:
    """VmHWM begins again at what is resident now; where the kernel does not let it, it is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def main(request: str) -> None:
    asked = json.loads(Path(request).read_text())
    sys.path += [entry for entry in asked["paths"] if entry not in sys.path]
    if asked["simulated"]:
        import memopt.sim

        memopt.sim.activate()
    import torch

    torch.set_num_threads(asked["threads"])
    Path(asked["answer"]).write_text(json.dumps(_measured(asked)))


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    import memopt
    from memopt.deploy import formats

    format = formats.module_of(asked["format"])
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
    imports = resident()
    forget_peak()
    counted = memopt.profile("cpu", modules=False) if not onnx and device.type == "cpu" else nullcontext()
    with torch.inference_mode(), counted:
        run = format.load(Path(asked["path"]))
        loaded = resident()
        seconds = min(_timed(run, call, device) for _ in range(RUNS))
        peak = resident("VmHWM")
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
    from memopt.deploy.inference_memory import runtime

    return runtime(format)


if __name__ == "__main__":
    main(sys.argv[1])
