"""A step of AdamW with its states on a disk, beside one with states in the host's memory, and what the disk itself
takes to read and write as many bytes. By hand: the directory decides.

On a CUDA device the other's states are in pinned memory (offload_states=True); without one all is on the CPU. They take
turns, round after round; a round's ratio is of figures next to each other in time."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

import memopt.optim  # noqa: E402

PIECE = 32 << 20


def raw_seconds(directory: str, nbytes: int) -> float:
    """Return what it takes to read so many bytes and to write them, past the page cache, a piece at a time."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
        piece = mmap.mmap(-1, PIECE)
        piece[:] = os.urandom(PIECE)
        for at in range(0, nbytes, PIECE):
            os.pwritev(direct, [piece], at)
        begun = time.perf_counter()
        for at in range(0, nbytes, PIECE):
            os.preadv(direct, [piece], at)
            os.pwritev(direct, [piece], at)
        took = time.perf_counter() - begun
        os.close(direct)
    return took


def step_seconds(optimizer: torch.optim.Optimizer, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--parameters", type=int, default=1 << 27, help="in matrices of 2**24")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs: dict[str, torch.optim.Optimizer] = {}
    for name, where in (("disk", options.directory), ("memory", True)):
        ps = [
            torch.nn.Parameter(torch.zeros(4096, 4096, device=device))
            for _ in range(options.parameters >> 24)
        ]
        for p in ps:
            p.grad = torch.full_like(p, 1e-3)
        runs[name] = memopt.optim.AdamW(ps, offload_states=where)
        runs[name].step()
    nbytes = 8 * options.parameters
    times: dict[str, list[float]] = {"disk": [], "memory": [], "raw": []}
    for _ in range(options.rounds):
        for name, optimizer in runs.items():
            times[name].append(step_seconds(optimizer, device))
        times["raw"].append(raw_seconds(options.directory, nbytes))
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "state_bytes": nbytes,
        "load": os.getloadavg(),
        "bytes_per_second": 2 * nbytes / statistics.median(times["raw"]),
    }
    for name, taken in times.items():
        found[name + "_seconds"] = [round(t, 3) for t in sorted(taken)]
    for other in ("memory", "raw"):
        ratios = [a / b for a, b in zip(times["disk"], times[other], strict=True)]
        found["disk_to_" + other] = round(statistics.median(ratios), 3)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
