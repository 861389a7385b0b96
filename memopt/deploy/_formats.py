"""The file formats that a model is exported to, each written and run by its own library.

torch.export's (pt2), ONNX by torch.onnx and onnxruntime, and TorchScript by torch.jit.trace, which torch calls
deprecated and says so. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memopt._runtime.state_snapshot import preserve_state
from memopt.deploy._output_check import tensors_of

INLINE = 1536 << 20
"""Bytes of weights up to which ONNX has them in the file itself: protobuf's files end at 2 GiB."""

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what forward gets
Runner = Callable[[Call], list[torch.Tensor]]  # of what forward gets, the tensors of what it returns


@dataclass(frozen=True)
class ExportOptions:
    """Dynamic shapes, as torch.export's dynamic_shapes, and options of the exporter's own."""

    shapes: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class Format:
    """A format: a torch that reads and writes it by itself is assumed where a method says nothing else."""

    suffix: str

    def require(self, *, run: bool) -> None:
        """Raise ImportError where a package that writes the format, or, with `run`, one that runs it, is missing."""

    def write(self, module: torch.nn.Module, call: Call, path: Path, options: ExportOptions) -> Any:
        """Write the file, and others beside it if need be; return the exporter's program."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Import what load() would, so that the memory of that is not the model's."""

    def load(self, path: Path) -> Runner:
        """Load the file, as a function that runs it."""
        raise NotImplementedError


class Pt2(Format):
    suffix = ".pt2"

    def write(self, module: torch.nn.Module, call: Call, path: Path, options: ExportOptions) -> Any:
        args, kwargs = call
        program = torch.export.export(module, args, kwargs, dynamic_shapes=options.shapes, **options.options)
        torch.export.save(program, path)
        return program

    def load(self, path: Path) -> Runner:
        run = torch.export.load(path).module()
        return lambda call: tensors_of(run(*call[0], **call[1]))

    def prepare(self) -> None:
        for name in ("torch.export.pt2_archive", "torch.export._trace"):
            with contextlib.suppress(ImportError):  # in another torch they may be elsewhere
                importlib.import_module(name)


class Onnx(Format):
    suffix = ".onnx"

    def require(self, *, run: bool) -> None:
        wanted = ["onnx", "onnxscript", *(["onnxruntime"] if run else [])]
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if missing:
            unchecked = (
                " (verify=False and measure=False need no onnxruntime)" if missing == ["onnxruntime"] else ""
            )
            raise ImportError(
                f"deploy.export: ONNX needs {' and '.join(missing)}: pip install 'memopt[deploy]'{unchecked}"
            )

    def write(self, module: torch.nn.Module, call: Call, path: Path, options: ExportOptions) -> Any:
        args, kwargs = call
        named = {"verbose": False} | options.options
        program: Any = torch.onnx.export(
            module, args, kwargs=kwargs or None, dynamo=True, dynamic_shapes=options.shapes, **named
        )
        weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
        ir = importlib.import_module("onnx_ir")
        # A name of its own each time: whoever reads the old file meanwhile has the old weights.
        apart = f"{path.name}.{secrets.token_hex(4)}.data" if weights > INLINE else None
        ir.save(program.model, path, external_data=apart)
        return program

    def prepare(self) -> None:
        importlib.import_module("onnxruntime")

    def load(self, path: Path) -> Runner:
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def run(call: Call) -> list[torch.Tensor]:
            given = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
            if len(given) != len(names):
                raise RuntimeError(
                    f"the file takes {len(names)} inputs ({', '.join(names)}), not {len(given)}"
                )
            for leaf in given:
                if leaf.dtype is torch.bfloat16:
                    raise ValueError(
                        "onnxruntime does not accept bfloat16 from Python: export another type, or pass verify=False "
                        "and measure=False"
                    )
            feed = {name: leaf.detach().cpu().numpy() for name, leaf in zip(names, given, strict=True)}
            return [torch.from_numpy(value) for value in session.run(None, feed)]

        return run


class TorchScript(Format):
    suffix = ".pt"

    def require(self, *, run: bool) -> None:
        if not hasattr(torch.jit, "trace"):
            raise ImportError(
                f"deploy.export: torch {torch.__version__} no longer has TorchScript: export to 'pt2' or 'onnx'"
            )

    def write(self, module: torch.nn.Module, call: Call, path: Path, options: ExportOptions) -> Any:
        args, kwargs = call
        named: dict[str, Any] = {}
        if kwargs:  # the tracer takes arguments by place or by name, not some of each
            named["example_kwarg_inputs"] = dict(
                inspect.signature(module.forward).bind(*args, **kwargs).arguments
            )
        # What check_trace would run is run afterwards, on the file.
        named |= {"strict": False, "check_trace": False} | options.options
        with preserve_state(module):  # it is run for that, and what it counts would go to the file
            program = torch.jit.trace(module, None if kwargs else args, **named)
        torch.jit.save(program, path)
        return program

    def load(self, path: Path) -> Runner:
        run = torch.jit.load(path)
        return lambda call: tensors_of(run(*call[0], **call[1]))


FORMATS: dict[str, Format] = {"pt2": Pt2(), "onnx": Onnx(), "torchscript": TorchScript()}


def name_of(name: str | None, path: Path | None) -> str:
    """The format's name, by a path's ending where none is given. Raises ValueError for an unknown one."""
    if name is None:
        suffix = "" if path is None else path.suffix.lower()
        named = {".pt2": "pt2", ".onnx": "onnx", ".ts": "torchscript", ".pt": "torchscript"}
        if suffix not in ("", *named):
            raise ValueError(f"deploy.export: {path} does not imply a format: pass format= {_ways()}")
        return named.get(suffix, "pt2")
    if name not in FORMATS:
        raise ValueError(f"deploy.export: format={name!r} is not one of {_ways()}")
    return name


def _ways() -> str:
    return ", ".join(map(repr, FORMATS))


# ---- the batch dimension of a sample ---------------------------------------------------------------------------------


def with_batch_size(call: Call, size: int, count: int) -> Call:
    """The call with `count` samples in place of `size`, the same ones again and again. Tensors whose first dimension is
    `size` have the batch."""

    def change(leaf: Any) -> Any:
        if not _has_batch(leaf, size):
            return leaf
        return leaf[torch.arange(count, device=leaf.device) % size]

    return pytree.tree_map(change, call)  # type: ignore[no-any-return]


def dynamic_batch_shapes(module: torch.nn.Module, call: Call, size: int) -> dict[str, Any]:
    """dynamic_shapes of torch.export, where the batch may have any size."""
    batch = torch.export.Dim("batch")
    args, kwargs = pytree.tree_map(lambda leaf: {0: batch} if _has_batch(leaf, size) else None, call)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    shapes = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            shapes |= shapes.pop(name, {})
    return shapes


def _has_batch(leaf: Any, size: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


# ---- the files -------------------------------------------------------------------------------------------------------


@contextmanager
def folder_beside(path: Path | None) -> Iterator[Path]:
    """A folder for files that are being made, gone afterwards with what is still in it.

    It is on the file system of `path`, or where temporary files go.
    """
    made = tempfile.mkdtemp(
        prefix="memopt-export-" if path is None else f".{path.name}.",
        dir=None if path is None else path.parent,
    )
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def put_beside(made: Path, path: Path) -> list[Path]:
    """Rename what is in the folder of `made` to beside `path`, `made` itself to `path`, last.

    An old file is what it was until then. Where weights are in a file of their own, its name is of this export alone,
    and earlier ones go.
    """
    beside = sorted(file for file in made.parent.iterdir() if file != made)
    for file in (*beside, made):
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    if path.exists():
        shutil.copymode(path, made)
    there = []
    try:
        for file in beside:
            os.replace(file, path.parent / file.name)
            there.append(path.parent / file.name)
        os.replace(made, path)
    except BaseException:
        for file in there:
            file.unlink(missing_ok=True)
        raise
    for old in _weights_of(path):
        if old not in there:
            old.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system can flush a folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return [path, *there]


def _weights_of(path: Path) -> list[Path]:
    """Files of weights of this export and earlier ones, as the ONNX format names them."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.data")
    return [file for file in path.parent.iterdir() if name.fullmatch(file.name)]
