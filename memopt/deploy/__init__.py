"""A trained model as a file that runs without the program that trained it."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.deploy.export_report import Export
    from memopt.deploy.exporting import export

__all__ = ["Export", "export"]

_LATER = {"Export": "memopt.deploy.export_report", "export": "memopt.deploy.exporting"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'memopt.deploy' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
