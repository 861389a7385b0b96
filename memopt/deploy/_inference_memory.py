"""The memory that running an exported file takes, measured in a process that does nothing else."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memopt._runtime import process
from memopt.deploy._batch import Call

_SECONDS = 600  # a hang
_SAID = 6  # lines of a child's output that tell why it gave no figures


@dataclass(frozen=True)
class InferenceMemory:
    """The bytes and seconds that running a file takes.

    `live`: bytes of tensors at the peak, weights, inputs and outputs among them, counted at torch's allocator; None
    where another runtime keeps its own (ONNX). `loaded`, `resident`: what the process has grown by in resident memory,
    what it imports not counted, once the file is loaded and at the peak of inference. `seconds`: of the fastest run.
    `where`: the device, and by what it is run.
    """

    live: int | None
    loaded: int
    resident: int
    imports: int
    seconds: float
    where: str

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class NotMeasured(RuntimeError):
    """The file does not run in a process of its own. The message says why."""


def measure(path: Path, format: str, call: Call, modules: Iterable[str] = ()) -> InferenceMemory:
    """modules: whose classes the file needs, torchao's say. Raises NotMeasured."""
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
            answer = process.ask("memopt.deploy._inference_child", asked, seconds=_SECONDS)
        except process.ChildFailed as error:
            said = [line for line in error.output.splitlines() if line.strip()]
            raise NotMeasured("\n".join(said[-_SAID:]) or str(error)) from None
        return InferenceMemory(**answer.what)


def runtime(format: str) -> str:
    if format != "onnx":
        return f"torch {torch.__version__}"
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"
