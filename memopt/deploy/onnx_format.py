"""ONNX, by torch.onnx's exporter that stands on torch.export; run by onnxruntime."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memopt.deploy.batch import Call
from memopt.deploy.formats import Asked, Runner

SUFFIX = ".onnx"
INLINE = 1536 << 20
"""Bytes of weights up to which they are in the file itself: protobuf's files end at 2 GiB."""


def require(*, run: bool) -> None:
    wanted = ["onnx", "onnxscript", *(["onnxruntime"] if run else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        unchecked = (
            " (verify=False and measure=False need no onnxruntime)" if missing == ["onnxruntime"] else ""
        )
        raise ImportError(
            f"deploy.export: ONNX needs {' and '.join(missing)}: pip install 'memopt[deploy]'{unchecked}"
        )


def write(module: torch.nn.Module, call: Call, path: Path, asked: Asked) -> Any:
    args, kwargs = call
    options = {"verbose": False} | asked.options
    program: Any = torch.onnx.export(
        module, args, kwargs=kwargs or None, dynamo=True, dynamic_shapes=asked.shapes, **options
    )
    weights = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    ir = importlib.import_module("onnx_ir")
    # A name of its own each time: whoever reads the old file meanwhile has the old weights.
    apart = f"{path.name}.{secrets.token_hex(4)}.data" if weights > INLINE else None
    ir.save(program.model, path, external_data=apart)
    return program


def prepare() -> None:
    importlib.import_module("onnxruntime")


def load(path: Path) -> Runner:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(call: Call) -> list[torch.Tensor]:
        given = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        if len(given) != len(names):
            raise RuntimeError(f"the file takes {len(names)} inputs ({', '.join(names)}), not {len(given)}")
        for leaf in given:
            if leaf.dtype is torch.bfloat16:
                raise ValueError(
                    "onnxruntime takes no bfloat16 from Python: export another type, or pass verify=False and "
                    "measure=False"
                )
        feed = {name: leaf.detach().cpu().numpy() for name, leaf in zip(names, given, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run
