"""Control of the simulated device: the functions of csrc/simcuda/control.h by ctypes. All need activate() first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from memopt._C import parse_size

_library: ctypes.CDLL | None = None
_bodies: list[object] = []  # host bodies of kernels: the device keeps their addresses for ever

_LIVE = [
    "bytes",
    "handles",
    "mappings",
    "allocations",
    "streams",
    "events",
    "graphs",
    "modules",
    "pending",
    "reservations",
    "reserved_bytes",
    "host_allocations",
]
_COUNTS = [
    "memory",
    "bytes_peak",
    "pool_reserved",
    "pool_used",
    "launches",
    "copies",
    "copied_bytes",
    "memsets",
    "syncs",
    "ooms",
    "faults",
]
_NOT_IMPLEMENTED = 2**64 - 1

# args: addresses of the argument values; grid and block: three numbers each.
Body = Callable[[list[int], tuple[int, ...], tuple[int, ...]], None]


class _Counts(ctypes.Structure):
    """simcuda_counts, its simcuda_live inlined."""

    _fields_ = [(name, ctypes.c_uint64) for name in (*_LIVE, *_COUNTS)]


_BODY = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint)
)


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the functions of sim_cuda.so."""
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
        "simcuda_emulate": (
            ctypes.c_int,
            [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)],
        ),
        "simcuda_setting_reads": (ctypes.c_uint64, [ctypes.c_char_p]),
        "simcuda_missing": (ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def attach(library: ctypes.CDLL) -> None:
    """From now on this module speaks to that library: declared, and activated."""
    global _library
    _library = library


def device_library() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(
            "the simulated device is not active: call memopt.sim.activate() before importing torch"
        )
    return _library


def stats(device: int = 0) -> dict[str, int]:
    """What the device holds and has done so far; the keys are the fields of simcuda_live and simcuda_counts."""
    counts = _Counts()
    if device_library().simcuda_stats(device, ctypes.byref(counts)) != 0:
        raise ValueError(f"no simulated device {device}")
    return {name: getattr(counts, name) for name in (*_LIVE, *_COUNTS)}


def reset_peak(device: int = 0) -> None:
    """Sets the peak of device bytes to what is held now."""
    if device_library().simcuda_reset_peak(device) != 0:
        raise ValueError(f"no simulated device {device}")


def set_memory(memory: int | str, device: int = 0) -> None:
    """Changes the memory a device claims to have, at most to what it was activated with. Less than is held leaves none
    free, as another process that took the rest would."""
    if device_library().simcuda_set_memory(device, parse_size(memory)) != 0:
        raise ValueError(
            f"device {device} cannot have {memory!r} of memory: there is no such device, or it was activated with less"
        )


def calls(name: str) -> int:
    """Calls so far of a driver or runtime function, by its CUDA name: "cuMemMap", "cudaMalloc"."""
    count: int = device_library().simcuda_calls(name.encode())
    if count == _NOT_IMPLEMENTED:
        raise ValueError(f"{name!r} is no function that the simulated device implements")
    return count


def fail(name: str, *, after: int = 0, count: int = 1, code: int = 0) -> None:
    """Lets `after` more calls of a function pass, then fails `count` of them with the error `code`; 0 stands for the
    function's natural error (out of memory for what takes memory)."""
    if after < 0 or count < 0:
        raise ValueError(f"after and count are numbers of calls, not {after} and {count}")
    if device_library().simcuda_fail(name.encode(), after, count, code) != 0:
        raise ValueError(f"{name!r} is no function that the simulated device implements")


def fail_clear() -> None:
    """Forgets every fail()."""
    device_library().simcuda_fail_clear()


def lazy(on: bool) -> None:
    """On: device work completes only when something waits for it, or by progress(). Off: all pending work is run."""
    device_library().simcuda_set_lazy(int(on))


def progress(n: int = -1, stream: int | None = None) -> int:
    """Runs up to n pending operations (all when negative) of one stream, named by its handle
    (torch.cuda.Stream.cuda_stream; 1 is the legacy stream), or of all streams; returns how many ran."""
    ran: int = device_library().simcuda_progress(stream, n)
    return ran


def emulate(name: str, body: Body | int, argument_sizes: Sequence[int]) -> None:
    """Gives the kernel of that exact name (mangled, or extern "C") a body on the host, run in stream order.

    body is the address of a C function `void (void **args, const unsigned grid[3], const unsigned block[3])`, or a
    Python callable body(args, grid, block), args being the addresses of the argument values."""
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
        raise MemoryError(f"no host memory to register the body of {name!r}")


def workspace_reads() -> int:
    """How often cuDNN's functions have looked at the workspace that they are to ask for; where they never did, another
    cudnn_workspace would change nothing."""
    count: int = device_library().simcuda_setting_reads(b"cudnn_workspace")
    return count


def missing_calls() -> dict[str, int]:
    """NVIDIA functions called so far that are not simulated (they answered "not supported"), with their counts."""
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
