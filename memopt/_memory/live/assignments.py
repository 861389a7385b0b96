"""The source line that gives a name its value: that binds a variable, grows a list or sets an attribute.

It is read from the source's text, because nothing has recorded it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from typing import NamedTuple

from memopt._memory.live.source_location import NOTEBOOK, cells
from memopt._memory.live.variables import Anchor, Path

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
        for name, attribute, line, rank, function, owner in _of(tree, 0, "")
    )


_Found = tuple[str, bool, int, int, int, str]


def _of(node: ast.AST, function: int, owner: str) -> Iterator[_Found]:
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
        yield from _of(child, inner, its_owner)


def _bound_by(node: ast.AST, function: int, owner: str) -> Iterator[_Found]:
    targets: list[tuple[ast.expr, int]] = []
    if isinstance(node, ast.Assign):
        rank = CONSTANT if isinstance(node.value, ast.Constant) else VALUE
        targets = [(part, rank) for target in node.targets for part in _parts(target)]
    elif isinstance(node, ast.AugAssign):
        targets = [(node.target, GROWN)]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = [(node.target, CONSTANT if isinstance(node.value, ast.Constant) else VALUE)]
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        targets = [(part, VALUE) for part in _parts(node.target)]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [(part, VALUE) for part in _parts(node.optional_vars)]
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


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _parts(one)
    else:
        yield target.value if isinstance(target, ast.Starred) else target
