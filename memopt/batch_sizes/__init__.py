"""Batch sizes: the largest that fits, one that adapts step by step, and what depends on it (the learning rate, the
number of accumulated batches)."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt._batch_size.accumulation import Accumulation
    from memopt._batch_size.adaptive import AdaptiveBatchSampler, BatchSize
    from memopt._batch_size.find_batch_size import find_batch_size
    from memopt._batch_size.learning_rate import rescale_learning_rate_, scaled_learning_rate
    from memopt._batch_size.result import FoundBatchSize, NoBatchSizeFits, Trial

__all__ = [
    "Accumulation",
    "AdaptiveBatchSampler",
    "BatchSize",
    "FoundBatchSize",
    "NoBatchSizeFits",
    "Trial",
    "find_batch_size",
    "rescale_learning_rate_",
    "scaled_learning_rate",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Accumulation": "memopt._batch_size.accumulation",
        "AdaptiveBatchSampler": "memopt._batch_size.adaptive",
        "BatchSize": "memopt._batch_size.adaptive",
        "FoundBatchSize": "memopt._batch_size.result",
        "NoBatchSizeFits": "memopt._batch_size.result",
        "Trial": "memopt._batch_size.result",
        "find_batch_size": "memopt._batch_size.find_batch_size",
        "rescale_learning_rate_": "memopt._batch_size.learning_rate",
        "scaled_learning_rate": "memopt._batch_size.learning_rate",
    },
)
