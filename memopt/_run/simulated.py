"""A program on a simulated card with real values, it and each Python that it starts: the environment brings the device
to a process, which gets it when it imports torch (startup/sitecustomize.py)."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memopt._run.user_program import call_after_torch, call_before_torch
from memopt.sim import _activation

_STARTUP = str(Path(__file__).resolve().parent / "startup")


def environment(settings: str, before: Mapping[str, str]) -> dict[str, str]:
    """Return `before` with variables that give its processes a device of these settings (activation.settings_of)."""
    folders = [_STARTUP, *filter(None, [before.get("PYTHONPATH")])]
    return {**before, _activation.VARIABLE: settings, "PYTHONPATH": os.pathsep.join(folders)}


def begin() -> None:
    """Prepare a process with such an environment, before it imports torch."""
    call_before_torch(_activate)
    call_after_torch(_compute)


def _activate() -> None:
    if not _activation.is_active():
        _activation.activate_from()


def _compute() -> None:
    from memopt._estimate.values import Computed as Computed
    from memopt.sim import _compute as compute

    compute.install(Computed())
    _speak_by_gloo()
    _share_nothing()


def _share_nothing() -> None:
    """Refuse to share a card between processes, which is not possible here; torch would only say "operation not
    supported"."""
    import torch

    def refused(*_: Any) -> None:
        raise RuntimeError(
            "a tensor on a simulated card cannot be shared with another process, which has its own card: share it "
            "before it is moved to the card, or run with one process"
        )

    torch.UntypedStorage._share_cuda_ = refused  # type: ignore[assignment, method-assign]


def _speak_by_gloo() -> None:
    """Use gloo between ranks: they are processes whose simulated cards NCCL cannot connect.

    gloo goes through the host, with the same values."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("world_size", -1)
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks < 0 else ranks
        if ranks > 1 and (backend is None or "nccl" in backend):
            if os.environ.get("RANK", "0") == "0":
                said = "memopt run: simulated cards have no NCCL: the ranks communicate over gloo"
                print(said, file=sys.stderr)
            backend = "gloo"
        original(backend, *args, **kwargs)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
