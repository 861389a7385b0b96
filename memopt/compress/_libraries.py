"""The libraries that do the work, and what is said where one is missing."""

from __future__ import annotations

import importlib
from typing import Any


def library(module: str, package: str, function: str) -> Any:
    """Import a module; what it prints or raises on the way is its own. ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and cannot find something itself
        raise ImportError(
            f"{function} is done by {package}, which is not installed: pip install 'memopt[compress]', or {package}",
            name=error.name,
        ) from error
