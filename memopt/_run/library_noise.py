"""Suppression of what libraries print when they are imported, here or in processes to be started."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

_WARNINGS: list[tuple[str, type[Warning]]] = [
    ("Failed to initialize NumPy", UserWarning),  # torch, without NumPy
    ("The pynvml package is deprecated", FutureWarning),  # torch.cuda, with the old name of NVML's package
]


def silence() -> None:
    """In this process from now on."""
    for begin, category in _WARNINGS:
        warnings.filterwarnings("ignore", re.escape(begin), category)


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, and what keeps them quiet; what it says itself of warnings, and of TensorFlow's log, holds."""
    ours = [f"ignore:{begin}:{category.__name__}" for begin, category in _WARNINGS]
    own = environment.get("PYTHONWARNINGS")
    return {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **environment,
        "PYTHONWARNINGS": ",".join([*ours, *filter(None, [own])]),
    }
