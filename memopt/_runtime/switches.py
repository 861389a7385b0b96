"""The switches of memopt in this process: enable() and patch(), and disable(), which undoes both."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any, Literal

from memopt._runtime.log import logger

_BACKENDS = ("native", "pool")
_ON_OOM = ("report", "raise")


def enable(
    backend: Literal["native", "pool"] | None = None,
    memory_budget: int | str | None = None,
    on_oom: Literal["report", "raise"] | None = None,
) -> None:
    """Enable memopt for an unmodified training script, without changing its results.

    It adds the report of an out-of-memory error, printed after the traceback of an uncaught exception; a warning when
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
    from memopt._runtime import arguments

    value = given if given is not None else os.environ.get("MEMOPT_BUDGET") or None
    source = "memory_budget" if given is not None else "MEMOPT_BUDGET"
    if value is None:
        return None
    size = arguments.size(value, source)
    if size == 0:
        raise ValueError(f"{source}=0 leaves nothing to allocate: leave it out for no budget")
    return size


def patch(*, loss_head: bool = False) -> None:
    """Replace torch's checkpointing functions with memopt's, for code that was not written for memopt.

    They are checkpoint, checkpoint_sequential and create_selective_checkpoint_contexts of torch.utils.checkpoint. They
    are replaced there and in every module that has imported them by name, such as transformers and torch.distributed's
    checkpoint_wrapper. Other references to torch's functions (a default argument, an earlier functools.partial) are not
    replaced: call this early. memopt.disable() undoes it.

    Args:
        loss_head: Whether transformers' models compute their training loss without their logits too, as
            memopt.nn.fuse_loss_head() makes a model do. A model whose head does not allow it stays plain; the log tells
            why.

    Raises:
        ImportError: PyTorch >= 2.10 is missing; or, with loss_head, no model of transformers is imported yet.
    """
    from memopt._runtime.torch_version import require

    require("memopt.patch()")
    if loss_head:
        from memopt.nn import _transformers_heads

        _transformers_heads.patch()
    _replace()


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
    heads = sys.modules.get("memopt.nn._transformers_heads")
    if heads is not None:
        heads.unpatch()
    _restore()


# ---- replacement of torch's functions --------------------------------------------------------------------------------


_lock = threading.Lock()
_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, torch's, ours


def _pairs() -> dict[int, tuple[Any, Any]]:
    """Return torch's functions and ours by the id of torch's, and of replacements by other code."""
    import torch.utils.checkpoint as torchs

    from memopt._checkpoint.drop_in import checkpoint, selective, sequential

    pairs = (
        (torchs.checkpoint, checkpoint.checkpoint),
        (torchs.checkpoint_sequential, sequential.checkpoint_sequential),
        (torchs.create_selective_checkpoint_contexts, selective.create_selective_checkpoint_contexts),
        (checkpoint.torchs_checkpoint, checkpoint.checkpoint),
        (sequential.torchs_sequential, sequential.checkpoint_sequential),
        (selective.torchs_contexts, selective.create_selective_checkpoint_contexts),
    )
    return {id(theirs): (theirs, ours) for theirs, ours in pairs if theirs is not ours}


def _replace() -> None:
    """Replace torch's functions in every loaded module that has them under some name."""
    with _lock:
        pairs = _pairs()
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "memopt":
                continue
            for name, value in list(vars(module).items()):
                if id(value) in pairs:
                    theirs, ours = pairs[id(value)]
                    setattr(module, name, ours)
                    _replaced.append((module, name, theirs, ours))
        logger.info(
            "torch names rebound to memopt's: %s", ", ".join(f"{m.__name__}.{n}" for m, n, *_ in _replaced)
        )


def _restore() -> None:
    """Restore torch's functions, also in torch's own modules that have imported ours since.

    A replacement by other code stays.
    """
    with _lock:
        theirs_of = {id(ours): theirs for _, _, theirs, ours in _replaced}
        of_torch = (
            [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "torch"] if _replaced else []
        )
        for module in {id(m): m for m in (*(m for m, *_ in _replaced), *of_torch)}.values():
            if not isinstance(module, ModuleType):
                continue
            names = {name for m, name, *_ in _replaced if m is module}
            for name, value in list(vars(module).items()):
                if id(value) in theirs_of and (name in names or module in of_torch):
                    setattr(module, name, theirs_of[id(value)])
        _replaced.clear()
