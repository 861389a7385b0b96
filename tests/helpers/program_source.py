"""Programs that tests write as text and run, with or without source that inspect finds."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

_numbers = itertools.count()


def run(source: str, namespace: dict[str, Any], *, with_source: bool = True) -> None:
    """Runs a program in a namespace. Its functions have source, as a notebook's cells do."""
    name = f"<program {next(_numbers)}>"
    if with_source:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
