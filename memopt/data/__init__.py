"""What feeds the model: containers that worker processes share instead of copying, preprocessing kept on disk, rows
that stay in a file, and batches that are on the device when they are asked for."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.data.caching import cached
    from memopt.data.folder_stream import FolderStream
    from memopt.data.mapped_dataset import MmapDataset
    from memopt.data.mapped_writer import MmapWriter
    from memopt.data.prefetching import Prefetcher
    from memopt.data.shared_dict import SharedDict
    from memopt.data.shared_list import SharedList
    from memopt.data.shared_strings import SharedStrings
    from memopt.data.tuning import tune
    from memopt.data.worker_watch import watch

__all__ = [
    "FolderStream",
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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "FolderStream": "memopt.data.folder_stream",
        "MmapDataset": "memopt.data.mapped_dataset",
        "MmapWriter": "memopt.data.mapped_writer",
        "Prefetcher": "memopt.data.prefetching",
        "SharedDict": "memopt.data.shared_dict",
        "SharedList": "memopt.data.shared_list",
        "SharedStrings": "memopt.data.shared_strings",
        "cached": "memopt.data.caching",
        "tune": "memopt.data.tuning",
        "watch": "memopt.data.worker_watch",
    },
)
