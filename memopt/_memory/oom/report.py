"""The report of an out-of-memory error: gathered while everything is still alive, and text from then on."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memopt import _C
from memopt._memory.live import heap_snapshot
from memopt._memory.live.device_bytes import AllocatorBlocks, DeviceBytes, blocks_of, category_of, split
from memopt._memory.live.live_tensors import LiveGroup, LiveTensor, LiveTensors, any_element, described
from memopt._memory.oom.fixes import Situation, situation
from memopt._memory.oom.location import Location, location
from memopt._memory.oom.trials import TriedFixes, tried
from memopt._memory.recording import recorder, snapshot_file
from memopt._memory.recording.recorder import facts
from memopt._memory.recording.recording import CATEGORIES, COLUMNS, Frame, Recording, Stack
from memopt._memory.recording.user_code import cells
from memopt._runtime.table import WIDTH, folded_headline, folded_lines, line_width
from memopt.cuda import _torch_patches

LINES = 20  # at most, on a wide terminal
_SEARCH = 0.3  # seconds that names are searched for, and that graphs are followed


@dataclass(frozen=True)
class OomReport:
    """The report of an out-of-memory error.

    `asked`: bytes of the request; `lines`: bytes by the line that allocated them, where that is recorded; `holders`:
    the largest holders other than models and optimizers; `limit`: the process's own limit, if it has set one;
    `situation`: the facts that decide which fixes are tried; `contents`: all live blocks, for a page.
    """

    device: int
    asked: int
    location: Location
    bytes: DeviceBytes
    fragmentation: Fragmentation
    lines: list[tuple[str, int]]
    holders: list[LiveGroup]
    nodes: list[tuple[str, int]]
    situation: Situation
    limit: int | None
    seconds: float
    complete: bool
    contents: Recording
    rank: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    tried: TriedFixes | None = None  # by tried_out()

    def __str__(self) -> str:
        where = f" at {self.location.where}" if self.location.where else ""
        text = f" ({self.location.text})" if self.location.text else ""
        phase = f" in the {self.location.phase}" if self.location.phase and not text else ""
        who = f"memopt [{self.rank}]" if self.rank else "memopt"
        first = f"{who}: CUDA out of memory{where}{text}{phase}, GPU {self.device}"
        lines = [
            *folded_headline(f"{first}, requested {_C.format_size(self.asked)}", _width()),
            *_wrapped(f"{_C.format_size(self.bytes.total_bytes)} = {shares(self.bytes)}", "  ", " + "),
        ]
        if self.limit is not None:
            lines.append(
                f"  Limit       {_C.format_size(self.limit)} of the device, set by this process itself"
            )
        lines += _wrapped(f"Fragmentation: {self.fragmentation}", "  ", ", ")
        if self.lines:
            lines += _listed("Top lines", [f"{name} {_C.format_size(size)}" for name, size in self.lines])
        if self.holders:
            lines += _listed("Held by", [_holder(group) for group in self.holders])
        if self.nodes and not self.lines:
            lines += _listed(
                "Graphs keep", [f"{_C.format_size(size)} for {name}" for name, size in self.nodes]
            )
        if not self.complete:
            lines.append("  The search for names ran out of time: tensors without a name may have one.")
        for name, value in self.facts.items():
            lines.append(f"  {name:<11} {value}")
        said = [] if self.tried is None else self.advice()
        most = LINES * WIDTH // _width()
        return "\n".join([*lines[: most - len(said)], *said])

    def tried_out(self) -> OomReport:
        """Return the report with the fixes that were tested on the recording, which takes seconds."""
        active = recorder.active()
        device = self.bytes.device
        if active is None or device not in active.devices():
            records = "%%memopt" if cells() else f"memopt run {_script() or 'SCRIPT'}"
            why = f"nothing is being recorded; `{records}` records"
            return replace(self, tried=TriedFixes([], why))
        return replace(self, tried=tried(lambda: active.recording(device), self.situation))

    def advice(self) -> list[str]:
        """Return lines of advice: fixes that were tested and fit, and changes that were not tested."""
        if self.tried is None:
            return []
        now, lines = self.situation, []
        if self.tried.fixes:
            lines += _listed("Would fit", [str(fix) for fix in self.tried.fixes])
        elif not self.tried.why:
            lines += _listed("Would fit", ["none of the changes that could be tried on the recording"])
        if now.first and now.phase != "optimizer step":
            least = sum(self.bytes.parts[name] for name in CATEGORIES) + self.asked
            lines.append(f"  Needs       at least {_C.format_size(least)}: no first step had completed")
        untried = [one for one in now.untried if not any(one in fix.text for fix in self.tried.fixes)]
        if self.tried.why:
            lines += _wrapped(f"changes on the recording: {self.tried.why}", "  Not tried   ", ", ")
        if untried:
            if not now.evaluating:
                card = _C.format_size(self.bytes.total_bytes).replace(" ", "")
                untried[-1] += f": `memopt estimate --gpu {card} {_script() or 'SCRIPT'}` tries them"
            begin = " " * 14 if self.tried.why else "  Not tried   "
            lines += _wrapped(" | ".join(untried), begin, " | ")
        return lines


def shares(device: DeviceBytes) -> str:
    """Return the parts in the total's unit, rounded so that they add up to the total as shown."""
    number, unit = _C.format_size(device.total_bytes).split()
    digits = len(number.partition(".")[2])
    scale = 10**digits / 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)
    exact = {name: size * scale for name, size in device.parts.items()}
    rounded = {name: int(value) for name, value in exact.items()}
    missing = round(float(number) * 10**digits) - sum(rounded.values())
    for name in sorted(exact, key=lambda name: rounded[name] - exact[name])[: max(0, missing)]:
        rounded[name] += 1
    order = sorted((name for name in exact if name != "free"), key=lambda name: -exact[name])
    shown = [name for name in (*order, "free") if rounded[name]]
    return " + ".join(f"{rounded[name] / 10**digits:.{digits}f} {name}" for name in shown)


def _holder(group: LiveGroup) -> str:
    notes = [group.where, f"graph of {group.nodes} nodes" if group.nodes else "", group.note]
    said = ", ".join(filter(None, notes))
    name = group.name or "no variable"
    return f"{name} {_C.format_size(group.nbytes)}" + (f" ({said})" if said else "")


def _listed(title: str, items: list[str]) -> list[str]:
    return _wrapped(" | ".join(items), f"  {title:<11} ", " | ")


def _wrapped(text: str, begin: str, between: str) -> list[str]:
    """Return items in lines; one that is longer than a line is folded."""
    width, further = _width(), " " * len(begin)
    lines, line = [], begin
    for i, item in enumerate(text.split(between)):
        joined = f"{line}{between}{item}" if i else f"{line}{item}"
        if len(joined) + len(between.rstrip()) > width and i:
            lines.append(line + between.rstrip())
            joined = further + item
        line = joined
    return [part for one in [*lines, line] for part in folded_lines(one, width, further=further + "  ")]


def _width() -> int:
    return line_width(sys.__stderr__)


# ---- gathering -------------------------------------------------------------------------------------------------------


def gather(device: int, asked: int) -> OomReport:
    """Gather a report in the thread whose request failed.

    It allocates nothing on a device, and runs none of the program's code.
    """
    start = time.perf_counter()
    where = location()
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), heap_snapshot.no_collection():
        taken = heap_snapshot.take(_SEARCH, _SEARCH)
        try:
            return _gathered(device, asked, where, taken, start)
        finally:
            taken.forget()


def _gathered(
    device: int, asked: int, where: Location, taken: heap_snapshot.HeapSnapshot, start: float
) -> OomReport:
    name = f"cuda:{device}"
    blocks = blocks_of(device)
    parts = split(device, taken, blocks)
    live = described(taken)
    limit = _limit(device, parts.total_bytes)
    allowed = (
        parts.parts["free"] if limit is None else max(0, min(parts.parts["free"], limit - blocks.reserved))
    )
    here = [tensor for tensor in live.tensors if tensor.device == name]
    running = where.where or "the running pass"
    holders = [(one.address, one.created or (running if one.library else one.where)) for one in here]
    fragmentation = fragmentation_of(device, asked, allowed, blocks, holders)
    capacity = blocks.reserved + allowed
    return OomReport(
        device=device,
        asked=asked,
        location=where,
        bytes=parts,
        fragmentation=fragmentation,
        lines=_sums([(tensor.created, tensor.nbytes) for tensor in here], 5),
        holders=_holders(live, name, where),
        nodes=_sums([(one.node, one.nbytes) for one in here if one.only_in_graph], 4),
        situation=situation(name, asked, capacity, where, _torch_patches.is_ours(), live, taken),
        limit=limit,
        seconds=time.perf_counter() - start,
        complete=live.complete,
        contents=contents_of(name, capacity, blocks, category_of(name, taken, blocks), live.tensors),
        rank=_rank(),
    )


def _sums(rows: list[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for name, size in rows:
        if name:
            sums[name] = sums.get(name, 0) + size
    return sorted(sums.items(), key=lambda item: -item[1])[:most]


def _holders(live: LiveTensors, device: str, where: Location) -> list[LiveGroup]:
    """Return the named groups of tensors; the groups that only running library functions hold become the running
    pass's."""
    chosen = [
        group
        for group in live.groups
        if group.device == device and group.name and group.category in ("activations", "inputs", "other")
    ]
    running = [group for group in chosen if group.library]
    if running:
        nbytes, count = sum(group.nbytes for group in running), sum(group.count for group in running)
        named = replace(
            running[0],
            nbytes=nbytes,
            count=count,
            name=f"the running {where.phase or 'call'}",
            where=where.where,
        )
        chosen = [group for group in chosen if not group.library] + [replace(named, note="")]
    return sorted(chosen, key=lambda group: -group.nbytes)[:5]


def _limit(device: int, total: int) -> int | None:
    """Return the bytes that this process has allowed itself (memory_budget, set_per_process_memory_fraction)."""
    if _torch_patches.is_ours():
        from memopt.cuda import _allocator

        fraction = _C.allocator_fraction(device)
        budget = _allocator.budget()
        limits = [size for size in (budget, int(total * fraction) if fraction < 1 else 0) if size]
        return min(limits, default=None)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(total * fraction) if fraction < 1 else None


def _script() -> str:
    """Return the script's path as it was started, "" if it was not started from a file."""
    name = sys.argv[0] if sys.argv else ""
    return shlex.join([name, *sys.argv[1:]]) if name.endswith(".py") and os.path.exists(name) else ""


def _rank() -> str:
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return f"rank {rank} of {world}" if rank is not None and world not in (None, "1") else ""


# ---- fragmentation ---------------------------------------------------------------------------------------------------


_MOST_EVENTS = 100_000  # that are replayed: some 0.3 s, most of it in reading torch's history


@dataclass(frozen=True)
class Fragmentation:
    """Fragmentation that made a request fail.

    `largest_free`: the largest range that the allocator, or the driver, could have given. `pinned_by`: the blocks that
    share a segment with free ranges, and the holder of most of their bytes; `how`: the method that decided.
    """

    fragmented: bool
    largest_free: int
    free_in_cache: int
    free_on_device: int
    pinning_blocks: int
    pinned_by: str
    how: str

    def __str__(self) -> str:
        text = (
            f"{'yes' if self.fragmented else 'no'}. Largest free run {_C.format_size(self.largest_free)}, "
            f"free in cache {_C.format_size(self.free_in_cache)}"
        )
        if self.pinning_blocks and self.free_in_cache:
            text += f", pinned by {self.pinning_blocks} block{'s' * (self.pinning_blocks > 1)}"
            text += f" from {self.pinned_by}" if self.pinned_by else ""
        return f"{text} (by {self.how})"


def fragmentation_of(
    device: int, asked: int, free: int, blocks: AllocatorBlocks, names: list[tuple[int, str]]
) -> Fragmentation:
    """Decide whether the request failed because of fragmentation.

    `free`: free bytes of the device that this process may have; `names`: addresses of tensors and their holders.
    torch's recorded history is replayed on a device of as much memory. Without one, sizes decide: fragmented is a
    request that would fit into all free memory together.
    """
    largest = _largest_run(blocks)
    enough = blocks.cached + free >= asked
    how = "the sizes of free blocks"
    if enough:
        replayed = _fits_under_ours(device, asked, blocks.reserved + free)
        if replayed is not None:
            enough, how = replayed, "a replay of the recorded history"
    pinning = _pinning(blocks)
    return Fragmentation(
        enough,
        max(largest, free),
        blocks.cached,
        free,
        int(pinning.sum()),
        _largest_holder(blocks, pinning, names),
        how,
    )


def _largest_run(blocks: AllocatorBlocks) -> int:
    """Return the largest free range; free neighbours in one segment are one range."""
    if not len(blocks.size):
        return 0
    # A run ends with a live block, and where a segment ends.
    first = torch.ones_like(blocks.live)
    first[1:] = blocks.live[1:] | blocks.live[:-1] | (blocks.segment[1:] != blocks.segment[:-1])
    run = first.cumsum(0) - 1
    sums = torch.zeros(int(run[-1]) + 1, dtype=torch.int64, device="cpu")
    sums.index_add_(0, run, torch.where(blocks.live, 0, blocks.size))
    return int(sums.max())


def _pinning(blocks: AllocatorBlocks) -> torch.Tensor:
    """The live blocks that have free ones in their segment."""
    count = int(blocks.segment.max()) + 1 if len(blocks.segment) else 0
    free = torch.zeros(count, dtype=torch.bool, device="cpu")
    free[blocks.segment[~blocks.live]] = True
    return blocks.live & free[blocks.segment]


def _largest_holder(blocks: AllocatorBlocks, pinning: torch.Tensor, names: list[tuple[int, str]]) -> str:
    known = [(address, name) for address, name in names if name]
    where = blocks.containing(torch.tensor([at for at, _ in known], dtype=torch.int64, device="cpu"))
    sums: dict[str, int] = {}
    for block, (_, name) in zip(where.tolist(), known, strict=True):
        if block >= 0 and pinning[block]:
            sums[name] = sums.get(name, 0) + int(blocks.size[block])
    return max(sums, key=lambda name: sums[name], default="")


def _fits_under_ours(device: int, asked: int, capacity: int) -> bool | None:
    """Return whether the recorded requests and then this one complete on a device of that capacity under memopt's
    allocator.

    None where nothing is recorded, or too much to be read at once.
    """
    if not torch._C._cuda_isHistoryEnabled():
        return None
    snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot(None)
    history = snapshot["device_traces"][device]
    if not history or len(history) > _MOST_EVENTS:
        return None
    traces = [entries if i == device else [] for i, entries in enumerate(snapshot["device_traces"])]
    try:
        trace = snapshot_file.as_trace({**snapshot, "device_traces": traces})
        trace += f"a {1 << 60} {asked} 0 {device}\n".encode()
        run: Any = _C.replay(trace, capacity, 20, 0, True, True, False, False, device, False)
    except (ValueError, _C.Error):  # history that does not fit together, as where it was switched on and off
        return None
    return bool(run["completed"])


# ---- contents --------------------------------------------------------------------------------------------------------


def contents_of(
    device: str, capacity: int, blocks: AllocatorBlocks, category: torch.Tensor, tensors: list[LiveTensor]
) -> Recording:
    """Return a recording of the allocator's live blocks.

    Each has the line that binds the variable which leads to it, and that variable in the place of a module. `category`:
    of each block, live or not.
    """
    stacks: dict[Stack, int] = {(): 0}
    names: dict[str, int] = {"": 0}
    here = [tensor for tensor in tensors if tensor.device == device]
    at = blocks.containing(torch.tensor([one.address for one in here], dtype=torch.int64, device="cpu"))
    stack, name = torch.zeros_like(blocks.size), torch.zeros_like(blocks.size)
    for one, block in zip(here, at.tolist(), strict=True):
        if block >= 0 and not name[block]:  # the largest tensor in it: they come first
            stack[block] = stacks.setdefault(_stack_of(one), len(stacks))
            title = f"the graph of {one.name}" if one.only_in_graph and one.name else one.name
            name[block] = names.setdefault(any_element(title), len(names))
    live = blocks.live
    columns = dict.fromkeys(COLUMNS, torch.zeros_like(blocks.size[live]))
    columns |= {"born": columns["born"] - 1, "address": blocks.address[live], "size": blocks.size[live]}
    columns |= {"stack": stack[live], "module": name[live], "category": category[live]}
    return Recording(
        device=device,
        source="what was live when a request failed; the modules are the variables that hold it",
        columns=columns,
        times_us=torch.empty(0, dtype=torch.int64, device="cpu"),
        stacks=list(stacks),
        modules=list(names),
        reserved_events=torch.tensor([-1], device="cpu"),
        reserved_bytes=torch.tensor([blocks.reserved], device="cpu"),
        capacity=capacity,
        facts=facts(),
    )


def _stack_of(tensor: LiveTensor) -> Stack:
    _, _, line = tensor.where.rpartition(":")
    return (Frame(tensor.file, int(line), ""),) if tensor.file else ()
