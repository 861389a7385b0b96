"""TorchScript, by torch.jit.trace, which torch calls deprecated and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memopt.checkpointing.measure_chain import nothing_changes
from memopt.deploy.batch import Call
from memopt.deploy.formats import Asked, Runner
from memopt.deploy.output_check import tensors_of

SUFFIX = ".pt"


def require(*, run: bool) -> None:
    """Raises ImportError once torch has no TorchScript any more."""
    if not hasattr(torch.jit, "trace"):
        raise ImportError(
            f"deploy.export: torch {torch.__version__} has no TorchScript any more: export to 'pt2' or 'onnx'"
        )


def write(module: torch.nn.Module, call: Call, path: Path, asked: Asked) -> Any:
    args, kwargs = call
    named: dict[str, Any] = {"example_kwarg_inputs": _all_named(module, call)} if kwargs else {}
    # What check_trace would run is run afterwards, on the file.
    options = {"strict": False, "check_trace": False} | asked.options
    with nothing_changes((), module.buffers()):  # it is run for that, and what it counts would go to the file
        program = torch.jit.trace(module, None if kwargs else args, **named, **options)
    torch.jit.save(program, path)
    return program


def _all_named(module: torch.nn.Module, call: Call) -> dict[str, Any]:
    """The tracer takes arguments by place or by name, not some of each."""
    import inspect

    bound = inspect.signature(module.forward).bind(*call[0], **call[1])
    return dict(bound.arguments)


def prepare() -> None:
    """torch has it all."""


def load(path: Path) -> Runner:
    run = torch.jit.load(path)
    return lambda call: tensors_of(run(*call[0], **call[1]))
