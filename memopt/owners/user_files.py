"""Which source files are the user's, and how they are called on the screen."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@functools.cache
def is_users(file: str) -> bool:
    """Not torch's, an installed package's, the standard library's or memopt's; what a notebook or a string holds is
    the user's."""
    if file.startswith("<"):
        return file.startswith(("<stdin", "<string", "<ipython"))
    path = os.path.abspath(file)
    if "site-packages" in path or "dist-packages" in path or path.startswith(_OURS + os.sep):
        return False
    return not path.startswith(_library())


@functools.cache
def _library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.abspath(paths[name]) + os.sep for name in ("stdlib", "platstdlib")})


def shown(file: str) -> str:
    """The file's name without its folders; of a notebook's cell the number that is beside it."""
    return _cell(file) or os.path.basename(file)


def _cell(file: str) -> str | None:
    number = cells().get(file)
    return None if number is None else f"In[{number}]"


NOTEBOOK = "<notebook>"  # the file of names that cells have bound: any of them


def cells() -> dict[str, int]:
    """The file names that IPython gives its cells, and their numbers; empty in a script."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def place(file: str, line: int) -> str:
    """ "train.py:41"; of a notebook "In[3]:2"."""
    return f"{shown(file)}:{line}"
