"""CudaPool's memory on the CPU: a separate mapping for each tensor.

The accounts therefore follow the storage's life to the byte, whoever keeps it, and a pause can give its pages back to
the system while the address stays.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import weakref
from typing import IO, TYPE_CHECKING

from memopt import _C

if TYPE_CHECKING:
    import torch

REASON = (
    "`with pool:` needs an allocator that torch asks for each tensor, and on the CPU torch lets nobody take its"
    " allocator's place: use pool.allocate() there, or a CUDA device (memopt.sim simulates one)"
)


class HostPoolMemory:
    """Whole pages of the system for each tensor. They are taken on first write, so nothing is held ahead."""

    route = "cpu"
    resizable = False  # a storage on a mapping cannot be resized: the tensor lets go of it instead

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.peak = 0
        self._live: dict[
            int, tuple[weakref.ref[mmap.mmap], int]
        ] = {}  # by address: the mapping, bytes asked for
        self._kept: list[tuple[weakref.ref[mmap.mmap], int]] = []  # while paused: mapping, place in the file
        self._file: IO[bytes] | None = None
        self._paused = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        count = 1
        for extent in shape:
            count *= extent
        asked = count * dtype.itemsize
        if not asked:
            return torch.empty(shape, dtype=dtype, device="cpu")
        pages = -(-asked // mmap.PAGESIZE) * mmap.PAGESIZE
        live = self._bytes()
        if self.size is not None and live + pages > self.size:
            raise torch.OutOfMemoryError(self._out_of_memory(asked, live))
        try:
            mapping = mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise torch.OutOfMemoryError(
                f"{self._out_of_memory(asked, live)} The system: {error}."
            ) from error
        tensor = torch.frombuffer(mapping, dtype=dtype, count=count).resize_(shape)
        address = tensor.data_ptr()
        self._live[address] = (weakref.ref(mapping, lambda _: self._live.pop(address, None)), asked)
        self.peak = max(self.peak, live + pages)
        return tensor

    def holds(self, address: int) -> bool:
        return address in self._live

    def enter(self) -> None:
        raise NotImplementedError(REASON)

    def leave(self) -> None:
        raise NotImplementedError(REASON)

    def pause(self, keep: bool) -> None:
        """The pages go back to the system; kept contents go to a file that has no name any more."""
        mappings = self._mappings()
        if keep and mappings:
            self._file = tempfile.TemporaryFile(prefix="memopt-")  # noqa: SIM115 (open until resume)
            try:
                for mapping in mappings:
                    self._kept.append((weakref.ref(mapping), self._file.tell()))
                    self._file.write(mapping)
                self._file.flush()
            except OSError:
                self._forget()
                raise
        for mapping in mappings:
            mapping.madvise(mmap.MADV_DONTNEED)
        self._paused = True

    def resume(self) -> None:
        for reference, place in self._kept:
            mapping = reference()
            if mapping is not None and self._file is not None:  # else it died meanwhile
                self._file.seek(place)
                if self._file.readinto(mapping) != len(mapping):  # type: ignore[attr-defined]
                    raise OSError("the file that kept a paused pool's contents is shorter than it was")
        self._forget()
        self._paused = False

    def stats(self) -> dict[str, int]:
        live = self._bytes()
        return {
            "reserved_bytes": 0 if self._paused else live,
            "allocated_bytes": live,
            "requested_bytes": sum(asked for _, asked in list(self._live.values())),
            "max_allocated_bytes": self.peak,
            "free_bytes": 0,
            "allocations": len(self._live),
        }

    def close(self) -> None:
        self._forget()

    def _mappings(self) -> list[mmap.mmap]:
        return [mapping for reference, _ in list(self._live.values()) if (mapping := reference()) is not None]

    def _bytes(self) -> int:
        return sum(len(mapping) for mapping in self._mappings())

    def _forget(self) -> None:
        self._kept = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _out_of_memory(self, asked: int, live: int) -> str:
        limit = "no limit" if self.size is None else f"at most {_C.format_size(self.size)}"
        wanted = _C.format_size(min(asked, sys.maxsize))
        return (
            f"CudaPool on the CPU is out of memory. Tried to allocate {wanted}. It may hold {limit}, and"
            f" {len(self._live)} tensors have {_C.format_size(live)} of it (in whole pages of"
            f" {_C.format_size(mmap.PAGESIZE)}). Free some with pool.free(t), or make a larger pool."
        )
