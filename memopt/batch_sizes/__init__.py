"""Batch sizes: the largest that fits, one that adapts step by step, and what else changes with it (the learning rate,
the number of batches that are accumulated)."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.batch_sizes.accumulation import Accumulation
    from memopt.batch_sizes.adaptive import BatchSize
    from memopt.batch_sizes.batch_sampler import AdaptiveBatchSampler
    from memopt.batch_sizes.found import FoundBatchSize, NoBatchSizeFits, Trial
    from memopt.batch_sizes.learning_rate import rescale_learning_rate_, scaled_learning_rate
    from memopt.batch_sizes.search import find_batch_size

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
        "Accumulation": "memopt.batch_sizes.accumulation",
        "AdaptiveBatchSampler": "memopt.batch_sizes.batch_sampler",
        "BatchSize": "memopt.batch_sizes.adaptive",
        "FoundBatchSize": "memopt.batch_sizes.found",
        "NoBatchSizeFits": "memopt.batch_sizes.found",
        "Trial": "memopt.batch_sizes.found",
        "find_batch_size": "memopt.batch_sizes.search",
        "rescale_learning_rate_": "memopt.batch_sizes.learning_rate",
        "scaled_learning_rate": "memopt.batch_sizes.learning_rate",
    },
)
