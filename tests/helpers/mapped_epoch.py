"""A shuffled epoch over a mapped file, and what it takes of memory: `mapped_epoch.py FILE MEBIBYTES WORKERS`.

Writes the file, of rows of 64 KiB that begin with their number, reads each row once through DataLoader, prints JSON.
Memory is RssAnon + RssShmem of this process and, with workers, of each of them, looked at after every batch; page cache
(RssFile) is beside it. The file has every byte written, none is a hole."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memopt.data import MmapDataset, MmapWriter  # noqa: E402
from memopt.data._tuning.worker_watch import process_memory  # noqa: E402

ROW = 8192  # int64: 64 KiB
BATCH = 64


def resident(pid) -> dict[str, int]:
    """Bytes, by the kernel's names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) << 10
        for line in lines
        if line.startswith(("RssAnon", "RssShmem", "RssFile"))
    }


def write(path, rows) -> None:
    noise = torch.randint(-(2**62), 2**62, (BATCH, ROW))
    with MmapWriter(path) as out:
        for begin in range(0, rows, BATCH):
            noise += 1
            noise[:, 0] = torch.arange(begin, begin + BATCH)
            out.extend(noise[: rows - begin])


def main(path, mebibytes, workers) -> dict[str, object]:
    torch.set_num_threads(1)
    rows = mebibytes * 16
    began = time.monotonic()
    write(path, rows)
    written = time.monotonic()
    about = os.stat(path)
    dataset = MmapDataset(path)
    sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=workers)
    before = resident("self")
    seen = bytearray(rows)
    peaks: dict[str, dict[str, int]] = {}
    pss = 0
    batches = iter(loader)
    pids = {"main": os.getpid()}
    pids |= {f"worker {n}": one.pid for n, one in enumerate(getattr(batches, "_workers", ()))}
    for number, batch in enumerate(batches):
        for row in batch[:, 0].tolist():
            seen[row] += 1
        for name, pid in pids.items():
            now = resident(pid) if os.path.exists(f"/proc/{pid}/status") else {}
            if now.get("RssAnon"):
                own = now["RssAnon"] + now["RssShmem"]
                peak = peaks.setdefault(name, {"own": 0, "file": 0})
                peak["own"], peak["file"] = max(peak["own"], own), max(peak["file"], now["RssFile"])
        if number % 64 == 0:
            every = [process_memory(pid) for pid in pids.values()]
            pss = max(pss, sum(one.anonymous + one.shared for one in every if one is not None))
    return {
        "file, bytes": about.st_size,
        "file, bytes on the disk": about.st_blocks * 512,
        "workers": workers,
        "rows": rows,
        "rows read once": seen.count(1),
        "own before the epoch": before["RssAnon"] + before["RssShmem"],
        "RssAnon + RssShmem at most": {name: peak["own"] for name, peak in peaks.items()},
        "RssFile at most": {name: peak["file"] for name, peak in peaks.items()},
        "PSS of all processes without files at most": pss,
        "seconds of writing": round(written - began, 1),
        "seconds of the epoch": round(time.monotonic() - written, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
