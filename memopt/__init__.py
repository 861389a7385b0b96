"""memopt: train bigger models in the memory you have, with PyTorch.

Importing it changes nothing: each switch is explicit. Neither torch nor a GPU is needed to import it; what needs one
says so when it is first used, and without torch dir() and help() list what works without. `python -m memopt doctor`
tells what works on this machine and why the rest does not."""

from __future__ import annotations

import importlib

from memopt.lazy_names import lazy_names

TYPE_CHECKING = (
    False  # type checkers take it for typing's; importing typing would double what this import costs
)

try:
    import memopt._C as _engines
except ImportError as error:
    from pathlib import Path

    if (Path(__file__).resolve().parents[1] / "setup.py").exists():
        hint = "this is a source tree whose C extension is not built (or was built for another Python): run `make`"
    else:
        hint = "the installed package is damaged: reinstall it with `pip install --force-reinstall memopt`"
    raise ImportError(f"memopt._C cannot be loaded ({error}): {hint}") from error

if TYPE_CHECKING:
    from memopt import amp, batch_sizes, chain, compress, cuda, data, deploy, optim, sim
    from memopt.batch_sizes import BatchSize, find_batch_size
    from memopt.checkpointing import (
        checkpoint,
        checkpoint_sequential,
        create_selective_checkpoint_contexts,
        set_checkpoint_early_stop,
    )
    from memopt.checkpointing.auto_checkpoint import auto_checkpoint, undo_checkpoint
    from memopt.diagnosis import doctor
    from memopt.estimation.model_estimate import estimate
    from memopt.lower_precision import to_dtype_
    from memopt.model_comparison.comparing import compare_models
    from memopt.offloading.activations import offload_activations
    from memopt.offloading.layers import offload_layers
    from memopt.owners.device_bytes import device_bar
    from memopt.owners.live import live_tensors
    from memopt.pieces.step import backward
    from memopt.profiling.session import profile
    from memopt.releasing import release
    from memopt.step_comparison import compare_steps
    from memopt.switches import disable, enable, patch

Error = _engines.Error
__version__ = _engines.__version__
__all__ = [
    "BatchSize",
    "Error",
    "__version__",
    "amp",
    "auto_checkpoint",
    "backward",
    "batch_sizes",
    "chain",
    "checkpoint",
    "checkpoint_sequential",
    "compare_models",
    "compare_steps",
    "compress",
    "create_selective_checkpoint_contexts",
    "cuda",
    "data",
    "deploy",
    "device_bar",
    "disable",
    "doctor",
    "enable",
    "estimate",
    "find_batch_size",
    "live_tensors",
    "offload_activations",
    "offload_layers",
    "optim",
    "patch",
    "profile",
    "release",
    "set_checkpoint_early_stop",
    "sim",
    "to_dtype_",
    "undo_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "BatchSize": "memopt.batch_sizes",
        "find_batch_size": "memopt.batch_sizes",
        "doctor": "memopt.diagnosis",
        "estimate": "memopt.estimation.model_estimate",
        "disable": "memopt.switches",
        "enable": "memopt.switches",
        "patch": "memopt.switches",
        "profile": "memopt.profiling.session",
        "release": "memopt.releasing",
        "compare_models": "memopt.model_comparison.comparing",
        "compare_steps": "memopt.step_comparison",
        "to_dtype_": "memopt.lower_precision",
        "checkpoint": "memopt.checkpointing",
        "checkpoint_sequential": "memopt.checkpointing",
        "create_selective_checkpoint_contexts": "memopt.checkpointing",
        "set_checkpoint_early_stop": "memopt.checkpointing",
        "auto_checkpoint": "memopt.checkpointing.auto_checkpoint",
        "undo_checkpoint": "memopt.checkpointing.auto_checkpoint",
        "backward": "memopt.pieces.step",
        "device_bar": "memopt.owners.device_bytes",
        "live_tensors": "memopt.owners.live",
        "offload_activations": "memopt.offloading.activations",
        "offload_layers": "memopt.offloading.layers",
        "amp": None,
        "batch_sizes": None,
        "chain": None,
        "compress": None,
        "cuda": None,
        "data": None,
        "deploy": None,
        "optim": None,
        "sim": None,
    },
)


def load_ipython_extension(ipython: object) -> None:
    """%load_ext memopt: memopt.enable(), %memopt and %%memopt."""
    importlib.import_module("memopt.torch_version").require("%load_ext memopt")
    importlib.import_module("memopt.notebooks.extension").load(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """%unload_ext memopt: memopt.disable(), and the magics are gone."""
    importlib.import_module("memopt.notebooks.extension").unload(ipython)
