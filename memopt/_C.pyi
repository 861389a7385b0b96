from array import array
from typing import TypedDict

class _Device(TypedDict):
    name: str
    compute_capability: str
    total_bytes: int
    virtual_memory: bool

class _Driver(TypedDict):
    version: str
    lacking: list[str]
    devices: list[_Device]

class _KernelStatus(TypedDict):
    embedded_bytes: int
    compilations: int
    origin: str
    architecture: int
    nvrtc: str
    options: str
    cache: str
    stored: bool
    note: str
    launches: int
    uploads: int
    repeats: int
    waits: int
    captured: int
    captured_bytes: int

class _Build(TypedDict):
    compiler: str
    level: int

__version__: str
build: _Build

class Error(RuntimeError):
    status: str
    code: int

def parse_size(size: int | str, /) -> int: ...
def format_size(bytes: int, /) -> str: ...
def cuda_driver() -> _Driver: ...
def cpu_isa(name: str | None = None, /) -> str: ...
def host_blocks() -> int: ...
def allocator_prepare() -> str: ...
def allocator_hooks() -> dict[str, int]: ...
def allocator_configure(
    budget: int, slack: int, double_map: bool, recall: bool, preallocate: int, /
) -> None: ...
def allocator_trim(device: int, keep: int, /) -> int: ...
def allocator_fraction(device: int, /) -> float: ...
def allocator_is_current() -> bool: ...
def allocator_misuse() -> dict[str, int]: ...
def allocator_stats(device: int = 0, /) -> dict[str, int]: ...
def kernels_configure(nvrtc_paths: tuple[str, ...], cache_directory: str | None, /) -> None: ...
def kernel_status(device: int = 0, load: bool = False, /) -> _KernelStatus: ...
def kernel_source() -> str: ...
def foreach_unscale_cuda(
    addresses: array[int],
    counts: array[int],
    kind: int,
    inv_scale: int,
    found_inf: int,
    device: int,
    stream: int,
    /,
) -> None: ...
