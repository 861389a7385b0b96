"""Recognition of the user's own source lines: neither torch's, nor an installed package's, nor memopt's."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
from collections.abc import Callable
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


@functools.lru_cache(maxsize=1 << 16)
def is_user_file(file: str) -> bool:
    """Whether a file is the user's. A notebook's cell is, whatever name its kernel gives it."""
    if file.startswith("<"):
        return file.startswith("<ipython-input")
    ours = file.startswith(_HERE) or file.startswith(_MEMOPT)
    return not (ours or _INSTALLED.search(file) or _COMPILED.search(file))


@functools.lru_cache(maxsize=1 << 16)
def is_package_file(file: str) -> bool:
    """Whether a file belongs to an installed package other than torch and memopt; its lines count where none is the
    user's."""
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
    from memopt._memory.live.source_location import cells

    number = cells().get(frame.file)
    if number is not None:
        return f"In[{number}]:{frame.line}"
    name = frame.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{frame.line}"


def source_of(frame: Frame) -> str:
    """Return the line's text, "" if its file is not here.

    A recording may name a file without an end, such as a device or a pipe.
    """
    if "\0" in frame.file or (os.path.exists(frame.file) and not os.path.isfile(frame.file)):
        return ""
    return linecache.getline(frame.file, frame.line).strip()
