"""memopt: train bigger models in the memory you have, with PyTorch.

Importing memopt changes nothing: each switch is explicit. The import needs neither torch nor a GPU; a function that
needs one says so when it is first used. Without torch, dir() and help() list what works without it. `python -m memopt
doctor` reports what works on this machine, and why the rest does not.
"""

from __future__ import annotations

import importlib

from memopt._runtime import old_names
from memopt._runtime.lazy_names import lazy_names

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
    from memopt import amp, batch_sizes, chain, compress, cuda, data, demo, deploy, nn, optim, sim, types
    from memopt._checkpoint import (
        checkpoint,
        checkpoint_sequential,
        create_selective_checkpoint_contexts,
        set_checkpoint_early_stop,
    )
    from memopt._checkpoint.auto import auto_checkpoint, undo_checkpoint
    from memopt._compare.models import compare_models
    from memopt._compare.steps import compare_steps
    from memopt._estimate.model import estimate
    from memopt._fit.planning import fit
    from memopt._memory.live.device_bytes import device_bar
    from memopt._memory.live.live_tensors import live_tensors
    from memopt._memory.recording.session import profile
    from memopt._memory.release import release
    from memopt._microbatch.backward import backward
    from memopt._offload.activations import offload_activations
    from memopt._offload.layers import offload_layers
    from memopt._runtime.doctor import doctor
    from memopt._runtime.switches import disable, enable, patch
    from memopt._runtime.to_dtype import to_dtype_
    from memopt.batch_sizes import BatchSize, find_batch_size

old_names.install()
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
    "demo",
    "deploy",
    "device_bar",
    "disable",
    "doctor",
    "enable",
    "estimate",
    "find_batch_size",
    "fit",
    "live_tensors",
    "nn",
    "offload_activations",
    "offload_layers",
    "optim",
    "patch",
    "profile",
    "release",
    "set_checkpoint_early_stop",
    "sim",
    "to_dtype_",
    "types",
    "undo_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "BatchSize": "memopt.batch_sizes",
        "find_batch_size": "memopt.batch_sizes",
        "doctor": "memopt._runtime.doctor",
        "estimate": "memopt._estimate.model",
        "fit": "memopt._fit.planning",
        "disable": "memopt._runtime.switches",
        "enable": "memopt._runtime.switches",
        "patch": "memopt._runtime.switches",
        "profile": "memopt._memory.recording.session",
        "release": "memopt._memory.release",
        "compare_models": "memopt._compare.models",
        "compare_steps": "memopt._compare.steps",
        "to_dtype_": "memopt._runtime.to_dtype",
        "checkpoint": "memopt._checkpoint",
        "checkpoint_sequential": "memopt._checkpoint",
        "create_selective_checkpoint_contexts": "memopt._checkpoint",
        "set_checkpoint_early_stop": "memopt._checkpoint",
        "auto_checkpoint": "memopt._checkpoint.auto",
        "undo_checkpoint": "memopt._checkpoint.auto",
        "backward": "memopt._microbatch.backward",
        "device_bar": "memopt._memory.live.device_bytes",
        "live_tensors": "memopt._memory.live.live_tensors",
        "offload_activations": "memopt._offload.activations",
        "offload_layers": "memopt._offload.layers",
        "amp": None,
        "batch_sizes": None,
        "chain": None,
        "compress": None,
        "cuda": None,
        "data": None,
        "demo": None,
        "deploy": None,
        "nn": None,
        "optim": None,
        "sim": None,
        "types": None,
    },
)


def load_ipython_extension(ipython: object) -> None:
    """Load the notebook extension (%load_ext memopt): memopt.enable(), and the magics %memopt and %%memopt."""
    importlib.import_module("memopt._runtime.torch_version").require("%load_ext memopt")
    importlib.import_module("memopt._jupyter.magics").load(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """Unload the notebook extension (%unload_ext memopt): memopt.disable(), and the magics are removed."""
    importlib.import_module("memopt._jupyter.magics").unload(ipython)
