"""memopt's CUDA kernels: the location of their fallback compiler and cache, and their state.

They are loaded when first used on a device. Where the embedded image cannot be used (built without nvcc, or refused by
the driver), their source is compiled by NVRTC, which torch's CUDA wheels include, and the result is kept under the
user's cache directory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from memopt import _C
from memopt._runtime.doctor import Finding
from memopt._runtime.log import logger


def user_cache() -> str | None:
    """Return $XDG_CACHE_HOME, or ~/.cache, as an absolute path that need not exist.

    None for a user without a home directory, such as one whose HOME is empty.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification has a relative one ignored
        return base
    # Of an empty HOME expanduser makes the root.
    home = os.path.expanduser("~") if os.environ.get("HOME") != "" else ""
    return os.path.join(home, ".cache") if os.path.isabs(home) else None


__all__ = ["cache_directory", "nvrtc_candidates", "prepare", "status"]

# Where NVIDIA's wheels put NVRTC below the package folder `nvidia`, by CUDA major.
_IN_WHEELS = {13: "cu13/lib/libnvrtc.so.13", 12: "cuda_nvrtc/lib/libnvrtc.so.12"}


def cache_directory() -> str | None:
    """Return the directory of compiled kernels: $XDG_CACHE_HOME or ~/.cache, then memopt/kernels.

    None without a home, and on the simulated device: its compiler's output does nothing on a GPU, and would lie there
    under the key of NVIDIA's.
    """
    activation = sys.modules.get("memopt.sim._activation")
    base = None if activation is not None and activation.is_active() else user_cache()
    return os.path.join(base, "memopt", "kernels") if base else None


def nvrtc_candidates() -> tuple[str, ...]:
    """Return the libraries to try as NVRTC, in order.

    MEMOPT_NVRTC alone if it is set; else the wheels' libraries, that of the loaded torch's CUDA first, then the names
    that the dynamic linker may know.
    """
    named = os.environ.get("MEMOPT_NVRTC")
    if named:
        return (named,)
    torch = sys.modules.get("torch")
    version: str = getattr(getattr(torch, "version", None), "cuda", None) or "13"
    majors = sorted(_IN_WHEELS, key=lambda major: (not version.startswith(f"{major}."), -major))
    namespace = importlib.util.find_spec("nvidia")
    folders = list(namespace.submodule_search_locations or ()) if namespace else []
    wheels = [Path(folder, _IN_WHEELS[major]) for major in majors for folder in folders]
    return (*(str(path) for path in wheels if path.exists()), *(f"libnvrtc.so.{major}" for major in majors))[
        :8
    ]


@cache
def prepare() -> None:
    """Tell the C engine the two above, once a process. Called by everything that launches a kernel."""
    logger.info("kernels: NVRTC (if needed) from %s; cache in %s", nvrtc_candidates(), cache_directory())
    _C.kernels_configure(nvrtc_candidates(), cache_directory())


def status(device: int = 0) -> dict[str, object]:
    """Return the state of a device's kernels: their source ('not loaded' before the first call that needs them) and
    counters.

    The keys are explained by memopt._C.kernel_status.
    """
    return dict(_C.kernel_status(device))


def finding() -> Finding:
    """Return a line for memopt.doctor(): whether there is an embedded image, and if not, whether NVRTC is available."""
    state = _C.kernel_status()
    named = os.environ.get("MEMOPT_NVRTC")
    if named and not _opens(named):
        return Finding(
            "kernels", "broken", f"MEMOPT_NVRTC={named} cannot be opened", "unset it, or name libnvrtc.so"
        )
    if state["origin"] != "not loaded":
        text = f"{state['origin']}, for compute capability {state['architecture'] / 10:.1f}"
        return Finding("kernels", "ok", f"{text} ({state['note']})" if state["note"] else text)
    if state["embedded_bytes"]:
        return Finding("kernels", "ok", f"embedded, {_C.format_size(int(state['embedded_bytes']))}")
    found = next(filter(_opens, nvrtc_candidates()), None)
    if found:
        kept = cache_directory()
        text = f"to be compiled at first use by {found}, {f'cached in {kept}' if kept else 'not cached'}"
        return Finding("kernels", "ok", text)
    remedy = (
        "on a machine with a GPU: pip install nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12), or build "
        "with nvcc"
    )
    return Finding("kernels", "absent", "none embedded, and no NVRTC is installed to compile them", remedy)


def _opens(library: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
