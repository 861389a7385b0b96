"""The files that torch.compile's compilers need with a simulated driver: its library by name, and separate caches.

Triton compiles its launcher against libcuda.so.1, which the dynamic linker then finds already loaded, and compiles real
kernels, which nothing runs. Compiled files are kept from run to run, as on a GPU, but apart from those of a real GPU:
no timing of the simulated device is used there.
"""

from __future__ import annotations

from pathlib import Path

from memopt._runtime.user_cache import user_cache


def kept() -> Path | None:
    """The folder in which compiled files are kept from run to run; made. None for a user without a cache
    that may be written to."""
    cache = user_cache()
    if cache is None:
        return None
    folder = Path(cache, "memopt", "simulated")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # each run compiles anew
        return None
    return folder


def environment(driver: Path, folder: Path) -> dict[str, str]:
    """Return the environment variables for the compilers.

    `driver`: the simulated libcuda; `folder`: for the life of the process, and for compiled files if none are kept.
    """
    link = folder / "libcuda" / "libcuda.so.1"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(driver)
    compiled = kept() or folder / "compiled"
    return {
        # A worker of the compiler would be a process of its own, which has no simulated device.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(link.parent),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
    }
