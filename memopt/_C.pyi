from collections.abc import Callable, Iterable
from typing import Any, NotRequired, TypedDict

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

class _Stat(TypedDict):
    current: int
    peak: int
    allocated: int
    freed: int

class _Columns(TypedDict):
    all: _Stat
    small_pool: _Stat
    large_pool: _Stat

class _Build(TypedDict):
    compiler: str
    level: int

class _Replay(TypedDict):
    completed: bool
    failed_line: int
    failure: str
    live_peak: int
    peak_reserved: int
    frontier: NotRequired[int]
    stitches: int
    granules_moved: int
    granules_switched: int
    driver_calls: int
    driver_calls_last_step: int
    operations: int
    ns_per_op: float
    driver_calls_per_step: list[int]
    granules_moved_per_step: list[int]
    granules_switched_per_step: list[int]
    held_per_step: list[int]

__version__: str
build: _Build

class Error(RuntimeError):
    status: str
    code: int

class _ArenaInfo(TypedDict):
    held_bytes: int
    free_bytes: int
    live_bytes: int
    live_blocks: int
    requested_bytes: int
    peak_bytes: int
    paused: bool

class Arena:
    def __init__(self, device: int, budget: int = 0, preallocate: int = 0) -> None: ...
    def release(self, trim: bool = False, /) -> None: ...
    def route(self, this_thread: bool = False, /) -> None: ...
    def unroute(self, /) -> None: ...
    def segment_functions(self, /) -> tuple[int, int]: ...
    def pause(self, /) -> None: ...
    def resume(self, /) -> None: ...
    def info(self, /) -> _ArenaInfo: ...
    def blocks(self, /) -> list[tuple[int, int, int]]: ...

class Surroundings:
    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None, /
    ) -> Any: ...

class CheckpointEngine:
    def __init__(self, **names: Any) -> None: ...
    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        generators: tuple[Any, ...] | None,
        device: str | None,
        early_stop: bool,
        check: bool,
        extras: tuple[Any, Any, Any, Any] | None,
        /,
    ) -> Any: ...
    def surroundings(self, generators: tuple[Any, ...] | None, device: str | None, /) -> Surroundings: ...
    def only_cpu(self, args: tuple[Any, ...], /) -> bool: ...
    def is_hook(self, pack: object, /) -> bool: ...

class ModuleCalls:
    def __new__(
        cls,
        function: Callable[..., Any],
        enter: Callable[[Any, bool], int],
        leave: Callable[[Any, tuple[Any, ...], dict[str, Any]], object],
        set_eval_frame: Callable[[Any], Any],
    ) -> ModuleCalls: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def know(self, module: object, index: int, /) -> None: ...
    def forget(self, id: int, /) -> None: ...
    def tell(self, told: Callable[[Any], object], arguments: list[Any], /) -> None: ...

def module_running() -> int: ...

class Gradients:
    others: list[Any]
    devices: tuple[int, ...]
    dtypes: set[Any]
    def __init__(self, tensors: Iterable[Any], of_parameters: bool = False) -> None: ...
    def run(
        self,
        device: int,
        store: bool = False,
        inv_scale: Any = None,
        found_inf: Any = None,
        norm: Any = None,
        clip: Any = None,
        factor: Any = None,
        max_norm: float = ...,
        maximum: bool = False,
    ) -> None: ...
    def multiply(self, device: int, clip: Any, /) -> None: ...
    def tensors(self, device: int, /) -> list[Any]: ...

class UpdatePlan:
    def __init__(
        self,
        state: dict[Any, Any],
        param_groups: list[dict[str, Any]],
        sgd: bool = False,
        first: list[int] = [],
    ) -> None: ...
    def collect(
        self, state: dict[Any, Any], param_groups: list[dict[str, Any]], fresh: bool = False, /
    ) -> list[int] | None: ...
    def add(self, which: int, grad: object, /) -> bool: ...
    def gradients(self, /) -> Gradients: ...
    def devices(self, /) -> list[int]: ...
    def run(
        self,
        device: int,
        factor: object = None,
        found_inf: object = None,
        store_gradients: bool = False,
        /,
    ) -> None: ...
    def drop(self, /) -> None: ...

_ChainOption = tuple[int, int, int, float, float, float]
_ChainStage = tuple[int, int, tuple[_ChainOption, ...]]
_ChainOp = tuple[str, int, int]

class ChainTable:
    least_budget: int
    def __init__(
        self,
        stages: tuple[_ChainStage, ...],
        input_bytes: int,
        output_grad_bytes: int,
        budget: int,
        slots: int,
        level: int,
        /,
    ) -> None: ...
    def curve(self, /) -> list[tuple[int, float]]: ...
    def schedule(self, budget: int, /) -> list[_ChainOp]: ...

def chain_check(stages: tuple[_ChainStage, ...], input_bytes: int, output_grad_bytes: int, /) -> None: ...
def chain_replay(
    stages: tuple[_ChainStage, ...], input_bytes: int, output_grad_bytes: int, ops: list[_ChainOp], /
) -> tuple[float, int, int, list[tuple[float, int, int]]]: ...
def adam8_encode(second: bool, values: object, codes: object, scales: object, /) -> None: ...
def adam8_decode(second: bool, values: object, codes: object, scales: object, /) -> None: ...
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
def allocator_observe(observer: Callable[[int, int, int, int], object] | None, /) -> None: ...
def allocator_misuse() -> dict[str, int]: ...
def allocator_statistics(device: int = 0, /) -> dict[str, Any]: ...
def allocator_private_pools(device: int = 0, /) -> dict[tuple[int, int], _Columns]: ...
def allocator_reset_peaks(device: int = 0, /) -> None: ...
def allocator_reset_accumulated(device: int = 0, /) -> None: ...
def allocator_fragmentation(device: int = 0, /) -> dict[str, int | float]: ...
def allocator_segments(
    device: int, pool: tuple[int, int] | None, frames: dict[int, list[dict[str, Any]]], /
) -> list[dict[str, Any]]: ...
def kernels_configure(nvrtc_paths: tuple[str, ...], cache_directory: str | None, /) -> None: ...
def kernel_status(device: int = 0, load: bool = False, /) -> _KernelStatus: ...
def kernel_source() -> str: ...
def _tensor_view(tensor: Any, by_methods: bool = False, /) -> tuple[int, int, int, int] | None: ...
def replay(
    trace: bytes,
    memory: int,
    slack: int,
    small_limit: int,
    double_map: bool,
    recall: bool,
    lazy: bool,
    check: bool,
    device: int,
    frontier: bool,
    /,
) -> _Replay: ...
def trace_start(device: int, capacity: int, stacks: bool, clear: bool, /) -> None: ...
def trace_stop(device: int, /) -> None: ...
def trace_state(device: int, /) -> tuple[bool, int, int, int]: ...
def trace_read(device: int, /) -> list[tuple[str, int, int, int, int, int, tuple[int, int], int]]: ...
def trace_stack(stack: int, /) -> list[tuple[str, str, int]]: ...
def trace_text(device: int, /) -> bytes: ...
def trace_step() -> None: ...

class PinnedMemory:
    def __new__(cls, device: int, nbytes: int, /) -> PinnedMemory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class _CopyCounts(TypedDict):
    copies_out: int
    bytes_out: int
    stream_out: int
    copies_in: int
    bytes_in: int
    stream_in: int

def copy_out(tensor: Any, host: Any, after: int = 0, /) -> int: ...
def copy_in(host: Any, tensor: Any, after: int = 0, /) -> int: ...
def copy_await(device: int, ticket: int, stream: int | None = None, /) -> None: ...
def copy_over(device: int, ticket: int, /) -> bool: ...
def copy_counts(device: int, /) -> _CopyCounts: ...
