"""%load_ext memopt and %unload_ext memopt."""

from __future__ import annotations

from typing import Any

from memopt.notebooks.magics import MemoptMagics
from memopt.switches import disable, enable


def load(ipython: Any) -> None:
    """Settings come from the environment; memopt.enable(...) before keeps its own."""
    from memopt import enabling

    if enabling.settings() is None:
        enable()
    ipython.register_magics(MemoptMagics)


def unload(ipython: Any) -> None:
    disable()
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("memopt", None)
