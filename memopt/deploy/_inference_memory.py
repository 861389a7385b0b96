"""The memory that running an exported file takes, measured in a process that does nothing else.

What has grown when the file is loaded, and at the peak of running it, is told by the kernel: resident bytes of the
process; live ones by torch's allocator. torch is imported late: a simulated device has to be there before it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt._runtime import process
from memopt._runtime.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from memopt._runtime.results import Result

if TYPE_CHECKING:
    from memopt.deploy._formats import Call

RUNS = 3  # the first has what is done once: kernels are chosen, pools are filled
_SECONDS = 600  # a hang
_SAID = 6  # lines of a child's output that tell why it gave no figures


@dataclass(frozen=True)
class InferenceMemory(Result):
    """The bytes and seconds that running a file takes.

    `live_bytes`: bytes of tensors at the peak, weights, inputs and outputs among them, counted at torch's allocator;
    None where another runtime keeps its own (ONNX). `loaded_bytes`, `resident_bytes`: what the process has grown by in
    resident memory, what it imports not counted, once the file is loaded and at the peak of inference. `seconds`: of
    the fastest run. `where`: the device, and by what it is run.
    """

    live_bytes: int | None
    loaded_bytes: int
    resident_bytes: int
    imports_bytes: int
    seconds: float
    where: str


class NotMeasured(RuntimeError):
    """The file does not run in a process of its own. The message says why."""


def measure(path: Path, format: str, call: Call, modules: Iterable[str] = ()) -> InferenceMemory:
    """Run the file in a process of its own. modules: whose classes it needs, torchao's say. Raises NotMeasured."""
    import torch

    with tempfile.TemporaryDirectory(prefix="memopt-inference-") as folder:
        sample = Path(folder) / "sample.pt"
        torch.save(call, sample)
        sim = sys.modules.get("memopt.sim")
        asked = {
            "path": str(path.resolve()),
            "format": format,
            "sample": str(sample),
            "modules": list(modules),
            "threads": torch.get_num_threads(),
            "simulated": sim is not None and sim.is_active(),
        }
        try:
            answer = process.ask("memopt.deploy._inference_memory", asked, seconds=_SECONDS)
        except process.ChildFailed as error:
            said = [line for line in error.output.splitlines() if line.strip()]
            raise NotMeasured("\n".join(said[-_SAID:]) or str(error)) from None
        return InferenceMemory(**answer.what)


# ---- in the child ----------------------------------------------------------------------------------------------------


def main() -> None:
    asked = next(process.requests())
    if asked["simulated"]:
        import memopt.sim

        memopt.sim.activate()
    process.tell("measured", **_measured(asked))


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.utils import _pytree as pytree

    import memopt
    from memopt.deploy._formats import FORMATS

    torch.set_num_threads(asked["threads"])
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
        "live_bytes": live,
        "loaded_bytes": loaded - imports,
        "resident_bytes": peak - imports,
        "imports_bytes": imports,
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
    if format != "onnx":
        import torch

        return f"torch {torch.__version__}"
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"


if __name__ == "__main__":
    main()
