"""What memopt switches on in this process, and all of it switched off again."""

from __future__ import annotations

import os
import sys
from typing import Literal

from memopt.log import logger

_BACKENDS = ("native", "pool")
_ON_OOM = ("report", "raise")


def enable(
    backend: Literal["native", "pool"] | None = None,
    memory_budget: int | str | None = None,
    on_oom: Literal["report", "raise"] | None = None,
) -> None:
    """Switches on what an unmodified training script profits from, without a change of its results: the report of an
    out of memory, printed before an exception that nobody catches; a warning where memory grows from step to step; and
    in a notebook the release of what a failed cell left on the device.

    backend: "native", torch's allocator, by default; "pool", memopt's, which has to come before the first CUDA
    allocation of the process and cannot be undone. memory_budget: bytes ("20GiB" too) that the allocator holds at most
    on each device. on_oom: "report", by default, or "raise", which leaves out of memory alone.

    What is not given comes from MEMOPT_BACKEND, MEMOPT_BUDGET and MEMOPT_ON_OOM. MEMOPT_REPORT names a file to which
    the report is added, too, or, where the name ends in .html, a page to write of it. MEMOPT_DISABLE=1 makes this call
    do nothing. Without a CUDA device the warnings of growth remain. May be called again; memopt.disable() undoes it.

    Raises ValueError for what is none of these, naming where it came from, ImportError without PyTorch >= 2.10, and
    memopt.Error where backend="pool" comes too late; nothing has changed then."""
    if os.environ.get("MEMOPT_DISABLE", "") not in ("", "0"):
        logger.info("memopt.enable() does nothing: MEMOPT_DISABLE is set")
        return
    from memopt.torch_version import require

    require("memopt.enable()")
    from memopt import enabling

    chosen = enabling.Settings(
        backend=_choice("backend", backend, "MEMOPT_BACKEND", _BACKENDS),
        memory_budget=_budget(memory_budget),
        on_oom=_choice("on_oom", on_oom, "MEMOPT_ON_OOM", _ON_OOM),
    )
    enabling.install(chosen)


def _choice(name: str, given: str | None, variable: str, choices: tuple[str, ...]) -> str:
    """Argument, environment, default (the first)."""
    value, source = (given, name) if given is not None else (os.environ.get(variable) or choices[0], variable)
    if value not in choices:
        raise ValueError(f"{source}={value!r} is not one of {', '.join(map(repr, choices))}")
    return value


def _budget(given: int | str | None) -> int | None:
    from memopt import _C

    value = given if given is not None else os.environ.get("MEMOPT_BUDGET") or None
    source = "memory_budget" if given is not None else "MEMOPT_BUDGET"
    if value is None:
        return None
    try:
        size = _C.parse_size(value)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if size == 0:
        raise ValueError(f"{source}=0 leaves nothing to allocate: leave it out for no budget")
    return size


def patch() -> None:
    """Puts memopt's functions in the place of torch's that they stand for: checkpoint, checkpoint_sequential and
    create_selective_checkpoint_contexts of torch.utils.checkpoint, there and in every module that has imported them
    by name, so that code which was not written for memopt (transformers, torch.distributed's checkpoint_wrapper) uses
    them. What holds torch's function otherwise (a default argument, a functools.partial made before) keeps it: call
    this early.

    memopt.disable() undoes it."""
    from memopt.torch_version import require

    require("memopt.patch()")
    from memopt import rebinding

    rebinding.install()


def disable() -> None:
    """Takes off all that memopt has put in torch's modules and Python's hooks: they are there again, as they were.

    memopt.enable() and memopt.patch() put them there and in modules that imported them, memopt.cuda.allocator() others;
    each does so again. An allocator that torch has taken stays its current one, for torch knows no way back:
    torch.cuda.memory_allocated() and the like then raise, as for any pluggable allocator, and
    memopt.cuda.memory_stats() still answers. Nothing happens where nothing was switched on."""
    enabling = sys.modules.get("memopt.enabling")
    if enabling is not None:
        enabling.remove()
    names = sys.modules.get("memopt.cuda.torch_names")
    if names is not None:
        names.remove()
    rebinding = sys.modules.get("memopt.rebinding")
    if rebinding is not None:
        rebinding.remove()
