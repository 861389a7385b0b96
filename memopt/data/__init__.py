"""Data for training.

Containers that worker processes share instead of copying, preprocessing kept on disk, rows that stay in a file, and
batches that are on the device when they are asked for.
"""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.data._cache.caching import cached
    from memopt.data._mmap.mapped_dataset import MmapDataset
    from memopt.data._mmap.mapped_writer import MmapWriter
    from memopt.data._prefetch.prefetcher import Prefetcher
    from memopt.data._shared_containers import SharedDict, SharedList, SharedStrings
    from memopt.data._tuning.tuning import tune
    from memopt.data._tuning.worker_watch import watch

__all__ = [
    "MmapDataset",
    "MmapWriter",
    "Prefetcher",
    "SharedDict",
    "SharedList",
    "SharedStrings",
    "cached",
    "tune",
    "watch",
]

_find, __dir__ = lazy_names(
    globals(),
    {
        "MmapDataset": "memopt.data._mmap.mapped_dataset",
        "MmapWriter": "memopt.data._mmap.mapped_writer",
        "Prefetcher": "memopt.data._prefetch.prefetcher",
        "SharedDict": "memopt.data._shared_containers",
        "SharedList": "memopt.data._shared_containers",
        "SharedStrings": "memopt.data._shared_containers",
        "cached": "memopt.data._cache.caching",
        "tune": "memopt.data._tuning.tuning",
        "watch": "memopt.data._tuning.worker_watch",
    },
)


def __getattr__(name: str) -> object:
    if name == "FolderStream":
        raise AttributeError(
            "memopt.data.FolderStream has become a worked example: copy LineStream from notebooks/06_data_path.ipynb, "
            "section 'A folder as a stream', and adapt it"
        )
    return _find(name)
