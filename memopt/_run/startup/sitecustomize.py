"""Python runs this when it starts and finds this folder on its PYTHONPATH: the processes of a simulated run do, and
those that an estimated script starts. It adds a finder; memopt is loaded, from where this file lies, when something
imports it or torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_ESTIMATE = "MEMOPT_ESTIMATE"  # _estimate/script_process.py's
_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


class _MemoptFinder:
    """A finder of this very memopt, whatever else is installed; and of torch, once, for which it first prepares the
    device."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "memopt":
            file = os.path.join(_PACKAGE, "__init__.py")
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[_PACKAGE])
        if name == "torch" and not self._begun and _ESTIMATE not in os.environ:
            self._begun = True
            from memopt._run import simulated

            simulated.begin()
            return importlib.util.find_spec(name)
        return None

    _begun = False


def _run_the_next() -> None:
    """The sitecustomize that Python would have run without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
if sys.version_info >= (3, 11):  # noqa: UP036  # what memopt needs; any Python may be started
    sys.meta_path.insert(0, _MemoptFinder())  # type: ignore[arg-type]  # importlib.abc takes longer than all of this
_run_the_next()
if _ESTIMATE in os.environ and sys.version_info >= (3, 11):
    from memopt._estimate import script_process

    script_process.begin(os.environ[_ESTIMATE])
