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

import numpy as np
import ptx_to_c

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels"))
import build_kernels  # noqa: E402

NAMES = ("gradients", "update", "widen")
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
            f"void kernel_{name}(const void *argument) {{ memopt_{name}(*(const mo_{name}_launch *)argument); }}\n"
            for name in NAMES
        )
    )


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    subprocess.run([*CC, *COMMON, *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


@functools.cache
def runtime(folder: Path) -> list[str]:
    """The grid and its watch, compiled once for all libraries of a folder."""
    sources = [ROOT / "csrc/simcuda/device_grid.c", Path(__file__).parent / "kernel_watch.c"]
    return [str(compile_c(source, folder / f"{source.stem}.o")) for source in sources]


class KernelLibrary:
    """Kernels that can be launched on NumPy's arrays.

    Args:
        folder: Where it is built.
        variant: One of VARIANTS.
        text: The kernels' text, kernel_text() or a mutant of it.
    """

    def __init__(self, folder: Path, variant: str, text: str | None = None) -> None:
        self.watched = variant == "watched"
        name = f"{variant}-{os.urandom(4).hex()}"  # a library is loaded once by its path
        source = folder / f"{name}.c"
        source.write_text('#include "simcuda/cuda_words.h"\n' + (text or kernel_text()))
        self._link(folder / f"{name}.so", compile_c(source, folder / f"{name}.o", *VARIANTS[variant]), folder)

    @classmethod
    def of_ptx(cls, folder: Path, architecture: str, text: str | None = None) -> KernelLibrary:
        """The kernels as nvcc compiles them for an architecture ("75"), instruction by instruction, and watched."""
        source = folder / f"{architecture}-{os.urandom(4).hex()}.cu"
        source.write_text(text or build_kernels.flatten())
        ptx = source.with_suffix(".ptx")
        subprocess.run(
            [
                str(build_kernels.find_nvcc()),
                "-ptx",
                "-std=c++17",
                "-O3",
                f"-arch=compute_{architecture}",
                "-o",
                str(ptx),
                str(source),
            ],
            check=True,
        )
        made = cls.__new__(cls)
        made.watched = True
        translated = source.with_suffix(".c")
        translated.write_text(ptx_to_c.to_c(ptx.read_text()))
        made._link(source.with_suffix(".so"), compile_c(translated, source.with_suffix(".o"), "-w"), folder)
        return made

    def _link(self, path: Path, kernels: Path, folder: Path) -> None:
        # Never libtsan: its functions are kernel_watch.c's.
        subprocess.run(
            [*CC, "-shared", "-Wl,-Bsymbolic", "-o", str(path), str(kernels), *runtime(folder), "-lm"],
            check=True,
        )
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.kernel_run.restype = ctypes.c_char_p
        self._buffers: list[Buffer] = []

    def buffer(self, name: str, values: np.ndarray, offset: int = 0, read_only: bool = False) -> Buffer:
        """A copy of values, `offset` bytes after a multiple of 16, that the next launch may touch."""
        made = Buffer(values, offset)
        self._library.kernel_buffer(
            name.encode(), ctypes.c_void_p(made.address), ctypes.c_size_t(made.nbytes), read_only
        )
        self._buffers.append(made)  # until the launch is over
        return made

    def launch(
        self, name: str, argument: ctypes.Structure, blocks: int, threads: int, rng: np.random.Generator
    ) -> list[str]:
        """Runs a kernel; what was wrong with it, a line each, in places of the text."""
        said = self._library.kernel_run(
            getattr(self._library, f"kernel_{name}"),
            ctypes.byref(argument),
            blocks,
            threads,
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
        """What is there now."""
        return np.frombuffer(self._bytes.tobytes(), dtype or self.dtype)
