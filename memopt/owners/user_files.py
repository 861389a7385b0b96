"""Which source files are the user's, and how they are called on the screen."""

from __future__ import annotations

import os
import sys

from memopt.profiling.user_code import is_user_file


def is_users(file: str) -> bool:
    """The user's, also what was typed at Python's prompt or given by -c."""
    return is_user_file(file) or file.startswith(("<stdin", "<string"))


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
