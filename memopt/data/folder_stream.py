"""memopt.data.FolderStream: the lines, windows or files of a large folder, read as they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from memopt import _C
from memopt.data import text_blocks
from memopt.data.folder_blocks import Block, FolderBlocks


class FolderStream(IterableDataset[Any]):
    """Streams a folder of any size, in any number of workers and ranks, each item once, from where it was left.

        lines  = memopt.data.FolderStream("corpus", "*.txt", split="lines")                 # str
        bytes_ = memopt.data.FolderStream("corpus", "*.txt", split=4096, drop_last=True)    # uint8 tensors (4096,)
        photos = memopt.data.FolderStream("photos", ("*.jpg", "*.png"), decode=load_image)  # load_image(path)
        loader = DataLoader(lines, batch_size=32, num_workers=4)

    Files are found by name below the folder (those that begin with a dot are left out), once, when this is made.
    split: "files": an item is a file's path. "lines": a line's text without its end. A number: so many bytes in a row,
    a file's last ones fewer unless drop_last. decode: what an item is made into, in the worker. A decode that is kept
    on disk by memopt.data.cached is computed once.

    Files are cut into blocks of block_size, which are what workers and ranks divide among them: a single large file is
    read by all. A line belongs to the block in which it begins. At any time a worker holds one block, and a line at
    most longest_line long that goes on behind it; the list of names is shared. Parts differ by a block at most, so
    ranks may end at different steps: see torch's Join.

    shuffle: a seed; blocks come in another order in each epoch, and lines and windows in another within their block (8
    bytes a block are held). As with DistributedSampler an epoch is told by set_epoch(), before the loader is iterated.
    rank, world_size: torch.distributed's where it is initialized when the stream is first iterated or goes to a worker,
    else 0 of 1.

    state_dict() is the position of the last iteration in this process, load_state_dict() where the next one begins: use
    them with num_workers=0, or torchdata's StatefulDataLoader, which keeps them for every worker. A state is refused
    where files, split or the number of parts are others.

    Raises ValueError for a folder without such files, a line that is too long, text that is not in `encoding`, and
    files that have become shorter; what decode raises is noted with the file."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        pattern: str | Iterable[str] = "*",
        *,
        split: str | int = "files",
        decode: Callable[[Any], Any] | None = None,
        shuffle: int | None = None,
        drop_last: bool = False,
        encoding: str = "utf-8",
        block_size: int | str = "1MiB",
        longest_line: int | str = "64MiB",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self.split, self.decode, self.shuffle, self.drop_last = split, decode, shuffle, drop_last
        self.encoding, self.longest_line = encoding, _C.parse_size(longest_line)
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        self.blocks = FolderBlocks(self.folder, patterns, self._block_bytes(_C.parse_size(block_size)))
        if not len(self.blocks):
            raise ValueError(
                f"memopt.data.FolderStream: nothing to read below {self.folder}: no file's name is like "
                f"{' or '.join(patterns)}, or all are empty"
            )
        if (rank is None) != (world_size is None) or (
            rank is not None and world_size is not None and not 0 <= rank < world_size
        ):
            raise ValueError(
                f"memopt.data.FolderStream: rank={rank}, world_size={world_size}: both or neither, and 0 <= rank < "
                "world_size"
            )
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._position = {"blocks": 0, "items": 0}
        self._parts = (0, 1)
        self._resumed: dict[str, Any] | None = None

    def _block_bytes(self, asked: int) -> int:
        if self.split == "files":
            return 0
        if asked == 0:
            raise ValueError("memopt.data.FolderStream: block_size=0: a block has bytes")
        if self.split == "lines":
            try:
                plain = "\n".encode(self.encoding) == b"\n"
            except LookupError:
                plain = False
            if not plain:
                raise ValueError(
                    f"memopt.data.FolderStream: encoding={self.encoding!r}: lines are found by the byte 10, which ends "
                    "them in UTF-8, Latin-1 and the like"
                )
            return asked
        if isinstance(self.split, bool) or not isinstance(self.split, int) or self.split < 1:
            raise ValueError(
                f'memopt.data.FolderStream: split={self.split!r}: "files", "lines" or a number of bytes'
            )
        return max(1, asked // self.split) * self.split

    @property
    def files(self) -> int:
        return len(self.blocks.names)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self.blocks.sizes)

    def set_epoch(self, epoch: int) -> None:
        """Which order the blocks come in, where they are shuffled."""
        self.epoch = epoch

    # ---- the parts --------------------------------------------------------------------------------------------------

    def _ranks(self) -> tuple[int, int]:
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def __getstate__(self) -> dict[str, Any]:
        """To a worker that is spawned, where nobody knows of ranks."""
        rank, world_size = self._ranks()
        return {**self.__dict__, "rank": rank, "world_size": world_size}

    def _part(self) -> tuple[int, int]:
        """Which part of the blocks is read here, of how many."""
        rank, world_size = self._ranks()
        worker = get_worker_info()
        if worker is None:
            return rank, world_size
        return rank * worker.num_workers + worker.id, world_size * worker.num_workers

    def _order(self, *of: int) -> torch.Generator:
        """The same in every process, another for each epoch and each block."""
        mixed = hash((self.shuffle, self.epoch, *of))  # of ints: the same in every process
        return torch.Generator().manual_seed(mixed % 2**63)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._parts = self._part()
        return self._read(
            self._start()
        )  # the position is that of the new iteration before its first item is asked for

    def _read(self, start: dict[str, int]) -> Iterator[Any]:
        part, parts = self._parts
        mine: Any = range(part, len(self.blocks), parts)
        if self.shuffle is not None:
            mine = torch.randperm(len(self.blocks), generator=self._order())[part::parts].clone()
        for done in range(start["blocks"], len(mine)):
            number = int(mine[done])
            block = self.blocks[number]
            items = self._items(block, number)
            skip = start["items"] if done == start["blocks"] else 0
            for index in range(skip, len(items)):
                item = self._decoded(items[index], block)
                self._position = {"blocks": done, "items": index + 1}
                yield item
        self._position = {"blocks": len(mine), "items": 0}

    def _items(self, block: Block, number: int) -> list[Any]:
        if self.split == "files":
            return [block.path]
        if self.split == "lines":
            items: list[Any] = text_blocks.lines_of(block, self.encoding, self.longest_line)
        else:
            items = text_blocks.windows_of(block, int(self.split), self.drop_last)
        if self.shuffle is not None:
            order = torch.randperm(len(items), generator=self._order(number)).tolist()
            items = [items[index] for index in order]
        return items

    def _decoded(self, item: Any, block: Block) -> Any:
        if isinstance(item, torch.Tensor):
            item = item.clone()  # one that is kept keeps no block
        if self.decode is None:
            return item
        try:
            return self.decode(item)
        except Exception as error:
            where = f", bytes {block.begin} to {block.end}" if self.split != "files" else ""
            error.add_note(f"memopt.data.FolderStream: while decoding an item of {block.path}{where}")
            raise

    # ---- the position -----------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        """What a state holds for."""
        return {
            "files": self.blocks.digest,
            "split": self.split,
            "block_size": self.blocks.block_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "parts": list(self._parts),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values: how many of its blocks this part has read, and how many items of the one it is at."""
        if self._resumed is not None:
            return dict(self._resumed)
        return {**self._identity(), "epoch": self.epoch, **self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins there; those after it at the start."""
        self._resumed = dict(state)
        self.epoch = state["epoch"]

    def _start(self) -> dict[str, int]:
        state, self._resumed = self._resumed, None
        self._position = {"blocks": 0, "items": 0}
        if state is None:
            return self._position
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise ValueError(
                    f"memopt.data.FolderStream: the state is of another stream: {name} was {state.get(name)}, here "
                    f"it is {here}; resume with the same files, arguments, ranks and workers"
                )
        self._position = {"blocks": state["blocks"], "items": state["items"]}
        return self._position

    def __repr__(self) -> str:
        size = _C.format_size(self.nbytes)
        return f"FolderStream({self.files} files below {self.folder}, {size}, split={self.split!r})"
