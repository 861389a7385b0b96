"""Costs of each stage of a chain, measured in place: bytes of storages, seconds of wall time.

A dispatch mode sees the outputs of every operation, and storages report their deaths; each storage counts once. Memory
that an operation takes for itself while it runs (cuDNN's workspaces, temporaries) comes from the device's allocator: on
CUDA from its statistics, on the CPU from a hook (csrc/alloc/torch_cpu.h). Seconds are the minimum of several runs; a
device that runs asynchronously is synchronized before and after each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memopt import _C
from memopt._offload.codes import can_code, code_bytes, work_bytes
from memopt._offload.pinned_memory import aligned
from memopt._offload.transfers import can_go
from memopt._runtime import device_clock
from memopt._runtime.higher_order import run_under

# ---- the allocator's figures -----------------------------------------------------------------------------------------


ROUNDED_TO = 512  # bytes: each block of a CUDA device's allocator begins at such an address


def block_bytes(nbytes: int, device: torch.device) -> int:
    """Return the bytes of the block that the device's allocator gives for so many, if it splits a larger one for it."""
    return -(-nbytes // ROUNDED_TO) * ROUNDED_TO if device.type == "cuda" else nbytes


class AllocatorBytes:
    """Figures of a device's allocator. This base class has none: for a device whose allocator cannot be asked.

    restart() begins a new peak; both calls return (bytes now, peak since restart() before this call).
    """

    def start(self) -> None:
        """Begin, before the first restart()."""

    def stop(self) -> bool:
        """End, after the last answer, and return whether one watch of its own gave all answers."""
        return True

    def restart(self) -> tuple[int, int]:
        return 0, 0

    def now_and_peak(self) -> tuple[int, int]:
        return 0, 0

    def of_storages(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Return the bytes of the blocks that these lie in."""
        return sum(block_bytes(one.nbytes(), one.device) for one in storages)


class CudaBytes(AllocatorBytes):
    """Figures of the CUDA allocator's own statistics, whose peak restart() resets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def restart(self) -> tuple[int, int]:
        answer = self.now_and_peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        return answer

    counted = "requested_bytes"

    def now_and_peak(self) -> tuple[int, int]:
        figures = torch.cuda.memory_stats_as_nested_dict(self.device).get(self.counted, {"all": {}})["all"]
        return figures.get("current", 0), figures.get("peak", 0)


class CudaBlocks(CudaBytes):
    """The same in whole blocks, as torch.cuda.max_memory_allocated() has them: one that is not split, as it is hardly
    larger than what was asked for, counts in full."""

    counted = "allocated_bytes"

    def of_storages(self, storages: Iterable[torch.UntypedStorage]) -> int:
        sizes = {
            block["address"]: block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.device.index
            for block in segment["blocks"]
        }
        return sum(
            sizes.get(one.data_ptr(), block_bytes(one.nbytes(), one.device)) if one.nbytes() else 0
            for one in storages
        )


class CpuBytes(AllocatorBytes):
    """Figures of torch's CPU allocator, watched from start() to stop(), for all threads.

    They are zeros if the allocator is not as expected. If a recording watches it already, that one's figures are used.
    yielding: until another watch begins, whose figures follow.
    """

    def __init__(self, *, yielding: bool = False) -> None:
        self.yielding = yielding

    def start(self) -> None:
        self.own = 0
        with suppress(RuntimeError):  # memopt.Error is one
            self.own = _C.cpu_log_start(1, self.yielding)
            _C.cpu_log_no_stacks()

    def stop(self) -> bool:
        return bool(self.own) and _C.cpu_log_stop(self.own)

    def restart(self) -> tuple[int, int]:
        return _C.cpu_log_live(True)

    def now_and_peak(self) -> tuple[int, int]:
        return _C.cpu_log_live(False)


def allocator_bytes(
    device: torch.device | None, *, blocks: bool = False, yielding: bool = False
) -> AllocatorBytes:
    """Return the figures of the device's allocator.

    blocks: of the allocator's whole blocks, not of requested bytes. yielding: its own watch ends where another begins.
    """
    if device is not None and device.type == "cuda":
        return CudaBlocks(device) if blocks else CudaBytes(device)
    return CpuBytes(yielding=yielding) if device is not None and device.type == "cpu" else AllocatorBytes()


def workspace_bytes(device: torch.device) -> int:
    """Return the bytes of cuBLAS's workspaces on a CUDA device so far, 0 on another.

    It frees them all, since their sizes can be read nowhere; the next product takes them again. The forward pass has
    one and, as it runs on another thread, the backward pass too: 8 MiB each by default, 32 MiB on Hopper
    (CUBLAS_WORKSPACE_CONFIG).
    """
    if device.type != "cuda":
        return 0
    before: int = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    after: int = torch.cuda.memory_allocated(device)
    return before - after


# ---- storages of tensors ---------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Live bytes, now and at the peak, of the storages that operations make while the mode is on.

    device: the one whose allocator is asked what each operation takes besides, and whose peak is reset for that; None:
    none.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.allocator = allocator_bytes(device)
        self.live = self.peak = self.made = 0
        # Of the live bytes some that would not be there yet; the peak without them.
        self.pending = self.late_peak = 0
        self.known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.older: set[int] = set()  # of the known: those that were there before
        self.given_before = 0  # bytes that the allocator had given then
        self.ignored: set[int] = set()
        self.device = device
        self.met: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # that operations took and none put out

    def __enter__(self) -> Meter:
        self.allocator.start()
        self.older = set(self.known)
        self.given_before, _ = self.allocator.restart()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.allocator.stop()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors from now on."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self.ignored.add(storage._cdata)
            self.see(storage)

    def see(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata
        # torch keeps the Python object of a storage for as long as C++ uses it: the reference dies with the storage.
        ref, before = self.known.get(identity) or (weakref.ref(storage, lambda _: self.died(identity)), 0)
        elsewhere = self.device is not None and storage.device.type != self.device.type
        counts = identity not in self.ignored and not elsewhere
        size = block_bytes(storage.nbytes(), storage.device) if counts else 0
        self.known[identity] = (ref, size)
        self.live += size - before
        self.made += max(0, size - before)
        self._note(self.live)

    def _note(self, live: int) -> None:
        self.peak = max(self.peak, live)
        self.late_peak = max(self.late_peak, live - self.pending)

    def died(self, identity: int) -> None:
        _, size = self.known.pop(identity)
        self.ignored.discard(identity)
        self.older.discard(identity)
        self.live -= size

    def others(self) -> list[torch.UntypedStorage]:
        """Return the device's storages that are there after the step.

        They are memory that operations took without returning it as a result, and results that something keeps, such as
        a mask or cuDNN's dropout state.
        """
        refs = [*self.met.values(), *(ref for ref, size in self.known.values() if size)]
        found = {one._cdata: one for ref in refs if (one := ref()) is not None and one.device == self.device}
        return list(found.values())

    def unseen(self) -> int:
        """Return live bytes that no operation returned.

        A Python number that a graph keeps is a tensor of 8 bytes, which no hook sees. On a CPU; on another device they
        are the host's.
        """
        if not isinstance(self.allocator, CpuBytes):
            return 0
        now, _ = self.allocator.now_and_peak()
        storages = [ref() for identity, (ref, _) in self.known.items() if identity not in self.older]
        seen = sum(int(one.nbytes()) for one in storages if one is not None)
        return max(0, now - self.given_before - seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return run_under(self, func, args, kwargs or {})
        made = self.made
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device == self.device:
                storage = local(leaf).untyped_storage()
                if storage._cdata not in self.known:
                    self.met[storage._cdata] = weakref.ref(storage)
        before, _ = self.allocator.restart()
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self.see(local(leaf).untyped_storage())
        now, peak = self.allocator.now_and_peak()
        # What stays is no passing memory (cuBLAS's workspace), garbage that was collected meanwhile not its own.
        passing = max(0, peak - max(now, before + self.made - made))
        self._note(self.live + passing)
        return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's part on this rank: it has no storage of its own, and the size of the whole."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def bytes_of(tensors: Iterable[torch.Tensor], beside: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of these tensors' storages, each counted once, without the storages of `beside`."""
    counted = {local(t).untyped_storage()._cdata for t in beside if t.layout is torch.strided}
    total = 0
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = local(tensor).untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                total += block_bytes(storage.nbytes(), storage.device)
    return total


def gradients_on(parameters: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the gradients that are on the device: of parameters that are offloaded they are elsewhere."""
    found = (p.grad for p in parameters)
    return [grad for grad in found if grad is not None and grad.device.type == device.type]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    return next((t.device for t in tensors), torch.device("cpu"))


# ---- one stage -------------------------------------------------------------------------------------------------------


class StageBytes(NamedTuple):
    """Measured bytes of a stage.

    saved: the saved set of a full forward with the output, without the input and what was there before.

    The overheads are memory that lives besides while it runs: in a full forward; in a forward that keeps only the
    output (run_overhead: the other's saved tensors live here for a while); in one that ends once all is saved
    (remake_overhead: besides the saved set without the output); in the backward pass.

    parameter_grad: gradients that the backward pass makes and leaves; its overhead counts them too if they exist at its
    peak. saves_input, saves_output: whether its backward pass needs them; saved_beside_output: the saved set without
    the output. changes_input: in place; what it makes of its input then counts as its own, output or saved.

    codable: the part of `movable` that can be kept in 8 bits; codes: what it takes then; coding_overhead: what the
    codes of one storage take while they are made; late_overhead: the backward pass's if they are decoded when they are
    wanted, and not counted before.
    """

    saved: int
    output: int
    input_grad: int
    forward_overhead: int
    run_overhead: int
    remake_overhead: int
    backward_overhead: int
    parameter_grad: int
    saved_count: int  # tensors that it saves
    saves_input: bool
    saves_output: bool
    saved_beside_output: int
    changes_input: bool = False
    movable: int = 0  # bytes of the saved set that the stage alone holds: they can be kept elsewhere
    movable_room: int = 0  # that they take there
    numbers: int = 0  # bytes of numbers of Python's that its graph keeps, in none of the others
    output_stays: bool = True  # it can be kept nowhere else, or is in memory that the stage is given
    codable: int = 0
    codes: int = 0
    coding_overhead: int = 0
    late_overhead: int = 0


Moments = tuple[float, float]  # a begin and an end, by the device's clock


class StageSeconds(NamedTuple):
    """Measured seconds of a stage. remake: a forward with a graph that ends once all is saved."""

    forward: float
    full_forward: float
    remake: float
    backward: float


class Enough(Exception):
    pass


class Seed(torch.autograd.Function):
    """A scalar whose backward makes the gradients of these tensors: only the engine holds them, as within a model."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in tensors]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


class MovableStorage(NamedTuple):
    """A storage of Movable. saved: the tensors of it, by their numbers among all saved ones. dtypes: theirs."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    saved: list[int]
    dtypes: set[torch.dtype]


class Movable:
    """Storages that a run saves and nothing else holds: they are freed after it if the graph gets none of them."""

    def __init__(self) -> None:
        self.seen: list[MovableStorage] = []
        self.last: dict[int, MovableStorage] = {}  # by address

    def see(self, tensor: torch.Tensor, number: int) -> None:
        if can_go(tensor):
            storage = tensor.untyped_storage()
            last = self.last.get(storage._cdata)
            if last is None or last.ref() is None:
                last = MovableStorage(weakref.ref(storage), storage.nbytes(), [], set())
                self.last[storage._cdata] = last
                self.seen.append(last)
            last.saved.append(number)
            last.dtypes.add(tensor.dtype)

    def gone(self) -> list[MovableStorage]:
        return [one for one in self.seen if one.ref() is None]


def codable(storages: list[MovableStorage]) -> list[tuple[MovableStorage, torch.dtype]]:
    """Return those of a stage's storages that are coded, with their dtypes."""
    largest = max((one.nbytes for one in storages), default=0)
    single = [(one, next(iter(one.dtypes))) for one in storages if len(one.dtypes) == 1]
    return [(one, dtype) for one, dtype in single if can_code(dtype, one.nbytes, largest)]


class GraphIsGone(ValueError):
    """A stage was run without keeping what its graph saves, and a gradient is taken through it."""

    def __init__(self, name: str = "a stage") -> None:
        super().__init__(
            f"{name} computes gradients in its own forward pass, or keeps a tensor that needs a gradient outside its "
            "output and attributes (in a list, say): auto_checkpoint() cannot measure it. Return that tensor, or "
            "checkpoint the other parts with memopt.checkpoint()"
        )


def no_backward(_: object) -> torch.Tensor:
    raise GraphIsGone


def stage_bytes(
    function: Callable[..., Any],
    arguments: Any,
    linked: Any,
    standing: list[torch.Tensor],
    trainable: Any,
    device: torch.device,
) -> StageBytes:
    for parameter in trainable:
        parameter.grad = None
    args, kwargs = arguments()
    given = tensors_in((args, kwargs))
    inputs = linked(args, kwargs)
    saved: list[torch.Tensor] = []
    first: list[tuple[torch.dtype, torch.Size]] = []

    def note(tensor: torch.Tensor) -> None:
        movable.see(tensor, len(first))
        first.append((tensor.dtype, tensor.shape))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if len(saved) in numbers_coded:
            storage = tensor.untyped_storage()
            late[storage._cdata] = block_bytes(storage.nbytes(), storage.device)
        saved.append(tensor.detach())
        return saved[-1]

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if late and tensor.layout is torch.strided:
            meter.pending -= late.pop(tensor.untyped_storage()._cdata, 0)
        return tensor.detach()

    movable = Movable()
    meter = Meter(device)
    meter.ignore([*standing, *given])
    with meter, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(note, no_backward):
            out = function(*args, **kwargs)
        run_peak = meter.peak
        gone = movable.gone()
        coded = codable(gone)
        numbers_coded = {number for one, _ in coded for number in one.saved}
        late: dict[int, int] = {}  # bytes of what can be coded and is not wanted yet
        del out
    remake_peak = bytes_to_remake(function, arguments, standing, len(first), device)
    args, kwargs = arguments()
    given, inputs = tensors_in((args, kwargs)), linked(args, kwargs)
    before = [t._version for t in given]
    meter = Meter(device)
    meter.ignore([*standing, *given])
    with meter, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = function(*args, **kwargs)
        if [(t.dtype, t.shape) for t in saved] != first:
            raise RuntimeError(
                f"it saves {len(first)} tensors, then {len(saved)}, or tensors of other shapes or dtypes"
            )
        outputs = tensors_in(out)
        unchanged = [t for t, version in zip(given, before, strict=True) if t._version == version]
        changes_input = len(unchanged) < len(given)
        given = unchanged
        # An output that is a view of an input holds as many bytes as one of its own would: while it lives, they do.
        output = bytes_of(outputs, standing)
        stays = not output or bytes_of(filter(can_go, outputs), [*standing, *given]) < output
        own = bytes_of([*saved, *outputs], [*standing, *given])
        numbers = meter.unseen()
        kept = max(own, output)
        count = len(saved)
        saves_input = bytes_of(saved, standing) > bytes_of(saved, [*standing, *inputs])
        beside_output = bytes_of(saved, [*standing, *given, *outputs])
        saves_output = bytes_of(saved, [*standing, *given]) > beside_output
        saved.clear()
        forward_overhead = max(0, meter.peak - own)
        ends = [t for t in outputs if t.requires_grad]
        output_grad = bytes_of(ends)
        seed = Seed.apply(*ends) if ends else torch.zeros((), requires_grad=True)
        one = torch.ones_like(seed)
        meter.ignore([seed, one])
        # By now nobody but the graph, if it does, holds the output.
        del out, outputs, ends
        held = meter.peak = meter.live
        meter.pending = late_bytes = sum(late.values())
        meter.late_peak = held - late_bytes
        seed.backward(one)
        # One that is changed in place is not what its gradient is kept for, but as large.
        grads = [t.grad if t.is_leaf else t for t in inputs if t.requires_grad]
        input_grad = bytes_of([grad for grad in grads if grad is not None])
        parameter_grad = bytes_of(gradients_on(trainable, device))
        backward_overhead = max(0, meter.peak - held - output_grad - input_grad)
        late_overhead = max(0, meter.late_peak - (held - late_bytes) - output_grad - input_grad)
    works = [work_bytes(one.nbytes, dtype, device) for one, dtype in coded]
    codes = [code_bytes(one.nbytes, dtype) for one, dtype in coded]
    return StageBytes(
        saved=kept,
        output=output,
        input_grad=input_grad,
        forward_overhead=forward_overhead,
        run_overhead=max(0, run_peak - output),
        remake_overhead=max(0, (kept + forward_overhead if changes_input else remake_peak) - beside_output),
        backward_overhead=backward_overhead,
        parameter_grad=parameter_grad,
        saved_count=count,
        saves_input=saves_input,
        saves_output=saves_output,
        saved_beside_output=beside_output,
        changes_input=changes_input,
        movable=sum(one.nbytes for one in gone),
        movable_room=sum(aligned(one.nbytes) for one in gone),
        numbers=numbers,
        output_stays=stays,
        codable=late_bytes,
        codes=sum(codes),
        coding_overhead=max(map(sum, zip(codes, works, strict=True)), default=0),
        late_overhead=late_overhead + max(works, default=0) // 2,
    )


def bytes_to_remake(
    function: Callable[..., Any],
    arguments: Any,
    standing: list[torch.Tensor],
    count: int,
    device: torch.device,
) -> int:
    """Return the peak bytes of a forward that ends once `count` tensors are saved."""
    args, kwargs = arguments()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        if len(saved) == count:
            raise Enough
        return saved[-1]

    given = tensors_in((args, kwargs))
    meter = Meter(device)
    meter.ignore([*standing, *given])
    with meter, torch.enable_grad():
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, no_backward):
                function(*args, **kwargs)
        except Enough:
            pass  # as it is meant to end
        return meter.peak


def stage_moments(
    function: Callable[..., Any],
    arguments: Any,
    trainable: list[torch.Tensor],
    count: int,
    device: torch.device,
) -> list[Moments]:
    """Run a stage, and return when each of StageSeconds began and ended, by the device's clock."""
    args, kwargs = arguments()
    clock = device_clock.clock
    moments: list[Moments] = []

    @contextmanager
    def timed() -> Iterator[None]:
        begun = clock.now(device)
        yield
        moments.append((begun, clock.now(device)))

    for parameter in trainable:
        parameter.grad = None
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: None, no_backward)
    with torch.enable_grad(), hooks, timed():
        out = function(*args, **kwargs)
    del out
    args, kwargs = arguments()
    with torch.enable_grad():
        with timed():
            out = function(*args, **kwargs)
        left = count

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            if not left:
                raise Enough
            return tensor.detach()

        again, again_kwargs = arguments()
        with timed():
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.detach):
                    function(*again, **again_kwargs)
            except Enough:
                if left:
                    raise
        ends = [t for t in tensors_in(out) if t.requires_grad]
        with timed():
            if ends:
                Seed.apply(*ends).backward()
    return moments
