"""The allocators on a real GPU, and what each call of the driver's virtual memory costs there.

    calls       cuMemAddressReserve, Create, Map, SetAccess, Unmap, Release and AddressFree for 1, 10, 100 and 1000
                handles of 2 MiB, by libcuda itself: what decides how large a granule should be. And events.
    python      the host's CPU time for torch.empty and del: PyTorch's own allocator, its expandable segments, memopt
    training    the loops of workloads.py: memory held over the live peak, and the time of a step

Without a GPU it says so and measures nothing: exit status 2. --simulated runs all of it on memopt's simulated device,
to test this script: its times are those of functions that do next to nothing, its result says that it is simulated,
and it is never written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from benchmarks.bench_alloc_train import Child, report_host_time, say  # noqa: E402

HANDLE = 2 << 20
ITSELF = "cuDriverGetVersion: calling by ctypes itself"
COUNTS = (1, 10, 100, 1000)
ALLOCATORS = ("native", "expandable", "memopt")
STATUS_NO_GPU = 2

# cuda.h's
PINNED, DEVICE, READ_WRITE, DISABLE_TIMING = 1, 1, 3, 2


class NoGPU(Exception):
    """Why there is nothing to measure."""


# ---- the driver, by ctypes -------------------------------------------------------------------------


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """libcuda's functions; one that fails is a RuntimeError with its name and CUDA's for the error."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoGPU(f"no NVIDIA driver ({error})") from error
        count = ctypes.c_int()
        try:
            self("cuInit", 0)
            self("cuDeviceGetCount", ctypes.byref(count))
        except RuntimeError as error:
            raise NoGPU(f"the driver finds no GPU ({error})") from error
        if not count.value:
            raise NoGPU("the driver finds no GPU (it counts 0)")
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self.device = device.value
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            known = self.library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
            raise RuntimeError(f"{name}: {text.value.decode() if known and text.value else f'error {code}'}")

    def version(self) -> int:
        version = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(version))
        return version.value

    def granularity(self) -> int:
        size = ctypes.c_size_t()
        self("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self.properties()), 0)
        return size.value

    def properties(self) -> Properties:
        return Properties(type=PINNED, location=Location(DEVICE, self.device))

    def close(self) -> None:
        self("cuDevicePrimaryCtxRelease_v2", self.device)


def timed(seconds: dict[str, list[float]], what: str, run: Callable[[], object]) -> None:
    start = time.perf_counter_ns()
    run()
    seconds.setdefault(what, []).append((time.perf_counter_ns() - start) * 1e-9)


def map_once(driver: Driver, count: int, whole: bool, seconds: dict[str, list[float]]) -> None:
    """Reserves, fills and empties a range of `count` handles; whole: one set-access and one unmap for all of it, else
    one a handle. Whatever fails, nothing is left of it."""
    size, none, one = ctypes.c_size_t(HANDLE), ctypes.c_uint64(0), ctypes.c_size_t(1)
    base, range_size = ctypes.c_uint64(), ctypes.c_size_t(HANDLE * count)
    properties = ctypes.byref(driver.properties())
    access = ctypes.byref(Access(Location(DEVICE, driver.device), READ_WRITE))
    made: list[ctypes.c_uint64] = []
    mapped: list[tuple[ctypes.c_uint64, ctypes.c_size_t]] = []

    def create() -> None:
        for _ in range(count):
            handle = ctypes.c_uint64()
            driver("cuMemCreate", ctypes.byref(handle), size, properties, none)
            made.append(handle)

    def put() -> None:
        for address, handle in zip(addresses, made, strict=True):
            driver("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
            mapped.append((address, size))

    def grant() -> None:
        for piece in [(base, range_size)] if whole else mapped:
            driver("cuMemSetAccess", *piece, access, one)

    def unmap() -> None:
        if whole:
            driver("cuMemUnmap", base, range_size)
            mapped.clear()
        while mapped:
            driver("cuMemUnmap", *mapped[-1])
            mapped.pop()

    def release() -> None:
        while made:
            driver("cuMemRelease", made[-1])
            made.pop()

    timed(seconds, "cuMemAddressReserve", lambda: driver(
        "cuMemAddressReserve", ctypes.byref(base), range_size, ctypes.c_size_t(0), none, none))  # fmt: skip
    addresses = [ctypes.c_uint64(base.value + HANDLE * i) for i in range(count)]
    suffix = ", one for the range" if whole else ""
    try:
        timed(seconds, "cuMemCreate", create)
        timed(seconds, "cuMemMap", put)
        timed(seconds, "cuMemSetAccess" + suffix, grant)
        timed(seconds, "cuMemUnmap" + suffix, unmap)
        timed(seconds, "cuMemRelease", release)
    except RuntimeError as error:
        for piece in mapped:
            driver.library.cuMemUnmap(*piece)
        for handle in made:
            driver.library.cuMemRelease(handle)
        raise RuntimeError(
            f"{error}, with {len(made)} of {count} handles of 2 MiB: is the device free?"
        ) from error
    finally:
        timed(seconds, "cuMemAddressFree", lambda: driver("cuMemAddressFree", base, range_size))


def use_events(driver: Driver, count: int, seconds: dict[str, list[float]]) -> None:
    """`count` events on an idle stream, without timing, as an allocator's are."""
    events = [ctypes.c_void_p() for _ in range(count)]
    streams = [ctypes.c_void_p() for _ in range(2)]
    for stream in streams:
        driver("cuStreamCreate", ctypes.byref(stream), 1)
    steps: dict[str, Callable[[ctypes.c_void_p], None]] = {
        "cuEventCreate": lambda e: driver("cuEventCreate", ctypes.byref(e), DISABLE_TIMING),
        "cuEventRecord": lambda e: driver("cuEventRecord", e, streams[0]),
        "cuStreamWaitEvent": lambda e: driver("cuStreamWaitEvent", streams[1], e, 0),
        "cuEventSynchronize": lambda e: driver("cuEventSynchronize", e),
        "cuEventQuery": lambda e: driver("cuEventQuery", e),
        "cuEventDestroy": lambda e: driver("cuEventDestroy_v2", e),
    }
    for name, step in steps.items():
        timed(seconds, name, lambda step=step: [step(event) for event in events])  # type: ignore[misc]
    for stream in streams:
        driver("cuStreamDestroy_v2", stream)


def report_calls(report: harness.Report, driver: Driver) -> None:
    """Microseconds a handle (an event) of each call, the median round; the ratio is that to one handle at a time."""
    found: dict[int, dict[str, list[float]]] = {count: {} for count in COUNTS}
    for number in range(report.rounds + 1):
        for count in COUNTS:
            seconds: dict[str, list[float]] = {} if number == 0 else found[count]  # the first round warms up
            map_once(driver, count, False, seconds)
            map_once(driver, count, True, seconds)
            use_events(driver, count, seconds)
            timed(seconds, ITSELF, lambda count=count: [driver.version() for _ in range(count)])  # type: ignore[misc]
    for name in found[COUNTS[0]]:
        one_call = name.startswith("cuMemAddress")
        values = {
            f"{count} at a time": statistics.median(found[count][name]) * 1e6 / (1 if one_call else count)
            for count in COUNTS
        }
        unit = "µs a call" if one_call else "µs an event" if "Event" in name else "µs each"
        report.record(name, values, unit=unit, peer="1 at a time")
    report.note("seconds of each round", found)


# ---- training --------------------------------------------------------------------------------------


def report_training(report: harness.Report, names: list[str], options: argparse.Namespace) -> None:
    measured: dict[str, dict[str, Any]] = {name: {} for name in names}
    for allocator in options.allocators:
        for name in names:
            child = Child(allocator, real=not options.simulated)
            measured[name][allocator] = found = child.ask(
                train=name, scale=options.scale, steps=options.steps
            )
            child.close()
            say(f"{name:24}{allocator:14}held {found['held'] / found['live_peak']:.4f}")
    report.note("training", measured)
    for name, by_allocator in measured.items():
        report.record(
            f"held, {name}",
            {allocator: found["held"] / found["live_peak"] for allocator, found in by_allocator.items()},
            unit="of the live peak",
            peer=options.allocators[0],
        )
        # The first half of the steps warms up: libraries load, kernels are compiled, memory is mapped.
        report.record(
            f"a step, {name}",
            {
                allocator: statistics.median(found["seconds"][len(found["seconds"]) // 2 :]) * 1e3
                for allocator, found in by_allocator.items()
            },
            unit="ms, median of the later half",
            peer=options.allocators[0],
        )


def refuse_results(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A simulated device's times are nobody's result."""
    if options.output and options.output.resolve().is_relative_to(harness.RESULTS):
        parser.error(f"--simulated measures no GPU: its result is not for {harness.RESULTS.name}/")
    if not options.output and not options.quick:
        parser.error("--simulated measures no GPU, and keeps no result: give -o FILE, or --quick")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--simulated", action="store_true", help="on memopt's simulated device: tests this script"
    )
    parser.add_argument("--only", choices=["calls", "python", "training"], help="one third of it")
    parser.add_argument(
        "--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS), help="all three"
    )
    parser.add_argument("--workloads", nargs="+", help="by name; all nine")
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads (1)")
    parser.add_argument("--steps", type=int, help="as many as each workload says")
    options = parser.parse_args()
    if options.simulated:
        refuse_results(parser, options)
        from memopt import sim

        sim.activate(memory="64GiB", blank=True)
    if options.quick:
        options.scale, options.steps = min(options.scale, 0.25), options.steps or 6
    try:
        driver = Driver()
    except NoGPU as why:
        print(
            f"bench_alloc_gpu: {why}. It measures a real GPU and nothing else; bench_alloc_train.py and"
            " bench_alloc_core.py are what can be measured without one.",
            file=sys.stderr,
        )
        return STATUS_NO_GPU

    options.cuda = True  # the device and its driver are part of what is reported
    report = harness.Report("bench_alloc_gpu", options)
    report.note("simulated", options.simulated)
    report.note("driver's CUDA version", driver.version())
    report.note("granularity", driver.granularity())
    if options.only in (None, "calls"):
        report_calls(report, driver)
    if options.only in (None, "python"):
        report_host_time(report, options.allocators, real=not options.simulated)
    if options.only in (None, "training"):
        from benchmarks.workloads import WORKLOADS

        unknown = sorted(set(options.workloads or ()) - set(WORKLOADS))
        if unknown:
            parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
        report_training(report, options.workloads or list(WORKLOADS), options)
    driver.close()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
