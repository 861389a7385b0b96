"""The recorder of the CPU by torch's allocator: allocations and frees of every thread, kernels' workspaces included.

Memory that is not the allocator's (of files, shared, NumPy's) is seen once it is attributed to a category.
"""

from __future__ import annotations

import atexit
import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memopt import _C
from memopt._memory.live.heap_snapshot import parts_of
from memopt._memory.recording.host_recorder import BLOCK, EVENT, Columns, HostRecorder
from memopt._memory.recording.recording import Frame, Stack
from memopt._memory.recording.unrecorded import unrecorded


class CpuRecorder(HostRecorder):
    """The recorder of the CPU. Allocations, stacks and modules are noted in C; this class adds the program's phases."""

    source = "torch's CPU allocator"

    def __init__(self, max_events: int) -> None:
        super().__init__(max_events)
        # By storage, what is not the allocator's: its address and the block's serial number.
        self._others: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._most_others = 1000

    # ---- starting and stopping ----------------------------------------------------------------------------------

    def _start(self, modules: bool) -> None:
        _C.cpu_log_start(self._max_events)
        atexit.unregister(_C.cpu_log_no_stacks)
        atexit.register(_C.cpu_log_no_stacks)
        with unrecorded():
            for thing in gc.get_objects():
                if type(thing) in (torch.Tensor, torch.nn.Parameter):
                    self._see(thing, before=True)
        self._program.start(modules)

    def _stop(self) -> None:
        self._running = False
        _C.cpu_log_stop()
        self._others.clear()

    # ---- memory that is not the allocator's ---------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor, before: bool = False) -> int:
        """Return the address of the tensor's memory, 0 for none, and note memory that is new."""
        if not self._running or not tensor.is_cpu or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        address = storage.data_ptr() if size else 0
        if not address or _C.cpu_log_size(address) == size:
            return address
        identity = storage._cdata
        known = self._others.pop(identity, None)
        if known is not None:
            _C.cpu_log_died(*known[1:])  # it has got another size, or another storage its place
        serial = _C.cpu_log_born(address, size, before)
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        ref = weakref.ref(storage, functools.partial(_C.cpu_log_died, address, serial))
        self._others[identity] = ref, address, serial
        if len(self._others) > self._most_others:
            self._others = {n: other for n, other in self._others.items() if other[0]() is not None}
            self._most_others = 2 * len(self._others) + 1000
        return address

    def _seen(self) -> tuple[Columns, Columns, int]:
        first, events, blocks = _C.cpu_log_read()
        return _by_name(events, EVENT), _by_name(blocks, (*BLOCK, "serial")), first

    def _all_stacks(self) -> list[Stack]:
        for told in _C.cpu_log_stacks(len(self._stacks)):
            self._stacks.append(
                tuple(
                    Frame(code.co_filename, line, code.co_name)
                    for code, line in zip(told[::2], told[1::2], strict=True)
                )
            )
        return list(self._stacks)

    # ---- what the program tells ---------------------------------------------------------------------------------

    def position(self, device: str = "cpu") -> int:
        return _C.cpu_log_position()

    def attribute(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        addresses = [
            address for tensor in tensors for part in parts_of(tensor) if (address := self._see(part))
        ]
        self._watch.attributions.add(self.position(), addresses, category)
        if len(self._watch.attributions) > 4 * self._max_events:
            self._watch.forget(self.position() - self._max_events)


def _by_name(table: bytearray, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if not table:
        return {name: torch.empty(0, dtype=torch.int64) for name in names}
    rows: Any = torch.frombuffer(table, dtype=torch.int64).view(-1, len(names))
    return dict(zip(names, rows.t().contiguous(), strict=True))
