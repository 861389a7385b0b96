"""Control of the simulated device: the functions of csrc/simcuda/control.h by ctypes. All need activate() first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from memopt._runtime import arguments

_library: ctypes.CDLL | None = None
_bodies: list[object] = []  # host bodies of kernels: the device keeps their addresses for ever

# The fields of simcuda_live and simcuda_counts in csrc/simcuda/control.h, in their order.
_LIVE = (
    "bytes handles mappings allocations streams events graphs modules pending reservations reserved_bytes"
    " host_allocations host_bytes"
).split()
_COUNTS = (
    "memory bytes_peak host_bytes_peak pool_reserved pool_used launches copies copied_bytes memsets syncs ooms faults"
    " to_device to_host side_to_device side_to_host"
).split()
_NOT_IMPLEMENTED = 2**64 - 1

# args: addresses of the argument values; grid and block: three numbers each.
Body = Callable[[list[int], tuple[int, ...], tuple[int, ...]], None]


class _Counts(ctypes.Structure):
    """The C structure simcuda_counts, with its simcuda_live inlined."""

    _fields_ = [(name, ctypes.c_uint64) for name in (*_LIVE, *_COUNTS)]


_BODY = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint)
)


def declare(library: ctypes.CDLL) -> None:
    """Declare the functions of sim_cuda.so to ctypes."""
    functions = {
        "simcuda_activate": (ctypes.c_char_p, [ctypes.c_char_p]),
        "simcuda_stats": (ctypes.c_int, [ctypes.c_int, ctypes.POINTER(_Counts)]),
        "simcuda_reset_peak": (ctypes.c_int, [ctypes.c_int]),
        "simcuda_set_memory": (ctypes.c_int, [ctypes.c_int, ctypes.c_size_t]),
        "simcuda_calls": (ctypes.c_uint64, [ctypes.c_char_p]),
        "simcuda_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]),
        "simcuda_fail_clear": (None, []),
        "simcuda_set_lazy": (None, [ctypes.c_int]),
        "simcuda_progress": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int]),
        "simcuda_clock": (
            ctypes.c_int,
            [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)],
        ),
        "simcuda_price": (ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64]),
        "simcuda_emulate": (
            ctypes.c_int,
            [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)],
        ),
        "simcuda_setting_reads": (ctypes.c_uint64, [ctypes.c_char_p]),
        "simcuda_missing": (ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]),
    }
    for name, (result, takes) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, takes


def attach(library: ctypes.CDLL) -> None:
    """Make this module use that library, which is declared and activated."""
    global _library
    _library = library


def device_library() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(
            "the simulated device is not active: call memopt.sim.activate() before importing torch"
        )
    return _library


def stats(device: int = 0) -> dict[str, int]:
    """Return a device's state and its counters since activation, by name.

    The keys are the fields of simcuda_live and simcuda_counts in csrc/simcuda/control.h, which explains them: "bytes",
    "bytes_peak", "launches", "ooms", and others.

    Args:
        device: Index of the device.

    Raises:
        ValueError: There is no such device.
    """
    counts = _Counts()
    if device_library().simcuda_stats(device, ctypes.byref(counts)) != 0:
        raise ValueError(f"no simulated device {device}")
    return {name: getattr(counts, name) for name in (*_LIVE, *_COUNTS)}


def reset_peak(device: int = 0) -> None:
    """Set the peak of device bytes to the bytes held now.

    Args:
        device: Index of the device.

    Raises:
        ValueError: There is no such device.
    """
    if device_library().simcuda_reset_peak(device) != 0:
        raise ValueError(f"no simulated device {device}")


def set_memory(memory: int | str, device: int = 0) -> None:
    """Change the memory that a device reports. Less than is held leaves none free, as if another process had the rest.

    Args:
        memory: Bytes ("8GiB" too), at most those of the activation.
        device: Index of the device.

    Raises:
        ValueError: There is no such device, or it was activated with less memory.
    """
    if device_library().simcuda_set_memory(device, arguments.size(memory, "memory")) != 0:
        raise ValueError(
            f"device {device} cannot have {memory!r} of memory: the device does not exist, or was activated with less"
        )


def calls(name: str) -> int:
    """Return the number of calls so far of a driver or runtime function.

    Args:
        name: CUDA's name of the function: "cuMemMap", "cudaMalloc".

    Raises:
        ValueError: The simulated device does not implement such a function.
    """
    count: int = device_library().simcuda_calls(name.encode())
    if count == _NOT_IMPLEMENTED:
        raise ValueError(f"{name!r} is not a function that the simulated device implements")
    return count


def fail(name: str, *, after: int = 0, count: int = 1, code: int = 0) -> None:
    """Make calls of a driver or runtime function fail.

    Args:
        name: CUDA's name of the function.
        after: Number of further calls that succeed first.
        count: Number of calls that then fail.
        code: The CUDA error; 0 for the function's natural error (out of memory for allocating functions).

    Raises:
        ValueError: The simulated device does not implement such a function, or a number is negative.
    """
    if after < 0 or count < 0:
        raise ValueError(f"after and count must be numbers of calls, not {after} and {count}")
    if device_library().simcuda_fail(name.encode(), after, count, code) != 0:
        raise ValueError(f"{name!r} is not a function that the simulated device implements")


def fail_clear() -> None:
    """Undo every fail()."""
    device_library().simcuda_fail_clear()


def lazy(on: bool) -> None:
    """Switch between lazy and immediate completion of device work.

    Args:
        on: True: work completes only when something waits for it, or by progress(). False: all pending work runs now,
            and further work at once.
    """
    device_library().simcuda_set_lazy(int(on))


def progress(n: int = -1, stream: int | None = None) -> int:
    """Run pending operations of the device.

    Args:
        n: Most operations to run, all if negative.
        stream: Handle of a stream (torch.cuda.Stream.cuda_stream; 1 is the legacy stream); None for all streams.

    Returns:
        The number of operations that ran.
    """
    ran: int = device_library().simcuda_progress(stream, n)
    return ran


def clock(device: int = 0) -> dict[str, int]:
    """Return the virtual time: what the program would have taken, had each call and each kernel its stated price.

    The prices and their sources are in csrc/simcuda/prices.h, the rules in clock.h. No clock of the machine is read, so
    the same program takes the same time in every run. Work that is done at once, which lazy(True) ends, makes every
    query of an event a wait.

    Args:
        device: Index of the device.

    Returns:
        Nanoseconds: "host" of the process, moved by each call and by each wait; "device" when all that is queued on the
        device so far will be done.

    Raises:
        ValueError: There is no such device.

    Examples:
        >>> before = memopt.sim.clock()["host"]
        >>> step()
        >>> torch.cuda.synchronize()
        >>> microseconds = (memopt.sim.clock()["host"] - before) / 1000
    """
    host, done = ctypes.c_uint64(), ctypes.c_uint64()
    if device_library().simcuda_clock(device, ctypes.byref(host), ctypes.byref(done)) != 0:
        raise ValueError(f"no simulated device {device}")
    return {"host": host.value, "device": done.value}


def price(what: str, nanoseconds: int | None = None) -> int:
    """Return a price on the virtual clock, and change it where a new one is given.

    Args:
        what: CUDA's name of a function ("cuMemMap"), whose calls cost the host; "kernel", which a launch costs the
            device; "device GiB" or "link GiB", which copies and memsets cost the device for each GiB of its memory, or
            between it and the host.
        nanoseconds: The price from now on; None leaves it.

    Returns:
        The price before, in nanoseconds.

    Raises:
        ValueError: Nothing of that name has a price, or the new one is negative.

    Examples:
        >>> memopt.sim.price("cuMemCreate", 50_000)
        29000
    """
    if nanoseconds is not None and nanoseconds < 0:
        raise ValueError(f"the price of {what!r} must not be negative, not {nanoseconds} ns")
    before: int = device_library().simcuda_price(what.encode(), -1 if nanoseconds is None else nanoseconds)
    if before < 0:
        raise ValueError(
            f"{what!r} has no price: name a function that the simulated device implements, or "
            "'kernel', 'device GiB' or 'link GiB'"
        )
    return before


def emulate(name: str, body: Body | int, argument_sizes: Sequence[int]) -> None:
    """Give a kernel a body on the host, which runs in stream order.

    Args:
        name: The kernel's exact name (mangled, or extern "C").
        body: The address of a C function `void (void **args, const unsigned grid[3], const unsigned block[3])`, or a
            Python callable body(args, grid, block) that gets the addresses of the argument values.
        argument_sizes: Bytes of each argument.

    Raises:
        MemoryError: There is no host memory to register the body.
    """
    sizes = (ctypes.c_size_t * len(argument_sizes))(*argument_sizes)
    if callable(body):
        python, count = body, len(argument_sizes)

        def call(args: Sequence[int], grid: Sequence[int], block: Sequence[int]) -> None:
            python([args[i] for i in range(count)], tuple(grid[:3]), tuple(block[:3]))

        wrapped = _BODY(call)
        address = ctypes.cast(wrapped, ctypes.c_void_p)
        _bodies.append(wrapped)
    else:
        address = ctypes.c_void_p(body)
    _bodies.append(sizes)
    if device_library().simcuda_emulate(name.encode(), address, len(argument_sizes), sizes) != 0:
        raise MemoryError(f"not enough host memory to register the body of {name!r}")


def workspace_reads() -> int:
    """Return how often cuDNN's functions have read the cudnn_workspace setting.

    If they never have, another setting would change nothing.
    """
    count: int = device_library().simcuda_setting_reads(b"cudnn_workspace")
    return count


def missing_calls() -> dict[str, int]:
    """Return the counts of calls to NVIDIA functions that are not simulated, by name; each answered "not supported"."""
    library = device_library()
    size = library.simcuda_missing(None, 0)
    while True:
        text = ctypes.create_string_buffer(size)
        needed = library.simcuda_missing(text, size)
        if needed <= size:
            break
        size = needed
    lines = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
    return {name: int(count) for name, count in lines}
