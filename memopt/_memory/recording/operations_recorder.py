"""The recorder of the CPU by operations of one thread: the storages that they make, and when those die.

Workspaces of kernels, and tensors of other threads, are not seen. It serves for tensors that no allocator gives (fake
ones), and for a torch whose CPU allocator is not as expected; a dispatch mode costs a step of small operations a tenth.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt import _C
from memopt._memory.live.heap_snapshot import parts_of
from memopt._memory.recording.attribution import column
from memopt._memory.recording.host_recorder import BLOCK, EVENT, Columns, HostRecorder
from memopt._memory.recording.torch_hooks import stack_here
from memopt._memory.recording.unrecorded import unrecorded

_aten = torch.ops.aten
_SHOW_NEW_MEMORY = {
    _aten.resize_.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.lift.default,
    _aten.lift_fresh.default,
}
_DEPTH = 64


class _Operations(TorchDispatchMode):
    """A dispatch mode that sees the results of operations."""

    def __init__(self, recorder: OperationsRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._makes: dict[Any, bool] = {}  # by operation: whether what it gives back can be new memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this spares would cost as much again as the mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return (
            True  # torch.compile goes on as if the mode were not there; what it compiled is seen when it runs
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        makes = self._makes.get(func)
        if makes is None:
            makes = self._makes[func] = _makes_memory(func)
        if makes:
            if type(out) is torch.Tensor:
                self._recorder.see(out)
            elif isinstance(out, list | tuple):
                for item in out:
                    if isinstance(item, torch.Tensor):
                        self._recorder.see(item)
            elif isinstance(out, torch.Tensor):
                self._recorder.see(out)
        return out


def _makes_memory(func: Any) -> bool:
    """Whether an operation can make memory.

    One whose results are all views of its arguments, or arguments themselves, makes none; exceptions are operations
    that give an argument another memory, and those by which torch.tensor() returns its result.
    """
    if func in _SHOW_NEW_MEMORY:
        return True
    returns = func._schema.returns
    return not returns or any(result.alias_info is None for result in returns)


class OperationsRecorder(HostRecorder):
    """The recorder of one thread. Once there are twice as many events as wanted, the oldest are dropped."""

    source = "operations on the CPU (what a kernel takes to work in is not seen)"

    def __init__(self, max_events: int) -> None:
        super().__init__(max_events)
        self._mode = _Operations(self)
        self._first = 0  # the position of the first event that is kept
        self._kept = {name: torch.empty(0, dtype=torch.int64) for name in BLOCK}  # blocks from before it
        self._events = array("q")  # EVENT of each; one array, so that threads' events do not mix
        self._known_stacks: dict[tuple[Any, ...], int] = {}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}

    # ---- starting and stopping ----------------------------------------------------------------------------------

    def _start(self, modules: bool) -> None:
        for tensor in [
            thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
        ]:
            self.see(tensor, here=False)
        self._cut(len(self._events) // len(EVENT))
        self._first = 0
        self._program.start(modules)
        self._mode.__enter__()

    def _stop(self) -> None:
        self._running = False
        self._mode.__exit__(None, None, None)
        self._live.clear()

    # ---- births and deaths --------------------------------------------------------------------------------------

    def see(self, tensor: torch.Tensor, here: bool = True) -> None:
        """Note the tensor's memory if it is new. here: the running line allocated it."""
        if not self._running or not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        identity = storage._cdata
        known = self._live.get(identity)
        size = storage.nbytes()
        if known is not None:
            if known[2] == size:
                return
            self._died(identity)  # it has got another size
        address = storage.data_ptr() if size else 0
        if not address:
            return
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        ref = weakref.ref(storage, lambda _: self._died(identity))
        self._live[identity] = ref, address, size
        self._note(1, address, size, self._stack() if here else 0)

    def _died(self, identity: int) -> None:
        known = self._live.pop(identity, None)
        if known is not None and self._running:
            self._note(0, known[1], known[2], 0)

    def _note(self, birth: int, address: int, size: int, stack: int) -> None:
        self._events.extend((birth, address, size, time.time_ns() // 1000, stack, _C.module_running()))
        if len(self._events) >= 2 * len(EVENT) * self._max_events:
            self._cut(self._max_events)

    def _stack(self) -> int:
        """The number of the stack that runs: by code and instruction, whose lines are looked up once."""
        key: list[Any] = []
        frame = sys._getframe(3)
        while frame is not None and len(key) < 2 * _DEPTH:
            key.append(frame.f_code)
            key.append(frame.f_lasti)
            frame = frame.f_back  # type: ignore[assignment]
        number = self._known_stacks.get(found := tuple(key))
        if number is None:
            number = self._known_stacks[found] = len(self._stacks)
            self._stacks.append(stack_here(3))
        return number

    def _seen(self) -> tuple[Columns, Columns, int]:
        told = dict(zip(EVENT, column(self._events).view(-1, len(EVENT)).t().contiguous(), strict=True))
        return told, self._kept, self._first

    def _cut(self, gone: int) -> None:
        """Drop that many events, the oldest ones, and keep the blocks that outlive them."""
        with unrecorded():
            columns, _, _ = self._columns()
            lived = (columns["born"] < gone) & (columns["died"] >= gone)
            self._kept = {name: columns[name][lived] for name in BLOCK}
            del self._events[: gone * len(EVENT)]
            self._first += gone
            self._watch.forget(self._first)

    # ---- what the program tells ---------------------------------------------------------------------------------

    def position(self, device: str = "cpu") -> int:
        return self._first + len(self._events) // len(EVENT)

    def attribute(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        addresses = []
        for tensor in [part for one in tensors for part in parts_of(one)]:
            self.see(tensor, here=False)
            known = (
                self._live.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
            )
            if known is not None:
                addresses.append(known[1])
        self._watch.attributions.add(self.position(), addresses, category)
