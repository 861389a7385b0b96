"""The requests of one training workload, as a trace that `python -m memopt replay` and the tests can run.

    python benchmarks/record_trace.py gpt_varlen -o gpt_varlen.txt

The workload runs in this process on memopt's simulated device (blank: no memory of the host is used), under PyTorch's
own allocator, whose history is then written down, a line of decimal integers an event:

    a <id> <bytes> <stream>     a request, bytes as they were asked for, on a stream
    f <id> <stream>             its end, as the program asked for it; the stream is the one it was allocated on
    r <id> <stream>             record_stream: used on that stream too
    w <stream> <stream>         the second stream waits for all that the first was given so far
    s                           end of a step
    # …                         a comment

Ids count up from 0 and are not reused; streams count up from 0 in order of appearance. `w` is written where a wait is
issued; where the event was recorded earlier, it says more than the program did.

History knows requests, not steps, record_stream or waits. Each of those is marked in it by a request of a size that
no tensor has, made and given back at once, and taken out again here. The run ends with an error, and no trace, unless
all marks are found, every free has its request, PyTorch has seen the same peak of requested bytes, and no
wait between streams went unseen.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/record_trace.py` finds the memopt that was built in place
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    import torch  # never at the top: memopt.sim has to be activated before torch is imported

MARK = 1009  # bytes, a prime; the marks are counted, so that a tensor of this size is found out


@dataclass
class Trace:
    """Lines in the making. Live blocks by address, streams by CUDA's handle."""

    lines: list[str] = field(default_factory=list)
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> id, bytes
    streams: dict[int, int] = field(default_factory=dict)
    ids: int = 0
    live_bytes: int = 0
    live_peak: int = 0
    marks: int = 0  # bytes of marks inside live_bytes' peak: history sees them, the trace does not

    def stream(self, handle: int) -> int:
        return self.streams.setdefault(handle, len(self.streams))

    def allocate(self, address: int, size: int, stream: int) -> None:
        if address in self.live:
            raise RuntimeError(
                f"history allocates {address:#x} twice: torch was asked to remember too little"
            )
        self.live[address] = self.ids, size
        self.live_bytes += size
        self.live_peak = max(self.live_peak, self.live_bytes)
        self.lines.append(f"a {self.ids} {size} {self.stream(stream)}")
        self.ids += 1

    def free(self, address: int, stream: int) -> None:
        if address not in self.live:
            raise RuntimeError(f"history frees {address:#x}, which it has not allocated")
        number, size = self.live.pop(address)
        self.live_bytes -= size
        self.lines.append(f"f {number} {self.stream(stream)}")

    def record_stream(self, address: int, stream: int) -> None:
        if address in self.live:  # a tensor of no bytes has no block
            self.lines.append(f"r {self.live[address][0]} {self.stream(stream)}")

    def wait(self, first: int, second: int) -> None:
        if first != second:
            self.lines.append(f"w {self.stream(first)} {self.stream(second)}")


class Marks:
    """Events that history does not record, in their order; each leaves a mark in history."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    def mark(self, what: str, first: int = 0, second: int = 0) -> None:
        import torch

        self.events.append((what, first, second))
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(MARK))

    def watch(self) -> None:
        """From now on record_stream and waits between streams leave their marks, for the life of this process."""
        import torch

        record_stream, record, wait = (
            torch.Tensor.record_stream,
            torch.cuda.Event.record,
            torch.cuda.Event.wait,
        )
        recorded_on: dict[int, int] = {}  # by the event's id(); an event that is waited for is alive

        def marked_record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
            record_stream(tensor, stream)
            self.mark("r", tensor.untyped_storage().data_ptr(), stream.cuda_stream)

        def marked_record(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
            stream = stream or torch.cuda.current_stream()
            record(event, stream)
            recorded_on[id(event)] = stream.cuda_stream

        def marked_wait(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
            stream = stream or torch.cuda.current_stream()
            wait(event, stream)
            self.mark("w", recorded_on[id(event)], stream.cuda_stream)

        torch.Tensor.record_stream = marked_record_stream  # type: ignore[method-assign,assignment]
        torch.cuda.Event.record = marked_record  # type: ignore[method-assign]
        torch.cuda.Event.wait = marked_wait  # type: ignore[method-assign]


def convert(history: Iterable[dict[str, Any]], marks: list[tuple[str, int, int]]) -> Trace:
    """The trace of torch's history (memory_snapshot's "device_traces" of one device), marks replaced."""
    trace, waiting, marked = Trace(), iter(marks), set[int]()
    for entry in history:
        action, address, size = entry["action"], entry.get("addr", 0), entry["size"]
        if action == "alloc" and size == MARK:
            marked.add(address)
            trace.marks = max(trace.marks, trace.live_bytes + MARK)
            what, first, second = next(waiting, ("", 0, 0))
            if what == "s":
                trace.lines.append("s")
            elif what == "r":
                trace.record_stream(first, second)
            elif what == "w":
                trace.wait(first, second)
            else:
                raise RuntimeError(f"a tensor has {MARK} bytes, as only marks may: choose another MARK")
        elif action == "alloc":
            trace.allocate(address, size, entry["stream"])
        elif action == "free_requested":
            if address in marked:
                marked.remove(address)
            else:
                trace.free(address, entry["stream"])
    if next(waiting, None) is not None:
        raise RuntimeError("history has lost marks: torch was asked to remember too little")
    return trace


def record(name: str, scale: float = 1.0, steps: int | None = None) -> Trace:
    """Runs the workload and returns its trace. memopt.sim must be active, and nothing allocated yet."""
    from benchmarks.workloads import WORKLOADS

    return record_run(lambda step_done: WORKLOADS[name].run(step_done, scale, steps))


def record_run(run: Callable[[Callable[[int], None]], None]) -> Trace:
    """The same of any program that calls what it is given at the end of each step."""
    import torch

    from memopt import sim

    marks = Marks()
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1 << 40)
    marks.watch()
    run(lambda step: marks.mark("s"))
    gc.collect()
    torch.cuda.synchronize()
    (history,) = torch.cuda.memory._snapshot()["device_traces"]
    trace = convert(history, marks.events)

    stats = torch.cuda.memory_stats()
    seen = max(trace.live_peak, trace.marks)
    if seen != stats["requested_bytes.all.peak"] or trace.live_bytes != stats["requested_bytes.all.current"]:
        raise RuntimeError(
            f"history gives a peak of {seen} requested bytes and {trace.live_bytes} at the end, torch's statistics "
            f"{stats['requested_bytes.all.peak']} and {stats['requested_bytes.all.current']}"
        )
    waits, issued = sum(event[0] == "w" for event in marks.events), sim.calls("cudaStreamWaitEvent")
    if waits != issued:
        raise RuntimeError(
            f"the device saw {issued} waits between streams, and only {waits} of them were marked"
        )
    return trace


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("name", help="a workload of benchmarks/workloads.py")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--scale", type=float, default=1.0, help="of widths, depths and batches (1)")
    parser.add_argument("--steps", type=int, help="as many as the workload says")
    parser.add_argument("--memory", default="80GiB", help="of the simulated device (80GiB)")
    options = parser.parse_args(arguments)

    from memopt import sim

    sim.activate(memory=options.memory, blank=True)
    import torch

    from benchmarks.workloads import WORKLOADS

    torch.set_num_threads(1)
    if options.name not in WORKLOADS:
        parser.error(f"no workload {options.name!r}; there are {', '.join(WORKLOADS)}")
    trace = record(options.name, options.scale, options.steps)
    head = (
        f"# {options.name}, scale {options.scale:g}, torch {torch.__version__}, "
        f"live peak {trace.live_peak} bytes, {trace.lines.count('s')} steps, {trace.ids} requests\n"
    )
    options.output.write_text(head + "\n".join(trace.lines) + "\n")
    print(head[2:].strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
