"""Write symbols/<name>.txt (symbols.py): the functions that NVIDIA's libraries export, kept as data.

    python csrc/simcuda/list_symbols.py [--only PACKAGE ...] [--torch TORCH_LIB_DIR ...]

Run by a maintainer when NVIDIA or torch adds functions, never by a build. It fetches the newest wheel of each package
below with pip, one at a time (about 4 GB in all; each is deleted once its names are read), and only reads: nothing of
NVIDIA's is kept but function names. The driver and NVML are in no wheel, so their names come from the declarations in
cuda.h and nvml.h. With --torch, whatever those torch builds import is added, and an import that no list holds is
reported: the exit status is then 1.

Lists only grow: a name once listed stays, as older torch builds may import it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import symbols

HERE = Path(__file__).resolve().parent

_spec = importlib.util.spec_from_file_location("elf", HERE.parents[1] / "memopt" / "sim" / "_elf.py")
assert _spec and _spec.loader
elf = sys.modules["elf"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elf)

# What is public C in these libraries; they also export C++ internals, which nobody links.
PUBLIC = re.compile(r"(cu|nccl|pnccl|nvrtc|nvshmem|__cuda)\w*|nvml\w+")

# package -> sonames to list from it. cuDNN, cuFile, cuSPARSELt, NCCL and NVSHMEM keep one soname over both CUDA majors:
# the CUDA 13 wheel, which is the newer one, serves both sets.
EITHER = {
    "nvidia-cudnn-cu13": ["libcudnn.so.9"],
    "nvidia-cufile": ["libcufile.so.0"],
    "nvidia-cusparselt-cu13": ["libcusparseLt.so.0"],
    "nvidia-nccl-cu13": ["libnccl.so.2"],
    "nvidia-nvshmem-cu13": ["libnvshmem_host.so.3"],
}
PACKAGES = {
    "cu12": {
        "nvidia-cuda-runtime-cu12": ["libcudart.so.12"],
        "nvidia-cuda-cupti-cu12": ["libcupti.so.12"],
        "nvidia-cuda-nvrtc-cu12": ["libnvrtc.so.12"],
        "nvidia-cublas-cu12": ["libcublas.so.12", "libcublasLt.so.12"],
        "nvidia-cufft-cu12": ["libcufft.so.11"],
        "nvidia-curand-cu12": ["libcurand.so.10"],
        "nvidia-cusolver-cu12": ["libcusolver.so.11"],
        "nvidia-cusparse-cu12": ["libcusparse.so.12"],
        **EITHER,
    },
    "cu13": {
        "nvidia-cuda-runtime": ["libcudart.so.13"],
        "nvidia-cuda-cupti": ["libcupti.so.13"],
        "nvidia-cuda-nvrtc": ["libnvrtc.so.13"],
        "nvidia-cublas": ["libcublas.so.13", "libcublasLt.so.13"],
        "nvidia-cufft": ["libcufft.so.12"],
        "nvidia-curand": ["libcurand.so.10"],
        "nvidia-cusolver": ["libcusolver.so.12"],
        "nvidia-cusparse": ["libcusparse.so.12"],
        **EITHER,
    },
}
# package -> (header, soname): libraries that come with the driver, listed from their declarations.
HEADERS = {
    "cu12": {
        "nvidia-cuda-runtime-cu12": ("cuda.h", "libcuda.so.1"),
        "nvidia-nvml-dev-cu12": ("nvml.h", "libnvidia-ml.so.1"),
    },
    "cu13": {
        "nvidia-cuda-runtime": ("cuda.h", "libcuda.so.1"),
        "nvidia-nvml-dev": ("nvml.h", "libnvidia-ml.so.1"),
    },
}

Names = dict[str, set[str]]  # version node ('' for none) -> names


def add(major: str, soname: str, source: str, names: Names) -> None:
    """To the list of a library, which has one version node or none."""
    if len(names) > 1:
        raise SystemExit(
            f"{soname}: {len(names)} version nodes, where a list holds one: {', '.join(sorted(names))}"
        )
    library = symbols.named(soname)
    exports = library.of.setdefault(int(major.removeprefix("cu")), symbols.Exports(soname))
    for node, found in names.items():
        exports.node = node
        exports.names |= found
    library.sources = {one for one in library.sources if one.split(" ")[0] != source.split(" ")[0]} | {source}
    symbols.store(library)
    print(f"{library.path.relative_to(HERE)}, {major}: {len(exports.names)} names")


def from_library(file: Path) -> Names:
    names: Names = {}
    for symbol in elf.read(file).exports:
        if symbol.is_function and PUBLIC.fullmatch(symbol.name):
            names.setdefault(symbol.version, set()).add(symbol.name)
    return names


def from_header(text: str) -> Names:
    """Names declared, plus the ABI names that macros map them to (cuMemAlloc -> cuMemAlloc_v2), plus the per-thread
    default stream variants (_ptds, _ptsz), which are macros around those."""
    declared = set(re.findall(r"(?:CUDAAPI|DECLDIR)\s+(?:char\s*\*\s*)?((?:cu|nvml)[A-Z]\w*)\s*\(", text))
    mapped = set()
    for name, suffix, target in re.findall(
        r"#\s*define\s+((?:cu|nvml)[A-Z]\w*)\s+(?:__CUDA_API_(PTDS|PTSZ)\()?((?:cu|nvml)[A-Z]\w*)\)?", text
    ):
        if name in declared or target in declared or target.startswith(name):
            mapped |= {target, f"{target}_{suffix.lower()}"} if suffix else {target}
    return {"": declared | mapped}


def fetch(package: str, into: Path) -> Path:
    print(f"fetching {package} …", flush=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, "--only-binary", ":all:", "-d", str(into), package], check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def list_package(major: str, package: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = fetch(package, Path(folder))
        source = "{} {}".format(package, wheel.name.split("-")[1])
        with zipfile.ZipFile(wheel) as archive:
            wanted = PACKAGES[major].get(package, [])
            for soname in wanted:
                (member,) = [name for name in archive.namelist() if name.endswith("/" + soname)]
                library = Path(archive.extract(member, folder))
                for each in PACKAGES if package in EITHER else (major,):
                    add(each, soname, source, from_library(library))
            if package in HEADERS[major]:
                header, soname = HEADERS[major][package]
                (member,) = [name for name in archive.namelist() if name.endswith("/" + header)]
                names = from_header(archive.read(member).decode(errors="replace"))
                for each in HEADERS:  # one driver serves programs of every CUDA major
                    add(each, soname, f"{source} {header}", names)


def add_torch(folder: Path) -> list[str]:
    """Adds what the torch libraries in folder import; returns the imports that no list of that major can hold."""
    libraries = [elf.read(path) for path in sorted(folder.glob("*.so"))]
    runtime = {
        soname for library in libraries for soname in library.needed if soname.startswith("libcudart.so.")
    }
    number = int(runtime.pop().rsplit(".", 1)[1])
    listed = [symbols.load(path.stem).of for path in symbols.FOLDER.glob("*.txt")]
    lists = {of[number].soname: {of[number].node: set(of[number].names)} for of in listed if number in of}
    unknown = []
    for library in libraries:
        for symbol in library.imports:
            if symbol.provider in lists:
                lists[symbol.provider].setdefault(symbol.version, set()).add(symbol.name)
            elif not symbol.version and re.fullmatch(
                r"(cu[A-Z]|cusparse|nccl|nvrtc|nvshmem)\w+", symbol.name
            ):
                held = any(symbol.name in names.get("", ()) for names in lists.values())
                unknown += [] if held else [f"{library.soname}: {symbol.name}"]
    for soname, names in lists.items():
        add(f"cu{number}", soname, "torch imports", names)
    return unknown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="packages to fetch (none: just --torch)")
    parser.add_argument("--torch", nargs="*", type=Path, default=[], help="torch/lib folders of CUDA builds")
    args = parser.parse_args()
    for major in PACKAGES:
        packages = [
            *PACKAGES[major],
            *(package for package in HEADERS[major] if package not in PACKAGES[major]),
        ]
        if major == "cu12":
            packages = [package for package in packages if package not in EITHER]
        for package in packages:
            if args.only is None or package in args.only:
                list_package(major, package)
    unknown = [line for folder in args.torch for line in add_torch(folder)]
    print("\n".join(unknown))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
