"""The time of the driver's calls, by libcuda itself: virtual memory in handles of 2 MiB and larger ones, and events.

Virtual memory is timed by 1, 10, 100 and 1000 handles at a time, which decides how large a granule should be.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

HANDLE = 2 << 20
LARGE = 20 << 20  # about a granule of a card of 80 GB
COUNTS = (1, 10, 100, 1000)
ITSELF = "a call by ctypes itself"

# cuda.h's
PINNED, DEVICE, READ_WRITE, DISABLE_TIMING = 1, 1, 3, 2


class MemoryLocation(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", MemoryLocation),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", MemoryLocation), ("flags", ctypes.c_int))


class Driver:
    """libcuda's functions; one that fails is a RuntimeError with its name and CUDA's for the error."""

    def __init__(self, number: int = 0) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), number)
        self.device = device.value
        self.context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.use()

    def use(self) -> None:
        """Make the device's context this thread's."""
        self("cuCtxSetCurrent", self.context)

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

    def properties(self, device: int | None = None) -> Properties:
        return Properties(
            type=PINNED, location=MemoryLocation(DEVICE, self.device if device is None else device)
        )

    def attribute(self, number: int, device: int) -> int | None:
        """A CUdevice_attribute's value, None where the driver does not know it."""
        value = ctypes.c_int()
        code = self.library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return None if code else value.value

    def granularity(self, device: int, option: int) -> int:
        """Bytes of which mapped memory must be a multiple; option 1: of which it should be."""
        size, properties = ctypes.c_size_t(), self.properties(device)
        self("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), option)
        return size.value

    def reaches(self, device: int, peer: int) -> bool:
        value = ctypes.c_int()
        self("cuDeviceCanAccessPeer", ctypes.byref(value), device, peer)
        return bool(value.value)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def close(self) -> None:
        self("cuDevicePrimaryCtxRelease_v2", self.device)


Timer = Callable[[dict[str, list[float]], str, Callable[[], object]], None]


def timed(seconds: dict[str, list[float]], what: str, run: Callable[[], object]) -> None:
    start = time.perf_counter_ns()
    run()
    seconds.setdefault(what, []).append((time.perf_counter_ns() - start) * 1e-9)


def map_once(
    driver: Driver,
    count: int,
    whole: bool,
    seconds: dict[str, list[float]],
    nbytes: int = HANDLE,
    timed: Timer = timed,
) -> None:
    """Reserves, fills and empties a range of `count` handles of nbytes; whole: one set-access and one unmap for all of
    it, else one a handle. Whatever fails, nothing is left of it."""
    size, none, one = ctypes.c_size_t(nbytes), ctypes.c_uint64(0), ctypes.c_size_t(1)
    base, range_size = ctypes.c_uint64(), ctypes.c_size_t(nbytes * count)
    properties = ctypes.byref(driver.properties())
    access = ctypes.byref(Access(MemoryLocation(DEVICE, driver.device), READ_WRITE))
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
    addresses = [ctypes.c_uint64(base.value + nbytes * i) for i in range(count)]
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
            f"{error}, with {len(made)} of {count} handles of {nbytes >> 20} MiB: is the device free?"
        ) from error
    finally:
        timed(seconds, "cuMemAddressFree", lambda: driver("cuMemAddressFree", base, range_size))


def use_events(driver: Driver, count: int, seconds: dict[str, list[float]], timed: Timer = timed) -> None:
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


def microseconds(rounds: int, counts: tuple[int, ...] = COUNTS, nbytes: int = HANDLE) -> dict[str, float]:
    """The median time of each call in microseconds, a handle or an event, by how many are made at a time.

    nbytes: of a handle; for those that are not of 2 MiB the names have their size, and there are no events.
    """
    driver = Driver()
    found: dict[int, dict[str, list[float]]] = {count: {} for count in counts}
    free: list[int] = []
    try:
        for number in range(rounds + 1):
            for count in counts:
                seconds: dict[str, list[float]] = (
                    {} if number == 0 else found[count]
                )  # the first round warms up
                map_once(driver, count, False, seconds, nbytes)
                map_once(driver, count, True, seconds, nbytes)
                if nbytes == HANDLE:
                    use_events(driver, count, seconds)
                    timed(seconds, ITSELF, lambda count=count: [driver.version() for _ in range(count)])  # type: ignore[misc]
            free.append(driver.free_bytes())
    finally:
        driver.close()
    if shrinks(free):
        raise RuntimeError(f"{free[0] - free[-1]} bytes of the device are not free again: handles are left")
    of = "" if nbytes == HANDLE else f" of {nbytes >> 20} MiB"
    return {
        f"{name}, {count}{of} at a time": statistics.median(found[count][name])
        * 1e6
        / (1 if name.startswith("cuMemAddress") else count)
        for name in found[counts[0]]
        for count in counts
    }


def shrinks(free: list[int]) -> bool:
    """Return whether each round leaves less free than the last: a leak does, another process takes memory once."""
    return all(after < before for before, after in itertools.pairwise(free))


def first_touch(driver: Driver, share: float) -> dict[str, float]:
    """Seconds until a share of the free memory is mapped, by the handles' size."""
    found = {}
    for nbytes in (HANDLE, LARGE):
        count = max(1, int(driver.free_bytes() * share) // nbytes)
        seconds: dict[str, list[float]] = {}
        map_once(driver, count, True, seconds, nbytes)
        taken = sum(
            sum(times)
            for name, times in seconds.items()
            if not name.startswith(("cuMemUnmap", "cuMemRelease"))
        )
        found[f"first touch of {count * nbytes >> 20} MiB in handles of {nbytes >> 20} MiB, s"] = taken
    return found
