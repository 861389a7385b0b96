"""Models, tensors and batches made smaller by the field's own libraries, each with a report of what that really saved:
bytes before and after, in memory and on disk, measured and not reckoned.

Every function that ends in an underscore changes a model in place, and changes all of it or nothing: where it raises,
the model is as it was."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.compress.distillation import DistillationLoss
    from memopt.compress.duplicate_storages import Duplicates, duplicates
    from memopt.compress.input_packing import PackedInputs, pack_inputs
    from memopt.compress.pruning import prune_
    from memopt.compress.quantizing import quantize_
    from memopt.compress.report import Bytes, Report
    from memopt.compress.sparsifying import SparseReport, sparsify_
    from memopt.compress.tying import tie_

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
        "Bytes": "memopt.compress.report",
        "DistillationLoss": "memopt.compress.distillation",
        "Duplicates": "memopt.compress.duplicate_storages",
        "PackedInputs": "memopt.compress.input_packing",
        "Report": "memopt.compress.report",
        "SparseReport": "memopt.compress.sparsifying",
        "duplicates": "memopt.compress.duplicate_storages",
        "pack_inputs": "memopt.compress.input_packing",
        "prune_": "memopt.compress.pruning",
        "quantize_": "memopt.compress.quantizing",
        "sparsify_": "memopt.compress.sparsifying",
        "tie_": "memopt.compress.tying",
    },
)
