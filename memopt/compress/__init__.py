"""Models, tensors and batches made smaller by established libraries, each with a report of what was really saved.

Bytes before and after, in memory and on disk, are measured, not estimated. Every function that ends in an underscore
changes a model in place, and changes all of it or nothing: if it raises, the model is as it was.
"""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.compress._distillation import DistillationLoss
    from memopt.compress._input_packing import PackedInputs, pack_inputs
    from memopt.compress._pruning import prune_
    from memopt.compress._quantizing import quantize_
    from memopt.compress._saved_report import Bytes, Report
    from memopt.compress._sparsifying import SparseReport, sparsify_
    from memopt.compress._tying import Duplicates, duplicates, tie_

__all__ = [
    "Bytes",
    "DistillationLoss",
    "Duplicates",
    "PackedInputs",
    "Report",
    "SparseReport",
    "duplicates",
    "pack_inputs",
    "prune_",
    "quantize_",
    "sparsify_",
    "tie_",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Bytes": "memopt.compress._saved_report",
        "DistillationLoss": "memopt.compress._distillation",
        "Duplicates": "memopt.compress._tying",
        "PackedInputs": "memopt.compress._input_packing",
        "Report": "memopt.compress._saved_report",
        "SparseReport": "memopt.compress._sparsifying",
        "duplicates": "memopt.compress._tying",
        "pack_inputs": "memopt.compress._input_packing",
        "prune_": "memopt.compress._pruning",
        "quantize_": "memopt.compress._quantizing",
        "sparsify_": "memopt.compress._sparsifying",
        "tie_": "memopt.compress._tying",
    },
)
