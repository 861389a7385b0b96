"""The torch that is here: whether it is one that memopt works with, said when a feature that needs it is first used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

OLDEST = (2, 10)


def installed() -> str | None:
    """The version of the installed torch, without importing it; None where there is none."""
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
    """The version in torch's own file, as torch.__version__ has it; the package's metadata may lack what follows the +.

    Args:
        home: the folder of the package torch.
    Returns: None where the file tells none."""
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
    """The error where torch cannot be imported: what Python's own says, with the feature and the remedy."""
    return ModuleNotFoundError(
        f"{feature} needs PyTorch, which is not installed: pip install 'torch>=2.10'", name="torch"
    )


def require(feature: str) -> None:
    """Raises ImportError, naming the feature and the mend, where torch is missing or too old."""
    version = installed()
    if version is None:
        raise missing(feature)
    if too_old(version):
        raise ImportError(
            f"{feature} needs PyTorch 2.10 or later, and this is {version}: pip install -U torch",
            name="torch",
        )
