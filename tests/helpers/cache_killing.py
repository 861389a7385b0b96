"""Processes that write and read one cache's folder and are killed at random: what memopt.data.cached promises of it.

As a program, `cache_killing.py FOLDER PROCESSES KILLS VALUES SEED`, it starts them, kills them and says as JSON what
happened. They are forks of it, so that one is there at once: an interpreter takes a hundred times as long. Each
compares every value with one that it makes itself, counts in FOLDER.counts, and stops when FOLDER.stop is there."""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from memopt.data import cached  # noqa: E402
from memopt.data._cache import cache_folder  # noqa: E402

EACH = 40 << 10
"""Bytes of max_size a value: about half of all values fit, and entries are evicted all the time."""


def make(index):
    """Different for every index, and of sizes that are read (some) and mapped (most)."""
    rng = np.random.default_rng(index)
    return {
        "x": rng.integers(0, 255, rng.integers(1, 160_000), np.uint8),
        "y": rng.random(index % 50),
        "text": f"é{index}" * (index % 9),
        "raw": [bytes(rng.integers(0, 9, index, np.uint8)), (index, None)],
    }


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def work(folder, seed, values):
    choose = random.Random(seed)
    call = cached(make, folder, max_size=values * EACH)
    with open(f"{folder}.counts", "r+b") as file:
        counts = mmap.mmap(file.fileno(), 0)
    at = 8 * (seed % (len(counts) // 8))  # the seed tells the slot too
    for turn in itertools.count():
        if turn % 8 == 0 and os.path.exists(f"{folder}.stop"):
            break
        index = choose.randrange(values)
        if not same(call(index), make(index)):
            with open(f"{folder}.wrong", "a") as file:
                file.write(f"{index} in process {os.getpid()}\n")
            raise SystemExit("a wrong value")
        counts[at : at + 8] = (int.from_bytes(counts[at : at + 8], "little") + 1).to_bytes(8, "little")
    with open(f"{folder}.said", "a") as file:
        file.write(f"{call.cache.statistics()}\n")


def kill_at_random(folder, processes, kills, values, seed):
    """Starts the processes, kills one of them at a time at random, each replaced at once, and lets all go on until
    each has asked for 20 more values. What happened, as a dict; RuntimeError for a process that failed by itself."""
    choose = random.Random(seed)
    Path(f"{folder}.counts").write_bytes(bytes(8 * processes))
    numbers = itertools.count()

    def start(slot):
        number = processes * next(numbers) + slot
        process = multiprocessing.get_context("fork").Process(target=work, args=(folder, number, values))
        process.start()
        return process

    def counts():
        raw = Path(f"{folder}.counts").read_bytes()
        return [int.from_bytes(raw[8 * slot : 8 * slot + 8], "little") for slot in range(processes)]

    running = [start(slot) for slot in range(processes)]
    try:
        while min(counts()) == 0:
            failed_by_itself(running)
            time.sleep(0.01)
        for _ in range(kills):
            slot = choose.randrange(processes)
            before = counts()[slot]
            while counts()[slot] == before:  # it is at work, not starting
                failed_by_itself(running)
                time.sleep(0.002)
            time.sleep(choose.uniform(0, 0.02))
            running[slot].kill()
            running[slot].join()
            assert running[slot].exitcode == -9
            running[slot] = start(slot)
        parts = len(list(Path(folder).rglob("*.part")))
        leases = len(list(Path(folder).rglob("*.lease")))
        before = counts()
        while any(now < then + 20 for now, then in zip(counts(), before, strict=True)):
            failed_by_itself(running)
            time.sleep(0.01)
        Path(f"{folder}.stop").touch()
        for process in running:
            process.join(600)
    finally:
        for process in running:
            process.kill()
            process.join()
    codes = [process.exitcode for process in running]
    if any(codes) or Path(f"{folder}.wrong").exists():
        raise RuntimeError(f"wrong values or failures: {codes}")
    return {
        "processes": processes,
        "kills": kills,
        "values compared": sum(counts()),
        "wrong values": 0,
        "half-written files that kills left": parts,
        "leases that were there at the end of the kills": leases,
        "bytes at the end": cache_folder.total_size(str(folder)),
        "max_size": values * EACH,
        "last processes": Path(f"{folder}.said").read_text().splitlines(),
    }


def failed_by_itself(running):
    for process in running:
        if process.exitcode is not None:
            raise RuntimeError(f"a process ended by itself with status {process.exitcode}")


if __name__ == "__main__":
    print(json.dumps(kill_at_random(sys.argv[1], *map(int, sys.argv[2:]))))
