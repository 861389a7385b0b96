"""Run by each Python at its start that an estimated script has started (PYTHONPATH begins with this folder): its device
is the simulated one too, and where it is the script itself, which has replaced itself, it is estimated further.

It stands before another sitecustomize, which runs first."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_other() -> None:
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _load_memopt() -> None:
    """The very memopt that estimates, whatever is installed here."""
    home = os.path.dirname(os.path.dirname(_HERE))
    spec = importlib.util.spec_from_file_location(
        "memopt", os.path.join(home, "__init__.py"), submodule_search_locations=[home]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["memopt"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


_run_the_other()
if "MEMOPT_ESTIMATE" in os.environ and sys.version_info >= (3, 11):
    _load_memopt()
    from memopt.estimation import started

    started.begin(os.environ["MEMOPT_ESTIMATE"])
