"""torch.export's own file."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch

from memopt.deploy.batch import Call
from memopt.deploy.formats import Asked, Runner
from memopt.deploy.output_check import tensors_of

SUFFIX = ".pt2"


def require(*, run: bool) -> None:
    """torch alone writes and runs it."""


def write(module: torch.nn.Module, call: Call, path: Path, asked: Asked) -> Any:
    args, kwargs = call
    program = torch.export.export(module, args, kwargs, dynamic_shapes=asked.shapes, **asked.options)
    torch.export.save(program, path)
    return program


def load(path: Path) -> Runner:
    run = torch.export.load(path).module()
    return lambda call: tensors_of(run(*call[0], **call[1]))


def prepare() -> None:
    for name in ("torch.export.pt2_archive", "torch.export._trace"):
        with contextlib.suppress(ImportError):  # in another torch they may be elsewhere
            importlib.import_module(name)
