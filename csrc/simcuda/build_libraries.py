"""Build the simulated CUDA libraries: memopt/sim/cu12/sim_*.so and memopt/sim/cu13/sim_*.so.

    python csrc/simcuda/build_libraries.py [OUT]          OUT: memopt/sim

Needs a C compiler that also assembles and links (gcc or clang), and nothing of NVIDIA's. A library is its hand-written
sources plus a stub for every other function that symbols/<name>.txt lists, so that whatever links NVIDIA's
library of that soname links ours. The files are called sim_*.so, with NVIDIA's soname inside: torch looks for the text
"libcudart.so" in /proc/self/maps and would open NVIDIA's own libraries beside these.

A set is one CUDA major: the ABI differs between them (structures, four signatures, sonames), not within one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETS = {"cu12": 12, "cu13": 13}
WORKERS = 2


def _module(name: str, path: Path) -> Any:
    """From a file, for this one is loaded so by setup.py."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


elf = _module("memopt_sim_elf", ROOT / "memopt" / "sim" / "_elf.py")
symbols = _module("memopt_sim_symbols", HERE / "symbols.py")

COMPILE = ["-std=c11", "-D_GNU_SOURCE", "-Os", "-g0", "-fPIC", "-fno-asynchronous-unwind-tables"]
COMPILE += [f"-I{ROOT}", f"-I{ROOT}/csrc"]
COMPILE += ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-pthread"]
LINK = ["-shared", "-s", "-pthread", "-Wl,--hash-style=gnu", "-Wl,--no-undefined", "-Wl,--build-id=none"]
# One read-execute segment and the 4 KiB pages of x86-64: the default layout pads each of these small files by 12 KiB.
DENSE = ["-Wl,-z,noseparate-code", "-Wl,-z,max-page-size=4096"]
TEXT = re.compile(r"\w+(ErrorString|StatusString|ErrorName|StatusName|LastError)")
PUBLIC = re.compile(r"(cu|nccl|nvrtc|nvshmem|nvml|__cuda)\w+")


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message says what to do."""


@dataclass(frozen=True)
class Library:
    """One library of a set. The status is its own "not supported"; functions that does_nothing matches answer 0."""

    name: str
    not_supported: int
    sources: tuple[str, ...] = ()
    does_nothing: str = ""

    @property
    def file(self) -> str:
        return f"sim_{self.name}.so"


# NVIDIA's status for "not supported", or its nearest: CURAND has ARCH_MISMATCH (the GPU lacks the feature), NCCL and
# NVRTC have only an internal error, cuFile has PLATFORM_NOT_SUPPORTED.
DEVICE = Library("cuda", 801, ("device_*.c", "driver_*.c", "kernel_bodies.c", "missing.c", "exit.c"))
LIBRARIES = [
    DEVICE,
    Library("cudart", 801, ("runtime_*.c",)),
    Library("nvidia-ml", 3, ("nvml.c",)),
    Library(
        "cublas", 15, ("library_cublas.c",), r"cublas([SDCZHI][a-z]|Gemm|Axpy|Asum|Nrm2|Rot|Dot|Scal|Set)\w*"
    ),
    Library("cublasLt", 15, ("library_cublasLt.c",), r"cublasLt(Matmul|MatrixTransform|\w+SetAttribute)"),
    Library(
        "cudnn",
        3000,
        ("library_cudnn_*.c",),
        r"cudnn(Set|Restore)\w+|cudnn(?!Get|Find|Create|Destroy|Backend)\w*(Forward|Backward|CTCLoss)\w*",
    ),
    Library("cufft", 16, ("library_cufft.c",), r"cufft(Destroy|Set\w+|Exec\w+|XtExec|XtSet\w+)"),
    Library("cufile", 5007, ("library_cufile.c",)),
    Library("cupti", 27, ("library_cupti.c",)),
    Library("curand", 204),
    Library("cusolver", 9, ("library_cusolver.c",), r"cusolverDnX(gesvdj|syevj)Set\w+"),
    Library(
        "cusparse",
        10,
        ("library_cusparse.c",),
        r"cusparse(Set\w+|\w+_(analysis|solve|preprocess)|SpM[MV]|SDDMM|SpGEMM_copy|CreateIdentityPermutation"
        r"|[SDCZ](bsrm[mv]|csrgeam2)|X(coo2csr|coosortByRow|csrsort)"
        r"|CsrSetPointers|CsrSetStridedBatch|DnMatSetStridedBatch|SpMatSetAttribute)",
    ),
    Library("cusparseLt", 10),
    Library("nccl", 3, ("library_nccl.c",)),
    Library("nvrtc", 11, ("library_nvrtc.c",)),
    Library("nvshmem_host", 3),
]


def build(out: Path, cc: list[str]) -> list[Path]:
    """Builds both sets under out with the compiler command cc; returns the libraries' paths. Does nothing for those
    that are newer than all they are made of. BuildError, naming the tool or the library, on any failure."""
    built: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="simcuda") as folder, ThreadPoolExecutor(WORKERS) as pool:
        layout = DENSE if _links_densely(cc, Path(folder)) else []
        work = [
            _Link(library, name, out / name, Path(folder) / name, cc, layout)
            for name in SETS
            for library in LIBRARIES
        ]
        stale = [link for link in work if not link.is_fresh()]
        compiled = [pool.submit(link.compile, source) for link in stale for source in link.sources]
        for future in compiled:
            future.result()
        for first in (True, False):  # the others link against the device
            linked = [pool.submit(link.link) for link in stale if (link.library is DEVICE) == first]
            for future in linked:
                future.result()
        built = [link.target for link in work]
    return built


def _links_densely(cc: list[str], folder: Path) -> bool:
    """Return whether libraries are for x86-64, and this linker knows DENSE, as that of zig does not."""
    source = folder / "probe.c"
    source.write_text("#ifndef __x86_64__\n#error another machine\n#endif\nint probe;\n")
    command = [*cc, "-shared", "-fPIC", *DENSE, str(source), "-o", str(folder / "probe.so")]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:  # which is told where a library is made
        return False


class _Link:
    """One library of one set: its sources, objects and product."""

    def __init__(
        self, library: Library, set_name: str, out: Path, folder: Path, cc: list[str], layout: list[str]
    ) -> None:
        self.library, self.set_name, self.out, self.cc, self.layout = library, set_name, out, cc, layout
        self.folder = folder / library.name
        self.target = out / library.file
        self.exports = _exports_of(library, set_name)
        self.sources = sorted(path for pattern in library.sources for path in HERE.glob(pattern))
        missing = [pattern for pattern in library.sources if not list(HERE.glob(pattern))]
        if missing:
            raise BuildError(f"{library.file}: no source {', '.join(missing)} in {HERE}")
        self.sources.append(HERE / "library_stub.c")
        self.objects: list[Path] = []

    def is_fresh(self) -> bool:
        if not self.target.exists():
            return False
        inputs = [*self.sources, *HERE.glob("*.h"), *HERE.glob("library_stub.*"), Path(__file__)]
        inputs += [symbols.FOLDER / f"{self.library.name}.txt", Path(symbols.__file__)]
        inputs += [ROOT / "csrc" / "driver" / "cuda_types.h", *(ROOT / "kernels").glob("*.cu*")]
        built = self.target.stat().st_mtime_ns
        return all(path.stat().st_mtime_ns <= built for path in inputs if path.exists())

    def compile(self, source: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"{source.stem}.o"
        defines = [
            f"-DSIM_CUDA_MAJOR={SETS[self.set_name]}",
            f"-DSIM_NOT_SUPPORTED={self.library.not_supported}",
        ]
        self._run([*self.cc, *COMPILE, *defines, "-c", str(source), "-o", str(target)])
        self.objects.append(target)

    def link(self) -> None:
        listed = self.exports.names
        defined = frozenset().union(*(elf.defined_in_object(path) for path in self.objects))
        unlisted = sorted(name for name in defined - listed if PUBLIC.fullmatch(name))
        if unlisted:
            raise BuildError(
                f"{self.library.file}: {', '.join(unlisted)} defined but not in symbols/{self.library.name}.txt"
            )
        stubs = self.folder / "stubs.S"
        stubs.write_text(_stub_source(self.library, sorted(listed - defined)))
        script = self.folder / "exports.map"
        script.write_text(_version_script(self.library, self.exports))
        self.out.mkdir(parents=True, exist_ok=True)
        fresh = self.target.with_name(f".{self.target.name}.{os.getpid()}")
        command = [
            *self.cc,
            *LINK,
            *self.layout,
            f"-I{ROOT}",
            f"-Wl,-soname,{self.exports.soname}",
            f"-Wl,--version-script={script}",
            "-o",
            str(fresh),
        ]
        command += [*map(str, sorted(self.objects)), str(stubs)]
        if self.library is not DEVICE:
            command.append(str(self.out / DEVICE.file))
        self._run([*command, "-ldl", "-lm"])
        os.replace(fresh, self.target)

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        except FileNotFoundError as error:
            tool = command[0]
            raise BuildError(
                f"{self.library.file}: no C compiler {tool!r}: install gcc, or set CC"
            ) from error
        if done.returncode != 0:
            raise BuildError(f"{self.set_name}/{self.library.file}: {' '.join(command)}\n{done.stderr}")
        if done.stderr:
            print(done.stderr, file=sys.stderr)


def _exports_of(library: Library, set_name: str) -> Any:
    try:
        return symbols.load(library.name).of[SETS[set_name]]
    except (OSError, KeyError) as error:
        raise BuildError(
            f"{library.file}: symbols/{library.name}.txt does not list it for {set_name}"
        ) from error


def _stub_source(library: Library, names: list[str]) -> str:
    lines = ['#include "csrc/simcuda/library_stub.S"']
    for name in names:
        if re.fullmatch(library.does_nothing, name):
            lines.append(f"does_nothing {name}")
        elif TEXT.fullmatch(name):
            lines.append(f"says {name}")
        else:
            lines.append(f"not_supported {name}")
    return "\n".join(lines) + "\n"


def _version_script(library: Library, exports: Any) -> str:
    """Exports exactly the listed names; of the device and the runtime also what control.h declares and what the
    simulated libraries ask of each other."""
    ours = ["simcuda_*", "sim_*"] if library.name in ("cuda", "cudart") else []
    return f"{exports.node} {{ global: {'; '.join([*sorted(exports.names), *ours])}; local: *; }};\n"


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "memopt" / "sim"
    try:
        built = build(out, os.environ.get("CC", "gcc").split())
    except BuildError as error:
        print(f"simulated CUDA libraries: {error}", file=sys.stderr)
        return 1
    for name in SETS:
        size = sum(path.stat().st_size for path in built if path.parent.name == name)
        print(f"{out / name}: {sum(path.parent.name == name for path in built)} libraries, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
