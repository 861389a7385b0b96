"""What memopt has switched on in this process, switched off again."""

from __future__ import annotations

import sys


def disable() -> None:
    """Takes off all that memopt has put in torch's modules: torch's own functions are there again, as they were.

    memopt.cuda.allocator() puts them there, and does so again. An allocator that torch has taken stays its current one,
    for torch knows no way back: torch.cuda.memory_allocated() and the like then raise, as for any pluggable allocator,
    and memopt.cuda.memory_stats() still answers. Nothing happens where nothing was switched on."""
    names = sys.modules.get("memopt.cuda.torch_names")
    if names is not None:
        names.remove()
