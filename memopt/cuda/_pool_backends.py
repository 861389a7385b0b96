"""CudaPool's memory under each allocator, and on the CPU."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import warnings
import weakref
from typing import IO, TYPE_CHECKING, Any

from memopt import _C

if TYPE_CHECKING:
    import torch

# ---- memopt's allocator ----------------------------------------------------------------------------------------------
# CudaPool's memory under memopt's allocator: an arena of its pool, to which torch's requests are routed.
#
# csrc/alloc/pool.h describes arenas.


class ArenaMemory:
    """An arena, and while it is paused what its blocks held."""

    route = "memopt"
    resizable = True

    def __init__(self, device: int, size: int | None) -> None:
        import torch

        self.device = torch.device("cuda", device)
        try:
            self.arena = _C.Arena(device, size or 0, size or 0)
        except _C.Error as error:
            raise _as_torchs(error) from error
        self._kept: list[tuple[_Span, torch.Tensor]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        self.arena.route(True)
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        finally:
            self.arena.unroute()

    def holds(self, address: int) -> bool:
        return any(start <= address < start + size for start, size, _ in self.arena.blocks())

    def enter(self) -> None:
        self.arena.route()

    def leave(self) -> None:
        self.arena.unroute()

    def pause(self, keep: bool) -> None:
        """Copy the blocks' contents to the host if wanted, then take their memory away."""
        import torch

        torch.cuda.synchronize(self.device)  # what is queued on other streams may still write
        kept = [(span, self._device_bytes(span).cpu()) for span in self._spans()] if keep else []
        try:
            self.arena.pause()
        except _C.Error:
            self._write(kept)  # some of the memory was away, and came back empty
            raise
        self._kept = kept

    def resume(self) -> None:
        try:
            self.arena.resume()
        except _C.Error as error:
            raise _as_torchs(error) from error
        self._write(self._kept)
        self._kept = []

    def _write(self, kept: list[tuple[_Span, torch.Tensor]]) -> None:
        import torch

        live = {serial for _, _, serial in self.arena.blocks()}
        for span, content in kept:
            if span.serial in live:  # else it was freed meanwhile
                self._device_bytes(span).copy_(content)
        torch.cuda.synchronize(self.device)  # other streams may go on at once

    def stats(self) -> dict[str, int]:
        info = self.arena.info()
        return {
            "reserved_bytes": info["held_bytes"],
            "allocated_bytes": info["live_bytes"],
            "requested_bytes": info["requested_bytes"],
            "max_allocated_bytes": info["peak_bytes"],
            "free_bytes": info["free_bytes"],
            "allocations": info["live_blocks"],
        }

    def close(self) -> None:
        self._kept = []
        self.arena.release()

    def _spans(self) -> list[_Span]:
        """Return the live blocks, whose contents are worth keeping while the pool is paused."""
        return [_Span(start, size, serial) for start, size, serial in self.arena.blocks()]

    def _device_bytes(self, span: _Span) -> torch.Tensor:
        import torch

        with torch.cuda.device(self.device):
            return torch.as_tensor(span, device=self.device)


def forked() -> bool:
    """Return whether this process is a child, by fork(), of one that used CUDA."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def _as_torchs(error: _C.Error) -> RuntimeError:
    """Return an out-of-memory error as torch's class, and any other error as it is."""
    import torch

    if error.status != "MO_NO_DEVICE_MEMORY":
        return error
    begin, text = "CUDA out of memory.", str(error)
    told: RuntimeError = torch.OutOfMemoryError(text if text.startswith(begin) else f"{begin} {text}")
    return told


class _Span:
    """Device memory by its address, as torch reads it. serial: of the pool's block that it lies in."""

    def __init__(self, address: int, size: int, serial: int) -> None:
        self.address, self.size, self.serial = address, size, serial

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


# ---- PyTorch's native allocator --------------------------------------------------------------------------------------
# CudaPool's memory under PyTorch's native allocator: a torch.cuda.MemPool over an arena of memopt's pool.
#
# The MemPool's segments are blocks of the arena. torch places the tensors, so its statistics, snapshots, history and
# record_stream include them; the arena limits the memory, holds it ahead, and pauses.
#
# Contexts: torch allocates from the pool begun last, and refuses to begin one twice. So for each device there are
#
#     _contexts   the pools of the `with` blocks that are open, the innermost last; one may stand there more than once
#     _begun      the pools begun in torch: each of them once, in the order of their last places
#
# Both are changed under _lock only, which is also held while one tensor is allocated.


_lock = threading.RLock()
_contexts: dict[int, list[MemPoolMemory]] = {}
_begun: dict[int, list[MemPoolMemory]] = {}
_allocators: dict[
    int, Any
] = {}  # torch's wrapper of each alloc function, for ever: a pool may refer to it at any time
_unneeded: list[_Torchs] = []  # pools that wait for a moment in which torch can drop them
_warned = False


class _Torchs:
    """State that torch and the arena keep of one MemPoolMemory; it outlives the pool until torch can let go."""

    def __init__(self, arena: Any) -> None:
        self.arena = arena
        self.pools: list[Any] = []  # the newest is in use; of an older one, tensors are left
        self.ids: list[tuple[int, int]] = []  # of those that are gone and may have live tensors still


_torchs: weakref.WeakSet[_Torchs] = weakref.WeakSet()


def _keep_for_ever() -> None:
    """Keep everything after a fork: the child cannot give memory back, and torch 2.10 crashes when it tries."""
    for torchs in _torchs:
        for pool in torchs.pools:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


os.register_at_fork(after_in_child=_keep_for_ever)


class MemPoolMemory(ArenaMemory):
    route = "MemPool"

    def __init__(self, device: int, size: int | None) -> None:
        super().__init__(device, size)
        _warn_once()
        self._torchs = _Torchs(self.arena)
        _torchs.add(self._torchs)
        with _lock:
            _drop_unneeded()
            self._renew()
        # Not at the interpreter's end: torch takes its pools down by itself then.
        weakref.finalize(self, _retire, self._torchs).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        try:
            return self._empty(shape, dtype)
        except torch.OutOfMemoryError:
            # Free segments of the wrong size are in torch's cache, which only the end of a pool empties.
            with _lock:
                if any(_contexts.values()):
                    raise
                self._renew()
                # And what was left in older pools, for which torch before 2.13 does not look while one is begun.
                torch.cuda.empty_cache()
            return self._empty(shape, dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        index = self.device.index
        with _lock:
            begun = _begun.get(index, [])
            if self in begun:
                self.enter()  # becomes the innermost, if it is not
                try:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                finally:
                    self.leave()
            else:
                torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._id())
                try:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                finally:
                    _end(index, self._id())
        if tensor.numel() and not self.holds(tensor.data_ptr()):
            raise RuntimeError(
                "torch took this memory from another pool, because torch.cuda.use_mem_pool was entered inside `with "
                "pool:`; call pool.allocate() outside of it"
            )
        return tensor

    def enter(self) -> None:
        import torch

        with _lock:
            if self._torchs.ids and not any(_contexts.values()):
                torch.cuda.empty_cache()  # the last moment for it, with torch before 2.13
            _contexts.setdefault(self.device.index, []).append(self)
            try:
                _tell_torch(self.device.index)
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        with _lock:
            contexts = _contexts[self.device.index]
            del contexts[len(contexts) - 1 - contexts[::-1].index(self)]
            _tell_torch(self.device.index)
            _drop_unneeded()

    def stats(self) -> dict[str, int]:
        found = super().stats()
        segments = self._segments()
        used = sum(segment["allocated_size"] for segment in segments)
        return found | {
            "allocated_bytes": used,
            "requested_bytes": sum(block.get("requested_size", 0) for block in _active(segments)),
            "free_bytes": max(found["reserved_bytes"] - used, 0),
            "allocations": len(_active(segments)),
        }

    def close(self) -> None:
        self._kept = []
        _retire(self._torchs)

    def _id(self) -> tuple[int, int]:
        number: tuple[int, int] = self._torchs.pools[-1].id
        return number

    def _renew(self) -> None:
        """A new MemPool over the same arena, so that torch gives the free segments of the old one back."""
        import torch

        functions = self.arena.segment_functions()
        allocator = _allocators.setdefault(functions[0], None) or torch._C._cuda_customAllocator(*functions)
        _allocators[functions[0]] = allocator
        with torch.cuda.device(self.device):
            new = torch.cuda.MemPool(allocator)
        self._torchs.ids += [pool.id for pool in self._torchs.pools]
        self._torchs.pools[:] = [new]

    def _segments(self) -> list[dict[str, Any]]:
        import torch

        ids = [*self._torchs.ids, self._id()]
        by_id = {
            each: torch.cuda.memory_snapshot(each)  # type: ignore[no-untyped-call]
            for each in ids
        }
        with _lock:
            self._torchs.ids = [each for each in self._torchs.ids if by_id.get(each)]
        return [segment for segments in by_id.values() for segment in segments]

    def _spans(self) -> list[_Span]:
        """Return the tensors' blocks; torch's cached memory is not worth a copy."""
        segments = self.arena.blocks()

        def serial(address: int) -> int:
            return next(number for start, size, number in segments if start <= address < start + size)

        return [
            _Span(block["address"], block["requested_size"], serial(block["address"]))
            for block in _active(self._segments())
            if block["requested_size"]
        ]


def _active(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for s in segments for block in s["blocks"] if block["state"] == "active_allocated"]


def _tell_torch(index: int) -> None:
    """Begin and end pools in torch until they match _contexts.

    Pools in their place are left alone, so that no thread's request goes elsewhere meanwhile.
    """
    import torch

    wanted: list[MemPoolMemory] = []
    for pool in reversed(_contexts[index]):
        if pool not in wanted:
            wanted.insert(0, pool)
    begun = _begun.setdefault(index, [])
    same = 0
    while same < min(len(wanted), len(begun)) and wanted[same] is begun[same]:
        same += 1
    while len(begun) > same:
        pool = begun.pop()
        _end(index, pool._id())
    for pool in wanted[same:]:
        torch._C._cuda_beginAllocateToPool(index, pool._id())
        begun.append(pool)


def _end(index: int, pool_id: tuple[int, int]) -> None:
    import torch

    torch._C._cuda_endAllocateToPool(index, pool_id)
    torch._C._cuda_releasePool(index, pool_id)


def _retire(torchs: _Torchs) -> None:
    with _lock:
        _unneeded.append(torchs)
        _drop_unneeded()


@atexit.register  # later, in an interpreter that is taken down, torch 2.10 does not survive it
def _drop_unneeded() -> None:
    """Destroy MemPools that are no longer needed, where that is safe.

    With torch before 2.13, a MemPool that is destroyed while a pool is begun or a graph is captured ends the process
    (an assertion in a destructor), so none is destroyed then. A use_mem_pool of another thread cannot be seen from
    here.
    """
    import torch

    if not _unneeded or any(_contexts.values()) or forked() or torch.cuda.is_current_stream_capturing():
        return
    while _unneeded:
        torchs = _unneeded.pop()
        torchs.pools.clear()
        torchs.arena.release(True)  # torch's empty_cache() would not know of what stays free


def _warn_once() -> None:
    import torch

    global _warned
    if _warned:
        return
    _warned = True
    old = (
        " With this torch, cached memory is not returned to the device while `with pool:` is open, neither for a "
        "request that does not fit nor by empty_cache()."
        if torch.torch_version.TorchVersion(torch.__version__) < "2.13"
        else ""
    )
    warnings.warn(
        "CudaPool under PyTorch's own allocator is a torch.cuda.MemPool: torch takes its memory in whole segments (2 "
        "MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB) and keeps freed segments for requests of the "
        f"same size class.{old} None of this applies under memopt.cuda.allocator().",
        stacklevel=5,
    )


# ---- the CPU ---------------------------------------------------------------------------------------------------------
# CudaPool's memory on the CPU: a separate mapping for each tensor.
#
# The accounts therefore follow the storage's life to the byte, whoever keeps it, and a pause can give its pages back to
# the system while the address stays.


REASON = (
    "`with pool:` needs an allocator that can be replaced, and torch's CPU allocator cannot: use pool.allocate() "
    "there, or a CUDA device (memopt.sim simulates one)"
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
                f"{self._out_of_memory(asked, live)} The operating system reported: {error}."
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
                    raise OSError("the file that holds a paused pool's contents has become shorter")
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
            f"CudaPool on the CPU is out of memory. Tried to allocate {wanted}. It may hold {limit}, and "
            f"{len(self._live)} tensors occupy {_C.format_size(live)} of it (in whole pages of "
            f"{_C.format_size(mmap.PAGESIZE)}). Free some with pool.free(t), or make a larger pool."
        )
