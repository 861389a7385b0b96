"""Execution of a chain's stages by a schedule, inside an ordinary forward and backward pass of autograd.

The forward pass runs each stage once, in grad mode, so that the graph, its hooks and whatever DDP, AMP or
torch.autograd.grad make of it are those of the plain run; the schedule decides only which saved tensors are kept. When
the backward pass first needs a saved tensor of stage i, the schedule is carried out up to the backward of stage i:
stages run again, saving nothing where only their output is needed. State of a pass:

    inputs[i]   tensors of a_i: those outputs of stage i-1 that stage i takes. Held as long as a_i is kept in its own
                right (`own`) or stage i-1's saved set, to which its output belongs, is there (`saved`)
    put[i]      the same, off the device between ("put_input", i) and ("get_input", i)
    SavedPlaceholder
                the graph's entry for a tensor that a stage saved. It holds the tensor; nothing; the view of inputs[i]
                that it is, where the schedule drops a_i in between, so that it is not held twice; or, where the
                operation is ("fall", i, "offload"), a view of memory off the device (schedule_sets.py). Two operations
                say when such a set's copies may overlap others: ("sent", i) after the forward of later stages,
                ("fetch", i) before their backwards; without them only stage i overlaps them. ("fetch_input", i) is
                that of an input, whose copy begins before stage i runs

An argument that is not an output of the stage before (a mask, a position, something computed between the two) is held
from the forward pass on, as its caller would hold it: results do not depend on how the stages are joined. Whatever
order the backward pass takes (a part of the graph, the graph a second time), missing tensors are made again from the
nearest input there is; only the order that the schedule was made for keeps the schedule's peak. Without a graph to keep
the pass alive nothing is to be made again, and nothing of it stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.stages.argument_objects import ArgumentObject, is_changeable
from memopt._checkpoint.stages.module_state import Changes, StageState, buffers_beside, unchanged
from memopt._offload.schedule_sets import OPTION, OffloadedSet, OffloadedTensor, ScheduleOffload, unpacked
from memopt._runtime.state_snapshot import Modes, version
from memopt.chain import Op

FORWARD = ("fnone", "fck", "fall")
COPIES = ("sent", "fetch", "fetch_input")  # when they begin and end; else nothing changes
AFTERWARDS = ("drop_input", "drop_saved", "sent", "put_input")
OPERATIONS = (*FORWARD, "bwd", *AFTERWARDS, "get_input", "fetch", "fetch_input")

Function = Callable[..., Any]


class ChainRunner:
    """Stages 0 … len(functions)-1 of a schedule. Stages beyond belong to the caller: the loss, say.

    functions: of each stage, modules or plain callables with any arguments and outputs. ops: the schedule's operations,
    (op, stage) or, of "fall" and "bwd", (op, stage, "offload"): `memopt.chain.Schedule.ops`. passing: stages whose
    input is dropped once they have run, because no saved set needs it, not even as the output of the stage before.
    changing: those of them that change it in place. offload: the place of offloaded sets. gathers: contexts in which
    stages run again. state: of each stage what its runs change in modules; None: nothing, and nothing is watched.
    Raises ValueError if the operations do not begin with one forward pass through all stages in their order.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        ops: Sequence[Op],
        passing: Collection[int] = (),
        changing: Collection[int] = (),
        offload: ScheduleOffload | None = None,
        gathers: Sequence[Callable[[], AbstractContextManager[None]]] | None = None,
        state: Sequence[Changes] | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.count = len(self.functions)
        self.ops: tuple[tuple[str, int], ...] = tuple((op, stage) for op, stage, *_ in ops)
        self.passing, self.changing = frozenset(passing), frozenset(changing)
        self.offload = offload
        self.gathers = gathers
        modules = [getattr(f, "__self__", f) for f in self.functions]
        self.modules = [module if isinstance(module, torch.nn.Module) else None for module in modules]
        self.called = [modules_called(f, m) for f, m in zip(self.functions, self.modules, strict=True)]
        self.norms = [batch_norm.of_function(function) for function in self.functions]
        self.held = [held_outputs(function) for function in self.functions]
        self.state: Sequence[Changes] = [{} for _ in self.functions] if state is None else state
        self.steady = [
            [] if state is None else buffers_beside(called, self.state[k])
            for k, called in enumerate(self.called)
        ]
        self.here = threading.local()
        # Where each stage's first run and its backward stand in ops.
        self.forward_at: dict[int, int] = {}
        self.backward_at: dict[int, int] = {}
        for n, (op, stage) in enumerate(self.ops):
            if op not in OPERATIONS:
                raise ValueError(f"operation {n} is {op!r}: expected one of {', '.join(OPERATIONS)}")
            if op == "bwd":
                self.backward_at.setdefault(stage, n)
            elif op in FORWARD:
                self.forward_at.setdefault(stage, n)
        first = [self.forward_at.get(k, -1) for k in range(self.count)]
        last = [self.backward_at.get(k, -1) for k in range(self.count)]
        if -1 in (*first, *last) or first != sorted(first) or last != sorted(last, reverse=True):
            raise ValueError(
                f"the schedule does not fit {self.count} stages: each must run forward, in order, and backward once, "
                "in the reverse order"
            )
        # Stages whose input is dropped, or put away, while their saved set waits for it.
        self.dropped = {k for op, k in self.ops if op in ("drop_input", "put_input")}
        # Operations that run a stage whose input is put away then.
        self.putting = {n for n, (op, k) in enumerate(self.ops) if op in FORWARD and self._puts(n, k)}
        if self.putting and offload is None:
            raise ValueError("the schedule puts inputs off the device: give it where to offload to")
        self.away = self._offloading(ops)
        self.offloaded = {self.ops[n][1] for n in self.away}

    def _offloading(self, ops: Sequence[Op]) -> dict[int, bool]:
        """The "fall"s whose saved set goes: operation -> whether it does so at a later operation, "sent". A set that
        is wanted at once stays."""
        away: dict[int, bool] = {}
        for n, (op, k, *option) in enumerate(ops):
            if option and (option != [OPTION] or op not in ("fall", "bwd") or self.offload is None):
                raise ValueError(
                    f"operation {n}, {op} {k}, has the option {option[0]!r}: this runner supports no option"
                    + (
                        f" but {OPTION!r} of fall and bwd"
                        if self.offload
                        else "; give it where to offload to"
                    )
                )
            if op == "fall" and option and k < self.count and not self.is_last(n):
                rest = self.ops[n:]
                upto = rest[: rest.index(("bwd", k))]
                away[n] = ("sent", k) in upto
        return away

    def _puts(self, n: int, k: int) -> bool:
        following = next((op for op, stage in self.ops[n + 1 :] if stage == k and op not in COPIES), None)
        return following == "put_input"

    def is_last(self, n: int) -> bool:
        """Return whether the backward of operation n's stage comes next."""
        following = next((op for op in self.ops[n + 1 :] if op[0] not in COPIES), None)
        return following == ("bwd", self.ops[n][1])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, here=threading.local())

    def __call__(self, value: Any) -> Any:
        """Run all stages, each on the output of the one before."""
        for k in range(self.count):
            value = self.run(k, value)
        return value

    def run(self, stage: int, *args: Any, **kwargs: Any) -> Any:
        """Run one stage's function as part of the present pass; a stage that does not follow the last one begins a new
        pass."""
        if not torch.is_grad_enabled():
            return self.functions[stage](*args, **kwargs)
        ref: weakref.ref[ChainPass] | None = getattr(self.here, "run", None)
        present = ref() if ref is not None else None
        if present is None or stage <= present.last:
            present = ChainPass(self)
            self.here.run = weakref.ref(present)
        out = present.first_run(stage, args, kwargs)
        self.keep_without_graph(present, out)
        return out

    def keep_without_graph(self, present: ChainPass, out: Any) -> None:
        """A stage that saved nothing, on a sample without a gradient say, leaves no graph to keep its pass alive: its
        output does, until a later stage saves something or there is none."""
        here = self.here.__dict__  # of this thread: the output may die in another one
        here.pop("kept", None)
        end = next((leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)), None)
        if end is not None and not present.saves and present.last < self.count - 1:
            here["kept"] = present, weakref.ref(end, lambda _: here.pop("kept", None))


class Alias(NamedTuple):
    """A view of tensor `leaf` of the stage's input."""

    leaf: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


Kept: TypeAlias = torch.Tensor | OffloadedTensor
Value: TypeAlias = Kept | Alias


class SavedPlaceholder:
    """The autograd graph's entry for a tensor that a stage saved."""

    __slots__ = ("__weakref__", "run", "stage", "value")

    def __init__(self, run: ChainPass, stage: int, value: Value | None) -> None:
        self.run, self.stage, self.value = run, stage, value

    def unpack(self) -> torch.Tensor:
        return self.run.value_of(self)


class SameMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def changeable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a graph on the memory of one without a graph, which an operation may change in place."""
    with torch.enable_grad():
        return SameMemory.apply(tensor)  # type: ignore[no-any-return]


def unchangeable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that changeable() was given for this one; else this one."""
    node = tensor.grad_fn
    if isinstance(node, SameMemory._backward_cls):
        return node.next_functions[0][0].variable  # type: ignore[union-attr, no-any-return]
    return tensor


class Held(NamedTuple):
    """A tensor kept for a later run of its stage."""

    tensor: torch.Tensor  # detached
    requires_grad: bool
    version: int

    @staticmethod
    def of(tensor: torch.Tensor, requires_grad: bool | None = None) -> Held:
        needed = tensor.requires_grad if requires_grad is None else requires_grad
        return Held(tensor.detach(), needed, tensor._version)

    def again(self, *, changing: bool = False) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead. It is an argument of a checkpointed stage, which must run again: "
                "change a copy of it, or leave that stage out of checkpointing"
            )
        tensor = self.tensor.detach().requires_grad_(self.requires_grad)
        return changeable(tensor) if changing else tensor


class TensorVersion(NamedTuple):
    """A tensor at one version: after an in-place change it is another."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorVersion:
        return TensorVersion(weakref.ref(tensor), version(tensor))

    def key(self) -> tuple[int, int] | None:
        tensor = self.tensor()
        return None if tensor is None else (id(tensor), self.version)

    def changed(self) -> bool:
        tensor = self.tensor()
        return tensor is not None and version(tensor) != self.version


class StageCall:
    """A stage's run in the forward pass: all that running it again takes, but for what inputs[] holds."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Sequence[TensorVersion | None],
        changes: Changes,
        called: Sequence[torch.nn.Module] = (),
    ) -> None:
        """Keep the call's arguments. changes: what the stage's runs change in modules. called: these, to be run again
        in their modes."""
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.state = StageState(leaves, changes)
        self.modes = Modes.of(called)
        # Leaf here, output of the last stage, whether it needs a grad.
        self.links: list[tuple[int, int, bool]] = []
        # A tensor as Held, an object that a run may change as ArgumentObject; the places of links are not used.
        self.leaves: list[Any] = leaves
        self.saved: list[weakref.ref[SavedPlaceholder]] = []
        self.metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.outputs: list[TensorVersion | None] = []
        self.has_own_backward = False  # takes gradients within its own forward
        # The same tensor, unchanged since: what changed between would not come out of running that stage again.
        sources = {output.key(): n for n, output in enumerate(before) if output}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if (source := sources.get((id(leaf), version(leaf)))) is not None:
                    self.links.append((place, source, leaf.requires_grad))
                leaves[place] = Held.of(leaf)
            elif is_changeable(leaf):
                leaves[place] = ArgumentObject(leaf)

    def take_linked(self) -> list[Held]:
        linked = [self.leaves[place] for place, _, _ in self.links]
        for place, _, _ in self.links:
            self.leaves[place] = None
        return linked

    def arguments(
        self, linked: Sequence[Held], *, changing: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments. changing: the linked ones are changed in place."""
        leaves = [leaf.again() if isinstance(leaf, (Held, ArgumentObject)) else leaf for leaf in self.leaves]
        for (place, _, _), held in zip(self.links, linked, strict=True):
            leaves[place] = held.again(changing=changing)
        return pytree.tree_unflatten(leaves, self.spec)  # type: ignore[no-any-return]

    def unsaved(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The pack hook of a run for its output alone: saves only what a backward pass within the stage needs."""
        return tensor.detach() if self.has_own_backward else None

    def note_outputs(self, out: Any, held: Collection[int] = ()) -> None:
        """Note what the next stage's arguments may be linked to: leaves, but for those that are held anyway."""
        self.outputs = [
            TensorVersion.of(leaf) if isinstance(leaf, torch.Tensor) and n not in held else None
            for n, leaf in enumerate(pytree.tree_leaves(out))
        ]


def modules_called(function: Function, module: torch.nn.Module | None) -> Sequence[torch.nn.Module]:
    """Return the modules that a stage calls, and those in them: all of its module's, if it does not name them."""
    called: Sequence[torch.nn.Module] | None = getattr(function, "modules_called", None)
    return called if called is not None else [] if module is None else list(module.modules())


def calls_of(function: Function) -> tuple[Any, ...]:
    """Return what a stage calls, for comparison with others: its steps' targets, modules by their types; else none."""
    steps: tuple[Any, ...] | None = getattr(function, "steps_called", None)
    if steps is not None:
        return steps
    module = getattr(function, "__self__", function)
    return tuple(map(type, module.modules())) if isinstance(module, torch.nn.Module) else ()


def held_outputs(function: Function) -> Collection[int]:
    """Return the leaves of a stage's output that are there until the backward pass: later stages take them too."""
    return getattr(function, "held_outputs", ())


class ChainPass:
    """One forward pass through the chain, and the state that its backward pass needs."""

    def __init__(self, runner: ChainRunner) -> None:
        self.runner = runner
        self.calls: dict[int, StageCall] = {}
        self.last = -1  # the stage that ran last in the forward pass
        self.saves = False  # there is a graph that asks for what a stage saved
        self.running = -1  # the stage that is running in the forward pass: it may take gradients of its own
        self.inputs: dict[int, list[Held]] = {}
        self.putting: dict[int, tuple[OffloadedSet, list[Kept]]] = {}  # on their way
        self.put: dict[int, list[tuple[Kept, bool]]] = {}  # and whether they need a grad
        self.own: set[int] = set()
        self.saved: set[int] = set()
        self.cursor = 0  # the next operation
        self.at = runner.count  # the stage whose backward pass has begun
        self.outside: int | None = None  # a stage whose saved set was made outside the schedule
        self.sending: dict[int, OffloadedSet] = {}  # whose copies go on beside later stages
        self.coming: list[weakref.ref[Any]] = []  # of which a part may still have to begin
        self.lock = threading.RLock()  # the engine has a thread for each device

    # ---- what is held -----------------------------------------------------------------------------------------

    def settle(self, k: int) -> None:
        """Drop inputs[k] once nothing holds it."""
        if k not in self.own and (k - 1 not in self.saved or k in self.runner.passing):
            self.inputs.pop(k, None)

    def give_input(self, k: int, held: list[Held], *, own: bool) -> None:
        if self.calls[k].links:
            self.inputs[k] = held
            if own:
                self.own.add(k)

    def drop_input(self, k: int) -> None:
        self.put.pop(k, None)
        self.own.discard(k)
        self.settle(k)

    def begin_put(self, k: int) -> OffloadedSet | None:
        """Begin to copy the input of stage k, which is to run and then to do without it. None: it stays."""
        self.putting.pop(k, None)
        if k not in self.own:
            return None
        assert self.runner.offload is not None
        taken = self.runner.offload.begin(~k, ())
        self.putting[k] = taken, [taken.keep(held.tensor) for held in self.inputs[k]]
        return taken

    def put_input(self, k: int) -> None:
        begun = self.putting.pop(k, None)
        if begun is None or k not in self.own:
            return
        taken, values = begun
        if any(held.tensor._version != held.version for held in self.inputs[k]):
            taken.settle()  # and to run the stage again is an error
            return
        self.own.discard(k)
        self.put[k] = [
            (value, held.requires_grad) for value, held in zip(values, self.inputs.pop(k), strict=True)
        ]
        taken.leave()

    def get_input(self, k: int) -> None:
        if (values := self.put.pop(k, None)) is not None:
            self.give_input(k, [Held.of(unpacked(value), needed) for value, needed in values], own=True)

    def input_of(self, k: int) -> list[Held] | None:
        self.get_input(k)
        return self.inputs.get(k)

    def fetch_input(self, k: int) -> None:
        for value, _ in self.put.get(k, ()):
            if isinstance(value, OffloadedTensor):
                self._fetch(value)

    def _fetch(self, value: OffloadedTensor) -> None:
        value.storage.fetch()
        self.coming.append(weakref.ref(value.storage))

    def drop_saved(self, k: int) -> None:
        self.sent(k)
        self.saved.discard(k)
        self.settle(k + 1)
        for saved in self.saved_by(k):
            saved.value = None

    def saved_by(self, k: int) -> list[SavedPlaceholder]:
        return [saved for ref in self.calls[k].saved if (saved := ref())] if k in self.calls else []

    def available(self, k: int) -> bool:
        return k in self.calls and (not self.calls[k].links or k in self.inputs or k in self.put)

    def fetch(self, k: int) -> None:
        for saved in reversed(self.saved_by(k)):
            if isinstance(saved.value, OffloadedTensor):
                self._fetch(saved.value)

    def sent(self, k: int) -> None:
        if (sending := self.sending.pop(k, None)) is not None:
            sending.settle()

    def begin_offload(self, k: int, arguments: Any) -> OffloadedSet:
        """Stage k is to run, and offloads what it saves but for what it is given."""
        self.sent(k)
        module = self.runner.modules[k]
        standing = [] if module is None else [*module.parameters(), *module.buffers()]
        assert self.runner.offload is not None
        return self.runner.offload.begin(k, (arguments, standing))

    def offloaded(self, k: int, taken: OffloadedSet, out: Any, at: int) -> None:
        """Note that stage k has run, by operation `at`, and that its saved set is being copied."""
        taken.ended(out)
        if self.runner.away[at]:
            self.sending[k] = taken
        else:
            taken.settle()

    # ---- forward ------------------------------------------------------------------------------------------------

    def first_run(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self.calls[self.last] if self.last >= 0 and self.last == k - 1 else None
        outputs = before.outputs if before else ()
        call = self.calls[k] = StageCall(args, kwargs, outputs, self.runner.state[k], self.runner.called[k])
        self.last = k
        self.cursor = self.runner.forward_at[k]
        op = self.runner.ops[self.cursor][0]
        linked = call.take_linked()
        # Made by the stage before in its own right, unless it lives in that stage's saved set.
        self.give_input(k, linked, own=k - 1 not in self.saved)
        storages = self.droppable_storages(k)
        taken = self.begin_offload(k, (args, kwargs)) if self.cursor in self.runner.away else None
        putting = self.begin_put(k) if self.cursor in self.runner.putting else None

        def pack(tensor: torch.Tensor) -> SavedPlaceholder:
            self.saves = True
            saved = SavedPlaceholder(
                self, k, self.kept_value(tensor, storages, taken) if op == "fall" else None
            )
            call.saved.append(weakref.ref(saved))
            call.metadata.append((tensor.shape, tensor.dtype, tensor.device))
            return saved

        with (
            taken or nullcontext(),
            putting or nullcontext(),
            batch_norm.inside(),
            unchanged(self.runner.steady[k], k),
            torch.autograd.graph.saved_tensors_hooks(pack, SavedPlaceholder.unpack),
        ):
            self.running = k
            try:
                out = self.runner.functions[k](*args, **kwargs)
            finally:
                self.running = -1
        if taken is not None:
            self.offloaded(k, taken, out, self.cursor)
        call.state.random.forget_unchanged()
        call.note_outputs(out, self.runner.held[k])
        if op == "fall":
            self.saved.add(k)
            self.settle(k)
        elif op == "fnone":
            self.drop_input(k)
        self.cursor += 1
        while self.cursor < len(self.runner.ops) and self.runner.ops[self.cursor][0] in AFTERWARDS:
            self.do(*self.runner.ops[self.cursor])
            self.cursor += 1
        return out

    def droppable_storages(self, k: int) -> dict[int, tuple[int, torch.dtype]]:
        if k not in self.runner.dropped:
            return {}
        return {
            held.tensor.untyped_storage()._cdata: (n, held.tensor.dtype)
            for n, held in enumerate(self.inputs.get(k, ()))
        }

    @staticmethod
    def kept_value(
        tensor: torch.Tensor, storages: dict[int, tuple[int, torch.dtype]], taken: OffloadedSet | None = None
    ) -> Value:
        if storages and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            leaf, dtype = storages.get(tensor.untyped_storage()._cdata, (-1, None))
            if dtype == tensor.dtype:
                return Alias(leaf, tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor.detach() if taken is None else taken.keep(tensor)

    # ---- backward -----------------------------------------------------------------------------------------------

    def value_of(self, saved: SavedPlaceholder) -> torch.Tensor:
        with self.lock:
            if saved.stage == self.running:
                self.calls[saved.stage].has_own_backward = True
            elif saved.stage < self.at:
                self.reach(saved.stage)
            self.coming = [one for one in self.coming if (storage := one()) and storage.advance()]
            value = self.resolved(saved)
            if value is None:
                self.make_saved(saved.stage)
                value = self.resolved(saved)
            if value is None:
                raise AssertionError(
                    f"stage {saved.stage}, when run again, did not produce the tensor that it had saved"
                )
            return value

    def resolved(self, saved: SavedPlaceholder) -> torch.Tensor | None:
        value = saved.value
        if isinstance(value, Alias):
            held = self.input_of(saved.stage)
            return (
                held[value.leaf].tensor.as_strided(value.size, value.stride, value.offset) if held else None
            )
        return value.tensor() if isinstance(value, OffloadedTensor) else value

    def reach(self, stage: int) -> None:
        """Carry out the schedule up to the backward of `stage`."""
        while self.cursor < self.runner.backward_at[stage]:
            self.do(*self.runner.ops[self.cursor])
            self.cursor += 1
        self.at = stage
        if stage in self.runner.offloaded:
            self.fetch(stage)

    def do(self, op: str, k: int) -> None:
        if op == "bwd":
            self.drop_saved(k)
            self.own.discard(k)
            self.put.pop(k, None)
            self.inputs.pop(k, None)  # also where stage k-1's saved set holds it: nothing asks for it again
        elif op == "drop_input":
            self.drop_input(k)
        elif op == "drop_saved":
            self.drop_saved(k)
        elif op == "sent":
            self.sent(k)
        elif op == "fetch":
            self.fetch(k)
        elif op == "put_input":
            self.put_input(k)
        elif op == "get_input":
            self.get_input(k)
        elif op == "fetch_input":
            self.fetch_input(k)
        elif self.available(k):  # else the pass came another way, and what is wanted of k is made when it is
            away = self.cursor if self.cursor in self.runner.away else None
            puts = self.cursor in self.runner.putting
            self.run_again(k, catch=op == "fall", stop=self.runner.is_last(self.cursor), away=away, puts=puts)
            if op == "fnone":
                self.drop_input(k)
            else:
                self.settle(k)

    def run_again(
        self, k: int, *, catch: bool, stop: bool = False, away: int | None = None, puts: bool = False
    ) -> None:
        """Run stage k: for its output; or (catch) for its saved set and, unless it may stop there, its output. away:
        the operation by which that is offloaded. puts: its input is put away then. In grad mode either way, as at
        first: else oneDNN's LSTM gives other bits."""
        call = self.calls[k]
        args, kwargs = call.arguments(self.input_of(k) or (), changing=k in self.runner.changing)
        out = None
        taken = None if away is None else self.begin_offload(k, (args, kwargs))
        putting = self.begin_put(k) if puts else None
        with (
            putting or nullcontext(),
            self.runner.gathers[k]() if self.runner.gathers else nullcontext(),
            call.state.again(),
            call.modes.again(),
            batch_norm.kept(self.runner.norms[k]) as copies,
            torch.enable_grad(),
        ):
            if catch:
                out = self.catch_saved(k, args, kwargs, copies, stop, taken)
                self.saved.add(k)
            else:
                with torch.autograd.graph.saved_tensors_hooks(call.unsaved, unpacked):
                    out = self.runner.functions[k](*args, **kwargs)
        if taken is not None and away is not None:
            self.offloaded(k, taken, out, away)
        following = self.calls.get(k + 1)
        if following is not None and not (catch and stop):
            leaves = pytree.tree_leaves(out)
            held = [Held.of(leaves[source], needed) for _, source, needed in following.links]
            self.give_input(k + 1, held, own=not catch)

    def catch_saved(
        self,
        k: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copies: batch_norm.Copies,
        stop: bool,
        taken: OffloadedSet | None = None,
    ) -> Any:
        call = self.calls[k]
        storages = self.droppable_storages(k)
        unlike: list[str] = []
        count = 0

        def pack(tensor: torch.Tensor) -> Kept:
            nonlocal count
            value: Value = tensor
            if count < len(call.saved):
                metadata = (tensor.shape, tensor.dtype, tensor.device)
                if metadata != call.metadata[count]:
                    unlike.append(
                        f"tensor at position {count}: {call.metadata[count]} at first, {metadata} now"
                    )
                if (saved := call.saved[count]()) is not None:
                    original = copies.buffers.get(tensor.untyped_storage()._cdata)
                    value = tensor if original is None else original
                    value = saved.value = self.kept_value(value, storages, taken)
            count += 1
            if stop and count == len(call.saved):
                raise SavedAll
            return value if isinstance(value, OffloadedTensor) else tensor.detach()

        out = None
        try:
            with taken or nullcontext(), torch.autograd.graph.saved_tensors_hooks(pack, unpacked):
                out = self.runner.functions[k](*args, **kwargs)
        except SavedAll:
            if not stop:
                raise
        if count != len(call.saved):
            raise torch.utils.checkpoint.CheckpointError(
                "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
                f"recomputation.\nNumber of tensors saved during forward: {len(call.saved)}\n"
                f"Number of tensors saved during recomputation: {count}.\n"
                f"Stage {k} of the chain, {self.runner.functions[k]!r}, must do the same whenever it runs"
            )
        if unlike:
            raise torch.utils.checkpoint.CheckpointError(
                "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than "
                "during the forward pass.\n" + "\n".join(unlike) + f"\nStage {k} of the chain, "
                f"{self.runner.functions[k]!r}, must do the same whenever it runs"
            )
        return out

    def make_saved(self, stage: int) -> None:
        """Make the saved set of `stage` outside the schedule, from the nearest input that is still available."""
        if self.outside is not None:
            self.drop_saved(self.outside)
        first = stage
        while not self.available(first):
            first -= 1
        for k in range(first, stage):
            self.run_again(k, catch=False)
            if k != first:
                self.drop_input(k)
        self.run_again(stage, catch=True, stop=True)
        if stage in self.runner.changing:
            self.drop_input(stage)  # it is not what it was
        self.outside = stage


class SavedAll(Exception):
    """A stage that runs again has saved all that it did at first: the rest of it is not needed."""
