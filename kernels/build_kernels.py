"""Builds the CUDA kernels: the files of this folder become

    OUT/kernels.cu       all of them as one text; NVRTC compiles it where the fatbin does not serve
    OUT/kernels.fatbin   what nvcc makes of it, for every architecture that nvcc knows

and both are embedded in the extension (csrc/driver/kernel_image.c). Needs the standard library only.

    python kernels/build_kernels.py [--macros] OUT      (--macros prints kernel_image.c's compiler flags)

Environment:
    MEMOPT_CUDA           auto (default): without nvcc there is no fatbin; 1: that is an error; 0: no fatbin
    MEMOPT_NVCC           the compiler; else the one of CUDA_HOME, of CUDA_PATH, on PATH, of /usr/local/cuda
    TORCH_CUDA_ARCH_LIST  as torch's own extensions take it: "8.0;9.0+PTX"
    MAX_JOBS              how many architectures are compiled at a time (default: the cores)
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE_NAME = "kernels.cu"
FATBIN_NAME = "kernels.fatbin"

OLDEST = 75
"""Turing: the oldest architecture that CUDA 13 compiles for and that torch's CUDA 13 wheels run on."""

ARCHITECTURE_NAMES = {
    "Turing": "7.5",
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0;12.0",
}


class KernelBuildError(Exception):
    """The kernels cannot be built; the text says why and what to do."""


def flatten(kernels: Path = HERE) -> str:
    """All .cu files as one text, each .cuh once, before its first use. #line keeps messages right."""
    seen: set[str] = set()
    text: list[str] = []

    def add(path: Path) -> None:
        if path.name in seen:
            return
        seen.add(path.name)
        text.append(f'#line 1 "{path.name}"')
        for number, line in enumerate(path.read_text().splitlines(), 1):
            included = re.fullmatch(r'#include "(\w+\.cuh)"', line)
            if included:
                add(kernels / included[1])
                text.append(f'#line {number + 1} "{path.name}"')
            else:
                text.append(line)

    for path in sorted(kernels.glob("*.cu")):
        add(path)
    return "\n".join(text) + "\n"


def find_nvcc() -> Path | None:
    """The compiler to use, or None. One that is named by MEMOPT_NVCC must be there."""
    named = os.environ.get("MEMOPT_NVCC")
    if named:
        found = shutil.which(named)
        if not found:
            raise KernelBuildError(
                f"MEMOPT_NVCC={named}: there is no such program; unset it or give nvcc's path"
            )
        return Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        found = shutil.which(str(Path(home, "bin", "nvcc"))) if home else None
        if found:
            return Path(found)
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return Path(found) if found else None


def listed_architectures(nvcc: Path) -> list[int]:
    """The architectures that nvcc can compile for, as 75, 80 … 120, ascending."""
    listing = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted({int(number) for number in re.findall(r"\bsm_(\d+)\b", listing)})


def covering(architectures: list[int]) -> list[int]:
    """The fewest of them whose code runs on all: code for X.y runs on X.z for every z >= y, so the first of
    each major does. These kernels wait for memory: later minors would gain nothing from code of their own."""
    return [a for i, a in enumerate(architectures) if i == 0 or architectures[i - 1] // 10 != a // 10]


def spelled_out(wanted: str) -> list[str]:
    """The items of TORCH_CUDA_ARCH_LIST, with names such as "Ampere+PTX" replaced by their numbers."""
    items = []
    for item in re.split(r"[;,\s]+", wanted.strip(" ;,")):
        name, plus, ptx = item.partition("+")
        items += [number + plus + ptx for number in ARCHITECTURE_NAMES.get(name, name).split(";")]
    return items


def target(item: str, known: list[int], nvcc: Path) -> tuple[str, bool, bool]:
    """One such item as a row of targets()."""
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
    if not match:
        raise KernelBuildError(
            f'TORCH_CUDA_ARCH_LIST: {item!r} is no architecture; write numbers, such as "8.0;9.0+PTX"'
        )
    number = int(match[1]) * 10 + int(match[2])
    if number not in known:
        listed = ", ".join(f"{k // 10}.{k % 10}" for k in known)
        raise KernelBuildError(f"TORCH_CUDA_ARCH_LIST asks for {item}, but {nvcc} compiles for {listed} only")
    return f"{number}{match[3]}", True, bool(match[4])


def targets(nvcc: Path, wanted: str | None) -> list[tuple[str, bool, bool]]:
    """(architecture, machine code?, PTX?) to build. wanted is TORCH_CUDA_ARCH_LIST's value, if any."""
    known = listed_architectures(nvcc)
    if wanted:
        return [target(item, known, nvcc) for item in spelled_out(wanted)]
    code = covering([a for a in known if a >= OLDEST])
    if not code:
        raise KernelBuildError(f"{nvcc} knows no architecture from sm_{OLDEST} on: use CUDA 11 or later")
    # PTX of the newest for GPUs to come, at their best; PTX of the oldest for whatever lies in between.
    return [(str(a), True, a in (code[0], code[-1])) for a in code]


def command(nvcc: Path, source: Path, fatbin: Path) -> list[str]:
    """nvcc's command line."""
    gencode = []
    for architecture, code, ptx in targets(nvcc, os.environ.get("TORCH_CUDA_ARCH_LIST")):
        made = [f"sm_{architecture}"] * code + [f"compute_{architecture}"] * ptx
        gencode += ["-gencode", f"arch=compute_{architecture},code=[{','.join(made)}]"]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not jobs.isdigit() or int(jobs) == 0:
        raise KernelBuildError(f"MAX_JOBS={jobs}: expected a positive number")
    line = [str(nvcc), "-fatbin", "-std=c++17", "-O3", "-Werror", "all-warnings", "--threads", jobs, *gencode]
    if (
        "--compress-mode"
        in subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout
    ):
        line += ["--compress-mode=size"]  # a quarter of the default's; drivers of CUDA 12.4 on
    return [*line, "-o", str(fatbin), str(source)]


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an equal file alone, so that nothing that depends on it is rebuilt."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(out: Path) -> Path | None:
    """Writes out/kernels.cu and, with nvcc, out/kernels.fatbin; returns the latter's path, or None where
    there is no nvcc (one line on standard error says so). Does nothing where what is there was made by the
    same command from the same text, in whatever folder."""
    mode = os.environ.get("MEMOPT_CUDA", "auto")
    if mode not in ("0", "1", "auto"):
        raise KernelBuildError(f"MEMOPT_CUDA={mode}: expected 0, 1 or auto")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    source, fatbin, stamp = out / SOURCE_NAME, out / FATBIN_NAME, out / "kernels.stamp"
    write_if_changed(source, flatten())

    nvcc = None if mode == "0" else find_nvcc()
    if nvcc is None:
        fatbin.unlink(missing_ok=True)
        stamp.unlink(missing_ok=True)
        if mode == "1":
            raise KernelBuildError(
                "MEMOPT_CUDA=1, but there is no nvcc: install the CUDA toolkit, give its compiler by "
                "MEMOPT_NVCC, or set MEMOPT_CUDA=auto to compile the kernels by NVRTC at first use"
            )
        why = "MEMOPT_CUDA=0" if mode == "0" else "no nvcc"
        print(f"memopt: {why}: kernels are not built now; NVRTC compiles them at first use", file=sys.stderr)
        return None

    line = command(nvcc, source, fatbin)
    named = [part.removeprefix(f"{out}{os.sep}") for part in line]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\0".join([*named, version, source.read_text()]).encode()).hexdigest() + "\n"
    if fatbin.exists() and stamp.exists() and stamp.read_text() == key:
        return fatbin
    stamp.unlink(missing_ok=True)
    ran = subprocess.run(line, capture_output=True, text=True)
    if ran.returncode:
        fatbin.unlink(missing_ok=True)
        raise KernelBuildError(f"{' '.join(line)}\nfailed:\n{ran.stdout}{ran.stderr}")
    stamp.write_text(key)
    return fatbin


def define_macros(out: Path) -> list[tuple[str, str]]:
    """Builds into out and returns the macros by which kernel_image.c finds the results."""
    fatbin = build(out)
    macros = [("MEMOPT_KERNEL_SOURCE_PATH", f'"{Path(out).resolve() / SOURCE_NAME}"')]
    if fatbin:
        macros.append(("MEMOPT_FATBIN_PATH", f'"{fatbin.resolve()}"'))
    return macros


def main() -> int:
    arguments = sys.argv[1:]
    as_macros = arguments[:1] == ["--macros"]
    if len(arguments) != 1 + as_macros:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        macros = define_macros(Path(arguments[-1]))
    except KernelBuildError as error:
        print(f"memopt: {error}", file=sys.stderr)
        return 1
    if as_macros:
        print(shlex.join(f"-D{name}={value}" for name, value in macros))
    else:
        for _, value in macros:
            path = Path(value.strip('"'))
            print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
