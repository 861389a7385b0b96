"""Shared containers in other processes: what arrives, what it costs, and what is left when a process is gone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from shared_children import ITEMS, Mine, answer
from torch.utils.data import DataLoader, Dataset

from memopt.data import SharedList, SharedStrings

ROOT = Path(__file__).resolve().parents[3]
METHODS = ["fork", "spawn", "forkserver"]
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.mark.parametrize("method", METHODS)
def test_a_process_gets_them_by_descriptor(method):
    context = multiprocessing.get_context(method)
    shared = SharedList([*ITEMS, np.arange(1 << 20)])
    strings = Mine(["p", "q", "r", "s"])
    queue, again, ready = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=answer, args=(shared, shared[4::-2], strings, again, queue, ready))
    process.start()
    again.put(strings)
    found, sent = queue.get(timeout=600), queue.get(timeout=600)
    ready.set()
    process.join()
    assert process.exitcode == 0
    assert found["list"] == ITEMS and found["part"] == ITEMS[4::-2] and found["strings"] == list("pqrs")
    assert found["kinds"] == ["SharedList", "Mine"]
    assert found["array"] == sum(range(1 << 20))
    # The slice's is the list's; a fork has all of its parent's.
    assert method == "fork" or found["memories"] == 2
    assert sent == list("qrs") and type(sent) is Mine


def test_a_descriptor_is_all_that_is_pickled():
    from multiprocessing.reduction import ForkingPickler

    large = SharedStrings(["x" * 1000] * 1000)
    assert len(ForkingPickler.dumps(large)) < 1000 < 1_000_000 < len(pickle.dumps(large))
    assert pickle.loads(ForkingPickler.dumps(large)) == large
    assert len(pickle.dumps(large[:3])) < 5000  # of a slice its own items


class Items(Dataset):
    def __init__(self, items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


# A spawned worker imports torch, as the server of forks does once: one of the two is enough for every day.
@pytest.mark.parametrize("method", METHODS if SOAK else ["fork", "forkserver"])
def test_a_loaders_batches_are_those_of_the_list(method):
    plain = [
        {"path": f"é{i}", "box": np.full(3, i), "image": torch.full((2,), i), "label": i} for i in range(12)
    ]
    options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    for one, other in zip(
        DataLoader(Items(SharedList(plain)), **options), DataLoader(Items(plain), batch_size=4), strict=True
    ):
        assert one["path"] == other["path"] and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in ("box", "image", "label"))


def test_nothing_is_left_after_a_kill():
    code = """if True:
        import os, sys, multiprocessing
        from memopt.data import SharedStrings
        shared = SharedStrings(f"{i:0100d}" for i in range(100_000))
        if not os.fork():
            list(shared)
        print("ready", flush=True)
        sys.stdin.read()
    """
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == process.stdout.readline() == b"ready\n"
    ours = {name for name in set(os.listdir("/dev/shm")) - before if "memopt" in name}
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert ours == set()  # it has no name, so there is nothing that could stay


def test_a_fork_while_it_is_built_harms_neither():
    def items():
        for i in range(300_000):
            if i == 150_000:
                children.append(os.fork())
            yield f"item {i}"

    children: list[int] = []
    try:
        shared = SharedStrings(items())
    except OSError as error:  # in the child, which must not write into the parent's memory
        os._exit(0 if not children[0] and "forked while" in str(error) else 1)
    if not children[0]:
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert len(shared) == 300_000 and shared[::50_000] == [f"item {i}" for i in range(0, 300_000, 50_000)]


def test_the_worker_of_a_fork_and_its_parent_read_the_same_memory():
    shared = SharedList([torch.zeros(4), "x"])
    mine = shared[0]
    mine += 1
    child = os.fork()
    if not child:
        ok = shared[0].sum() == 4 and shared[1] == "x"
        shared[0].add_(1)
        os._exit(0 if ok and shared[0].sum() == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared[0].sum() == 4
