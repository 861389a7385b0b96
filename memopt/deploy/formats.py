"""The forms that a model can be exported to. Each is a module of what Format has, a thin one: torch's own exporter does
the work."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from memopt.deploy.batch import Call

FORMATS = ("pt2", "onnx", "torchscript")

Runner = Callable[[Call], list[torch.Tensor]]  # of what forward gets, the tensors of what it returns


@dataclass(frozen=True)
class Asked:
    """What the exporter is told: shapes, as torch.export's dynamic_shapes, and options of its own."""

    shapes: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class Format(Protocol):
    SUFFIX: str

    def require(self, *, run: bool) -> None:
        """ImportError, naming the mend, where a package is missing that writes it, or, with `run`, one that runs it."""

    def write(self, module: torch.nn.Module, call: Call, path: Path, asked: Asked) -> Any:
        """Writes the file, and others beside it if need be; gives the exporter's program."""

    def load(self, path: Path) -> Runner:
        """What runs the file."""

    def prepare(self) -> None:
        """Imports what load() would: so that what that takes is not the model's."""


def of(name: str | None, path: Path | None) -> str:
    """The format's name, by a path's ending where none is given. Raises ValueError for one that there is not."""
    if name is None:
        suffix = "" if path is None else path.suffix.lower()
        named = {".pt2": "pt2", ".onnx": "onnx", ".ts": "torchscript", ".pt": "torchscript"}
        if suffix not in ("", *named):
            raise ValueError(f"deploy.export: {path} says no format: name it, format= {_ways()}")
        return named.get(suffix, "pt2")
    if name not in FORMATS:
        raise ValueError(f"deploy.export: format={name!r} is none of {_ways()}")
    return name


def _ways() -> str:
    return ", ".join(map(repr, FORMATS))


def module_of(name: str) -> Format:
    found: Any = importlib.import_module(f"memopt.deploy.{name}_format")
    return found  # type: ignore[no-any-return]
