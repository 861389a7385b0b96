"""Activation of the simulated device, in a process that has not imported torch yet.

The dynamic linker reuses a loaded library whose soname is the one requested. The simulated libraries, which carry
NVIDIA's sonames, are therefore opened here first; `import torch` then links them, whatever NVIDIA packages are
installed. Nothing is preloaded and no environment variable is set; one is read where a program asks for it, by
activate_from().

The set (CUDA 12 or 13) is the one whose runtime torch's libc10_cuda.so needs. It is read from the file: torch stays
unimported.
"""

from __future__ import annotations

import _ctypes
import atexit
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

from memopt._runtime import arguments, torch_version
from memopt.sim import _control
from memopt.sim._coverage import OURS_AGAIN, coverage, library_set

VARIABLE = "MEMOPT_SIM"  # in the environment: what active_settings() gives
_INSTALL = "`pip install --no-deps 'torch===2.13.0'`"


def activate(
    memory: int | str = "2GiB",
    devices: int = 1,
    compute_capability: str = "8.0",
    multiprocessors: int = 108,
    lazy: bool = False,
    blank: bool = False,
    context: int | str = 0,
    cudnn_workspace: int | str = 0,
    cudnn_version: int | None = None,
    stale_aliases: bool = False,
    dead_handles: bool = False,
) -> None:
    """Create simulated CUDA devices for this process, until it ends. Must come before `import torch`.

    After a refusal no simulated library is loaded, and activate() may be called again.

    Args:
        memory: Bytes of each device ("8GiB" too).
        devices: Number of devices.
        compute_capability: Like "8.0"; with multiprocessors it decides what torch's own code chooses (attention
            backends, workspace sizes).
        multiprocessors: Number of multiprocessors of each device.
        lazy: Whether device work completes only when waited for, or by progress().
        blank: Whether device memory reads as zeros and writes are dropped, so that a card larger than the host costs
            nothing.
        context: Bytes of each device that a CUDA context would take.
        cudnn_workspace: Bytes of workspace that every cuDNN plan requests. NVIDIA's sizes are not known; 0 is a lower
            bound.
        cudnn_version: Answer of cudnnGetVersion; by default the version that this torch was published with.
        stale_aliases: Whether the devices are broken in one way, for tests: what is written by one address of memory
            that is mapped at two is never seen by the other.
        dead_handles: Whether a call that is given the handle of a destroyed stream or event aborts the process, with a
            line on standard error that names both. By default it answers "invalid handle"; CUDA says neither.

    Raises:
        RuntimeError: torch is imported already; a real CUDA driver or runtime is mapped in this process; torch is
            missing, too old, damaged or a CPU build, or imports symbols that the simulated libraries lack; or one of
            those is damaged. The message names the remedy.
        ValueError: A setting makes no sense.
    """
    settings = settings_of(
        memory,
        devices,
        compute_capability,
        multiprocessors,
        lazy,
        blank,
        context,
        cudnn_workspace,
        stale_aliases,
        dead_handles,
    )
    if cudnn_version is not None:
        settings += f" cudnn_version={cudnn_version}"
    activate_from(settings)


def activate_from(settings: str | None = None) -> None:
    """Activate the device as another process did, from the text of its active_settings().

    Args:
        settings: The text; by default that of the environment variable MEMOPT_SIM, by which a process hands its
            device's settings to its children.

    Raises:
        RuntimeError: As activate() raises it.
        ValueError: There is no such text, or the simulated device refuses it.
    """
    if settings is None:
        settings = os.environ.get(VARIABLE)
    if not settings:
        raise ValueError(
            f"there are no settings of a simulated device: {VARIABLE} must hold the result of active_settings()"
        )
    if is_active():
        raise RuntimeError("the simulated device is already active: a process can activate it only once")
    global _active
    # Not among what is handed on: another process may have another torch.
    version = "" if "cudnn_version=" in settings else f" cudnn_version={_cudnn_version()}"
    if _libraries is None:
        _load_with(settings + version)
    else:
        _make_device(_control.device_library(), settings + version)
    _active = settings


def load() -> None:
    """Load the simulated libraries without a device, so that torch can be imported before its settings are known.

    torch sees a machine without a GPU until activate(), which a forked child may call for itself.

    Raises:
        RuntimeError: As activate() raises it.
    """
    _load_with(None)


def _load_with(settings: str | None) -> None:
    """Load the libraries, with a device if there are settings."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported: memopt.sim.activate() must come before `import torch`")
    real = mapped_cuda()
    if real:
        raise RuntimeError(
            f"a CUDA library is already loaded in this process ({real[0]}): the simulated device needs its own "
            "process; start a new one and activate the device before anything opens CUDA"
        )
    folder = _set_for_this_torch()
    device = _loaded(folder, settings)
    _control.attach(device)
    atexit.register(_at_exit, device)
    global _libraries
    _libraries = folder


_active: str | None = None  # the settings
_libraries: Path | None = None  # that are loaded


def active_settings() -> str:
    """Return the settings of this process's device, as a line of text for activate_from().

    Raises:
        RuntimeError: The simulated device is not active in this process.

    Examples:
        >>> memopt.sim.activate(memory="8GiB")
        >>> subprocess.run(command, env={**os.environ, VARIABLE: active_settings()})
    """
    if _active is None:
        raise RuntimeError("the simulated device is not active: call memopt.sim.activate() first")
    return _active


def libraries() -> Path:
    """Return the folder of the simulated libraries that this process has loaded.

    Raises:
        RuntimeError: It has loaded none.
    """
    if _libraries is None:
        raise RuntimeError("no simulated library is loaded: call memopt.sim.activate() first")
    return _libraries


def is_active() -> bool:
    """Return whether activate() has succeeded in this process."""
    return _active is not None


def readiness() -> str:
    """Describe what activate() would load with this torch. Loads nothing, and may be called before or after torch.

    Raises:
        RuntimeError: activate() would refuse this torch; the message is the same.
    """
    folder = _set_for_this_torch()
    return f"ready for this torch: memopt/sim/{folder.name}, {len(list(folder.glob('sim_*.so')))} libraries"


def _set_for_this_torch() -> Path:
    torch_lib = _torch_lib_dir()
    folder = library_set(torch_lib)
    missing = coverage(torch_lib)
    if missing:
        shown = "; ".join(f"{soname}: {', '.join(names[:5])}" for soname, names in missing.items())
        raise RuntimeError(
            f"torch in {torch_lib.parent} imports functions that the simulated libraries lack ({shown}): "
            "use an older torch, or a newer memopt"
        )
    return folder


def mapped_cuda(maps: str = "/proc/self/maps") -> list[str]:
    """Return paths of CUDA drivers and runtimes mapped in this process, without ours (sim_*.so)."""
    pattern = re.compile(r"/lib(cuda|cudart|nvidia-ml)(-[\w.]+)?\.so[\w.]*( \(deleted\))?$")
    try:
        lines = Path(maps).read_text().splitlines()
    except OSError as error:
        raise RuntimeError(
            f"{maps} cannot be read ({error}), so a real CUDA driver may be loaded in this process: mount /proc"
        ) from error
    return sorted({line.split(maxsplit=5)[5] for line in lines if pattern.search(line)})


def stands_in(maps: str = "/proc/self/maps") -> bool:
    """Return whether the simulated driver is loaded without an activation, as a machine that has no device.

    Where the environment has links to it in the place of NVIDIA's libraries, `import torch` loads it.
    """
    return not is_active() and Path(maps).exists() and "/sim_cuda.so" in Path(maps).read_text()


def settings_of(
    memory: int | str,
    devices: int = 1,
    compute_capability: str = "8.0",
    multiprocessors: int = 108,
    lazy: bool = False,
    blank: bool = False,
    context: int | str = 0,
    cudnn_workspace: int | str = 0,
    stale_aliases: bool = False,
    dead_handles: bool = False,
) -> str:
    """Return the text for activate_from() that stands for these arguments of activate()."""
    capability = re.fullmatch(r"(\d+)\.(\d)", str(compute_capability))
    if capability is None:
        raise ValueError(f'compute_capability must be a string such as "8.0", not {compute_capability!r}')
    values = {
        "memory": arguments.size(memory, "memory"),
        "devices": devices,
        "cc": capability[1] + capability[2],
        "sms": multiprocessors,
        "lazy": int(lazy),
        "blank": int(blank),
        "context": arguments.size(context, "context"),
        "cudnn_workspace": arguments.size(cudnn_workspace, "cudnn_workspace"),
        "stale_aliases": int(stale_aliases),
        "dead_handles": int(dead_handles),
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def _torch_lib_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"torch is not installed for {sys.executable}: install its CUDA build: {_INSTALL}")
    home = Path(spec.origin).parent
    version = torch_version.told_by(home)
    if version is None:
        raise RuntimeError(f"{home} has no version (version.py): reinstall torch: {_INSTALL}")
    if torch_version.too_old(version):
        oldest = ".".join(map(str, torch_version.OLDEST))
        raise RuntimeError(
            f"torch {version} in {home} is too old: {oldest} is the oldest supported: {_INSTALL}"
        )
    return home / "lib"


def _cudnn_version() -> int:
    """Return the cuDNN version that this torch was published with, from its requirements, as cudnnGetVersion counts.

    9.20.0 is 92000. Where they name none, it is a recent one, because torch refuses an older library than the one it
    was compiled against.
    """
    for requirement in importlib.metadata.requires("torch") or []:
        found = re.match(r"nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", requirement)
        if found:
            return int(found[1]) * 10000 + int(found[2]) * 100 + int(found[3])
    return 92800


def _loaded(folder: Path, settings: str | None) -> ctypes.CDLL:
    """Load the whole set, with a device if there are settings; after an error none of it stays loaded.

    The device is made while its library is loaded alone, invisible to other libraries: after a refusal no library that
    bears NVIDIA's soname may stay for `import torch` to link.
    """
    device = _load(folder / "sim_cuda.so", ctypes.RTLD_LOCAL)
    _control.declare(device)
    try:
        if settings is not None:
            _make_device(device, settings)
        _open(folder)
    except (RuntimeError, ValueError):
        _ctypes.dlclose(device._handle)
        raise
    return device


def _make_device(library: ctypes.CDLL, settings: str) -> None:
    refused = library.simcuda_activate(settings.encode())
    if refused is not None:
        raise ValueError(f"the simulated device rejects {settings!r}: {refused.decode()}")


def _open(folder: Path) -> ctypes.CDLL:
    """Load the whole set globally, or none of it, and return the device library.

    The device library comes first because the others link it.
    """
    first = folder / "sim_cuda.so"
    opened: list[ctypes.CDLL] = []
    try:
        for path in [first, *sorted(set(folder.glob("sim_*.so")) - {first})]:
            opened.append(_load(path, ctypes.RTLD_GLOBAL))
    except RuntimeError:
        for library in reversed(opened):
            _ctypes.dlclose(library._handle)
        raise
    return opened[0]


def _load(path: Path, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}): {OURS_AGAIN}") from error


# ---- the end of the interpreter --------------------------------------------------------------------------------------


_WORKER = "pt_autograd"  # c10::setThreadName in torch/csrc/autograd/engine.cpp
_POLL_SECONDS = 0.002
_LIMIT_SECONDS = 2.0


def _at_exit(device: ctypes.CDLL) -> None:
    """Let the process end with the script's own status while torch's autograd threads finish their work.

    loss.backward() returns when the last gradient is there; its worker threads go on for a moment, dropping Python
    objects of the graph. If the interpreter ends meanwhile, CPython before 3.14 kills such a thread in a C++
    destructor, and the process aborts (csrc/simcuda/exit.c). So the last exit function, registered before torch's own
    and therefore run after them, waits until those threads sleep on their queues, and leaves a guard for one that wakes
    up later still.
    """
    wait_for_workers(_LIMIT_SECONDS)
    device.simcuda_guard_exit()


def wait_for_workers(limit_seconds: float) -> bool:
    """Wait until every autograd worker has slept through two polls; return False if one did not within the limit.

    A worker that waits for the interpreter's lock wakes every 5 ms to ask again, so its count of context switches
    moves; the count of one that waits on its queue stands still. sleep() releases the lock.
    """
    deadline = time.monotonic() + limit_seconds
    still, before = 0, _worker_activity()
    while before and still < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS * (1 + 2 * still))
        after = _worker_activity()
        still = still + 1 if after == before and all(state == "S" for state, _ in after.values()) else 0
        before = after
    return True


def _worker_activity() -> dict[str, tuple[str, str]]:
    """Return by thread id (state letter, context switches so far) of this process's autograd workers."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            if not (thread / "comm").read_text().startswith(_WORKER):
                continue
            fields = dict(
                line.split(":", 1) for line in (thread / "status").read_text().splitlines() if ":" in line
            )
        except FileNotFoundError:  # the thread has ended since it was listed
            continue
        switches = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
        found[thread.name] = (fields["State"].split()[0], switches)
    return found
