"""Modules under the names that memopt 0.1 gave them: for its pickles, and for scripts that import by those names."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of what a pickle can hold: the classes that a user has had in hand, and those of their parts.
MODULES = {
    "amp.grad_scaler": "amp._grad_scaler",
    "batch_sizes.accumulation": "_batch_size.accumulation",
    "batch_sizes.adaptive": "_batch_size.adaptive",
    "batch_sizes.batch_sampler": "_batch_size.adaptive",
    "batch_sizes.found": "_batch_size.result",
    "checkpointing.chain_runner": "_checkpoint.runner",
    "checkpointing.plan": "_checkpoint.plan",
    "checkpointing.stage_costs": "_checkpoint.stages.costs",
    "compress.distillation": "compress._distillation",
    "compress.duplicate_storages": "compress._tying",
    "compress.input_packing": "compress._input_packing",
    "compress.report": "compress._saved_report",
    "compress.sparse_layouts": "compress._sparsifying",
    "compress.sparse_linear": "compress._sparsifying",
    "compress.sparsifying": "compress._sparsifying",
    "compress.two_of_four": "compress._pruning",
    "data.cache_counters": "data._cache.cache_counters",
    "data.cache_folder": "data._cache.cache_folder",
    "data.caching": "data._cache.caching",
    "data.loader_settings": "data._tuning.tuning_trial",
    "data.mapped_dataset": "data._mmap.mapped_dataset",
    "data.mapped_file": "data._mmap.mapped_file",
    "data.passing": "data._shared_containers",
    "data.prefetching": "data._prefetch.prefetcher",
    "data.shared_dict": "data._shared_containers",
    "data.shared_list": "data._shared_containers",
    "data.shared_strings": "data._shared_containers",
    "data.tuning_report": "data._tuning.tuning",
    "data.tuning_trial": "data._tuning.tuning_trial",
    "deploy.export_report": "deploy._export_report",
    "deploy.inference_memory": "deploy._inference_memory",
    "deploy.output_check": "deploy._output_check",
    "diagnosis": "_runtime.doctor",
    "estimation.cards": "_estimate.cards",
    "estimation.prediction": "_estimate.prediction",
    "finding": "_runtime.doctor",
    "lower_precision": "_runtime.to_dtype",
    "model_comparison.comparison_table": "_compare.model_table",
    "optim.adam": "optim._adam",
    "optim.adamw": "optim._adam",
    "optim.sgd": "optim._sgd",
    "owners.device_bytes": "_memory.live.device_bytes",
    "owners.live": "_memory.live.live_tensors",
    "profiling.recording": "_memory.recording.recording",
    "profiling.session": "_memory.recording.session",
    "releasing": "_memory.release",
    "step_comparison.measuring": "_compare.step_table",
    "step_comparison.step_table": "_compare.step_table",
}
CLASSES = {  # renamed since
    "releasing.Bytes": "AllocatorUse",
    "checkpointing.plan.Around": "StepOverhead",
    "data.tuning_trial.Trial": "LoaderTrial",
}
PACKAGES = {name.split(".")[0] for name in MODULES if "." in name}


class _OldModule(ModuleType):
    """A module of memopt 0.1 that forwards to its successor."""

    _new: str

    def __getattr__(self, name: str) -> object:
        # Asked by the import system; a package, which had modules alone.
        if name[:2] == "__" or not self._new:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        today = CLASSES.get(f"{self.__name__}.{name}".removeprefix("memopt."), name)
        value = getattr(importlib.import_module(self._new), today)
        text = (
            f"{self.__name__} is a module of memopt 0.1: import {name} by a public name (memopt.types has the result "
            "types); a pickle that names it still loads, and no longer names it once it is saved again"
        )
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value


class OldNames:
    """The last finder of sys.meta_path: asked where no module of a name is found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        old = name.removeprefix("memopt.")
        if old != name and (old in MODULES or old in PACKAGES):
            return ModuleSpec(name, OldNames, is_package=old in PACKAGES)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name)
        new = MODULES.get(spec.name.removeprefix("memopt."))
        module._new = f"memopt.{new}" if new else ""
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Do nothing: the module has no code."""


def install() -> None:
    """Add the finder, once."""
    if OldNames not in sys.meta_path:
        sys.meta_path.append(OldNames)  # type: ignore[arg-type]
