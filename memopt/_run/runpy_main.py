"""A program run in this process as `python script.py` or `python -m module` runs it."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any


def run_as_main(argv: list[str], module: bool) -> None:
    """argv[0]: the script, or the module's name. What it raises comes through, SystemExit too. The program's __main__
    stays afterwards: functions that run at exit, and pickles, want it."""
    sys.argv = list(argv)
    if module:
        sys.path[0] = os.getcwd()
        run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` itself calls
        run(argv[0], alter_argv=True)
        return
    path = os.path.abspath(argv[0])
    if os.path.isdir(path) or not path.endswith((".py", ".pyw")):
        if not os.path.isdir(path) and not _is_archive(path):
            _source(path)
            return
        runpy.run_path(path, run_name="__main__")  # a folder or an archive with a __main__
        return
    _source(path)


def _source(path: str) -> None:
    sys.path[0] = os.path.dirname(path)
    main: Any = types.ModuleType("__main__")
    main.__file__, main.__loader__ = path, importlib.machinery.SourceFileLoader("__main__", path)
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    exec(main.__loader__.source_to_code(Path(path).read_bytes(), path), main.__dict__)


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK" or path.endswith(".pyc")
