"""memopt's kernels, whole, as a library of this machine: the .cu files, compiled by the C compiler for a grid
of fibers (csrc/simcuda/grid.h), and what a grid did to memory (kernel_watch.c)."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ptx_to_c

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels"))
import build_kernels  # noqa: E402

# Each with the type of its argument.
NAMES = {name: f"mo_{name}_launch" for name in ("cross_entropy", "gradients", "update", "widen")}
NAMES["factored"] = "mo_update_launch"
CC = os.environ.get("CC", "gcc").split()
COMMON = [
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-g1",
    "-fno-var-tracking",
    "-fPIC",
    f"-I{ROOT}/csrc",
    f"-I{ROOT}",
]
COMMON += ["-ffp-contract=off"]
VARIANTS = {
    "plain": ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"],
    "watched": ["-fsanitize=thread", "--param", "tsan-distinguish-volatile=1"],
}


def kernel_text() -> str:
    """The text that NVRTC would compile, with an entry for each kernel."""
    return (
        build_kernels.flatten()
        + '#line 1 "entries"\n'
        + "".join(
            f"void kernel_{name}(const void *argument);\n"
            f"void kernel_{name}(const void *argument) {{ memopt_{name}(*(const {kind} *)argument); }}\n"
            for name, kind in NAMES.items()
        )
    )


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    subprocess.run([*CC, *COMMON, *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


def new_file(folder: Path, name: str) -> Path:
    """A C file to be written: a library is loaded once by its path."""
    return folder / f"{name}-{os.urandom(4).hex()}.c"


@functools.cache
def runtime(folder: Path) -> list[str]:
    """The grid and its watch, compiled once for all libraries of a folder."""
    sources = [ROOT / "csrc/simcuda/device_grid.c", Path(__file__).parent / "kernel_watch.c"]
    return [str(compile_c(source, folder / f"{source.stem}.o")) for source in sources]


class Work(NamedTuple):
    """Counts of what threads did: issue slots, bytes of global memory loaded and stored, those of them 16 at a time."""

    kernel_slots: int
    kernel_bytes: int
    kernel_vector_bytes: int


class KernelLibrary:
    """Kernels that can be launched on NumPy's arrays.

    Args:
        source: Their C text, with an entry kernel_NAME for each.
        flags: The compiler's, beside COMMON.
        watched: True where the text names its accesses to kernel_watch.c.
    """

    def __init__(self, source: Path, flags: list[str], watched: bool) -> None:
        self.path, self.watched = source.with_suffix(".so"), watched
        kernels = compile_c(source, source.with_suffix(".o"), *flags)
        # Never libtsan: its functions are kernel_watch.c's.
        objects = [str(kernels), *runtime(source.parent)]
        subprocess.run([*CC, "-shared", "-o", str(self.path), *objects, "-lm"], check=True)
        self._library = ctypes.CDLL(str(self.path))
        self._library.kernel_run.restype = ctypes.c_char_p
        self._buffers: list[Buffer] = []

    @classmethod
    def of_text(cls, folder: Path, variant: str, text: str | None = None) -> KernelLibrary:
        """The .cu files as the C compiler reads them, or a mutant of kernel_text(), in one of VARIANTS."""
        source = new_file(folder, variant)
        source.write_text('#include "simcuda/cuda_words.h"\n' + (text or kernel_text()))
        return cls(source, VARIANTS[variant], watched=variant == "watched")

    @classmethod
    def of_ptx(
        cls, folder: Path, architecture: str, text: str | None = None, counted: bool = False
    ) -> KernelLibrary:
        """The .cu files, or a mutant, as nvcc compiles them for an architecture ("75"), instruction by instruction.
        counted: work() tells what a launch took, and nothing is watched."""
        source = new_file(folder, architecture)
        cuda, ptx = source.with_suffix(".cu"), source.with_suffix(".ptx")
        cuda.write_text(text or build_kernels.flatten())
        nvcc = [str(build_kernels.find_nvcc()), "-ptx", "-std=c++17", "-O3", f"-arch=compute_{architecture}"]
        subprocess.run([*nvcc, "-o", str(ptx), str(cuda)], check=True)
        source.write_text(ptx_to_c.to_c(ptx.read_text(), counted))
        return cls(source, ["-w"], watched=not counted)

    def work(self) -> Work:
        """The counts since the last call."""
        counters = [ctypes.c_uint64.in_dll(self._library, name) for name in Work._fields]
        found = Work(*(counter.value for counter in counters))
        for counter in counters:
            counter.value = 0
        return found

    def buffer(self, name: str, values: np.ndarray, offset: int = 0, read_only: bool = False) -> Buffer:
        """A copy of values, `offset` bytes after a multiple of 16, that the next launch may touch."""
        made = Buffer(values, offset)
        self._library.kernel_buffer(
            name.encode(), ctypes.c_void_p(made.address), ctypes.c_size_t(made.nbytes), read_only
        )
        self._buffers.append(made)  # until the launch is over
        return made

    def launch(
        self,
        name: str,
        argument: ctypes.Structure,
        blocks: int,
        threads: int,
        rng: np.random.Generator,
        chosen: range = range(0),
    ) -> list[str]:
        """Runs a kernel; what was wrong with it, a line each, in places of the text. chosen: the blocks that run; all
        of them where it is empty."""
        said = self._library.kernel_run(
            getattr(self._library, f"kernel_{name}"),
            ctypes.byref(argument),
            blocks,
            threads,
            chosen.start,
            len(chosen),
            ctypes.c_uint64(int(rng.integers(1 << 62))),
            self.watched,
            ctypes.c_double(0.02),
        )
        self._buffers.clear()
        return [self._in_places(line) for line in said.decode().splitlines()]

    def _in_places(self, line: str) -> str:
        def place(found: re.Match[str]) -> str:
            address = hex(int(found[0], 16) - 1)  # of the call, not of what follows it
            done = subprocess.run(
                ["addr2line", "-e", str(self.path), address], capture_output=True, text=True
            )
            return done.stdout.strip().rpartition("/")[2]

        return re.sub(r"0x[0-9a-f]+", place, line)


class Buffer:
    """Bytes at a chosen misalignment."""

    def __init__(self, values: np.ndarray, offset: int) -> None:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self._room = np.empty(raw.size + offset + 32, np.uint8)
        start = -self._room.ctypes.data % 16 + offset
        self._bytes = self._room[start : start + raw.size]
        self._bytes[:] = raw
        self.dtype, self.nbytes = values.dtype, raw.size
        self.address = self._bytes.ctypes.data if raw.size else self._room.ctypes.data

    def array(self, dtype: type | np.dtype | None = None) -> np.ndarray:
        """The present content."""
        return np.frombuffer(self._bytes.tobytes(), dtype or self.dtype)
