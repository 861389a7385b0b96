"""CudaPool: memory of one device kept apart, with a limit, to allocate from, to route a program's requests
to, and to give up for a while."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memopt import _C, torch_version
from memopt.cuda.users import users

if TYPE_CHECKING:
    import torch

__all__ = ["CudaPool"]


class Memory(Protocol):
    """What stands behind a pool. Everything is called under the pool's lock; a call that fails has changed
    nothing."""

    route: str
    resizable: bool

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...
    def holds(self, address: int) -> bool: ...
    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def pause(self, keep: bool) -> None: ...
    def resume(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class CudaPool:
    """Memory of one device that is kept apart.

        pool = memopt.cuda.CudaPool("2GiB")          # held from now on, and never more than that
        t = pool.allocate((1024, 1024), dtype=torch.float16)
        with pool:                                   # what any thread allocates on that device, backward included
            loss = model(x); loss.backward()
        pool.pause()                                 # the device has its memory back; the tensors keep their addresses
        pool.resume()                                # and are what they were
        pool.free(t)

    size: the most physical bytes the pool holds ("2GiB" or an int), all of them held from the start; None: no
    limit, and memory is taken as it is needed. A request beyond it is torch.OutOfMemoryError. device: as
    torch takes it; the current CUDA device by default.

    The tensors are torch's own: record_stream, statistics, snapshots and history know them, and they may
    outlive the pool object. Under memopt's allocator the pool is an arena of it; under PyTorch's native one a
    torch.cuda.MemPool, of which what that means is said in a warning, once. device="cpu" is host memory, for
    trying things out without a GPU: the limit holds (in whole pages), nothing is held ahead, and `with pool:`
    raises NotImplementedError.

    Raises ValueError for a size or device that is none, RuntimeError where there is no CUDA or where torch's
    allocator is neither its native one nor memopt's, torch.OutOfMemoryError where `size` cannot be had.
    Thread safe."""

    def __init__(
        self, size: int | str | None = None, *, device: torch.device | str | int | None = None
    ) -> None:
        torch_version.require("memopt.cuda.CudaPool")
        from torch.utils.weak import WeakTensorKeyDictionary

        self._closed = True  # until there is something to close
        self._size = None if size is None else _C.parse_size(size)
        if self._size == 0:
            raise ValueError(
                "CudaPool(0) could hold nothing: give the most bytes it may hold, or None for no limit"
            )
        self._device = _chosen(device)
        self._lock = threading.RLock()
        self._entered = 0
        self._paused = False
        self._given: Any = WeakTensorKeyDictionary()  # tensors of allocate(), and the address of their memory
        self._freed: Any = WeakTensorKeyDictionary()  # tensors of free()
        self._memory = _memory(self._device, self._size)
        self._closed = False

    # ---- what it is ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._device

    @property
    def size(self) -> int | None:
        """The most bytes it holds; None: no limit."""
        return self._size

    @property
    def paused(self) -> bool:
        """Between pause() and resume(): its addresses are kept, its memory is given back."""
        return self._paused

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def stats(self) -> dict[str, Any]:
        """What the pool holds and what of it is in use, in bytes where a name ends so:

        size (None: no limit), reserved_bytes (physical, held; 0 while paused), allocated_bytes (of live
        tensors, as rounded), requested_bytes (of live tensors, as asked for), max_allocated_bytes (the most
        at any time; under PyTorch's native allocator in whole segments), free_bytes (held, in no tensor),
        allocations (live ones), paused, route ("memopt", "MemPool" or "cpu")."""
        with self._lock:
            self._must_be_open("stats")
            return {
                "size": self._size,
                **self._memory.stats(),
                "paused": self._paused,
                "route": self._memory.route,
            }

    def __repr__(self) -> str:
        limit = "" if self._size is None else f'"{_C.format_size(self._size)}", '
        state = ", closed" if self._closed else ", paused" if self._paused else ""
        return f'<CudaPool({limit}device="{self._device}"){state}>'

    # ---- tensors -------------------------------------------------------------------------------------------

    def allocate(self, size: int | str | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of undefined content in this pool, for the current stream: of so many bytes (an int, or
        "16MiB": torch.uint8, one dimension), or of a shape, its dtype torch's default unless given.

        Raises torch.OutOfMemoryError where the pool has no room, ValueError for a size that is none,
        RuntimeError when the pool is closed or paused, or a graph is being captured (a pool of one's own
        keeps nothing for its replays)."""
        import torch

        if isinstance(size, (int, str)):
            if dtype is not None:
                raise ValueError(
                    f"allocate({size!r}, dtype={dtype}) may mean bytes or elements: allocate(({size},), dtype=…) gives"
                    f" so many elements, allocate({size!r}) so many bytes"
                )
            shape: tuple[int, ...] = (_C.parse_size(size),)
            kind = torch.uint8
        else:
            shape, kind = tuple(int(extent) for extent in size), dtype or torch.get_default_dtype()
        if any(extent < 0 for extent in shape):
            raise ValueError(f"allocate({shape}): an extent is negative")
        with self._lock:
            self._must_be_open("allocate")
            self._must_run("allocate")
            self._device_must_be_free("allocate")
            try:
                tensor = self._memory.empty(shape, kind)
            except torch.OutOfMemoryError as error:
                self._tell(error)
                raise
            self._given[tensor] = tensor.data_ptr()
            return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Gives the memory of a tensor of this pool back at once, whatever names the tensor still has; it has
        no elements after that. For any tensor whose memory is the pool's alone, whether allocate() or
        `with pool:` made it.

        Refused with RuntimeError, naming who, while anybody else uses that memory: autograd (a result saved
        for backward), a view, another tensor. What torch does not count is the caller's to know: an address
        that was read with data_ptr(), a tensor kept in a closure that checkpointing will run again, or by an
        autograd.Function as a plain attribute of ctx. ValueError for what is not this pool's, TypeError for
        what is no tensor."""
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"CudaPool.free() takes a tensor, not {type(tensor).__name__}")
        with self._lock:
            self._must_be_open("free")
            self._must_own(tensor)
            found = users(tensor)
            if found:
                listed = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
                raise RuntimeError(
                    f"this tensor of shape {tuple(tensor.shape)} cannot be freed, its memory is still used by {listed}."
                    " Run that backward, or delete (del) what leads there, and free it then"
                )
            if self._memory.resizable:
                tensor.untyped_storage().resize_(0)
            # An empty tensor from now on: one with a shape and no memory would be a wild address to the next kernel.
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._given.pop(tensor, None)
            self._freed[tensor] = True

    # ---- a program's requests ------------------------------------------------------------------------------

    def __enter__(self) -> CudaPool:
        """From now on every thread's allocations on the device come from this pool, until the block is left:
        those of autograd's threads too, and those of other threads of the program. Of blocks one in another,
        of any threads, the one entered last counts; the same pool may be entered again."""
        with self._lock:
            self._must_be_open("`with pool:`")
            self._must_run("`with pool:`")
            self._device_must_be_free("`with pool:`")
            self._memory.enter()
            self._entered += 1
            return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            if not self._entered:
                raise RuntimeError("this `with pool:` block was left before")
            self._entered -= 1
            self._memory.leave()
            import torch

            if isinstance(error, torch.OutOfMemoryError):
                self._tell(error)

    # ---- pausing -------------------------------------------------------------------------------------------

    def pause(self, *, keep: bool = True) -> None:
        """Gives the pool's physical memory back to the device. Its tensors keep their addresses and must not
        be touched before resume() (on a GPU that is a fault of the context; on the CPU zeros are read, and
        what is written is lost). They may die meanwhile.

        keep: what the tensors hold is copied to host memory first, for a pool on the CPU to a file without a
        name (in tempfile.gettempdir(): where that is in memory nothing is gained), and is there again after
        resume(). With keep=False it is undefined then. Waits for the device. Raises RuntimeError inside
        `with pool:` and when paused."""
        with self._lock:
            self._must_be_open("pause")
            self._must_run("pause")
            self._device_must_be_free("pause")
            self._must_be_outside("pause")
            self._memory.pause(keep)
            self._paused = True

    def resume(self) -> None:
        """Puts memory behind the addresses again, and the contents that pause() kept. Raises
        torch.OutOfMemoryError where the device has no room (the pool stays paused, nothing kept is lost),
        RuntimeError when it is not paused."""
        with self._lock:
            self._must_be_open("resume")
            if not self._paused:
                raise RuntimeError("resume(): the pool is not paused")
            self._device_must_be_free("resume")
            self._memory.resume()
            self._paused = False

    def close(self) -> None:
        """Ends the pool: free memory goes back, that of live tensors when they die. A second call does
        nothing. Raises RuntimeError inside `with pool:`, and when paused with live tensors, whose contents
        would be lost."""
        with self._lock:
            if self._closed:
                return
            self._must_be_outside("close")
            if self._paused and (live := self._memory.stats()["allocations"]):
                raise RuntimeError(
                    f"close(): the pool is paused, and {live} live tensors would stay without memory: resume() it"
                    " first, or delete them"
                )
            self._memory.close()
            self._paused = False
            self._closed = True

    # ---- refusals ------------------------------------------------------------------------------------------

    def _must_be_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: this CudaPool was closed; make a new one")

    def _must_run(self, what: str) -> None:
        if self._paused:
            raise RuntimeError(f"{what}: this CudaPool is paused; call resume() first")

    def _must_be_outside(self, what: str) -> None:
        if self._entered:
            raise RuntimeError(f"{what}: a `with pool:` block of this pool is open; leave it first")

    def _device_must_be_free(self, what: str) -> None:
        import torch

        if self._device.type == "cpu":
            return
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                f"{what}: CUDA does not work in a child of fork(): start it with the multiprocessing method 'spawn'"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what}: a CUDA graph is being captured, which would keep addresses that this pool may give to others:"
                " do it before the capture"
            )

    def _must_own(self, tensor: torch.Tensor) -> None:
        if tensor in self._freed and not tensor.numel():
            raise ValueError("free(): this tensor was freed before")
        if tensor.device != self._device:
            raise ValueError(f"free(): the tensor is on {tensor.device}, and this pool on {self._device}")
        if tensor._is_view() and tensor._base is not None:
            raise ValueError(
                f"free(): this tensor is a view of one of shape {tuple(tensor._base.shape)}: free that one, once its"
                " views are gone"
            )
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"free(): a {tensor.layout} {type(tensor).__name__} has no storage of its own"
            ) from error
        if self._given.get(tensor) != address and not self._memory.holds(address):
            raise ValueError(
                f"free(): this tensor of shape {tuple(tensor.shape)} is not from this pool: free takes what allocate()"
                " gave or `with pool:` made; others are freed with their last name (del)"
            )

    def _tell(self, error: BaseException) -> None:
        """Adds to an out of memory how the pool stands, which is not what the device's own figures say."""
        now = self._memory.stats()
        limit = "no limit" if self._size is None else f"a limit of {_C.format_size(self._size)}"
        error.add_note(
            f"This CudaPool has {limit}, holds {_C.format_size(now['reserved_bytes'])}, and"
            f" {_C.format_size(now['allocated_bytes'])} of that are in {now['allocations']} live tensors."
        )


def _chosen(device: torch.device | str | int | None) -> torch.device:
    import torch

    wanted = torch.device("cuda") if device is None else torch.device(device)
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise ValueError(f"CudaPool(device={device!r}): there are pools on CUDA devices and on the CPU")
    if not torch.cuda.is_available():
        raise RuntimeError(
            'CudaPool: torch sees no CUDA device; CudaPool(device="cpu") is host memory, to try things out'
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"CudaPool(device={device!r}): torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _memory(device: torch.device, size: int | None) -> Memory:
    import torch

    if device.type == "cpu":
        from memopt.cuda.host_memory import HostMemory

        return HostMemory(size)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    backend = torch.cuda.memory.get_allocator_backend()
    if backend == "native":
        from memopt.cuda.mem_pool import MemPoolMemory

        return MemPoolMemory(device.index, size)
    if _C.allocator_is_current():
        from memopt.cuda.arena_memory import ArenaMemory

        return ArenaMemory(device.index, size)
    if backend == "pluggable":
        backend = "one that is not memopt's"
    raise RuntimeError(
        f"CudaPool: torch's CUDA allocator is {backend}; a pool works under memopt.cuda.allocator() and under PyTorch's"
        " native one (the default)"
    )
