"""Recognition of the user's source files, and their names in reports."""

from __future__ import annotations

import os
import sys

from memopt._memory.recording.user_code import is_user_file


def is_users(file: str) -> bool:
    """Whether a file is the user's; code typed at Python's prompt or given by -c is, too."""
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
    """Return "train.py:41", or in a notebook "In[3]:2"."""
    return f"{shown(file)}:{line}"
