"""%load_ext memopt and %unload_ext memopt."""

from __future__ import annotations

from typing import Any

from memopt._jupyter.magics import MemoptMagics
from memopt._runtime.switches import disable, enable


def load(ipython: Any) -> None:
    """Load the extension. Settings come from the environment, unless memopt.enable(...) was called before."""
    from memopt._runtime import enabling

    if enabling.settings() is None:
        enable()
    ipython.register_magics(MemoptMagics)


def unload(ipython: Any) -> None:
    disable()
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop("memopt", None)
