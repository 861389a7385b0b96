"""The torch that is here: whether it is one that memopt works with, said when a feature that needs it is first used."""

from __future__ import annotations

import importlib.metadata
import re
import sys

OLDEST = (2, 10)


def installed() -> str | None:
    """The version of the installed torch, without importing it; None where there is none."""
    # Looking it up on disk takes milliseconds, and this is asked at every call of what needs torch.
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def too_old(version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST


def require(feature: str) -> None:
    """Raises ImportError, naming the feature and the mend, where torch is missing or too old."""
    version = installed()
    if version is None:
        raise ImportError(f"{feature} needs PyTorch, which is not installed: pip install 'torch>=2.10'")
    if too_old(version):
        raise ImportError(
            f"{feature} needs PyTorch 2.10 or later, and this is {version}: pip install -U torch"
        )
