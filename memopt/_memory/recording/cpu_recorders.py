"""The recorders of the CPU: by torch's allocator, and by the operations of one thread.

The first sees the allocations and frees of every thread, kernels' workspaces included. The second serves for tensors
that no allocator gives (fake ones), and for a torch whose CPU allocator is not as expected.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys
import time
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memopt import _C
from memopt._memory.recording.recorder import Recorder, Watch, categories_of, facts, marks_of
from memopt._memory.recording.recording import Frame, Recording, Stack, pair_events
from memopt._memory.recording.torch_hooks import category_column, stack_here
from memopt._runtime.storages import parts_of

Columns = dict[str, torch.Tensor]
EVENT = ("birth", "address", "size", "time", "stack", "module")
BLOCK = ("address", "size", "stack", "module")


class HostRecorder(Recorder):
    source: ClassVar[str]  # a recording's

    def __init__(self, max_events: int) -> None:
        super().__init__(max_events)
        self._watch = Watch()
        self._stacks: list[Stack] = [()]
        self._running = True

    @abstractmethod
    def _seen(self) -> tuple[Columns, Columns, int]:
        """Return the EVENT fields of each kept event, the BLOCK fields of each older block, and the first event's
        position."""

    def _all_stacks(self) -> list[Stack]:
        return list(self._stacks)

    # ---- what the program tells ---------------------------------------------------------------------------------

    def _now(self) -> list[tuple[Watch, int]]:
        return [(self._watch, self.position("cpu"))]

    # ---- reading ------------------------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        return ["cpu"]

    def recording(
        self, device: torch.device | str | int | None = None, *, since: int | None = None
    ) -> Recording:
        if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
            raise ValueError(f"device={device!r}: only the CPU is recorded here")
        with unrecorded():
            self._program.attribute_all()
            columns, times, first = self._columns()
            position = first + len(times)
            columns["category"] = categories_of(columns, self._watch, first, position, len(times))
            made = Recording(
                device="cpu",
                source=self.source,
                columns=columns,
                times_us=times,
                stacks=self._all_stacks(),
                modules=list(self._program.modules.names),
                marks=marks_of(self._watch, first),
                facts=facts() | self._program.facts() | {"events_lost": first},
            )
            return made if since is None else made.since(since - first - 1)

    def _columns(self) -> tuple[Columns, torch.Tensor, int]:
        """Return everything kept as a recording's columns, the times of the events, and the position of the first."""
        told, kept, first = self._seen()
        times = told["time"]
        # What was there before is born before the first event: put in its front, then taken back.
        before = len(kept["address"])
        told |= {name: torch.cat((kept[name], told[name])) for name in BLOCK}
        births = torch.cat((torch.ones(before, dtype=torch.bool), told["birth"].bool()))
        born, died, event = pair_events(births, told["address"])
        columns = {name: told[name][event] for name in BLOCK}
        columns["born"] = (born - before).clamp(min=-1)
        columns["died"] = died - before
        columns["stream"] = torch.zeros_like(born)
        return columns, times, first


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Keep this thread's allocations within the context out of every recording of the CPU."""
    _C.cpu_log_pause()
    try:
        with _disable_current_modes():
            yield
    finally:
        _C.cpu_log_resume()


# ---- by torch's allocator --------------------------------------------------------------------------------------------
# Memory that is not the allocator's (of files, shared, NumPy's) is seen once it is attributed to a category.


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
        self._number = _C.cpu_log_start(self._max_events)
        atexit.unregister(_C.cpu_log_no_stacks)
        atexit.register(_C.cpu_log_no_stacks)
        with unrecorded():
            for thing in gc.get_objects():
                if type(thing) in (torch.Tensor, torch.nn.Parameter):
                    self._see(thing, before=True)
        self._program.start(modules)

    def _stop(self) -> None:
        self._running = False
        _C.cpu_log_stop(self._number)
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


# ---- by operations ---------------------------------------------------------------------------------------------------
# Workspaces of kernels, and tensors of other threads, are not seen. It serves for tensors that no allocator gives (fake
# ones), and for a torch whose CPU allocator is not as expected; a dispatch mode costs a step of small operations a
# tenth.


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
    """Return whether an operation can make memory.

    One whose results are all views of its arguments, or arguments themselves, makes none; exceptions are operations
    that give an argument another memory, and those by which torch.tensor() returns its result.
    """
    if func in _SHOW_NEW_MEMORY:
        return True
    returns = func._schema.returns
    return not returns or any(result.alias_info is None for result in returns)


class OperationsRecorder(HostRecorder):
    """The recorder of one thread. Once there are twice as many events as wanted, the oldest are dropped."""

    source = "operations on the CPU (the scratch memory of kernels is not seen)"

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
        told = dict(
            zip(EVENT, category_column(self._events).view(-1, len(EVENT)).t().contiguous(), strict=True)
        )
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
