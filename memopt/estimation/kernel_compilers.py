"""What torch.compile's compilers need where the driver is simulated: its library by name, and caches of their own.

Triton compiles its launcher against libcuda.so.1, which the dynamic linker then finds loaded already, and real kernels,
which nobody runs. Compiled files are kept from run to run, as on a GPU; but apart from those of a real one, so that no
timing of the simulated device decides there."""

from __future__ import annotations

import os
from pathlib import Path

from memopt.user_cache import user_cache


def environment(driver: Path, folder: Path) -> dict[str, str]:
    """`driver`: the simulated libcuda; `folder`: for the life of the process. What the caller's environment says of
    caches already stays."""
    link = folder / "libcuda" / "libcuda.so.1"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(driver)
    cache = user_cache()
    kept = Path(cache, "memopt", "simulated") if cache else folder / "compiled"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:  # none that may be written to: each run compiles anew
        kept = folder / "compiled"
    return {
        # A worker of the compiler would be a process of its own, which has no simulated device.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_LIBCUDA_PATH": str(link.parent),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(kept / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(kept / "inductor"),
    }
