"""Device memory for whole training loops under each allocator: PyTorch's own, its expandable segments, memopt's.

The loops are those of workloads.py, on memopt's simulated device: PyTorch's real CUDA code and real allocators, kernels
that do nothing, and a device that counts every call and every byte. For each loop and allocator:

    live peak   the largest sum of requested bytes live at once; a property of the loop
    held        the most the device gave out, where it has plenty, over the live peak
    frontier    the smallest device on which the loop completes, over the live peak; by bisection to 0.1 %
    calls       driver calls a step, by function: in the last three steps with plenty, over all steps at the frontier
                and on a device of 1.03 times the live peak. moved = maps beyond the first of each handle; host_waits,
                as the allocator counts them, for queued work of the device

the host's CPU time for torch.empty and del, in turns between processes that each have one allocator,
and, with --only clock, a step's time on the device's virtual clock (csrc/simcuda/clock.h), beside native's with plenty:

    time of a step    from when the device will have done the first half of the steps to when it will have done
                      them all, over the steps in between; the device waits where the host, a step ahead, is late
    price of calls    what the calls of that half that change memory cost together, a step, were none of it hidden

A call costs what csrc/simcuda/prices.h says. A launch takes the same on the device whatever it computes: what the
loop's operations take by roofline.py, over its launches, and 2 us. Python's own time is not counted, so the host is
never late but for its calls; a program that is bound by the host would see the price of calls in full.

With plenty memopt holds its default of 2 % above the live peak; on a smaller device it is told by memory_budget= that
it may have all of it, which the others take anyway. The host is one step ahead of the device, as on a GPU: the work of
a step is over when the next has been queued. memopt maps a granule at two addresses, as on a GPU that passes its
self-test, or with --no-double-map at one, as on one that does not.

No context and no library workspaces but PyTorch's own cuBLAS ones are charged to the device. Each probe starts from a
device that holds nothing: a process serves another probe only when it has given back every byte, and memopt, which
learns from what it has seen, gets a new process each time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

PLENTY = 16_000 << 20  # bytes: a card of 16 GB, which no loop fills under any allocator
PRECISION = 0.001  # of the live peak
LAST_STEPS = 3
LAUNCH_NS = 2000  # of the device, for a kernel that does next to nothing; an estimate
CALLS = {
    "memory": (
        "cudaMalloc cudaFree cuMemAlloc cuMemFree cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease "
        "cuMemMap cuMemUnmap cuMemSetAccess"
    ).split(),
    "events": (
        "cudaEventRecord cudaEventQuery cudaEventSynchronize cudaStreamWaitEvent cudaStreamSynchronize "
        "cudaDeviceSynchronize cuEventRecord cuEventQuery cuEventSynchronize cuStreamWaitEvent cuStreamSynchronize "
        "cuCtxSynchronize"
    ).split(),
}


@dataclass(frozen=True)
class Allocator:
    """A contender: PyTorch's allocator with these settings, or memopt's."""

    settings: str = ""
    memopt: bool = False
    torch: tuple[int, int] = (2, 10)  # the first that knows these settings


ALLOCATORS = {
    "native": Allocator("expandable_segments:False"),
    "expandable": Allocator("expandable_segments:True"),
    "expandable 12 MB": Allocator("expandable_segments:True,large_segment_size_mb:12", torch=(2, 11)),
    "memopt": Allocator(memopt=True),
}
BEST_PEER = "expandable 12 MB"


# ---- the child: one allocator, one device, probes until told no more -------------------------------


def serve(allocator: Allocator, real: bool = False) -> None:
    """Answers requests, a line of JSON each, from standard input; whatever else prints goes to standard error.

    real: on the machine's GPU, where time_pairs and train are asked for alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from memopt import sim

    if not real:
        sim.activate(memory=PLENTY, blank=True)
    import torch

    torch.set_num_threads(1)
    given = not allocator.memopt
    for line in sys.stdin:
        request = json.loads(line)
        double_map = request.pop("double_map", None)
        if not given:
            import memopt

            memory = request.get("memory", PLENTY)
            mine = memopt.cuda.allocator(
                memory_budget=memory if memory < PLENTY else None, double_map=double_map
            )
            torch.cuda.memory.change_current_allocator(mine)
            given = True
        if "sizes" in request:
            answer = time_pairs(**request)
        elif "train" in request:
            answer = train(**request)
        elif "roofline" in request:
            answer = price_of_a_launch(**request)
        else:
            answer = probe(**request)
            give_everything_back()
        # memopt remembers sizes and peaks of what ran before, and would not start as a new process does.
        answer["reusable"] = not real and sim.stats()["bytes"] == 0 and not allocator.memopt
        print(json.dumps(answer), file=answers, flush=True)


def probe(
    name: str, memory: int, scale: float, steps: int | None, kernel: int | None = None
) -> dict[str, Any]:
    """Runs a loop on a device of so much memory, the host one step ahead. kernel: nanoseconds of a launch."""
    import torch

    from benchmarks.workloads import WORKLOADS
    from memopt import sim

    sim.set_memory(memory)
    sim.lazy(True)
    sim.reset_peak()
    native = torch.cuda.memory.get_allocator_backend() == "native"
    if native:
        torch.cuda.memory.reset_peak_memory_stats()
    if kernel is not None:
        sim.price("kernel", kernel)
    counts, ends = [count_calls()], [sim.clock()["device"]]
    ahead: list[torch.cuda.Event] = []

    def step_done(step: int) -> None:
        counts.append(count_calls())
        ends.append(sim.clock()["device"])
        ahead.append(torch.cuda.current_stream().record_event())
        if len(ahead) > 1:
            ahead.pop(0).synchronize()

    message = None
    start = time.perf_counter()
    try:
        WORKLOADS[name].run(step_done, scale, steps)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        message = str(error)
    done = len(counts) - 1
    tail = counts[max(0, done - LAST_STEPS)]
    half = done // 2
    return {
        "completed": message is None,
        "message": message,
        "steps": done,
        "seconds": time.perf_counter() - start,
        "held": sim.stats()["bytes_peak"],
        # memopt's allocator keeps its own count of requested bytes until torch's statistics are its own.
        "live_peak": torch.cuda.memory_stats()["requested_bytes.all.peak"] if native else memopt_peak(),
        "last_steps": difference(counts[-1], tail),
        "all_steps": difference(counts[-1], counts[0]),
        "step_ns": (ends[done] - ends[half]) / max(1, done - half),
        "calls_ns": price_of(difference(counts[-1], counts[half])) / max(1, done - half),
    }


def price_of(calls: dict[str, int]) -> float:
    from memopt import sim

    return sum(calls.get(name, 0) * sim.price(name) for name in CALLS["memory"])


def price_of_a_launch(roofline: str, scale: float, steps: int | None) -> dict[str, Any]:
    """Nanoseconds that a launch of this loop takes on the device, all of them alike."""
    from benchmarks.roofline import Roofline
    from benchmarks.workloads import WORKLOADS
    from memopt import sim

    launches = sim.stats()["launches"]
    with Roofline() as found:
        WORKLOADS[roofline].run(lambda step: None, scale, steps)
    launches = sim.stats()["launches"] - launches
    return {
        "kernel": round(found.seconds * 1e9 / launches) + LAUNCH_NS,
        "launches": launches,
        "seconds": found.seconds,
        "flops": found.flops,
        "bytes": found.bytes,
    }


def memopt_peak() -> int:
    import memopt

    return memopt.cuda.memory_stats()["peak_bytes"]


def host_waits() -> int:
    import torch

    if torch.cuda.memory.get_allocator_backend() == "native":
        return int(torch.cuda.memory_stats().get("num_sync_all_streams", 0))
    import memopt

    return memopt.cuda.memory_stats()["host_waits"]


def count_calls() -> dict[str, int]:
    from memopt import sim

    counts = {name: sim.calls(name) for names in CALLS.values() for name in names}
    counts["host_waits"] = host_waits()
    # A call that failed is a call, but made nothing: handles that were made = those that live + those released.
    return counts | {"created": sim.stats()["handles"] + counts["cuMemRelease"]}


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def give_everything_back() -> None:
    import torch

    from memopt import sim

    sim.lazy(False)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def time_pairs(sizes: list[int], calls: int) -> dict[str, Any]:
    """This thread's CPU seconds for `calls` turns, each of which makes a tensor of every size, in this order, and then
    drops them all. CPU time: nothing is waited for here, and what else the machine does is not the allocator's."""
    import torch

    device, empty, byte = torch.device("cuda:0"), torch.empty, torch.uint8

    def turn() -> None:
        held = [empty(size, dtype=byte, device=device) for size in sizes]
        del held

    turn()
    gc.disable()
    start = time.thread_time_ns()
    for _ in range(calls):
        turn()
    seconds = (time.thread_time_ns() - start) * 1e-9
    gc.enable()
    return {"seconds": seconds}


def train(train: str, scale: float, steps: int | None) -> dict[str, Any]:
    """Runs a loop on whatever device there is. Bytes as torch's statistics say, and seconds of each step, the device
    idle before and after."""
    import torch

    from benchmarks.workloads import WORKLOADS

    torch.cuda.reset_peak_memory_stats()
    ends = [time.perf_counter()]

    def step_done(step: int) -> None:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())

    WORKLOADS[train].run(step_done, scale, steps)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "live_peak": stats["requested_bytes.all.peak"],
        "held": stats["reserved_bytes.all.peak"],
        "seconds": [after - before for before, after in itertools.pairwise(ends)],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


class Child:
    """A process with one allocator; a new one where the last cannot be used again. real: on the machine's GPU."""

    def __init__(self, allocator: str, real: bool = False) -> None:
        self.allocator, self.real = allocator, real
        self.process: subprocess.Popen[str] | None = None

    def ask(self, keep: bool = False, **request: Any) -> dict[str, Any]:
        """`keep`: the process goes on to the next request whatever it remembers (timings want it warm)."""
        if self.process is None:
            settings = ALLOCATORS[self.allocator].settings
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", self.allocator, *(["--real"] if self.real else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
                | {
                    "TORCH_CPP_LOG_LEVEL": "ERROR"
                },  # running out is what is tried here; torch warns each time
            )
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            status = self.process.wait()
            self.process = None
            raise RuntimeError(f"{self.allocator} ended with status {status} at {request}")
        found: dict[str, Any] = json.loads(answer)
        if not found.pop("reusable") and not keep:
            self.close()
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


# ---- the parent ------------------------------------------------------------------------------------


def measure(
    child: Child, name: str, scale: float, steps: int | None, double_map: bool, live_peak: int
) -> dict[str, Any]:
    """Plenty, then bisection between the live peak, on which nothing can complete with less, and what was held."""

    def on(memory: int) -> dict[str, Any]:
        return child.ask(name=name, memory=memory, scale=scale, steps=steps, double_map=double_map)

    plenty = on(PLENTY)
    if not plenty["completed"]:
        raise RuntimeError(
            f"{name} under {child.allocator} ran out of {PLENTY >> 30} GiB: {plenty['message']}"
        )
    live_peak = live_peak or plenty["live_peak"]
    low, high = live_peak - 1, plenty["held"]
    frontier, probes = on(high), 1
    while not frontier["completed"]:  # a retry may wait for less than plenty did
        low, high = high, int(high * 1.02)
        frontier, probes = on(high), probes + 1
    refusal = None
    while high - low > PRECISION * live_peak:
        middle = (low + high) // 2
        found, probes = on(middle), probes + 1
        if found["completed"]:
            high, frontier = middle, found
        else:
            low, refusal = middle, found["message"]
    return {
        "live_peak": live_peak,
        "own_live_peak": plenty["live_peak"],
        "held": plenty["held"],
        "frontier": high,
        "plenty": calls_of(plenty),
        "at_frontier": calls_of(frontier),
        "at_103_percent": calls_of(on(int(1.03 * live_peak))),
        "refusal": refusal,
        "probes": probes,
        "seconds": plenty["seconds"],
    }


def calls_of(found: dict[str, Any]) -> dict[str, Any]:
    """Calls a step, the last steps' and those of all; None where the loop did not complete."""
    if not found["completed"]:
        return {"completed": False}
    last = min(LAST_STEPS, found["steps"])
    return {
        "completed": True,
        "last_steps": {name: count / last for name, count in found["last_steps"].items()},
        "all_steps": {name: count / found["steps"] for name, count in found["all_steps"].items()},
    }


def memory_calls(calls: dict[str, float]) -> float:
    # cudaMalloc and cuMemAlloc are two entries to the same: the device counts the one that was called.
    return sum(calls.get(name, 0) for name in CALLS["memory"])


def moved(calls: dict[str, float]) -> float:
    """Handles mapped again after their first map, a step; at least that: one made and never mapped, because the next
    could not be made, hides a move."""
    return max(0.0, calls.get("cuMemMap", 0) - calls.get("created", 0))


def waited(calls: dict[str, float]) -> float:
    return calls.get("host_waits", 0)


MODES = {"memopt": ("memopt", True), "memopt, one address": ("memopt", False)}  # of the clock's contenders


def clock_runs(options: argparse.Namespace, names: list[str], runs: Runs) -> dict[str, Any]:
    """{workload: {contender: what a launch takes, and a step with plenty and at 1.03 of the live peak}}."""
    contenders = {name: (name, True) for name in options.allocators if not ALLOCATORS[name].memopt}
    contenders |= {name: mode for name, mode in MODES.items() if mode[0] in options.allocators}
    children = {name: Child(allocator) for name, (allocator, _) in contenders.items()}
    prices = digest("csrc/simcuda/prices.h", "csrc/simcuda/device_clock.c", "benchmarks/roofline.py")
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    asked = {"scale": options.scale, "steps": options.steps}
    for name in names:
        first: dict[str, Any] = {}
        for contender, (allocator, double_map) in contenders.items():
            options.double_map = double_map  # part of the key
            key = f"clock {key_of(name, allocator, options)} {prices}"
            run = runs.get(key)
            if run is None:
                launch = first["launch"] if first else priced(name, asked)
                ask = functools.partial(
                    children[contender].ask,
                    name=name,
                    double_map=double_map,
                    kernel=launch["kernel"],
                    **asked,
                )
                plenty = ask(memory=PLENTY)
                live = first.get("live_peak", plenty["live_peak"])
                short = ask(memory=int(1.03 * live))
                run = {"key": key, "live_peak": live, "launch": launch}
                run |= {"plenty": timed(plenty), "at_103_percent": timed(short)}
                runs.put(run)
            first = first or run
            measured[name][contender] = run
            for where in ("plenty", "at_103_percent"):
                ratio = run[where]["step_ns"] / first["plenty"]["step_ns"]
                beside = f"{ratio:.4f} of native's" if run[where]["completed"] else "none: out of memory"
                say(f"{name:24}{contender:22}{where:16}a step {beside}")
    for child in children.values():
        child.close()
    return measured


def priced(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    child = Child("native")
    found = child.ask(roofline=name, **asked)
    child.close()
    return found


def timed(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("completed", "step_ns", "calls_ns")}


def report_clock(report: harness.Report, measured: dict[str, Any]) -> None:
    shown = (("plenty", "with no limit", 1.01), ("at_103_percent", "at 1.03 of the live peak", 1.03))
    for figure, unit, title in (
        ("step_ns", "ms", "virtual time of a step"),
        ("calls_ns", "ms", "price of memory calls a step"),
    ):
        for where, said, _ in shown:
            for name, by_contender in measured.items():
                values = {
                    contender: run[where][figure] * 1e-6
                    for contender, run in by_contender.items()
                    if run[where]["completed"]
                }
                if values:
                    report.record(f"{title} {said}, {name}", values, unit=unit, peer=next(iter(values)))
    for contender in MODES:
        for where, said, limit in shown:
            for name, by_contender in measured.items():
                run = by_contender.get(contender)
                if run is None or "native" not in by_contender or not run[where]["completed"]:
                    continue
                ratio = run[where]["step_ns"] / by_contender["native"]["plenty"]["step_ns"]
                case = f"goal: a step's time {said}, {contender}, {name}"
                report.record(
                    case, {"limit": limit, contender: ratio}, unit="of native's", peer="limit", goal=1.0
                )


class Runs:
    """With --resume: finished measurements, on disk a line each, and those of the last result. One counts while torch,
    the workloads and, for memopt, the extension are what it was made with: its key says."""

    def __init__(self, log: Path, result: Path, resume: bool) -> None:
        self.log = log if resume else None
        found: list[dict[str, Any]] = []
        if resume and result.exists():
            runs = json.loads(result.read_text())["notes"]["runs"]
            found += [run for by_allocator in runs.values() for run in by_allocator.values()]
        if resume and log.exists():
            whole = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += map(json.loads, whole)
            log.write_text("".join(whole))  # the last line may have been cut off while it was written
        self.found = {run["key"]: run for run in found}

    def get(self, key: str) -> dict[str, Any] | None:
        return self.found.get(key)

    def put(self, run: dict[str, Any]) -> None:
        self.found[run["key"]] = run
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a") as file:
                file.write(json.dumps(run) + "\n")
                file.flush()
                os.fsync(file.fileno())


def digest(*patterns: str) -> str:
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def key_of(name: str, allocator: str, options: argparse.Namespace) -> str:
    import torch

    parts = [name, allocator, f"scale={options.scale}", f"steps={options.steps}"]
    parts += [torch.__version__, digest("memopt/_gpu_check/workloads.py")]
    if ALLOCATORS[allocator].memopt:
        parts += [digest("memopt/_C.abi3.so", "memopt/**/*.py"), f"double_map={options.double_map}"]
    return " ".join(parts)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def all_runs(
    options: argparse.Namespace, names: list[str], allocators: list[str], runs: Runs
) -> dict[str, Any]:
    """{workload: {allocator: what measure() returns}}; the first allocator's live peak is everyone's."""
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    for allocator in allocators:
        child = Child(allocator)
        for name in names:
            key = key_of(name, allocator, options)
            run = runs.get(key)
            if run is None:
                shared = next(iter(measured[name].values()), {}).get("live_peak", 0)
                found = measure(child, name, options.scale, options.steps, options.double_map, shared)
                run = {"key": key, **found}
                runs.put(run)
            measured[name][allocator] = run
            live = run["live_peak"]
            say(
                f"{name:24}{allocator:18}live {live / 2**30:6.3f} GiB   held {run['held'] / live:.4f}   "
                f"frontier {run['frontier'] / live:.4f}"
            )
        child.close()
    return measured


def report_memory(report: harness.Report, measured: dict[str, Any], peer: str) -> None:
    for title, figure in (
        ("frontier", lambda run: run["frontier"] / run["live_peak"]),
        ("held with no limit", lambda run: run["held"] / run["live_peak"]),
    ):
        for name, by_allocator in measured.items():
            values = {allocator: figure(run) for allocator, run in by_allocator.items()}
            report.record(f"{title}, {name}", values, unit="of the live peak", peer=peer)
        allocators = next(iter(measured.values()))
        mean = {
            allocator: statistics.mean(figure(by_allocator[allocator]) for by_allocator in measured.values())
            for allocator in allocators
        }
        report.record(f"{title}, mean", mean, unit="of the live peak", peer=peer)
    for title, where, which, count in (
        ("memory calls a step, last steps, no limit", "plenty", "last_steps", memory_calls),
        ("memory calls a step at the frontier", "at_frontier", "all_steps", memory_calls),
        ("memory calls a step, last steps, at the frontier", "at_frontier", "last_steps", memory_calls),
        ("granules moved a step at the frontier", "at_frontier", "all_steps", moved),
        ("granules moved a step at 1.03 of the live peak", "at_103_percent", "all_steps", moved),
        ("host waits a step, last steps, at 1.03 of the live peak", "at_103_percent", "last_steps", waited),
    ):
        for name, by_allocator in measured.items():
            values = {
                allocator: count(run[where][which])
                for allocator, run in by_allocator.items()
                if run[where]["completed"]
            }
            if values:
                report.record(f"{title}, {name}", values, unit="calls", peer=next(iter(values)))


def report_goals(report: harness.Report, measured: dict[str, Any], double_map: bool) -> None:
    """The promises of memopt, each beside its limit. At one address only the mean of what is held has one."""

    def within(case: str, limit: float, value: float, unit: str = "of the live peak") -> None:
        report.record(f"goal: {case}", {"limit": limit, "memopt": value}, unit=unit, peer="limit", goal=1.0)

    frontiers, helds, excess = [], [], []
    for name, by_allocator in measured.items():
        run, live = by_allocator["memopt"], by_allocator["memopt"]["live_peak"]
        # A live peak under 1 GiB is measured by 16 MiB instead of the ratio.
        allowed = 1.02 if live >= 1 << 30 else 1 + (16 << 20) / live
        within(f"frontier, {name}", allowed, run["frontier"] / live)
        frontiers += [run["frontier"] / live] if live >= 1 << 30 else []
        helds += [run["held"] / live] if live >= 1 << 30 else []
        if double_map:
            within(f"held, {name}", 1.025 if live >= 1 << 30 else 1 + (16 << 20) / live, run["held"] / live)
        within(
            f"moved at the frontier, {name}", 300, moved(run["at_frontier"]["all_steps"]), "granules a step"
        )
        if run["at_103_percent"]["completed"]:
            within(f"moved at 1.03, {name}", 30, moved(run["at_103_percent"]["all_steps"]), "granules a step")
        if BEST_PEER in by_allocator:
            excess.append(run["frontier"] / by_allocator[BEST_PEER]["frontier"])
    if frontiers:
        within("mean frontier", 1.01, statistics.mean(frontiers))
        within("mean held", 1.02 if double_map else 1.06, statistics.mean(helds))
    if excess:
        within(f"largest frontier beside {BEST_PEER}'s", 1.0, max(excess), f"of {BEST_PEER}'s")


# ---- the host's time -------------------------------------------------------------------------------


def report_host_time(
    report: harness.Report,
    allocators: list[str],
    *,
    goal: float | None = None,
    real: bool = False,
    seed: int = 1,
) -> None:
    """torch.empty and del from Python, the allocators in turns, each in a process of its own that stays warm."""
    draw = random.Random(seed)
    cases = {
        "4 KiB": [4 << 10],
        "8 MiB": [8 << 20],
        "64 mixed sizes live at once": [int(512 * 2 ** draw.uniform(0, 15)) for _ in range(64)],
    }
    children = {allocator: Child(allocator, real) for allocator in allocators}

    class Turn:
        def __init__(self, child: Child, sizes: list[int]) -> None:
            self.child, self.sizes = child, sizes

        def __call__(self) -> None:
            raise AssertionError("timed in its own process, by the clock")

    def cpu_time_of_its_process(run: Any, calls: int) -> float:
        seconds: float = run.child.ask(keep=True, sizes=run.sizes, calls=calls)["seconds"]
        return seconds

    for case, sizes in cases.items():
        report.compare(
            f"torch.empty and del, {case}",
            {allocator: Turn(child, sizes) for allocator, child in children.items()},
            peer=allocators[0],
            clock=cpu_time_of_its_process,
            goal=goal,
        )
    for child in children.values():
        child.close()


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(ALLOCATORS[sys.argv[2]], real="--real" in sys.argv)
        return 0
    parser = harness.parser(__doc__)
    parser.add_argument("--workloads", nargs="+", help="by name; all nine")
    parser.add_argument(
        "--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS), help="all four"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads (1)")
    parser.add_argument("--steps", type=int, help="as many as each workload says")
    parser.add_argument(
        "--no-double-map",
        dest="double_map",
        action="store_false",
        help="memopt's allocator maps its memory at one address only",
    )
    parser.add_argument(
        "--only",
        choices=["memory", "time", "clock"],
        help="one part of it; both modes' virtual time, which no other part has, is a result of its own",
    )
    options = parser.parse_args()
    if options.cuda:
        parser.error("this measures on the simulated device; bench_alloc_gpu.py is the one for a GPU")
    if options.quick:
        options.scale, options.steps = min(options.scale, 0.25), options.steps or 5

    from memopt import sim

    sim.activate(memory=PLENTY, blank=True)  # for the versions of this torch; the measuring is the children's
    from benchmarks.workloads import WORKLOADS

    names = options.workloads or list(WORKLOADS)
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    mode = ".clock" if options.only == "clock" else "" if options.double_map else ".no_double_map"
    report = harness.Report(f"bench_alloc_train{mode}", options)
    report.note("scale", options.scale)
    report.note("steps", options.steps or {name: WORKLOADS[name].steps for name in names})
    report.note("precision of the frontier", PRECISION)
    report.note("settings", {name: ALLOCATORS[name].settings for name in options.allocators})
    if options.only == "clock":
        result = options.output or harness.RESULTS / f"{report.name}.json"
        runs = Runs(harness.RESULTS / "rounds" / f"{report.name}.runs.jsonl", result, options.resume)
        timings = clock_runs(options, names, runs)
        report.note("runs", timings)
        report_clock(report, timings)
        return report.finish()
    if options.only != "time":
        result = options.output or harness.RESULTS / f"{report.name}.json"
        runs = Runs(harness.RESULTS / "rounds" / f"{report.name}.runs.jsonl", result, options.resume)
        measured = all_runs(options, names, options.allocators, runs)
        report.note("runs", measured)
        peer = BEST_PEER if BEST_PEER in options.allocators else options.allocators[0]
        report_memory(report, measured, peer)
        if "memopt" in options.allocators:
            report_goals(report, measured, options.double_map)
    if options.only != "memory" and len(options.allocators) > 1:
        report_host_time(report, options.allocators)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
