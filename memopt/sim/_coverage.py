"""Symbols that a torch build imports from NVIDIA's libraries and the simulated libraries lack.

They are read from the files alone, before torch is imported. A missing symbol would otherwise show as a linker error in
`import torch`, or at the first call of a function that is bound lazily.
"""

from __future__ import annotations

import re
from pathlib import Path

from memopt.sim import _elf

_PACKAGE = Path(__file__).resolve().parent
NVIDIA_SONAME = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
# Libraries without version nodes leave no provider in an import; their names begin so.
_NVIDIA_NAME = re.compile(r"(cu[A-Z]|cusparse|nccl|nvrtc|nvshmem|nvml)\w+")
OURS_AGAIN = "build it again with `make`, or reinstall memopt"
_TORCH_AGAIN = "reinstall torch: pip install --force-reinstall --no-deps 'torch===2.13.0'"


def library_set(torch_lib_dir: str | Path) -> Path:
    """Return the folder of the prebuilt set for a torch, chosen by the CUDA runtime that its libc10_cuda.so needs.

    Args:
        torch_lib_dir: The folder of that torch's libraries.

    Raises:
        RuntimeError: There is no libc10_cuda.so, it is damaged, or there is no set for that runtime.
    """
    c10_cuda = Path(torch_lib_dir) / "libc10_cuda.so"
    if not c10_cuda.exists():
        raise RuntimeError(
            f"{torch_lib_dir} is a CPU build of torch (it has no libc10_cuda.so): "
            "install torch's CUDA build: `pip install --no-deps 'torch===2.13.0'`"
        )
    needed = _read(c10_cuda, _TORCH_AGAIN, exports=False).needed
    runtimes = [name for name in needed if name.startswith("libcudart.so.")]
    if not runtimes:
        raise RuntimeError(f"{c10_cuda} needs no libcudart.so: this torch links the CUDA runtime statically")
    major = runtimes[0].rsplit(".", 1)[1]
    folder = _PACKAGE / f"cu{major}"
    if not (folder / "sim_cuda.so").exists():
        have = sorted(path.parent.name for path in _PACKAGE.glob("cu*/sim_cuda.so"))
        remedy = "memopt simulates CUDA 12 and 13" if have else "build them: make, or pip install ."
        raise RuntimeError(
            f"no simulated libraries for CUDA {major} in {_PACKAGE} (there: {have or 'none'}): {remedy}"
        )
    return folder


def coverage(torch_lib_dir: str | Path) -> dict[str, list[str]]:
    """Return the symbols that a torch build imports from NVIDIA's libraries and the simulated ones lack.

    Args:
        torch_lib_dir: The folder of that torch's libraries.

    Returns:
        Lists of names by NVIDIA soname, empty when nothing is missing. The list of a soname that is not simulated at
            all begins with "(no such library)".

    Raises:
        RuntimeError: As library_set() raises it, or a library of either side is damaged.
    """
    ours = {}
    for path in sorted(library_set(torch_lib_dir).glob("sim_*.so")):
        library = _read(path, OURS_AGAIN)
        ours[library.soname] = {symbol.name for symbol in library.exports}
    missing: dict[str, set[str]] = {}
    for path in sorted(Path(torch_lib_dir).glob("*.so")):
        library = _read(path, _TORCH_AGAIN, exports=False)
        nvidia = [soname for soname in library.needed if NVIDIA_SONAME.fullmatch(soname)]
        for soname in nvidia:
            if soname not in ours:
                missing.setdefault(soname, set()).add("(no such library)")
        for symbol in library.imports:
            if symbol.provider:
                if symbol.provider in nvidia and symbol.name not in ours.get(symbol.provider, ()):
                    missing.setdefault(symbol.provider, set()).add(symbol.name)
                continue
            held = any(symbol.name in ours.get(soname, ()) for soname in nvidia)
            if nvidia and not held and _NVIDIA_NAME.fullmatch(symbol.name):
                missing.setdefault(f"{path.name} (unversioned)", set()).add(symbol.name)
    return {soname: sorted(names) for soname, names in sorted(missing.items())}


def _read(path: Path, remedy: str, exports: bool = True) -> _elf.Library:
    try:
        return _elf.read(path, exports)
    except (OSError, ValueError) as error:
        named = error if str(path) in str(error) else f"{path}: {error}"
        raise RuntimeError(f"{named}: {remedy}") from error
