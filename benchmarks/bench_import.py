"""The cost of `import memopt` at the start of a bare interpreter: nothing of torch, CUDA or NumPy is loaded by it.

Whole processes, `python -c pass` against `python -c "import memopt"`, in turns. The claim is under 50 ms.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 0.050


def start(code: str) -> None:
    # -I: no user site, no PYTHONPATH; the source tree is put on the path by the code itself.
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_import", options)
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    done = report.compare(
        "a process that imports memopt",
        {"bare": lambda: start(path), "memopt": lambda: start(f"{path}; import memopt")},
        peer="bare",
        calls=5,
    )
    # Of the best rounds of both, since either may be disturbed; no less than nothing.
    added = max(0.0, done.seconds("memopt").best - done.seconds("bare").best)
    report.record(
        "added by import memopt, best against best, and the limit",
        {"limit": LIMIT_SECONDS * 1e3, "memopt": added * 1e3},
        unit="ms",
        peer="limit",
        goal=1.0,
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
