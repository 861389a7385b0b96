"""The switches of memopt in this process: enable() and patch(), and disable(), which undoes both."""

from __future__ import annotations

import os
import sys
from typing import Literal

from memopt._runtime.log import logger

_BACKENDS = ("native", "pool")
_ON_OOM = ("report", "raise")


def enable(
    backend: Literal["native", "pool"] | None = None,
    memory_budget: int | str | None = None,
    on_oom: Literal["report", "raise"] | None = None,
) -> None:
    """Enable memopt for an unmodified training script, without a change of its results.

    It adds the report of an out-of-memory error, printed before the traceback of an uncaught exception; a warning when
    memory grows from step to step; and in a notebook the release of memory that a failed cell left on the device.
    Without a CUDA device the warnings of growth remain. It may be called again; memopt.disable() undoes it.

    An argument that is not given comes from MEMOPT_BACKEND, MEMOPT_BUDGET or MEMOPT_ON_OOM. MEMOPT_REPORT names a file
    that the report is appended to as well, or, if the name ends in .html, a page to write it to. With MEMOPT_DISABLE=1
    this call does nothing.

    Args:
        backend: "native" (the default), torch's allocator; "pool", memopt's, which must come before the first CUDA
            allocation of the process and cannot be undone.
        memory_budget: Most bytes ("20GiB" too) that the allocator holds on each device.
        on_oom: "report" (the default), or "raise", which leaves out-of-memory errors alone.

    Raises:
        ValueError: A value is not valid; the message names its source.
        ImportError: PyTorch >= 2.10 is missing.
        memopt.Error: backend="pool" comes too late. Nothing has changed then.
    """
    if os.environ.get("MEMOPT_DISABLE", "") not in ("", "0"):
        logger.info("memopt.enable() does nothing: MEMOPT_DISABLE is set")
        return
    from memopt._runtime.torch_version import require

    require("memopt.enable()")
    from memopt._runtime import enabling

    chosen = enabling.EnableSettings(
        backend=_choice("backend", backend, "MEMOPT_BACKEND", _BACKENDS),
        memory_budget=_budget(memory_budget),
        on_oom=_choice("on_oom", on_oom, "MEMOPT_ON_OOM", _ON_OOM),
    )
    enabling.install(chosen)


def _choice(name: str, given: str | None, variable: str, choices: tuple[str, ...]) -> str:
    """Return the argument, else the environment variable, else the default, which is the first choice."""
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
    """Replace torch's checkpointing functions with memopt's, for code that was not written for memopt.

    They are checkpoint, checkpoint_sequential and create_selective_checkpoint_contexts of torch.utils.checkpoint. They
    are replaced there and in every module that has imported them by name, such as transformers and torch.distributed's
    checkpoint_wrapper. Other references to torch's functions (a default argument, an earlier functools.partial) stay:
    call this early. memopt.disable() undoes it.
    """
    from memopt._runtime.torch_version import require

    require("memopt.patch()")
    from memopt._runtime import monkeypatch

    monkeypatch.install()


def disable() -> None:
    """Undo memopt.enable() and memopt.patch(), and restore torch's functions and Python's hooks.

    What memopt.cuda.allocator() has patched is restored too. Each of these calls may be made again afterwards. An
    allocator that torch has taken stays its current one, because torch cannot change back.
    torch.cuda.memory_allocated() and the like then raise, as for any pluggable allocator; memopt.cuda.memory_stats()
    still answers. Without anything enabled the call does nothing.
    """
    enabling = sys.modules.get("memopt._runtime.enabling")
    if enabling is not None:
        enabling.remove()
    names = sys.modules.get("memopt.cuda._torch_patches")
    if names is not None:
        names.remove()
    monkeypatch = sys.modules.get("memopt._runtime.monkeypatch")
    if monkeypatch is not None:
        monkeypatch.remove()
