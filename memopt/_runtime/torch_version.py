"""The version of torch: whether memopt works with it, reported when a feature that needs torch is first used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

OLDEST = (2, 10)


def installed() -> str | None:
    """Return the version of the installed torch, without importing it; None if there is none."""
    # Looking it up on disk takes milliseconds, and this is asked at every call of what needs torch.
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # something stands in its place that no import has made
        spec = None
    written = told_by(Path(spec.origin).parent) if spec is not None and spec.origin else None
    if written is not None:
        return written
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def told_by(home: Path) -> str | None:
    """Return the version in torch's own file, as torch.__version__ has it.

    The package's metadata may lack the part after +.

    Args:
        home: The folder of the package torch.

    Returns:
        None if the file has none.
    """
    try:
        text = (home / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"__version__\s*=\s*'(\d+\.\d+[^']*)'", text)
    return found[1] if found is not None else None


def too_old(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST


def missing(feature: str) -> ModuleNotFoundError:
    """Return the error for a torch that cannot be imported: Python's own text, with the feature and the remedy."""
    return ModuleNotFoundError(
        f"{feature} needs PyTorch, which is not installed: pip install 'torch>=2.10'", name="torch"
    )


def is_of_torch(error: ImportError) -> bool:
    """Return whether the error was raised while torch loaded its libraries."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__") == "torch"


def require(feature: str) -> None:
    """Raise ImportError, naming the feature and the remedy, if torch is missing or too old."""
    version = installed()
    if version is None:
        raise missing(feature)
    if too_old(version):
        raise ImportError(
            f"{feature} needs PyTorch 2.10 or later, but this is {version}: pip install -U torch",
            name="torch",
        )
