"""The API's documentation from its docstrings, by pdoc: `make docs` writes build/docs/memopt.html and others."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def public(module: ModuleType) -> list[ModuleType]:
    """The module and the public ones in it. Asking for the names makes those that are imported late be there."""
    found = [module]
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value) and hasattr(value, "__all__"):
            found += public(value)
    return found


def main() -> None:
    warnings.simplefilter("error")  # a name that does not resolve
    modules = public(importlib.import_module("memopt"))
    pdoc.render.configure(docformat="markdown", footer_text=f"memopt {modules[0].__version__}")
    target = ROOT / "build/docs"
    pdoc.pdoc(*(module.__name__ for module in modules), output_directory=target)
    print(target / "memopt.html")


if __name__ == "__main__":
    main()
