"""The commands whose output README shows, on scripts of benchmarks: `estimate` and `fit` of a Llama of 1B parameters,
and the report of a run that ends out of memory, on simulated cards. In the environment `sim`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
RESULT = BENCHMARKS / "results" / "readme_screens.json"
LLAMA = "llama_train.py --model 1b --amp"
SCREENS = {
    "estimate": ("", f"estimate --gpu 16GiB {LLAMA}"),
    "fit": ("", f"fit -f -o PLAN --gpu 16GiB {LLAMA}"),
    "out of memory": ("scripts", "run -f -o RECORDING --sim 1GiB kept_losses.py"),
}
COLUMNS = 100


def output(folder: str, command: str, kept: Path) -> str:
    """Return what a command prints: of one that ends out of memory the report, else the answer."""
    words = [str(kept / word) if word.isupper() else word for word in command.split()]
    ended = subprocess.run(
        [sys.executable, "-m", "memopt", *words],
        cwd=BENCHMARKS / folder,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{command}: {ended.stderr}")
    if words[0] != "run":
        return ended.stdout.replace(str(kept / "PLAN"), f"{LLAMA.split('.')[0]}.fit.json")
    report = ended.stderr[ended.stderr.index("memopt: CUDA out of memory") :]
    return report[: report.index("memopt run: ")]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        said = {name: output(*screen, Path(folder)) for name, screen in SCREENS.items()}
    RESULT.write_text(json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
