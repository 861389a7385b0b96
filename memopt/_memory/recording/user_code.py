"""The user's own source lines, which are neither torch's, nor an installed package's, nor memopt's, and their names."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from memopt._memory.recording.recording import Frame, Stack

# A recording may come from another machine, so a package is known by how its path looks; this machine's own library
# besides, which a distribution may have put anywhere.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python\d+(\.\d+)?t?)[/\\]", re.IGNORECASE)
_HERE = tuple(
    f"{Path(path)}/" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} if path
)
# What torch.compile writes for itself: named by a hash, wherever its cache is.
_COMPILED = re.compile(r"[/\\]c[a-z2-7]{51}\.py$")
# As it is, and as it was found: by a sys.path of "..", say.
_MEMOPT = tuple(f"{path.parents[2]}/" for path in (Path(__file__).resolve(), Path(__file__)))
NOTEBOOK = "<notebook>"  # the file of names that cells have bound: any of them


@functools.lru_cache(maxsize=1 << 16)
def is_user_file(file: str) -> bool:
    """Return whether a file is the user's. A notebook's cell is, whatever name its kernel gives it."""
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    ours = file.startswith(_HERE) or file.startswith(_MEMOPT)
    return not (ours or _INSTALLED.search(file) or _COMPILED.search(file))


def is_users(file: str) -> bool:
    """Return whether a file is the user's; code typed at Python's prompt or given by -c is, too."""
    return is_user_file(file) or file.startswith(("<stdin", "<string"))


@functools.lru_cache(maxsize=1 << 16)
def is_package_file(file: str) -> bool:
    """Return whether a file belongs to an installed package other than torch and memopt; its lines count where none is
    the user's."""
    installed = re.search(r"[/\\](site-packages|dist-packages)[/\\](.*)", file)
    return installed is not None and not re.match(r"(torch|memopt)[/\\.]", installed[2])


def _innermost(stack: Stack, chosen: Callable[[str], bool]) -> Frame | None:
    return next((frame for frame in stack if chosen(frame.file)), None)


def user_frame(stack: Stack) -> Frame | None:
    """Return the user's innermost line, or the package's in a program that is an installed package (`-m package`).

    None if there is neither.
    """
    return _innermost(stack, is_user_file) or _innermost(stack, is_package_file)


def short_name(frame: Frame) -> str:
    """ "train.py:41"; of a cell of the notebook that runs here "In[3]:2"."""
    return place(frame.file, frame.line)


def user_lines(stacks: Sequence[Stack]) -> tuple[list[Frame | None], list[int]]:
    """Return the user's lines, each once, without its function, the first None; and of each stack the index of its own,
    0 where none of its lines is the user's."""
    lines: dict[Frame | None, int] = {None: 0}
    found = [
        lines.setdefault(frame and frame._replace(function=""), len(lines))
        for frame in map(user_frame, stacks)
    ]
    return list(lines), found


def place(file: str, line: int) -> str:
    """Return "train.py:41", or in a notebook "In[3]:2"."""
    return f"{shown(file)}:{line}"


def shown(file: str) -> str:
    """The file's name without its folders, which another system may have named; of a notebook's cell its number."""
    number = cells().get(file)
    return file.replace("\\", "/").rsplit("/", 1)[-1] if number is None else f"In[{number}]"


def cells() -> dict[str, int]:
    """The file names that IPython gives its cells, and their numbers; empty in a script."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def source_of(frame: Frame) -> str:
    """Return the line's text, "" if its file is not here.

    A recording may name a file without an end, such as a device or a pipe.
    """
    if "\0" in frame.file or (os.path.exists(frame.file) and not os.path.isfile(frame.file)):
        return ""
    return linecache.getline(frame.file, frame.line).strip()
