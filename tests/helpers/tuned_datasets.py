"""Data sets for tests of memopt.data.tune, in a module of its own so that spawned workers find them."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset):
    """Changes itself and draws from every global generator, as data sets do."""

    def __init__(self, count=4000) -> None:
        self.count, self.seen, self.unpicklable = count, 0, None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.seen += 1
        return torch.tensor([index + 0 * random.random(), 0 * np.random.rand(), 0 * torch.rand(()).item()])


class Hoards(Numbers):
    """Each worker takes 4 MiB more with every item, for which it waits for a byte, and writes down what it has."""

    def __init__(self, bytes_, file) -> None:
        super().__init__()
        self.kept, self.bytes, self.file = [], bytes_, file

    def __getitem__(self, index):
        os.read(self.bytes, 1)
        self.kept.append(bytearray(os.urandom(1)) * (4 << 20))
        with open(self.file, "a") as out:
            out.write(f"{os.getpid()} {4 * len(self.kept)}\n")
        return torch.tensor(index)


class Dies(Numbers):
    def __getitem__(self, index):
        if get_worker_info() is not None and index >= 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class Waits(Numbers):
    def __getitem__(self, index):
        if get_worker_info() is not None:
            time.sleep(600)
        return torch.tensor(index)


class Stream(IterableDataset):
    """split: each worker takes its part."""

    def __init__(self, count=3000, split=True) -> None:
        self.count, self.split = count, split

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None and self.split else (0, 1)
        for index in range(first, self.count, step):
            yield torch.tensor([index])
