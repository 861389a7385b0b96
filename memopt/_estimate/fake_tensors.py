"""An estimate on fake tensors, which have shapes and no memory.

It serves where there is no CUDA build of torch, or where a model cannot be sent to another process. No CUDA code runs,
so it is less exact. It runs in a fork of this process: its changes to the process are gone afterwards, and code that
ends an interpreter (some paths of fake attention) does not end this one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import io
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import memopt
from memopt._estimate import cards, protection
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.host_reads import Guesses
from memopt._estimate.prediction import FAKE, Estimate
from memopt._estimate.protection import Protection, fork_watched
from memopt._estimate.training import TrainingTask
from memopt._memory.recording.cpu_recorders import OperationsRecorder, _Operations
from memopt._memory.recording.user_code import is_user_file
from memopt._runtime.process import ChildFailed, ended

_BLOCK = 512  # an allocator's least unit


# What ends a test that a training which goes well passes, such as torch.isfinite(x).all().
_TRUE = {torch.ops.aten.mul, torch.ops.aten.isfinite, torch.ops.aten.all}


class _HostReads(_Operations):
    """A mode that answers the program's reads of tensors without values, and counts these answers."""

    def __init__(self, recorder: OperationsRecorder) -> None:
        super().__init__(recorder)
        self.guesses = Guesses()
        self._true: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that say all is well

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func.overloadpacket in _TRUE and isinstance(out, torch.Tensor):
                self._true[id(out)] = weakref.ref(out)
            return out
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            if not dtype.is_floating_point and dtype is not torch.bool:
                raise RuntimeError(
                    f"it reads the value of a {dtype} tensor, on which shapes may depend: only the simulated device "
                    "knows this value; name a Python that has PyTorch's CUDA build"
                ) from None
            self.guesses.add("value", f"the value of {str(dtype).removeprefix('torch.')}")
            if dtype is torch.bool:
                known = self._true.get(id(args[0]))
                return known is not None and known() is args[0]
            return 1.0


class _FakeRecorder(OperationsRecorder):
    """A recorder of the fake storages of one mode.

    Fake storages have no address: each gets a unique one, and the size that a block would have. Tensors that
    torch.compile has left in this process belong to other modes, and may have no size in bytes.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__(max_events=1 << 22)
        self._fakes = fakes
        self._mode = self.reads = _HostReads(self)
        self._next = _BLOCK

    def see(self, tensor: torch.Tensor, here: bool = True) -> None:
        if not self._running or not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fakes:
            return
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        identity, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        known = self._live.get(identity)
        if known is not None:
            if known[2] == size:
                return
            self._died(identity)
        if not size:
            return
        ref = weakref.ref(storage, lambda _: self._died(identity))
        self._live[identity] = ref, self._next, size
        self._note(1, self._next, size, self._stack() if here else 0)
        self._next += size


class NoFakeTensors(ChildFailed):
    """The training does what fake tensors cannot."""


def run(training: TrainingTask, seconds: float, protected: Protection, output: int = 2) -> Answer:
    """Run the training on fake tensors and return its answer.

    output: a file descriptor for the training's output. Raises ChildFailed if it does not run on fake tensors.
    """
    with tempfile.TemporaryDirectory(prefix="memopt-estimate-") as folder:
        return _run(training, seconds, protected, os.path.realpath(folder), output)


def _run(training: TrainingTask, seconds: float, protected: Protection, folder: str, output: int) -> Answer:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = _fork()
    if pid == 0:
        os.close(read)
        _in_child(training, protected, folder, write, output)
    os.close(write)
    try:
        told = _heard(read, seconds)
    except BaseException:  # an interrupt too
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(read)
        _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        raise ChildFailed(f"the process that ran on fake tensors {ended(-os.WTERMSIG(status))}")
    answer = json.loads(told)
    if answer.get("fake"):
        raise NoFakeTensors(f"it does not run on fake tensors: {answer['failed']}{answer['line']}")
    if "failed" in answer:
        raise ChildFailed(f"it does not run on fake tensors: {answer['failed']}", answer["trace"])
    return Answer.from_json(answer)


def _fork() -> int:
    """os.fork(), whose child can run backward passes.

    torch refuses them in a fork of a process where backward passes have started threads: of one with a GPU, or where
    torch.compile has met a CUDA build without one. It learns of a fork from a handler, and glibc's _Fork() runs none.
    The child needs none of those threads, because its tensors are fake. A lock of malloc's that a thread happens to
    hold stays locked in the child, which its time limit ends then. Where there is no _Fork() (before glibc 2.34),
    torch's refusal is the answer.
    """
    _backward()  # a device's threads start here, where its driver is known to work
    trial = os.fork()
    if trial == 0:
        try:
            _backward()
            os._exit(0)
        finally:
            os._exit(1)
    _, refused = os.waitpid(trial, 0)
    raw = getattr(ctypes.PyDLL(None, use_errno=True), "_Fork", None) if refused else None
    if raw is None:
        return os.fork()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = raw()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _backward() -> None:
    with torch.inference_mode(False):
        torch.zeros((), device="cpu", requires_grad=True).backward()


def _heard(read: int, seconds: float) -> bytes:
    import select

    end, parts = time.monotonic() + seconds, [b""]
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise ChildFailed(f"the run on fake tensors took more than {seconds:.0f} s")
        part = os.read(read, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _in_child(training: TrainingTask, protected: Protection, folder: str, write: int, output: int) -> None:
    """Run the training in the forked child. Never returns, because none of the parent's code may run in this process
    again."""
    try:
        os.dup2(output, 2)
        os.dup2(2, 1)  # standard output is for the answer
        if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is not
            sys.stdout.reconfigure(line_buffering=True)  # so that they stand between errors in their place
        torch.set_num_threads(1)  # the threads that share work are not here either
        told: dict[str, Any] = {}
        _tell(lambda: _confine(protected, folder), told)
        if not told:
            # In a thread of its own, so that no line that waits in this one is taken for the one that asked for memory.
            thread = threading.Thread(target=_tell, args=(lambda: told.update(_answer(training)), told))
            thread.start()
            thread.join()
        sys.stdout.flush()
        with os.fdopen(write, "wb") as out:
            out.write(json.dumps(told).encode())
    finally:
        os._exit(0)


def _confine(protected: Protection, folder: str) -> None:
    """A fork has one thread, however many its parent has."""
    fork_watched(_fork)
    opened = protection.open_for_writing()
    protection.confine(protected, folder)
    protection.reopen(protected, opened, folder)
    protection.saved(protection.redirected(protected, folder))


def _tell(run: Callable[[], None], told: dict[str, Any]) -> None:
    try:
        run()
    except BaseException as error:
        users = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
        told |= {
            "failed": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
            # What has no fake tensor is no error of the script's.
            "fake": type(error).__module__.startswith("torch._subclasses"),
            "line": f" at {users[-1].filename}:{users[-1].lineno}" if users else "",
        }


def _answer(training: TrainingTask) -> dict[str, Any]:
    begun = time.monotonic()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _as_in_a_fork_of_fakes()
    _make_fake(training, mode)
    recorder = _FakeRecorder(mode)
    steps = _Steps()
    with ExitStack() as stack:
        stack.enter_context(mode)
        recorder._start(modules=True)
        stack.callback(recorder._stop)
        stack.callback(recorder._program.stop)
        for tensor in _fakes():
            recorder.see(tensor, here=False)
        with LikeCuda():
            training.run("cpu")
        recording = recorder.recording()
    peak, event = recording.peak()
    return {
        "peak_allocated": peak,
        "peak_reserved": peak,
        "by_category": recording.by_category(event),
        "by_line": [line._asdict() for line in recording.by_line(event)],
        "by_module": [line._asdict() for line in recording.by_module(event)],
        "guesses": recorder.reads.guesses.rows(),
        "steps": steps.done,
        "seconds": time.monotonic() - begun,
        "versions": {
            "memopt": memopt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _as_in_a_fork_of_fakes() -> None:
    """Patch torch for fake tensors for the rest of this process.

    Patched are conversions of modules, CUDA's autocast, which a CPU build would switch off, DataLoader's workers, to
    which fake tensors cannot be sent, the question before an optimizer's step whether a CUDA graph is captured, which a
    fork cannot ask, and the backward pass, which torch runs outside LikeCuda: what it runs again must be what was run.
    """
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):  # either, by the version
            setattr(torch.optim.Optimizer, name, lambda _: None)
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def like_cuda(*args: Any, **kwargs: Any) -> Any:
        with LikeCuda():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = like_cuda  # type: ignore[attr-defined]
    from torch.utils.data import DataLoader

    torch.nn.Module._apply = _apply  # type: ignore[method-assign, assignment]
    for owner, changed in (
        (torch.autocast, lambda given: given | {"device_type": "cpu"}),
        (DataLoader, lambda given: given | _NO_WORKERS),
    ):
        _with_arguments(owner, changed)


_NO_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}


def _with_arguments(owner: Any, changed: Any) -> None:
    """Change the arguments that a class's constructor gets."""
    plain, signature = owner.__init__, inspect.signature(owner.__init__)

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        given.pop("self")
        plain(self, **changed(given))

    owner.__init__ = init


def _apply(self: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
    """Apply a conversion as torch does. torch swaps a fake parameter with another, which a recorder's reference
    forbids."""
    made: dict[int, torch.Tensor] = {}
    for module in self.modules() if recurse else [self]:
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with torch.no_grad():
                        changed = change(tensor)
                    if changed is not tensor and isinstance(tensor, torch.nn.Parameter):
                        changed = torch.nn.Parameter(changed, tensor.requires_grad)
                    made[id(tensor)] = changed
                table[name] = made[id(tensor)]
    return self


class _Steps:
    """A counter of an optimizer's steps.

    Steps go over all parameters at once if nobody has chosen, as on a CUDA device, because that takes more memory.
    """

    def __init__(self) -> None:
        self.done = 0
        register_optimizer_step_pre_hook(self._as_on_cuda)
        register_optimizer_step_post_hook(self._count)

    def _as_on_cuda(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = not group.get("differentiable")

    def _count(self, *_: Any) -> None:
        self.done += 1


def _fakes() -> Iterator[FakeTensor]:
    return (thing for thing in gc.get_objects() if type(thing) is FakeTensor)


def _make_fake(training: TrainingTask, mode: FakeTensorMode) -> None:
    """Replace real tensors by fake ones, in modules, in optimizers, and what else the training holds by itself."""
    from torch.utils import _pytree as pytree

    empties: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.is_cpu:
            return mode.from_tensor(tensor)  # one and the same each time
        if id(tensor) not in empties:
            with mode:
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            needs_grad = tensor.requires_grad
            parameter = isinstance(tensor, torch.nn.Parameter)
            empties[id(tensor)] = torch.nn.Parameter(made, needs_grad) if parameter else made
        return empties[id(tensor)]

    for held, put in list(_held(training)):
        if isinstance(held, torch.nn.Module):
            for module in held.modules():
                for table in (module._parameters, module._buffers):
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = fake(tensor)
        elif isinstance(held, torch.optim.Optimizer):
            states = {fake(p): s for p, s in held.state.items()}
            held.state.clear()
            for parameter, state in states.items():
                held.state[parameter] = pytree.tree_map_only(torch.Tensor, fake, state)
            for group in held.param_groups:
                group["params"] = [fake(p) for p in group["params"]]
        elif any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(held)):
            put(pytree.tree_map_only(torch.Tensor, fake, held))


_Held = Iterator[tuple[Any, Callable[[Any], None]]]


def _held(training: TrainingTask) -> _Held:
    """Yield what the training is given, and what its functions hold: in their closures, their defaults, the globals
    that they name, and as their objects. Each comes with a function that puts another in its place."""
    yield from _named(vars(training))
    for function in (training.subject, training.loss):
        if isinstance(function, types.MethodType):
            yield function.__self__, lambda _: None
            if not isinstance(function.__self__, torch.nn.Module):
                yield from _named(getattr(function.__self__, "__dict__", {}))
            function = function.__func__
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                if cell != types.CellType():
                    yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            yield function.__defaults__, functools.partial(setattr, function, "__defaults__")
            yield from _named(function.__kwdefaults__ or {})
            yield from _named(function.__globals__, function.__code__.co_names)


def _named(table: dict[str, Any], names: Iterable[str] | None = None) -> _Held:
    for name in table if names is None else names:
        if name in table:
            yield table[name], functools.partial(table.__setitem__, name)


# ---- a script --------------------------------------------------------------------------------------------------------


@dataclass
class FakeScript(TrainingTask):
    """A script that ends with the last of `count` optimizer steps.

    Tensors that it puts on a CUDA device and tensors on the CPU count alike, because all are CPU tensors here.
    """

    subject: None = None
    argv: list[str] = field(default_factory=list)
    module: bool = False
    count: int | None = 3

    def run(self, device: str) -> None:
        from memopt._estimate import script
        from memopt._estimate.loops import Loops

        loops = Loops(self.count, stop=True)
        end = script.run(self.argv, self.module)
        if end.error is not None:
            raise end.error
        if end.stopped == "exit" and end.status:
            raise RuntimeError(f"it ended with status {end.status} after {loops.done} steps")


# ---- the memory of CUDA's kernels ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Flash attention's memory: the output and one number for each row are kept, gradients are summed in 32 bits."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, rows = ctx.saved_tensors
        sums = torch.empty_like(q, dtype=torch.float32), torch.empty_like(rows)
        made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del sums
        return made


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = query.new_empty(attn_mask.shape)  # a kernel gets it as numbers
    made: torch.Tensor = _Attention.apply(query, key, value)
    return made


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not p:
        return input  # type: ignore[no-any-return]
    made = torch.native_dropout(input, p, True)[0]
    return input.copy_(made) if inplace else made  # type: ignore[no-any-return]


_INSTEAD = {functional.scaled_dot_product_attention: _attention, functional.dropout: _dropout}


def _on_cpu(thing: Any) -> Any:
    if isinstance(thing, torch.device) and thing.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(thing, str) and thing.partition(":")[0] == "cuda" else thing


class LikeCuda(TorchFunctionMode):
    """A mode that gives code which asks for a CUDA device the CPU, whose tensors are fake.

    What CUDA's kernels keep is kept: the CPU's attention and dropout hold several times as much.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return _INSTEAD.get(func, func)(*map(_on_cpu, args), **kwargs)


# ---- the estimate ----------------------------------------------------------------------------------------------------


# Where no allocator has run: what CUDA's kernels keep may be so much more or less, and what the allocator holds so much
# more than it hands out. Of a few models the first was seen to be off by 7 %, the second to be 1.0 to 1.3.
_OFF = 0.1
_HELD = 1.3
_WORKSPACES = {True: 64 << 20, False: 17 << 20}  # cuBLAS's two, from compute capability 9.0 on, and before


def estimate_of(answer: Answer, title: str, card: Card | None, reason: str) -> Estimate:
    """Make the estimate. `reason`: why it was not the simulated device, "" if fake tensors were asked for."""
    found = Estimate(
        title=title,
        method=FAKE,
        allocated_bytes=(int(answer.peak_allocated * (1 - _OFF)), _at_most(answer, card)),
        reserved_bytes=(int(answer.peak_allocated * (1 - _OFF)), held_at_most(answer, card)),
        context_bytes=card.context_bytes if card else cards.CONTEXT,
        card=card,
        unknowns=[
            f"memory kept by CUDA kernels: {_OFF:.0%} more or less; memory held by the allocator: {_HELD - 1:.0%} "
            "more; cuDNN workspaces are not counted"
        ],
        runs=1,
        **answer.told() | {"unmodelled": [f"not run on the simulated device: {reason}"] if reason else []},
    )
    if card is not None:
        fits = [needed <= card.usable_bytes for needed in found.needed_bytes]
        found.verdict = "fits" if all(fits) else "unsure" if any(fits) else "does not fit"
    return found


def held_at_most(answer: Answer, card: Card | None) -> int:
    return int(_at_most(answer, card) * _HELD)


def _at_most(answer: Answer, card: Card | None) -> int:
    newer = card is not None and float(card.compute_capability) >= 9
    return int(answer.peak_allocated * (1 + _OFF)) + _WORKSPACES[newer]
