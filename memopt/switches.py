"""What memopt switches on in this process, and all of it switched off again."""

from __future__ import annotations

import sys


def patch() -> None:
    """Puts memopt's functions in the place of torch's that they stand for: checkpoint, checkpoint_sequential and
    create_selective_checkpoint_contexts of torch.utils.checkpoint, there and in every module that has imported them
    by name, so that code which was not written for memopt (transformers, torch.distributed's checkpoint_wrapper) uses
    them. What holds torch's function otherwise (a default argument, a functools.partial made before) keeps it: call
    this early.

    memopt.disable() undoes it."""
    from memopt import rebinding
    from memopt.torch_version import require

    require("memopt.patch()")
    rebinding.install()


def disable() -> None:
    """Takes off all that memopt has put in torch's modules: torch's own functions are there again, as they were.

    memopt.patch() puts them there and in modules that imported them, memopt.cuda.allocator() others; each does so
    again. An allocator that torch has taken stays its current one, for torch knows no way back:
    torch.cuda.memory_allocated() and the like then raise, as for any pluggable allocator, and
    memopt.cuda.memory_stats() still answers. Nothing happens where nothing was switched on."""
    names = sys.modules.get("memopt.cuda.torch_names")
    if names is not None:
        names.remove()
    rebinding = sys.modules.get("memopt.rebinding")
    if rebinding is not None:
        rebinding.remove()
