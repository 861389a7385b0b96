"""CudaPool: separate memory of one device with a limit, to allocate from, to redirect allocations to, and to pause."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memopt import _C
from memopt._runtime import arguments, torch_version

if TYPE_CHECKING:
    import torch

__all__ = ["CudaPool"]


class PoolMemory(Protocol):
    """The memory behind a pool. The pool's lock is held during every call; a call that fails has changed nothing."""

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
    """Memory of one device that is kept apart from the rest.

    The tensors are torch's own: record_stream, statistics, snapshots and history include them, and they may outlive the
    pool object. Under memopt's allocator the pool is an arena of it; under PyTorch's native allocator it is a
    torch.cuda.MemPool, whose limits a warning states once. device="cpu" is host memory, to try things out without a
    GPU: the limit holds (in whole pages), nothing is held ahead, and `with pool:` raises NotImplementedError. Thread
    safe.

    Args:
        size: Most physical bytes that the pool holds ("2GiB" or an int), all of them held from the start. None: no
            limit, and memory is taken as needed. A request beyond it raises torch.OutOfMemoryError.
        device: As torch takes it; by default the current CUDA device.

    Raises:
        ValueError: The size or the device is not valid.
        RuntimeError: CUDA is not available, or torch's allocator is neither its native one nor memopt's.
        torch.OutOfMemoryError: The device cannot provide `size` bytes.

    Examples:
        >>> pool = memopt.cuda.CudaPool("2GiB")  # held from now on, and never more than that
        >>> t = pool.allocate((1024, 1024), dtype=torch.float16)
        >>> with pool:  # any thread's allocations on that device, the backward pass included
        ...     loss = model(x)
        ...     loss.backward()
        >>> pool.pause()  # the device has its memory back; the tensors keep their addresses
        >>> pool.resume()  # the tensors have their contents back
        >>> pool.free(t)
    """

    def __init__(
        self, size: int | str | None = None, *, device: torch.device | str | int | None = None
    ) -> None:
        torch_version.require("memopt.cuda.CudaPool")
        from torch.utils.weak import WeakTensorKeyDictionary

        self._closed = True  # until there is something to close
        self._size = None if size is None else arguments.size(size, "size")
        if self._size == 0:
            raise ValueError(
                "CudaPool(0) can hold nothing: give the maximum number of bytes, or None for no limit"
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
        """The device of the pool's memory."""
        return self._device

    @property
    def size(self) -> int | None:
        """The most bytes that the pool holds; None for no limit."""
        return self._size

    @property
    def paused(self) -> bool:
        """Return whether pause() was called without resume(): addresses are kept, memory is given back."""
        return self._paused

    @property
    def closed(self) -> bool:
        """Return whether close() was called."""
        return self._closed

    def stats(self) -> dict[str, Any]:
        """Return the pool's figures by name; those that end in _bytes, and size, are in bytes.

        Returns:
            A dict with these keys:
                size: The limit, None for none.
                reserved_bytes: Physical memory held; 0 while paused.
                allocated_bytes: Of live tensors, as rounded.
                requested_bytes: Of live tensors, as requested.
                max_allocated_bytes: Most allocated at any time; under PyTorch's native allocator in whole segments.
                free_bytes: Held, in no tensor.
                allocations: Number of live tensors.
                paused: Whether the pool is paused.
                route: "memopt", "MemPool" or "cpu".

        Raises:
            RuntimeError: The pool is closed.
        """
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
        """Return a tensor of undefined content in this pool, for the current stream.

        Args:
            size: A number of bytes (an int, or "16MiB"), for a one-dimensional torch.uint8 tensor; or a shape.
            dtype: For a shape; by default torch's default dtype.

        Raises:
            torch.OutOfMemoryError: The pool has no room.
            ValueError: The size is not valid.
            RuntimeError: The pool is closed or paused, or a graph is being captured (a pool of one's own keeps nothing
                for the graph's replays).
        """
        import torch

        if isinstance(size, (int, str)):
            if dtype is not None:
                raise ValueError(
                    f"allocate({size!r}, dtype={dtype}) may mean bytes or elements: allocate(({size},), dtype=…) gives"
                    f" so many elements, allocate({size!r}) so many bytes"
                )
            shape: tuple[int, ...] = (arguments.size(size, "size"),)
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
        """Give the memory of a tensor of this pool back at once, whatever names the tensor still has.

        The tensor has no elements afterwards. It may come from allocate() or from within `with pool:`, as long as its
        memory is the pool's alone. Uses that torch does not count are the caller's responsibility: an address that was
        read with data_ptr(), a tensor in a closure that checkpointing will run again, or one that an autograd.Function
        keeps as a plain attribute of ctx.

        Args:
            tensor: A tensor of this pool.

        Raises:
            RuntimeError: The memory has another user: autograd (a result saved for backward), a view, another tensor.
                The message names it.
            ValueError: The tensor is not this pool's.
            TypeError: The argument is not a tensor.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"CudaPool.free() takes a tensor, not {type(tensor).__name__}")
        with self._lock:
            self._must_be_open("free")
            self._must_own(tensor)
            found = users_of(tensor)
            if found:
                listed = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
                raise RuntimeError(
                    f"this tensor of shape {tuple(tensor.shape)} cannot be freed: its memory is still used by "
                    f"{listed}. Run that backward pass, or delete (del) the references to it, then free it"
                )
            if self._memory.resizable:
                tensor.untyped_storage().resize_(0)
            # An empty tensor from now on: one with a shape and no memory would be a wild address to the next kernel.
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._given.pop(tensor, None)
            self._freed[tensor] = True

    # ---- a program's requests ------------------------------------------------------------------------------

    def __enter__(self) -> CudaPool:
        """Take every thread's allocations on the device from this pool until the block is left.

        Autograd's threads and other threads of the program are included. Of nested blocks, in whatever threads, the one
        entered last counts; the same pool may be entered again.
        """
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
        """Give the pool's physical memory back to the device; its tensors keep their addresses.

        The tensors must not be touched before resume(): on a GPU that is a fault of the context; on the CPU reads give
        zeros and writes are lost. They may be destroyed meanwhile. Waits for the device.

        Args:
            keep: Whether the contents are copied to host memory first and restored by resume(). A pool on the CPU
                copies them to an unnamed file in tempfile.gettempdir(), which saves nothing where that directory is in
                memory. Without keep, contents are undefined after resume().

        Raises:
            RuntimeError: Called inside `with pool:`, or the pool is paused already.
        """
        with self._lock:
            self._must_be_open("pause")
            self._must_run("pause")
            self._device_must_be_free("pause")
            self._must_be_outside("pause")
            self._memory.pause(keep)
            self._paused = True

    def resume(self) -> None:
        """Put memory behind the addresses again, and the contents that pause() kept.

        Raises:
            torch.OutOfMemoryError: The device has no room. The pool stays paused, and kept contents are not lost.
            RuntimeError: The pool is not paused.
        """
        with self._lock:
            self._must_be_open("resume")
            if not self._paused:
                raise RuntimeError("resume(): the pool is not paused")
            self._device_must_be_free("resume")
            self._memory.resume()
            self._paused = False

    def close(self) -> None:
        """End the pool: free memory is given back now, that of live tensors when they are destroyed.

        A second call does nothing.

        Raises:
            RuntimeError: Called inside `with pool:`, or the pool is paused with live tensors, whose contents would be
                lost.
        """
        with self._lock:
            if self._closed:
                return
            self._must_be_outside("close")
            if self._paused and (live := self._memory.stats()["allocations"]):
                raise RuntimeError(
                    f"close(): the pool is paused, and {live} live tensors would be left without memory: resume() it "
                    "first, or delete them"
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
                f"{what}: CUDA does not work in a forked child: start the process with the multiprocessing method "
                "'spawn'"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{what}: a CUDA graph is being captured, which would keep addresses that this pool may reuse: do it "
                "before the capture"
            )

    def _must_own(self, tensor: torch.Tensor) -> None:
        if tensor in self._freed and not tensor.numel():
            raise ValueError("free(): this tensor was already freed")
        if tensor.device != self._device:
            raise ValueError(f"free(): the tensor is on {tensor.device}, but this pool is on {self._device}")
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
                f"free(): this tensor of shape {tuple(tensor.shape)} is not from this pool: free() takes tensors from "
                "allocate() or made inside `with pool:`; other tensors are freed with their last reference (del)"
            )

    def _tell(self, error: BaseException) -> None:
        """Add the pool's figures, which differ from the device's, to an out-of-memory error."""
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
        raise ValueError(f"CudaPool(device={device!r}): pools exist on CUDA devices and on the CPU")
    if not torch.cuda.is_available():
        raise RuntimeError(
            'CudaPool: torch sees no CUDA device; CudaPool(device="cpu") is host memory, for experiments'
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"CudaPool(device={device!r}): torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _memory(device: torch.device, size: int | None) -> PoolMemory:
    import torch

    if device.type == "cpu":
        from memopt.cuda._pool_backends import HostPoolMemory

        return HostPoolMemory(size)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    backend = torch.cuda.memory.get_allocator_backend()
    if backend == "native":
        from memopt.cuda._pool_backends import MemPoolMemory

        return MemPoolMemory(device.index, size)
    if _C.allocator_is_current():
        from memopt.cuda._pool_backends import ArenaMemory

        return ArenaMemory(device.index, size)
    if backend == "pluggable":
        backend = "not memopt's"
    raise RuntimeError(
        f"CudaPool: torch's CUDA allocator is {backend}; a pool works under memopt.cuda.allocator() and under PyTorch's"
        " native one (the default)"
    )


# ---- users of a tensor's memory --------------------------------------------------------------------------------------
# Users of a tensor's memory besides the tensor itself, looked for before memory is taken away under it.
#
# Whoever can reach the memory through torch holds a reference to the storage (another tensor: a view, a detached one, a
# saved result) or to the tensor (a saved input, the node that accumulates its gradient, a DLPack consumer, a C++
# caller). torch counts both. Counts that one tensor alone explains therefore prove that there is no other user, on any
# thread and behind any hook. Names are looked for only when there is a user. Not counted, and so not seen: further
# Python names of the same tensor object (a list, a closure that a checkpoint will run again, an attribute of an
# autograd Function's ctx) and raw addresses (data_ptr(), __cuda_array_interface__).


def users_of(tensor: torch.Tensor) -> list[str]:
    """Return descriptions of the other users of a tensor's memory, autograd's first; empty if there are none.

    A user that cannot be named is a line that says so.
    """
    tensors, of_this, wrappers = _references(tensor)
    alone = _alone()
    if (tensors, of_this) == alone[:2] and wrappers <= alone[2]:
        return []
    found = [*_graph_users(tensor), *_other_tensors(tensor)]
    if wrappers > alone[2]:
        found.append("a storage object (untyped_storage()) that the program keeps")
    if not found:
        found.append(
            f"something outside Python ({max(tensors - alone[0], of_this - alone[1])} references: autograd on another"
            " thread, a DLPack consumer or a C++ library)"
        )
    return found


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the reference counts of a tensor's storage, of the tensor, and of the storage's Python object."""
    import torch

    storage = tensor.untyped_storage()
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    return torch._C._storage_Use_Count(storage._cdata), of_tensor, sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int, int]:
    """Return the counts of _references() for a tensor without other users, in this Python and this torch."""
    import torch

    return _references(torch.empty(1, device="cpu"))


def _graph_users(tensor: torch.Tensor) -> list[str]:
    """Return nodes of live tensors' autograd graphs that keep the tensor, or another one on its memory."""
    storage = tensor.untyped_storage()._cdata
    found: dict[str, None] = {}
    for node, root in _nodes():
        for attribute, kept in _kept_by(node):
            if kept is tensor or _storage(kept) == storage:
                shape = tuple(root.shape)
                why = f"({attribute}) for the backward of a tensor of shape {shape}"
                found[f"{node.name()}, which keeps it {why}"] = None
    return list(found)


def _nodes() -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each autograd node once, with a tensor whose backward reaches it."""
    seen = set()
    for root in _live_tensors():
        stack = [root.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            yield node, root
            stack.extend(following for following, _ in node.next_functions)


def _kept_by(node: Any) -> Iterator[tuple[str, Any]]:
    for attribute in dir(node):
        if attribute.startswith("_saved_") or attribute in ("saved_tensors", "variable"):
            try:
                value = getattr(node, attribute)
            except (
                Exception
            ):  # freed by a backward, changed in place since, or hooks of others refuse: not to be read
                continue
            for one in value if isinstance(value, (tuple, list)) else (value,):
                yield attribute.removeprefix("_saved_"), one


def _other_tensors(tensor: torch.Tensor) -> list[str]:
    storage = tensor.untyped_storage()._cdata
    return [
        f"{'a view' if other._is_view() else 'another tensor'} of shape {tuple(other.shape)} on the same memory"
        for other in _live_tensors()
        if other is not tensor and _storage(other) == storage
    ]


def _live_tensors() -> list[torch.Tensor]:
    import torch

    # type(), not isinstance(): asking the class of a proxy may run its code.
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def _storage(value: Any) -> int | None:
    """Return the address of a tensor's storage; None for other objects and for tensors without a storage."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    try:
        storage: int = value.untyped_storage()._cdata
        return storage
    except (NotImplementedError, RuntimeError):
        return None
