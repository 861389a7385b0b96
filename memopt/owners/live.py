"""memopt.live_tensors(): every live tensor's memory with the variable that holds it, and the line."""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from memopt import _C
from memopt.owners import census
from memopt.owners.bindings import GROWN, Binding, binding_of
from memopt.owners.census import Census, Held
from memopt.owners.creators import Creators
from memopt.owners.graphs import nodes_of
from memopt.owners.user_files import place
from memopt.owners.variables import Path
from memopt.profiling.recording import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER, PARAMETERS


class LiveTensor(NamedTuple):
    """Memory of one storage. `name`: the variable that leads to it, "trainer.losses[3]"; what is kept by a graph alone
    has that of the tensor whose graph it is, and `node` says what keeps it there. `where`: the line that binds the
    name; `created`: the line that asked for the memory, if that was recorded; `nodes`: of the graph behind it."""

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
    """Tensors of one kind that one name holds: elements of a list, a model's parameters, what a graph has saved."""

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


@dataclass(frozen=True)
class LiveTensors:
    """Printed, the largest groups. `tensors`: each storage, the largest first; `groups`: all of them."""

    tensors: list[LiveTensor]
    groups: list[LiveGroup]
    top: int
    complete: bool = True
    devices: dict[str, int] = field(default_factory=dict)  # bytes

    def __str__(self) -> str:
        sums = ", ".join(f"{_C.format_size(size)} on {device}" for device, size in self.devices.items())
        lines = [f"live tensors: {sums or 'none'}"]
        width = max((len(_title(group)) for group in self.groups[: self.top]), default=0)
        for group in self.groups[: self.top]:
            lines.append(
                f"  {_C.format_size(group.nbytes):>9}  {group.category:<11} {_title(group):<{width}}  {_said(group)}"
            )
        rest = self.groups[self.top :]
        if rest:
            size = _C.format_size(sum(group.nbytes for group in rest))
            lines.append(f"  {size:>9}  in {len(rest)} more groups")
        if not self.complete:
            lines.append("  the search for names was cut short: what has none here may have one")
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{html.escape(text)}</td>"
                for text in (_C.format_size(group.nbytes), group.category, _title(group), _said(group))
            )
            + "</tr>"
            for group in self.groups[: self.top]
        )
        heads = "<th>bytes</th><th>category</th><th>held by</th><th></th>"
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def live_tensors(top: int = 10) -> LiveTensors:
    """Who holds the memory of live tensors, on every device of this process, the CPU too: size, category, the variable
    that leads there and its line; for what only an autograd graph holds, the variable whose graph that is. Where a
    recording runs, the line that made the tensor, too.

    top: groups that are printed; .groups and .tensors have them all. Views of one memory count once. Costs a walk over
    the objects of the process (a tenth of a second with torch loaded), nothing on a device, and keeps no tensor."""
    if top < 0:
        raise ValueError(f"top={top}: the number of groups to print, 0 or more")
    taken = census.take()
    try:
        return described(taken, top)
    finally:
        taken.forget()


def holders(device: str, addresses: set[int]) -> dict[int, LiveTensor]:
    """By address, those of a device that lie there."""
    taken = census.take()
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
    """ "losses[*]" for "losses[3]"."""
    return _INDEX.sub("[*]", name)


def described(taken: Census, top: int = 10) -> LiveTensors:
    """A census in words. Holds none of its tensors."""
    describe = _Description(taken)
    found = sorted(map(describe.tensor, taken.held.values()), key=lambda tensor: -tensor.nbytes)
    sums: dict[str, int] = {}
    for tensor in found:
        sums[tensor.device] = sums.get(tensor.device, 0) + tensor.nbytes
    return LiveTensors(found, _grouped(found), top, taken.complete, sums)


class _Description:
    def __init__(self, taken: Census) -> None:
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

    def tensor(self, one: Held) -> LiveTensor:
        node = model = ""
        whose = _NOBODY
        holder = None
        if one.category in (PARAMETERS, GRADIENTS, OPTIMIZER):
            if one.model is None:
                holder = self.holder(one)
            else:
                model = self.models[one.model]
            whose = whose._replace(name=".".join(filter(None, (model, one.name))), note=one.claim)
        else:
            holder = self.holder(one)
            if holder is None and one.root is not None:
                holder, node = self.taken.roots[one.root], one.name
        if holder is not None:
            if id(holder) not in self.known:
                self.known[id(holder)] = self.whose(holder)
            whose = self.known[id(holder)]
            if one.claim:
                whose = whose._replace(note=one.claim)
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

    def holder(self, one: Held) -> torch.Tensor | None:
        """The tensor with the best name, if one has any."""
        best = min(one.tensors, key=self.taken.names.rank, default=None)
        return best if best is not None and best in self.taken.names else None

    def binding(self, path: Path) -> Binding | None:
        if path not in self.bindings:
            self.bindings[path] = binding_of(path)
        return self.bindings[path]

    def count(self, tensor: torch.Tensor) -> int:
        """Nodes of the graph behind it."""
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
    """Elements of one container are one group; so are a model's parameters, their gradients, their states."""
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
    name = group.name or "(no variable leads there)"
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
