"""What running an exported file takes, measured in a process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memopt.deploy.batch import Call
from memopt.estimation.child_process import command

_SECONDS = 600  # a hang
_SAID = 6  # lines of a child's output that tell why it gave no figures


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes. `live`: of tensors at the peak, weights, inputs and outputs among them, counted at torch's allocator; None
    where another runtime keeps its own (ONNX). `loaded`, `resident`: what the process has grown by in resident memory,
    what it imports not counted, once the file is loaded and at the peak of inference. `seconds`: of the fastest run.
    `where`: the device, and by what it is run."""

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
        there = Path(folder)
        sample, request, answer = there / "sample.pt", there / "request.json", there / "answer.json"
        torch.save(call, sample)
        sim = sys.modules.get("memopt.sim")
        asked = {
            "path": str(path.resolve()),
            "format": format,
            "sample": str(sample),
            "answer": str(answer),
            "paths": [entry for entry in sys.path if entry],
            "modules": list(modules),
            "threads": torch.get_num_threads(),
            "simulated": sim is not None and sim.is_active(),
        }
        request.write_text(json.dumps(asked))
        line = command(sys.executable, "memopt.deploy.inference_child", str(request))
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"it took more than {_SECONDS} s") from None
        if done.returncode != 0 or not answer.exists():
            said = [text for text in (done.stdout + done.stderr).splitlines() if text.strip()]
            raise NotMeasured("\n".join(said[-_SAID:]) or f"it ended with status {done.returncode}")
        return InferenceMemory(**json.loads(answer.read_text()))


def runtime(format: str) -> str:
    if format != "onnx":
        return f"torch {torch.__version__}"
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"
