"""A folder's files, listed once, and cut into blocks: what the parts of a stream are made of."""

from __future__ import annotations

import bisect
import fnmatch
import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from memopt.data.shared_strings import SharedStrings


class Block(NamedTuple):
    path: str
    begin: int
    end: int
    size: int
    """Of the file, as it was listed."""


class FolderBlocks:
    """The files below a folder by name, in each folder in order, and the blocks of `block_size` bytes that they are cut
    into, the last of each file shorter; 0: each file is one, whatever its size. A file takes its name's bytes and 20
    more, which worker processes share."""

    def __init__(self, folder: str, patterns: Sequence[str], block_size: int) -> None:
        self.folder, self.block_size = folder, block_size
        digest = hashlib.blake2b(digest_size=16)
        sizes = array("Q")

        def names() -> Iterator[str]:
            for name, size in _files(folder, patterns):
                digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
                sizes.append(size)
                yield name

        self.names = SharedStrings(names())
        self.sizes = sizes
        self.digest = digest.hexdigest()
        self.ends = array("Q", accumulate(-(-size // block_size) if block_size else 1 for size in sizes))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, number: int) -> Block:
        file = bisect.bisect_right(self.ends, number)
        before = self.ends[file - 1] if file else 0
        size = self.sizes[file]
        begin = (number - before) * self.block_size
        end = min(begin + self.block_size, size) if self.block_size else size
        return Block(os.path.join(self.folder, self.names[file]), begin, end, size)


def _files(folder: str, patterns: Sequence[str], below: str = "") -> Iterator[tuple[str, int]]:
    """(path below the folder, bytes); what begins with a dot is left out."""
    with os.scandir(os.path.join(folder, below)) as found:
        entries = sorted((one for one in found if not one.name.startswith(".")), key=lambda one: one.name)
    for entry in entries:
        path = os.path.join(below, entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from _files(folder, patterns, path)
        elif entry.is_file() and any(fnmatch.fnmatchcase(entry.name, one) for one in patterns):
            yield path, entry.stat().st_size
