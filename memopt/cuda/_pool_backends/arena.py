"""CudaPool's memory under memopt's allocator: an arena of its pool, to which torch's requests are routed.

csrc/alloc/pool.h describes arenas; mem_pool.py is the form under torch's allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memopt import _C

if TYPE_CHECKING:
    import torch


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
    """Whether this process is a child, by fork(), of one that used CUDA."""
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
