"""A Python process for a test that no thread of this one may disturb, or that may not end well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_python(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script's text with this checkout's memopt; options are subprocess.run's."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,  # a hang; a busy host may take minutes
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )
