"""Memory of a large data set's file names in DataLoader's workers: a plain list, the names pickled into NumPy
arrays, memopt.data.SharedList and SharedStrings.

Memory: under fork, spawn and forkserver 4 workers read 2 million names (some 55 characters each), all of them, in
random order. Every case is a process of its own. Growth is what the PSS of parent and workers (a page that n
processes share counts an nth in each; files left out) is after the epoch more than it was before the workers read
anything, when the parent had read all once; what the same workers with names made up on the fly grow by, batches
and Python's own memory, is taken off. "In all" is PSS after the epoch, less that of the same run with made-up
names: what the names cost, parent and workers together.

Time: one access after the other in one process, in random order and from front to back. What a worker does with a
name is not in it.

Goals: SharedStrings grows by under 5 % of the list's size with each way to start workers, and random accesses take
at most twice the time of a list's.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

COUNT, WORKERS, BATCH = 2_000_000, 4, 2000
METHODS = ["fork", "spawn", "forkserver"]
NONE, LIST, ARRAYS, SHARED_LIST, STRINGS = (
    "made up",
    "list",
    "pickled, in NumPy",
    "SharedList",
    "SharedStrings",
)


def name_of(i: int) -> str:
    return f"/data/images/train/class_{i % 1000:04d}/image_{i:08d}.jpeg"


class MadeUp:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> str:
        return name_of(i)


class Pickled:
    """The usual advice: each item's pickle in one array of bytes, and where it ends in another."""

    def __init__(self, names: Sequence[str]) -> None:
        pickles = [np.frombuffer(pickle.dumps(name, -1), np.uint8) for name in names]
        self.ends = np.cumsum([len(one) for one in pickles], dtype=np.int64)
        self.bytes = np.concatenate(pickles)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        start = 0 if i == 0 else self.ends[i - 1]
        return pickle.loads(memoryview(self.bytes[start : self.ends[i]]))


def build(kind: str, count: int) -> Sequence[str]:
    import memopt

    names: Iterator[str] = map(name_of, range(count))
    if kind == LIST:
        return list(names)
    if kind == ARRAYS:
        return Pickled(list(names))  # type: ignore[return-value]
    if kind == SHARED_LIST:
        return memopt.data.SharedList(names)
    return memopt.data.SharedStrings(names) if kind == STRINGS else MadeUp(count)  # type: ignore[return-value]


class Names:
    """The data set of an epoch."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> int:
        return len(self.names[i])


def pss(pids: list[int]) -> int:
    """Bytes; private memory in full, what is shared in parts. Files are left out: libraries' pages are shared with
    whatever else runs on the machine."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) << 10
    return total


def epoch(kind: str, method: str, count: int) -> dict[str, int]:
    """In a process of its own: PSS of parent and workers before and after the workers read all names once."""
    import gc
    import os

    import torch
    from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

    torch.set_num_threads(1)
    names = build(kind, count)
    gc.collect()
    # The parent reads all: what is shared is in its PSS from here on.
    expected = sum(len(names[i]) for i in range(count))
    started = multiprocessing.get_context(method).Semaphore(0)
    go = multiprocessing.get_context(method).Event()
    sampler = BatchSampler(SubsetRandomSampler(range(count)), BATCH, drop_last=False)
    loader = DataLoader(
        Names(names),
        batch_sampler=sampler,
        num_workers=WORKERS,
        multiprocessing_context=method,
        persistent_workers=True,
        worker_init_fn=Waits(started, go),
    )
    batches = Opened(loader, started, go)
    iterator = batches.iterator
    before = pss([os.getpid(), *batches.workers])
    go.set()
    found = sum(int(batch.sum()) for batch in iterator)
    after = pss([os.getpid(), *batches.workers])
    if found != expected:
        raise RuntimeError(f"{kind}: the workers read {found} characters of {expected}")
    size = sum(map(sys.getsizeof, names)) + sys.getsizeof(names) if kind == LIST else 0
    return {"before": before, "after": after, "list": size, "own": getattr(names, "nbytes", 0)}


class Waits:
    """A worker says that it is there, and begins when it may."""

    def __init__(self, started: object, go: object) -> None:
        self.started, self.go = started, go

    def __call__(self, worker: int) -> None:
        self.started.release()  # type: ignore[attr-defined]
        self.go.wait()  # type: ignore[attr-defined]


class Opened:
    """A loader whose workers all stand, none of which has read anything."""

    def __init__(self, loader: object, started: object, go: object) -> None:
        self.iterator = iter(loader)  # type: ignore[call-overload]
        self.workers = [one.pid for one in self.iterator._workers]
        for _ in self.workers:
            started.acquire()  # type: ignore[attr-defined]


def in_a_process(kind: str, method: str, count: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--epoch", json.dumps([kind, method, count])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind}, {method}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(report: harness.Report, count: int, methods: list[str]) -> None:
    kinds = [NONE, LIST, ARRAYS, SHARED_LIST, STRINGS]
    for method in methods:
        cases = {kind: in_a_process(kind, method, count) for kind in kinds}
        size = cases[LIST]["list"]
        nothing = cases[NONE]["after"] - cases[NONE]["before"]
        grown = {kind: cases[kind]["after"] - cases[kind]["before"] - nothing for kind in kinds[1:]}
        report.note(f"{method}, bytes", cases)
        report.record(
            f"{method}: PSS growth of an epoch, share of the list's {size >> 20} MiB",
            {"limit": 5.0, **{kind: 100 * max(0, grown[kind]) / size for kind in kinds[1:]}},
            unit="%",
            peer="limit",
        )
        report.record(
            f"goal: {method}",
            {"limit": 5.0, STRINGS: max(0.01, 100 * grown[STRINGS] / size)},
            unit="%",
            peer="limit",
            goal=1.0,
        )
        report.record(
            f"{method}: the names in all, parent and {WORKERS} workers",
            {kind: (cases[kind]["after"] - cases[NONE]["after"]) / 2**20 for kind in kinds[1:]},
            unit="MiB",
            peer=LIST,
        )


def times(report: harness.Report, count: int) -> None:
    kinds = {kind: build(kind, count) for kind in (LIST, ARRAYS, SHARED_LIST, STRINGS)}
    order = list(range(count))
    random.Random(1).shuffle(order)
    some = order[: count // 4]

    def at_random(names: Sequence[str]) -> None:
        for i in some:
            names[i]

    def in_order(names: Sequence[str]) -> None:
        for _ in names:
            pass

    fast = {kind: names for kind, names in kinds.items() if kind != ARRAYS}
    report.compare(
        f"{len(some)} names of {count}, in random order",
        {kind: (lambda names=names: at_random(names)) for kind, names in kinds.items()},
        peer=LIST,
        goal={STRINGS: 0.5},
        calls=1,
    )
    report.compare(
        f"{count} names from front to back",
        {kind: (lambda names=names: in_order(names)) for kind, names in fast.items()},
        peer=LIST,
        calls=1,
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--epoch", help="one case in this process (used by the script itself)")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS, help="how workers start")
    options = parser.parse_args()
    if options.epoch:
        print(json.dumps(epoch(*json.loads(options.epoch))))
        return 0
    report = harness.Report("bench_shared_list", options, claim="workers share a data set's names")
    count = COUNT // 10 if options.quick else COUNT
    times(report, count)
    memory(report, count, options.methods)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
