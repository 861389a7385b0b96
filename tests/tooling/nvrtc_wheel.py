"""NVIDIA's run-time compiler for the tests: the library of its wheel, unpacked once below build/. It needs no
GPU.

The same for the CPU suite and for the simulated device's, which run in environments without NVIDIA's
packages."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = "nvidia-cuda-nvrtc==13.*"
FOLDER = ROOT / "build" / "nvrtc-13"
LIBRARY = FOLDER / "libnvrtc.so.13"


def nvrtc() -> Path:
    """The absolute path of libnvrtc.so.13. Raises RuntimeError where the wheel cannot be had."""
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not LIBRARY.exists():
            fetch()
    return LIBRARY


def fetch() -> None:
    """Both libraries of the wheel (the compiler opens the other one by itself), into FOLDER as one step."""
    say = sys.__stderr__ or sys.stderr
    print(
        f"{REQUIREMENT}, for the tests of the kernels: about 60 MB to download, 150 MB on disk",
        file=say,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "-d", scratch, REQUIREMENT], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise RuntimeError(
                f"{REQUIREMENT} cannot be downloaded; let pip reach an index that has it, or put its libraries into "
                f"{FOLDER}:\n{done.stdout}{done.stderr}"
            )
        unpacked = Path(scratch, "unpacked")
        unpacked.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if "/lib/" in name and ".so" in name:
                    with wheel.open(name) as source, open(unpacked / Path(name).name, "wb") as target:
                        shutil.copyfileobj(source, target)
        if not (unpacked / LIBRARY.name).exists():
            raise RuntimeError(
                f"{wheels[0].name} has no {LIBRARY.name}: {sorted(p.name for p in unpacked.iterdir())}"
            )
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked.rename(FOLDER)
