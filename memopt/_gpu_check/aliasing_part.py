"""The part `aliasing`: memory at two addresses, which double_map needs, by what CUDA promises of it, and beyond.

CUDA promises ("Virtual Aliasing Support") that a write by one address is seen by the other once the operation that
writes is over. The allocator's own test covers one device (csrc/driver/alias_test.h). Here are two cases more:

- A peer reads one device's memory by its second address, behind an event of that device.
- A grid that programmatic dependent launch starts while its predecessor still writes reads by the second address.
  Before griddepcontrol.wait CUDA promises nothing: what it reads is a figure. Behind it an old value is wrong.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from memopt import _C
from memopt._gpu_check.driver_calls import (
    DEVICE,
    DISABLE_TIMING,
    READ_WRITE,
    Access,
    Driver,
    MemoryLocation,
)
from memopt._gpu_check.part_outcome import (
    Figures,
    PartOutcome,
    PartRequest,
    late_work,
    run_checks,
    use_memopts_allocator,
)

ROUNDS = 100
DEPENDENT_LAUNCH = (9, 0)  # the least compute capability that has it
WORDS = 64  # of 4 bytes, between two values: they share no line of a cache

COPY_PTX = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry memopt_copy_word(.param .u64 target, .param .u64 source)
{
    .reg .b64 %t, %s;
    .reg .b32 %v;
    ld.param.u64 %t, [target];
    ld.param.u64 %s, [source];
    ld.global.u32 %v, [%s];
    st.global.u32 [%t], %v;
    ret;
}
"""
# A thread each. data: two words, 256 bytes apart, at an address of the grid's own. flags, 256 bytes apart, at one
# address for both grids: the reader is resident; the writer has written; the reader has read. No wait is for ever.
# results: whether the reader was resident at the write; its reads before griddepcontrol.wait, behind it, and at first.
DEPENDENT_PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry memopt_dependent_write(.param .u64 data, .param .u64 flags, .param .u32 value)
{
    .reg .pred %p;
    .reg .b64 %d, %f;
    .reg .b32 %v, %seen, %left;
    griddepcontrol.launch_dependents;
    ld.param.u64 %d, [data];
    ld.param.u64 %f, [flags];
    ld.param.u32 %v, [value];
    mov.u32 %left, 10000;
RESIDENT:
    ld.volatile.global.u32 %seen, [%f];
    setp.eq.u32 %p, %seen, %v;
    @%p bra WRITE;
    nanosleep.u32 1000;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %p, %left, 0;
    @%p bra RESIDENT;
WRITE:
    st.volatile.global.u32 [%d], %v;
    st.volatile.global.u32 [%d + 256], %v;
    membar.gl;
    st.volatile.global.u32 [%f + 256], %v;
    mov.u32 %left, 10000;
READ:
    ld.volatile.global.u32 %seen, [%f + 512];
    setp.eq.u32 %p, %seen, %v;
    @%p bra DONE;
    nanosleep.u32 1000;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %p, %left, 0;
    @%p bra READ;
DONE:
    ret;
}
.visible .entry memopt_dependent_read(
    .param .u64 data, .param .u64 flags, .param .u64 results, .param .u32 value)
{
    .reg .pred %p;
    .reg .b64 %d, %f, %r;
    .reg .b32 %v, %seen, %left, %early, %late;
    ld.param.u64 %d, [data];
    ld.param.u64 %f, [flags];
    ld.param.u64 %r, [results];
    ld.param.u32 %v, [value];
    ld.volatile.global.u32 %early, [%d];
    st.global.u32 [%r + 12], %early;
    ld.volatile.global.u32 %seen, [%f + 256];
    setp.eq.u32 %p, %seen, %v;
    selp.u32 %seen, 0, 1, %p;
    st.global.u32 [%r], %seen;
    membar.gl;
    st.volatile.global.u32 [%f], %v;
    mov.u32 %left, 10000;
WRITTEN:
    ld.volatile.global.u32 %seen, [%f + 256];
    setp.eq.u32 %p, %seen, %v;
    @%p bra READ;
    nanosleep.u32 1000;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %p, %left, 0;
    @%p bra WRITTEN;
READ:
    membar.gl;
    ld.volatile.global.u32 %early, [%d];
    st.global.u32 [%r + 4], %early;
    membar.gl;
    st.volatile.global.u32 [%f + 512], %v;
    griddepcontrol.wait;
    ld.global.u32 %late, [%d + 256];
    st.global.u32 [%r + 8], %late;
    ret;
}
"""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the one of programmatic dependent launch."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6


def aliasing(request: PartRequest) -> PartOutcome:
    """The allocator's own test of each device, then peers and dependent launches."""
    import torch

    use_memopts_allocator()
    figures: Figures = {}
    incoherent = False
    with late_work(request.simulated), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is off is said here
        for number in range(torch.cuda.device_count()):
            torch.empty(1, device=number)
            found = _C.allocator_double_map(number)
            assert found is not None
            on, tested, why = found
            incoherent |= tested and not on
            figures[f"device {number}"] = (
                "on" if on else f"off: {why}" if tested else "no virtual memory management"
            )
    text = "; ".join(f"{name}: {value}" for name, value in figures.items() if value != "on")
    if text and not incoherent:
        return PartOutcome("not here", text, figures)
    if request.simulated:
        _emulate()
    more = run_checks({"dependent launch": dependent_launch, "peers": peers}, request, figures)
    if incoherent:
        return more._replace(status="wrong", text="; ".join(filter(None, [text, more.text])))
    return more


# ---- programmatic dependent launch -----------------------------------------------------------------------------------


def dependent_launch(request: PartRequest, figures: Figures) -> str:
    """Each device's grids that are resident while their predecessor writes: before and behind griddepcontrol.wait."""
    import torch

    wrong = []
    for number in range(torch.cuda.device_count()):
        name = f"dependent launch, device {number}"
        if torch.cuda.get_device_capability(number) < DEPENDENT_LAUNCH:
            figures[name] = "not here: compute capability below 9.0"
            continue
        resident, early, late = _dependent_rounds(number)
        figures[f"{name}, reader resident at the write"] = f"{resident} of {ROUNDS}"
        figures[f"{name}, then new values before griddepcontrol.wait (not promised)"] = early
        figures[f"{name}, new values behind griddepcontrol.wait"] = f"{late} of {ROUNDS}"
        if late != ROUNDS:
            wrong.append(
                f"{name}: {ROUNDS - late} of {ROUNDS} reads behind griddepcontrol.wait had an old value"
            )
    return "; ".join(wrong)


def _dependent_rounds(number: int) -> tuple[int, int, int]:
    """Rounds in which the reader was resident at the write; of these, reads with the new value; and all reads with the
    new value behind the wait."""
    with ExitStack() as stack:
        driver = stack.enter_context(_driver(number))
        first, second, size = stack.enter_context(_two_addresses(driver, [number]))
        module = stack.enter_context(_module(driver, DEPENDENT_PTX))
        write = _function(driver, module, "memopt_dependent_write")
        read = _function(driver, module, "memopt_dependent_read")
        stream = stack.enter_context(_stream(driver))
        flags, results = first + 4 * WORDS * 2, first + 4 * WORDS * 8
        driver("cuMemsetD8Async", ctypes.c_uint64(first), ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
        for value in range(1, ROUNDS + 1):
            of_write = (ctypes.c_uint64(first), ctypes.c_uint64(flags), ctypes.c_uint(value))
            of_read = (
                ctypes.c_uint64(second),
                ctypes.c_uint64(flags),
                ctypes.c_uint64(results + 16 * value),
                ctypes.c_uint(value),
            )
            _launch(driver, write, stream, of_write)
            _launch(driver, read, stream, of_read, dependent=True)
        found = _read(driver, stream, results, 4 * (ROUNDS + 1))
    rows = [(found[4 * value : 4 * value + 3], value) for value in range(1, ROUNDS + 1)]
    return (
        sum(resident for (resident, _, _), _ in rows),
        sum(early == value for (resident, early, _), value in rows if resident),
        sum(late == value for (_, _, late), value in rows),
    )


# ---- two devices -----------------------------------------------------------------------------------------------------


def peers(request: PartRequest, figures: Figures) -> str:
    """Values that a device wrote by one address of its memory, read by its peer by the other, behind an event."""
    import torch

    count, wrong, pairs = torch.cuda.device_count(), [], 0
    with _driver(0) as driver:
        reached = [
            (owner, peer)
            for owner in range(count)
            for peer in range(count)
            if owner != peer and driver.reaches(peer, owner)
        ]
    for owner, peer in reached:
        name = f"device {owner}'s memory by its second address, read by device {peer}"
        new = _peer_rounds(owner, peer)
        figures[name] = f"{new} of {2 * ROUNDS} reads had the new value"
        pairs += 1
        if new != 2 * ROUNDS:
            wrong.append(f"{name}: {2 * ROUNDS - new} of {2 * ROUNDS} reads had an old value")
    if not pairs:
        figures["peers"] = f"not here: {'one GPU' if count < 2 else 'no device reaches another'}"
    return "; ".join(wrong)


def _peer_rounds(owner: int, peer: int) -> int:
    """Reads with the new value: each round writes once, and the peer reads by a copy and by a kernel."""
    with ExitStack() as stack:
        there = stack.enter_context(_driver(peer))
        results, _, _ = stack.enter_context(_two_addresses(there, [peer]))
        module = stack.enter_context(_module(there, COPY_PTX))
        copy = _function(there, module, "memopt_copy_word")
        reader = stack.enter_context(_stream(there))
        read_event = stack.enter_context(_event(there))
        here = stack.enter_context(_driver(owner))
        first, second, _ = stack.enter_context(_two_addresses(here, [owner, peer]))
        writer = stack.enter_context(_stream(here))
        written = stack.enter_context(_event(here))
        for value in range(1, ROUNDS + 1):
            here.use()
            word = ctypes.c_uint(value)
            here("cuMemsetD32Async", ctypes.c_uint64(first), word, ctypes.c_size_t(1), writer)
            here("cuEventRecord", written, writer)
            there.use()
            there("cuStreamWaitEvent", reader, written, 0)
            target, source = ctypes.c_uint64(results + 8 * value), ctypes.c_uint64(second)
            there("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(4), reader)
            _launch(there, copy, reader, (ctypes.c_uint64(results + 8 * value + 4), source))
            there("cuEventRecord", read_event, reader)
            here.use()
            here("cuStreamWaitEvent", writer, read_event, 0)
        there.use()
        found = _read(there, reader, results + 8, 2 * ROUNDS)
        return sum(found[i] == 1 + i // 2 for i in range(2 * ROUNDS))


# ---- the driver ------------------------------------------------------------------------------------------------------


@contextmanager
def _driver(number: int) -> Iterator[Driver]:
    """The driver with a device's context, and in the end the context that was current before."""
    driver, before = Driver(number), ctypes.c_void_p()
    driver("cuCtxGetCurrent", ctypes.byref(before))
    driver.use()
    try:
        yield driver
    finally:
        driver("cuCtxSetCurrent", before)
        driver.close()


@contextmanager
def _two_addresses(driver: Driver, devices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The two addresses of a piece of a device's memory, which these devices may use, and its bytes."""
    size = driver.granularity(driver.device, 0)
    base, handle, none = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(0)
    properties = driver.properties()
    piece, both = ctypes.c_size_t(size), ctypes.c_size_t(2 * size)
    access = (Access * len(devices))(*(Access(MemoryLocation(DEVICE, d), READ_WRITE) for d in devices))
    with ExitStack() as stack:
        driver("cuMemAddressReserve", ctypes.byref(base), both, ctypes.c_size_t(0), none, none)
        stack.callback(driver, "cuMemAddressFree", base, both)
        driver("cuMemCreate", ctypes.byref(handle), piece, ctypes.byref(properties), none)
        stack.callback(driver, "cuMemRelease", handle)
        for address in (base.value, base.value + size):
            driver("cuMemMap", ctypes.c_uint64(address), piece, ctypes.c_size_t(0), handle, none)
            stack.callback(driver, "cuMemUnmap", ctypes.c_uint64(address), piece)
        driver("cuMemSetAccess", base, both, access, ctypes.c_size_t(len(devices)))
        yield base.value, base.value + size, size


@contextmanager
def _module(driver: Driver, ptx: bytes) -> Iterator[ctypes.c_void_p]:
    module = ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), ptx)
    try:
        yield module
    finally:
        driver.use()
        driver("cuModuleUnload", module)


def _function(driver: Driver, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
    function = ctypes.c_void_p()
    driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function


@contextmanager
def _stream(driver: Driver) -> Iterator[ctypes.c_void_p]:
    """A stream whose work is over when the block ends."""
    stream = ctypes.c_void_p()
    driver("cuStreamCreate", ctypes.byref(stream), 1)
    try:
        yield stream
    finally:
        driver.use()
        driver("cuStreamSynchronize", stream)
        driver("cuStreamDestroy_v2", stream)


@contextmanager
def _event(driver: Driver) -> Iterator[ctypes.c_void_p]:
    event = ctypes.c_void_p()
    driver("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)
    try:
        yield event
    finally:
        driver("cuEventDestroy_v2", event)


def _launch(
    driver: Driver,
    function: ctypes.c_void_p,
    stream: ctypes.c_void_p,
    arguments: Sequence[ctypes._SimpleCData[int]],
    dependent: bool = False,
) -> None:
    """A grid of one thread; dependent: it may start before its predecessor's end."""
    attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1)
    one = (ctypes.c_uint * 3)(1, 1, 1)
    config = LaunchConfig(one, one, 0, stream, ctypes.pointer(attribute), int(dependent))
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    driver("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)


def _read(driver: Driver, stream: ctypes.c_void_p, address: int, words: int) -> list[int]:
    found = (ctypes.c_uint * words)()
    driver("cuStreamSynchronize", stream)
    driver("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address), ctypes.c_size_t(4 * words))
    return list(found)


# ---- the kernels on the simulated device, which runs one grid after the other ----------------------------------------


def _word(argument: int, of: type[ctypes._SimpleCData[int]] = ctypes.c_uint64) -> int:
    return of.from_address(argument).value


def _copied(arguments: list[int], grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    target, source = map(_word, arguments)
    ctypes.memmove(target, source, 4)


def _written(arguments: list[int], grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    data, flags, value = *map(_word, arguments[:2]), _word(arguments[2], ctypes.c_uint)
    for address in (data, data + 4 * WORDS, flags + 4 * WORDS):
        ctypes.c_uint.from_address(address).value = value


def _dependently_read(arguments: list[int], grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    data, flags, results, value = *map(_word, arguments[:3]), _word(arguments[3], ctypes.c_uint)
    resident = ctypes.c_uint.from_address(flags + 4 * WORDS).value != value
    read = [ctypes.c_uint.from_address(data + 4 * WORDS * i).value for i in (0, 1)]
    (ctypes.c_uint * 3).from_address(results)[:] = [int(resident), *read]


def _emulate() -> None:
    from memopt import sim

    sim.emulate("memopt_copy_word", _copied, [8, 8])
    sim.emulate("memopt_dependent_write", _written, [8, 8, 4])
    sim.emulate("memopt_dependent_read", _dependently_read, [8, 8, 8, 4])
