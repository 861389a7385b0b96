"""Batch sizes: the largest that fits, one that adapts step by step, and what else changes with it (the learning rate,
the number of batches that are accumulated)."""

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
