"""A dataset for tests of memopt.data.cached, in a module of its own that needs no torch: processes that start in a
moment."""

from __future__ import annotations

import numpy as np


class Squares:
    """Items of 80 KB, a size worth mapping."""

    def __init__(self, count=20, scale=1.0):
        self.count, self.scale = count, scale

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        x = np.full((200, 100), index * self.scale, np.float32)
        return {"x": x, "index": index, "name": f"é{index}"}
