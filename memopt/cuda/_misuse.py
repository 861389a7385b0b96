"""Misuse of memopt's allocator that was refused in torch's destructors, where no exception can be raised."""

from __future__ import annotations

import warnings

from memopt import _C
from memopt.cuda._caller import stacklevel

_MISUSE = {
    "double_frees": "frees of memory that was free already",
    "foreign_frees": "frees of addresses that memopt never gave",
    "foreign_streams": "record_stream() of addresses that memopt never gave",
    "unbalanced_pools": "ends of private pools that were not begun",
    "failed_releases": "pieces of memory that the driver refused to take back",
}
_told = dict.fromkeys(_MISUSE, 0)


def text(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[name]} {what}" for name, what in _MISUSE.items() if counts[name])


def warn() -> None:
    """Warn of misuse that was refused since the last warning. Called by every function that reads the allocator."""
    counts = _C.allocator_misuse()
    fresh = {name: max(0, counts[name] - _told[name]) for name in _MISUSE}
    if any(fresh.values()):
        _told.update({name: counts[name] for name in _MISUSE})
        warnings.warn(f"memopt's allocator refused {text(fresh)}", RuntimeWarning, stacklevel=stacklevel())
