"""One binary for every torch: the wheel as `make wheel` builds it, under the oldest supported torch, those between and
the newest that pip offers, each in an environment of its own (about 1.4 GB on disk and 530 MB to download each).

Writes benchmarks/results/torch_versions.json after each version. A version that is there already for this very binary
is not run again, so an interrupted run goes on where it was. Exits with 1 if a version failed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/torch_versions.json"
VERSIONS = ["2.10.0", "2.11.0", "2.13.0", "newest"]


def newest() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Available versions: ([\d.]+)", done.stdout)
    if not found:
        raise SystemExit(f"pip names no version of torch:\n{done.stdout}{done.stderr}")
    return found[1]


def wheel() -> Path:
    subprocess.run(["make", "--silent", "wheel"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)


def digest(home: Path) -> str:
    return hashlib.sha256((home / "memopt/_C.abi3.so").read_bytes()).hexdigest()


def smoke(version: str, home: Path) -> dict[str, object]:
    """home: the folder into which the wheel was installed, and nothing else."""
    make = [sys.executable, str(ROOT / "tests/environments.py"), "sim", "--torch", version]
    python = subprocess.run(make, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
    command = [python, str(ROOT / "tests/isolated/one_binary.py")]
    environ = os.environ | {"PYTHONPATH": str(home)}
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        return {"passed": False, "error": (done.stdout + done.stderr)[-2000:]}
    return {"passed": True, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description="one binary under several versions of torch")
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    wanted = [newest() if v == "newest" else v for v in parser.parse_args().versions]
    made = wheel()
    with tempfile.TemporaryDirectory() as folder:
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            folder,
        ]
        subprocess.run([*install, str(made)], check=True)
        return run(wanted, Path(folder), made)


def run(wanted: list[str], home: Path, made: Path) -> int:
    binary = digest(home)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if known.get("sha256") != binary:
        size = {"wheel": made.name, "wheel_bytes": made.stat().st_size}
        known = {"sha256": binary, **size, "environment": environment.describe(), "versions": {}}
    for version in wanted:
        if not known["versions"].get(version, {}).get("passed"):
            known["versions"][version] = smoke(version, home)
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(json.dumps(known, indent=2) + "\n")
        outcome = known["versions"][version]
        print(
            f"torch {version:8} {'ok' if outcome['passed'] else 'FAILED'}",
            outcome.get("error", ""),
            flush=True,
        )
    return 0 if all(known["versions"][v]["passed"] for v in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
