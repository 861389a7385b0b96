from typing import TypedDict

class _Device(TypedDict):
    name: str
    compute_capability: str
    total_bytes: int
    granularity: int

class _Driver(TypedDict):
    version: str
    lacking: list[str]
    devices: list[_Device]

class _Build(TypedDict):
    compiler: str
    level: int

__version__: str
__file__: str
build: _Build

class Error(RuntimeError):
    status: str
    code: int

def parse_size(size: int | str, /) -> int: ...
def format_size(bytes: int, /) -> str: ...
def cuda_driver() -> _Driver: ...
def cpu_isa(name: str | None = None, /) -> str: ...
def host_blocks() -> int: ...
def allocator_prepare() -> None: ...
def allocator_stats(device: int = 0, /) -> dict[str, int]: ...
