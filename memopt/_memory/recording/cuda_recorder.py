"""The recorder of CUDA devices, by the history of their allocator: torch's, or memopt's under the same names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memopt import _C
from memopt._memory.recording import torch_history
from memopt._memory.recording.recorder import Recorder, Watch, categories_of, facts, marks_of
from memopt._memory.recording.recording import OTHER, WORKSPACES, Recording, Stack
from memopt._runtime.storages import memory_of


class CudaRecorder(Recorder):
    """A position is the number of requests and frees that the allocator has counted: exact, but for what other threads
    ask for at that very moment."""

    def __init__(self, max_events: int) -> None:
        super().__init__(max_events)
        self._watches: dict[int, Watch] = {}
        self._counted: dict[int, tuple[int, int]] = {}  # by device: the last count, and what to add to it
        self._begun: dict[int, int] = {}
        self._own_history = True  # nobody else had switched it on
        self._running = True
        self._by_time = (
            False  # memopt's allocator keeps no metadata: modules are told by the clock of its history
        )

    # ---- starting and stopping ----------------------------------------------------------------------------------

    def _start(self, modules: bool) -> None:
        # torch's own answer to this crashes where no device is in use yet.
        self._own_history = not (torch.cuda.is_initialized() and _has_history())
        self._program.start(modules)
        if torch.cuda.is_initialized():
            if self._own_history:
                self._switch_on()
            for device in range(torch.cuda.device_count()):
                self._begun[device] = self._count(device)
            self._cuda_begins()
        else:  # to switch it on now would begin CUDA, and so keep forked processes from it
            torch.cuda._lazy_call(self._cuda_begins)  # type: ignore[no-untyped-call]

    def _switch_on(self) -> None:
        record = torch.cuda.memory._record_memory_history
        # The completion of a free tells nothing new: a third of the entries.
        skip = {"skip_actions": ["free_completed", "snapshot"]}
        known = inspect.signature(record).parameters
        options: dict[str, Any] = skip if "skip_actions" in known else {}
        entries = self._max_events if options else self._max_events * 3 // 2
        record("all", context="alloc", stacks="python", max_entries=entries, clear_history=True, **options)

    def _cuda_begins(self) -> None:
        if not self._running:
            return
        self._by_time = _C.allocator_is_current()
        if not _has_history():
            self._switch_on()  # the allocator was changed since
        if self._by_time:
            self._program.modules.note(4 * self._max_events)
        else:
            self._program.modules.tell(_set_metadata, as_text=True)

    def _stop(self) -> None:
        self._running = False
        if self._own_history and torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(None)
        if not self._by_time and torch.cuda.is_initialized():
            _set_metadata("")

    # ---- positions ----------------------------------------------------------------------------------------------

    def _count(self, device: int) -> int:
        """Return the number of requests and frees so far. Users may reset torch's counters: a smaller number starts
        anew."""
        last, more = self._counted.get(device, (0, 0))
        counted = torch._C._cuda_memoryStats(device)["allocation"]["all"]  # type: ignore[attr-defined]
        now = counted["allocated"] + counted["freed"]
        if now < last:
            more += last - (counted["current"] if now >= counted["current"] else 0)
        self._counted[device] = now, more
        return int(now + more)

    def position(self, device: str) -> int:
        return self._position(_index(device))

    def _position(self, device: int) -> int:
        if not torch.cuda.is_initialized():
            return 0
        return self._count(device) - self._begun.get(device, 0)

    def _watch(self, device: int) -> Watch:
        return self._watches.setdefault(device, Watch())

    # ---- what the program tells ---------------------------------------------------------------------------------

    def attribute(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        by_device: dict[int, list[int]] = {}
        for tensor in tensors:
            for _, address, _, part in memory_of(tensor) if tensor.is_cuda else ():
                if part.is_cuda:
                    by_device.setdefault(part.get_device(), []).append(address)
        for device, addresses in by_device.items():
            watch, position = self._watch(device), self._position(device)
            watch.attributions.add(position, addresses, category)
            if len(watch.attributions) > 4 * self._max_events:
                watch.forget(position - self._max_events)

    def _now(self) -> list[tuple[Watch, int]]:
        if not torch.cuda.is_initialized():
            return []
        in_use = {torch.cuda.current_device(), *self._watches}
        return [(self._watch(device), self._position(device)) for device in in_use]

    # ---- reading ------------------------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        if not torch.cuda.is_initialized():
            return []
        current = torch.cuda.current_device()
        used = [d for d in range(torch.cuda.device_count()) if d != current and self._count(d)]
        return [f"cuda:{device}" for device in (current, *used)]

    def recording(
        self, device: torch.device | str | int | None = None, *, since: int | None = None
    ) -> Recording:
        index = _index(device)
        if torch.cuda.is_initialized():
            self._program.attribute_all()
            torch.cuda.synchronize(index)
        watch = self._watch(index)
        position, snapshot = self._snapshot(index)
        history = torch_history.read(snapshot, index)
        columns, events = history.columns, len(history.times_us)
        first = position - events  # the position at which event 0 stands
        columns["module"], modules = self._modules_of(history)
        columns["category"] = categories_of(columns, watch, first, position, events)
        columns["category"][_workspaces(columns, events)] = OTHER
        stacks = self._backward_stacks(history, watch, first, position)
        recording = Recording(
            device=f"cuda:{index}",
            source=self._source(),
            columns=columns,
            times_us=history.times_us,
            stacks=stacks,
            modules=modules,
            marks=sorted(marks_of(watch, first) + history.ooms, key=lambda mark: mark.event),
            reserved_events=history.reserved_events,
            reserved_bytes=history.reserved_bytes,
            capacity=_capacity(index),
            facts=facts() | self._program.facts() | self._figures(index, first) | {"asked": history.asked},
        )
        return recording if since is None else recording.since(since - first - 1)

    def _snapshot(self, device: int) -> tuple[int, dict[str, Any]]:
        """Take a snapshot and the position at which it was taken.

        Autograd's threads drop what they hold some time after a backward pass has returned, so a free may come between
        the two. Both are then taken again.
        """
        if not torch.cuda.is_initialized():
            return 0, _NOTHING
        position = self._position(device)
        for _ in range(_TRIES):
            snapshot = torch.cuda.memory._snapshot()
            before, position = position, self._position(device)
            if before == position:
                break
        return position, snapshot

    def _modules_of(self, history: torch_history.History) -> tuple[torch.Tensor, list[str]]:
        names, module, born = self._program.modules.names, history.columns["module"], history.columns["born"]
        if not self._by_time:
            numbers = [int(text) if text.isdecimal() else 0 for text in history.labels]
            table = torch.tensor([number if number < len(names) else 0 for number in numbers])
            return table[module], list(names)
        found = torch.zeros_like(module)
        times, indices = self._program.modules.moments()
        if len(times):
            seen = born >= 0
            at = torch.searchsorted(times, history.times_us[born[seen]], right=True) - 1
            found[seen] = torch.where(at >= 0, indices[at.clamp(min=0)], 0)
        return found, list(names)

    def _backward_stacks(
        self, history: torch_history.History, watch: Watch, first: int, position: int
    ) -> list[Stack]:
        """Give requests of autograd's own threads, which have no Python stack, the stack of the backward() call."""
        stacks, stack, born = history.stacks, history.columns["stack"], history.columns["born"]
        numbers: dict[Stack, int] = {known: number for number, known in enumerate(stacks)}
        for phase, begin, end, of in watch.phases.all(position):
            if phase == "backward" and end > first:
                number = numbers.setdefault(of, len(stacks))
                if number == len(stacks):
                    stacks.append(of)
                stack[(stack == 0) & (born >= max(begin - first, 0)) & (born < end - first)] = number
        return stacks

    def _source(self) -> str:
        sim = sys.modules.get("memopt.sim")
        simulated = sim is not None and sim.is_active()
        allocator = "memopt's allocator" if self._by_time else "torch's allocator"
        return f"history of {allocator}" + (
            " on a simulated device: simulated, not measured" if simulated else ""
        )

    def _figures(self, device: int, lost: int) -> dict[str, Any]:
        if not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory_stats(device)
        return {
            "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
            "events_lost": max(0, lost),
            "device_name": torch.cuda.get_device_name(device),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        }


# Missing where torch has no CUDA, and no recorder of this kind is made.
_set_metadata: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", lambda _: None)
_TRIES = 5
_NOTHING: dict[str, Any] = {"device_traces": [], "segments": []}


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
    index: int | None = device if isinstance(device, int) else torch.device(device).index
    if isinstance(device, str | torch.device) and torch.device(device).type != "cuda":
        raise ValueError(f"device={device!r}: CUDA devices are recorded here")
    return _index(None) if index is None else index


def _has_history() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())  # type: ignore[attr-defined]


def _workspaces(columns: dict[str, torch.Tensor], events: int) -> torch.Tensor:
    """Return a mask of cuBLAS's workspaces: blocks of those sizes, asked for once on each stream by either kind of
    pass, and never freed."""
    born, size = columns["born"], columns["size"]
    found = torch.zeros(len(born), dtype=torch.bool)
    unattributed = (columns["category"] > 2) & (columns["died"] == events) & (born >= 0)
    for workspace in WORKSPACES:
        for inside in (columns["module"] > 0, columns["module"] == 0):
            like = (unattributed & inside & (size == workspace)).nonzero().flatten()
            for stream in columns["stream"][like].unique().tolist():
                found[like[columns["stream"][like] == stream][:1]] = True
    return found


def _capacity(device: int) -> int | None:
    if not torch.cuda.is_initialized():
        return None
    total = torch.cuda.mem_get_info(device)[1]
    return int(total * torch.cuda.get_per_process_memory_fraction(device))
