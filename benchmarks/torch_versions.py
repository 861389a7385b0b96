"""One binary for every Python and every torch: a wheel under each Python that is named, with the oldest supported
torch, those between and the newest that pip offers, each in an environment of its own, which is removed again (about
1.4 GB on disk and 530 MB to download each).

    python benchmarks/torch_versions.py --wheel dist/memopt-*x86_64.whl --python python3.11 --python python3.14

Writes benchmarks/results/torch_versions.json after each. What has passed there with this very binary is not run again:
an interrupted run goes on where it was, and Pythons of another machine can be added. Exits with 1 if one failed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import environment

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from environments import PURE  # noqa: E402

RESULT = ROOT / "benchmarks/results/torch_versions.json"
VERSIONS = ["2.10.0", "2.11.0", "2.13.0", "newest"]


def newest() -> str:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Available versions: ([\d.]+)", done.stdout)
    if not found:
        raise SystemExit(f"pip names no version of torch:\n{done.stdout}{done.stderr}")
    return found[1]


def made_now() -> Path:
    subprocess.run(["make", "--silent", "wheel"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)


def digest(wheel: Path) -> str:
    """Of the extension in it: the archive has other times whenever it is made."""
    with zipfile.ZipFile(wheel) as files:
        return hashlib.sha256(files.read("memopt/_C.abi3.so")).hexdigest()


def install(python: Path, *arguments: str | Path) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True)


def smoke(python: str, version: str, wheel: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        mine = Path(folder, "bin/python")
        try:
            install(mine, *PURE)
            install(mine, "--no-deps", f"torch==={version}")
            install(mine, "--no-deps", "--no-index", wheel)
        except subprocess.CalledProcessError as error:
            return {"passed": False, "error": str(error)}
        command = [mine, ROOT / "tests/isolated/one_binary.py"]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        return {"passed": False, "error": (done.stdout + done.stderr)[-2000:]}
    return {"passed": True, **json.loads(done.stdout.splitlines()[-1])}


def of_python(python: str) -> str:
    """Its version, such as 3.11."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="one binary under several versions of Python and torch")
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument(
        "--python", action="append", help="a Python to run it under; may be repeated (this one)"
    )
    parser.add_argument("--wheel", type=Path, help="the binary (made by `make wheel` now)")
    options = parser.parse_args()
    wheel = (options.wheel or made_now()).resolve()
    binary = digest(wheel)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if known.get("sha256") != binary:
        size = {"wheel": wheel.name, "wheel_bytes": wheel.stat().st_size}
        known = {"sha256": binary, **size, "environment": environment.describe(), "pythons": {}}
    wanted = [newest() if name == "newest" else name for name in options.versions]
    failed = 0
    for python in options.python or [sys.executable]:
        name = of_python(python)
        outcomes = known["pythons"].setdefault(name, {})
        for version in wanted:
            if not outcomes.get(version, {}).get("passed"):
                outcomes[version] = smoke(python, version, wheel)
                RESULT.write_text(json.dumps(known, indent=2) + "\n")
            outcome = outcomes[version]
            said = "ok" if outcome["passed"] else f"FAILED {outcome['error']}"
            print(f"Python {name:5} torch {version:8} {said}", flush=True)
            failed += not outcome["passed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
