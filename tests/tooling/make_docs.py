"""The API's documentation from its docstrings, by pdoc: `make docs` writes build/docs/memopt.html and others."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

ROOT = Path(__file__).resolve().parents[2]
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
    modules = public(importlib.import_module("memopt"))
    warnings.simplefilter("error")
    # Types that the stub alone has, or that are imported for type checkers: they are shown as they are written.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    pdoc.render.configure(docformat="markdown", footer_text=f"memopt {modules[0].__version__}")
    target = ROOT / "build/docs"
    pdoc.pdoc(modules[0].__name__, output_directory=target)  # with the modules that its __all__ names
    missing = [
        one.__name__ for one in modules if not (target / f"{one.__name__.replace('.', '/')}.html").exists()
    ]
    if missing:
        raise SystemExit(f"no page was made for {', '.join(missing)}")
    print(target / "memopt.html")


if __name__ == "__main__":
    main()
