"""memopt.live_tensors(): memory of every live tensor, with the variable that holds it and the line that binds it."""

from __future__ import annotations

import ast
import bisect
import functools
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from memopt import _C
from memopt._memory.live import heap_snapshot
from memopt._memory.live.heap_snapshot import HeapSnapshot, HeldStorage, nodes_of
from memopt._memory.live.variables import Anchor, Path
from memopt._memory.recording import snapshot_file
from memopt._memory.recording.recording import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER, PARAMETERS
from memopt._memory.recording.user_code import NOTEBOOK, cells, is_users, place
from memopt._runtime.results import Result
from memopt._runtime.table import ResultTable


class LiveTensor(NamedTuple):
    """Memory of one storage.

    Attributes:
        nbytes: Bytes of the storage.
        device: The storage's device.
        shape: Shape of the largest tensor on it.
        dtype: Its dtype.
        category: "parameters", "gradients", "optimizer", "inputs", "activations" or "other".
        name: The variable that leads to it, such as "trainer.losses[3]"; for memory that only a graph keeps, the
            variable whose graph it is.
        note: Remark on the name.
        where: The line that binds the name.
        nodes: Number of nodes of the graph behind the tensor.
        node: The graph's node that keeps the memory.
        created: The line that allocated the memory, if that was recorded.
    """

    nbytes: int
    device: str
    shape: tuple[int, ...]
    dtype: str
    category: str
    name: str
    note: str
    where: str
    nodes: int
    kept: bool  # in a container, an attribute, a closure, a sum: where it may outlive its step
    library: bool  # only a library's function has it, which runs
    file: str  # of `where`, with its folders
    created: str
    node: str
    address: int
    model: str = ""  # the model's name, of its parameters, their gradients and states

    @property
    def only_in_graph(self) -> bool:
        return bool(self.node)


@dataclass(frozen=True)
class LiveGroup:
    """Tensors of one kind that one name holds: elements of a list, a model's parameters, tensors saved by a graph."""

    nbytes: int
    count: int
    device: str
    category: str
    name: str
    note: str
    where: str
    created: str
    nodes: int
    only_in_graph: bool
    kept: bool
    library: bool


@dataclass(frozen=True, repr=False)
class LiveTensors(Result):
    """The result of memopt.live_tensors(); printed, its largest groups.

    Attributes:
        tensors: One entry for each storage, largest first.
        groups: All groups, largest first.
        top: Number of groups that are printed.
        complete: False if the search ended for lack of time, so that more memory may have a name.
        devices: Bytes by device.
    """

    tensors: list[LiveTensor]
    groups: list[LiveGroup]
    top: int
    complete: bool = True
    devices: dict[str, int] = field(default_factory=dict)  # bytes

    def __str__(self) -> str:
        sums = ", ".join(f"{_C.format_size(size)} on {device}" for device, size in self.devices.items())
        lines = [f"live tensors: {sums or 'none'}"]
        lines += self._table.lines()
        rest = self.groups[self.top :]
        if rest:
            size = _C.format_size(sum(group.nbytes for group in rest))
            lines.append(f"  and {size} in {len(rest)} more groups")
        if not self.complete:
            lines.append("  the search for names ran out of time: tensors without a name may have one")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return replace(self._table, heads=("bytes", "category", "held by", "")).html()

    @property
    def _table(self) -> ResultTable:
        groups = self.groups[: self.top]
        rows = [(_C.format_size(one.nbytes), one.category, _title(one), _said(one)) for one in groups]
        return ResultTable(rows, left=(1, 2, 3))


def live_tensors(top: int = 10) -> LiveTensors:
    """Report the memory of all live tensors of this process, on every device, with the variables that hold it.

    Each entry has the size, the category, the variable that leads to the tensor and the line that binds it. Memory that
    only an autograd graph keeps has the variable whose graph it is. While a recording runs, the line that made the
    tensor is given too. Views of one memory count once. The call walks over the objects of the process (a tenth of a
    second with torch loaded), allocates nothing on a device, and keeps no tensor alive.

    Args:
        top: Number of groups that are printed; .groups and .tensors have all of them.

    Returns:
        A LiveTensors; print it.

    Raises:
        ValueError: top is negative.
    """
    if top < 0:
        raise ValueError(f"top={top}: the number of groups to print, 0 or more")
    taken = heap_snapshot.take()
    try:
        return described(taken, top)
    finally:
        taken.forget()


def holders(device: str, addresses: set[int]) -> dict[int, LiveTensor]:
    """Return the live tensors of a device at these addresses, by address."""
    taken = heap_snapshot.take()
    try:
        describe = _Description(taken)
        return {
            one.address: describe.tensor(one)
            for one in taken.held.values()
            if one.device == device and one.address in addresses
        }
    finally:
        taken.forget()


def any_element(name: str) -> str:
    """Return "losses[*]" for "losses[3]"."""
    return _INDEX.sub("[*]", name)


def described(taken: HeapSnapshot, top: int = 10) -> LiveTensors:
    """Describe a heap snapshot. The result holds none of its tensors."""
    describe = _Description(taken)
    found = sorted(map(describe.tensor, taken.held.values()), key=lambda tensor: -tensor.nbytes)
    sums: dict[str, int] = {}
    for tensor in found:
        sums[tensor.device] = sums.get(tensor.device, 0) + tensor.nbytes
    return LiveTensors(found, _grouped(found), top, taken.complete, sums)


class _Description:
    def __init__(self, taken: HeapSnapshot) -> None:
        self.taken = taken
        self.creators = Creators()
        self.bindings: dict[Path, Binding | None] = {}
        self.left = 300_000  # nodes that are counted, of all graphs together
        self.known: dict[int, _Whose] = {}
        paths = [taken.names.path(model) for model in taken.models]
        self.models = [
            path.text if path else type(model).__name__
            for path, model in zip(paths, taken.models, strict=True)
        ]

    def tensor(self, one: HeldStorage) -> LiveTensor:
        node = model = ""
        whose = _NOBODY
        holder = None
        if one.category in (PARAMETERS, GRADIENTS, OPTIMIZER):
            if one.model is None:
                holder = self.holder(one)
            else:
                model = self.models[one.model]
            whose = whose._replace(name=".".join(filter(None, (model, one.name))), note=one.owner)
        else:
            holder = self.holder(one)
            if holder is None and one.root is not None:
                holder, node = self.taken.roots[one.root], one.name
        if holder is not None:
            if id(holder) not in self.known:
                self.known[id(holder)] = self.whose(holder)
            whose = self.known[id(holder)]
            if one.owner:
                whose = whose._replace(note=one.owner)
        return LiveTensor(
            one.nbytes,
            one.device,
            one.shape,
            one.dtype,
            CATEGORIES[one.category],
            *whose,
            created=self.creators.place(one.device, one.address),
            node=node,
            address=one.address,
            model=model,
        )

    def whose(self, holder: torch.Tensor) -> _Whose:
        path = self.taken.names.path(holder)
        nodes = self.count(holder)
        if path is None:
            return _NOBODY._replace(nodes=nodes)
        binding = self.binding(path)
        where = place(binding.file, binding.line) if binding else ""
        file = binding.file if binding else ""
        return _Whose(path.text, path.note, where, nodes, _is_kept(path, binding), path.library, file)

    def holder(self, one: HeldStorage) -> torch.Tensor | None:
        """The tensor with the best name, if one has any."""
        best = min(one.tensors, key=self.taken.names.rank, default=None)
        return best if best is not None and best in self.taken.names else None

    def binding(self, path: Path) -> Binding | None:
        if path not in self.bindings:
            self.bindings[path] = binding_of(path)
        return self.bindings[path]

    def count(self, tensor: torch.Tensor) -> int:
        """Count the nodes of the graph behind a tensor."""
        if not tensor.requires_grad or tensor.is_leaf or self.left <= 0:
            return 0
        found = nodes_of(tensor, most=100_000)
        self.left -= found
        return found


class _Whose(NamedTuple):
    name: str
    note: str
    where: str
    nodes: int
    kept: bool
    library: bool
    file: str


_NOBODY = _Whose("", "", "", 0, False, False, "")


def _is_kept(path: Path, binding: Binding | None) -> bool:
    return not path.library and bool(
        path.inside
        or path.note
        or (path.anchor and path.anchor.kind == "attribute")
        or (binding and binding.rank == GROWN)
    )


def _grouped(tensors: list[LiveTensor]) -> list[LiveGroup]:
    """Group tensors: elements of one container, and a model's parameters, gradients and states, are one group each."""
    groups: dict[tuple[str, ...], list[LiveTensor]] = {}
    for tensor in tensors:
        name = tensor.model or _INDEX.sub("[*]", tensor.name)
        groups.setdefault((tensor.device, tensor.category, name, tensor.where), []).append(tensor)
    found = []
    for (device, category, name, where), members in groups.items():
        lines = Counter({member.created: 0 for member in members})
        for member in members:
            lines[member.created] += member.nbytes
        found.append(
            LiveGroup(
                sum(member.nbytes for member in members),
                len(members),
                device,
                category,
                members[0].name if len(members) == 1 else name,
                members[0].note if category in CATEGORIES[ACTIVATIONS:] else "",
                where,
                lines.most_common(1)[0][0],
                max(member.nodes for member in members),
                all(member.only_in_graph for member in members),
                members[0].kept,
                members[0].library,
            )
        )
    return sorted(found, key=lambda group: -group.nbytes)


_INDEX = re.compile(r"\[(?:\d+|True|False)\]")


def _title(group: LiveGroup) -> str:
    name = group.name or "(no variable reaches it)"
    return f"the graph of {name}" if group.only_in_graph and group.name else name


def _said(group: LiveGroup) -> str:
    said = [
        f"{group.count} tensors" if group.count > 1 else "",
        group.where,
        group.note,
        f"made at {group.created}" if group.created else "",
        f"its graph has {group.nodes} nodes" if group.nodes else "",
    ]
    return ", ".join(filter(None, said))


# ---- the line that binds a name --------------------------------------------------------------------------------------
# The source line that gives a name its value: that binds a variable, grows a list or sets an attribute.
#
# It is read from the source's text, because nothing has recorded it.


_GROWS = frozenset("append appendleft extend extendleft insert add update setdefault put".split())


CONSTANT, VALUE, GROWN, ELEMENT = range(4)  # ranks


class Binding(NamedTuple):
    name: str
    attribute: bool  # obj.name, not name
    line: int
    rank: int  # ELEMENT: one is put in; GROWN: by +=; VALUE: it gets one; CONSTANT: so, or it is a parameter
    function: int  # first line of the function that it is in, 0 for none
    owner: str  # the class around it
    file: str
    cell: int  # of a notebook, later ones count more


def binding_of(path: Path) -> Binding | None:
    """Return the binding of a path's last name, None without a source or where it does not show."""
    anchor = path.anchor
    if anchor is None:
        return None
    files = [anchor.file] if anchor.file not in cells() and anchor.file != NOTEBOOK else list(cells())
    main = getattr(sys.modules["__main__"], "__file__", None)
    if anchor.kind == "attribute" and main and main not in files:  # set from outside its class
        files.append(main)
    found = [one for file in files for one in bindings(file) if one.name == anchor.name]
    found = _in_scope(found, anchor, path.inside)
    if not found:
        return None
    wanted = ELEMENT if path.inside and any(one.rank == ELEMENT for one in found) else GROWN

    def key(one: Binding) -> tuple[int, int, bool, int]:
        passed = one.file == anchor.file and one.line <= anchor.line  # of a frame that runs
        return min(one.rank, wanted), one.cell, passed, one.line

    best = max(found, key=key)
    return best


def _in_scope(found: list[Binding], anchor: Anchor, inside: bool) -> list[Binding]:
    if anchor.kind == "attribute":
        found = [one for one in found if one.attribute]
        owner = anchor.owner.rpartition(".")[2]
        own = [one for one in found if one.owner.rpartition(".")[2] == owner]
        return own if own and (not inside or any(one.rank >= GROWN for one in own)) else found
    found = [one for one in found if not one.attribute]
    if anchor.kind == "local":
        own = [one for one in found if one.function == anchor.scope]
        # A closure's variable is bound in the function around it, or only there grown.
        return (
            own if any(one.rank >= GROWN for one in own) else own + [one for one in found if one not in own]
        )
    local = {(one.function, one.name) for one in found if one.function and one.rank in (CONSTANT, VALUE)}
    return [one for one in found if (one.function, one.name) not in local] or found


@functools.lru_cache(64)
def bindings(file: str) -> tuple[Binding, ...]:
    """Return all bindings of a source file or of a notebook's cell."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no Python: a name that is no file's
        return ()
    cell = cells().get(file, 0)
    return tuple(
        Binding(name, attribute, line, rank, function, owner, file, cell)
        for name, attribute, line, rank, function, owner in _bindings_of(tree, 0, "")
    )


_Found = tuple[str, bool, int, int, int, str]


def _bindings_of(node: ast.AST, function: int, owner: str) -> Iterator[_Found]:
    for child in ast.iter_child_nodes(node):
        inner, its_owner = function, owner
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = min([child.lineno, *(one.lineno for one in getattr(child, "decorator_list", []))])
            arguments = child.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield argument.arg, False, child.lineno, CONSTANT, inner, owner
        elif isinstance(child, ast.ClassDef):
            its_owner = f"{owner}.{child.name}" if owner else child.name
        yield from _bound_by(child, function, owner)
        yield from _bindings_of(child, inner, its_owner)


def _bound_by(node: ast.AST, function: int, owner: str) -> Iterator[_Found]:
    targets: list[tuple[ast.expr, int]] = []
    if isinstance(node, ast.Assign):
        rank = CONSTANT if isinstance(node.value, ast.Constant) else VALUE
        targets = [(part, rank) for target in node.targets for part in _target_parts(target)]
    elif isinstance(node, ast.AugAssign):
        targets = [(node.target, GROWN)]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = [(node.target, CONSTANT if isinstance(node.value, ast.Constant) else VALUE)]
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        targets = [(part, VALUE) for part in _target_parts(node.target)]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [(part, VALUE) for part in _target_parts(node.optional_vars)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS:
        targets = [(node.func.value, ELEMENT)]
    for target, rank in targets:
        if isinstance(target, ast.Subscript):
            target, rank = target.value, ELEMENT
        line = getattr(node, "lineno", target.lineno)
        if isinstance(target, ast.Name):
            yield target.id, False, line, rank, function, owner
        elif isinstance(target, ast.Attribute):
            yield target.attr, True, line, rank, function, owner


def _target_parts(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _target_parts(one)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


# ---- the line that allocated -----------------------------------------------------------------------------------------


class Creators:
    """The allocating lines of the blocks that are live now. Empty, and cheap, where nothing is recorded."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], list[tuple[int, str]]]] = {}
        torch = sys.modules["torch"]
        if torch.cuda.is_available() and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
            self._read(torch._C._cuda_memorySnapshot(None)["segments"])

    def _read(self, segments: list[dict[str, Any]]) -> None:
        blocks: dict[str, list[tuple[int, int, str]]] = {}
        for segment in segments:
            for at, block in snapshot_file.blocks_of(segment):
                if block["state"] == "active_allocated" and block.get("frames"):
                    line = user_line(block["frames"])
                    blocks.setdefault(f"cuda:{segment['device']}", []).append((at, at + block["size"], line))
        for device, found in blocks.items():
            found.sort()
            self._blocks[device] = [at for at, _, _ in found], [(end, line) for _, end, line in found]

    def place(self, device: str, address: int) -> str:
        """Return the line that allocated the block, such as "train.py:41", or ""."""
        starts, ends = self._blocks.get(device, ([], []))
        i = bisect.bisect_right(starts, address) - 1
        return ends[i][1] if i >= 0 and address < ends[i][0] else ""


def user_line(frames: list[dict[str, Any]]) -> str:
    """The innermost line of the user's in a stack as torch has it."""
    for frame in frames:
        if frame["filename"] and is_users(frame["filename"]):
            return place(frame["filename"], frame["line"])
    return ""
