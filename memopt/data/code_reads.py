"""What compiled code reads from outside itself: globals, variables it closes over and modules it imports, each with the
attributes that are taken of it one after the other.

The instructions of CPython 3.11 to 3.14 differ, so they are first brought to one form (`_steps`); what none of these
versions has between a name and its attribute is left out there."""

from __future__ import annotations

import dis
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple


class Read(NamedTuple):
    scope: str
    """Where `root` is a name: "global", "closure", or "import": it is a module's."""
    root: str
    chain: tuple[str, ...]
    """Attributes, as ("b", "c") of a.b.c; of an import those taken by the statement itself come first."""
    level: int = 0
    """Of an import: the dots before its name."""
    whole: bool = False
    """Of an import without `from`: the variable holds the package in front, not the module at the end of the name."""
    used: bool = True
    """False: only bound to a variable or assigned to, which reads nothing of a module."""
    finder: tuple[Read, ...] = ()
    """Of what code finds by a name that is a constant in it: what it is found with, as sys.modules or import_module."""
    resolved: bool = False
    """Of a finder: what is found with it is a Read of its own."""


_BETWEEN = {"CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "NOT_TAKEN", "RESUME", "PUSH_NULL"}
_STEPS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "deref"),
    **dict.fromkeys(("STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"), "store"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), "attribute"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "assign"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT", "KW_NAMES"), "constant"),
    **dict.fromkeys(("CALL", "CALL_KW"), "call"),
    "BINARY_SUBSCR": "subscript",
    "CONTAINS_OP": "in",
    "POP_TOP": "drop",
    "IMPORT_NAME": "import",
    "IMPORT_FROM": "from",
}
_FAST = re.compile("(LOAD|STORE)_FAST(_AND_CLEAR)?")  # one instruction of 3.13 and later may be two of these
_Step = tuple[str, Any]
_Bound = dict[str, set[Read]]


def reads_of(code: types.CodeType) -> list[Read]:
    """Of a function's code and of the functions, comprehensions and classes within it; sorted, each once."""
    found = set(_reads(code, {}, frozenset(code.co_freevars)))
    return sorted(read for read in found if read.used or read._replace(used=True) not in found)


def names_in(code: types.CodeType) -> set[str]:
    """The attributes and globals that the code loads, not those of functions within it, and the texts that are
    constants: getattr() may have them for names."""
    return {
        value
        for what, value in _steps(code)
        if what in ("attribute", "global", "constant") and isinstance(value, str)
    }


def _steps(code: types.CodeType) -> Iterator[_Step]:
    for one in dis.get_instructions(code):
        name = one.opname
        if name in _BETWEEN:
            continue
        fast = _FAST.findall(name)
        if fast:
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            for (way, cleared), variable in zip(fast, names, strict=True):
                yield "store" if way == "STORE" else "other" if cleared else "fast", variable
        else:
            value = one.arg if name == "LOAD_SMALL_INT" else one.argval
            if name == "BINARY_OP" and one.argrepr == "[]":  # 3.14's BINARY_SUBSCR
                name = "BINARY_SUBSCR"
            yield _STEPS.get(name, "other"), value


def _imports(steps: list[_Step]) -> _Bound:
    """The variables that import statements bind, and to what."""
    bound: _Bound = defaultdict(set)
    current: Read | None = None
    for number, (what, value) in enumerate(steps):
        if what == "import":
            level, names = steps[number - 2][1], steps[number - 1][1]
            current = Read("import", value, (), level, whole=not names, used=False)
        elif what == "from" and current is not None:
            # `import a.b as c` takes b of a; `from a import b, c` both of a.
            current = current._replace(chain=(*current.chain, value) if current.whole else (value,))
        elif what == "store" and current is not None and (current.whole or current.chain):
            bound[value].add(current)
            current = None if current.whole else current._replace(chain=())
    return bound


_END: list[_Step] = [("other", None)] * 5
"""Behind the last step, so that a pattern may look there."""


def _attributes(steps: list[_Step], start: int) -> tuple[tuple[str, ...], int]:
    """The attributes taken from a step on, one of the other, and the step behind them."""
    end = start
    while steps[end][0] == "attribute":
        end += 1
    return tuple(str(value) for _, value in steps[start:end]), end


def _found(steps: list[_Step], names: tuple[str, ...], end: int) -> tuple[Read, int] | None:
    """What a finder of these names finds, if the steps from `end` on say so by a constant; and the step behind that."""

    def follow(*kinds: str) -> bool:
        return tuple(what for what, _ in steps[end : end + len(kinds)]) == kinds

    name = str(steps[end][1])
    if names[-1] == "import_module" and follow("constant"):
        bare = name.lstrip(".")
        end += 1
        end += steps[end] == ("global", "__package__")
        end += steps[end] == ("constant", ("package",))
        return (Read("import", bare, (), len(name) - len(bare)), end + 1) if follow("call") else None
    if names[-1] == "__import__" and follow("constant", "call"):
        return Read("import", name, (), whole=True), end + 2
    if names[-1] == "modules" and follow("constant", "subscript"):
        return Read("import", name, ()), end + 2
    if names[-1] == "modules" and follow("global", "subscript") and name == "__name__":
        return Read("global", "", ()), end + 2
    if names[-2:] == ("modules", "get") and follow("constant"):
        end += 2 if follow("constant", "constant") else 1
        return (Read("import", name, ()), end + 1) if follow("call") else None
    if names[-1] == "globals" and follow("call", "constant", "subscript"):
        return Read("global", str(steps[end + 1][1]), ()), end + 3
    if names[-1] == "globals" and follow("call", "attribute", "constant") and steps[end + 1][1] == "get":
        name = str(steps[end + 2][1])
        end += 4 if follow("call", "attribute", "constant", "constant") else 3
        return (Read("global", name, ()), end + 1) if follow("call") else None
    return None


def _of(read: Read, chain: tuple[str, ...], used: bool) -> Read:
    """What is taken of what is read. A global without a name is the function's own module."""
    chain = (*read.chain, *chain)
    if read.scope == "global" and not read.root and chain:
        read, chain = read._replace(root=chain[0]), chain[1:]
    return read._replace(chain=chain, used=used)


def _reads(code: types.CodeType, outer: _Bound, closed: frozenset[str]) -> Iterator[Read]:
    """outer: what functions around this code have imported; closed: the names of the outermost one's closure."""
    steps = [*_steps(code), *_END]
    bound = _imports(steps)
    cells = {*code.co_cellvars, *code.co_freevars}
    loads = [
        (number, what, name)
        for number, (what, name) in enumerate(steps)
        if what in ("global", "deref") or (what == "fast" and name not in cells)
    ]  # a fast load of a cell hands it to a function made here

    def roots(what: str, name: str) -> set[Read]:
        imported = bound.get(name) or (outer.get(name) if what == "deref" else None)
        if imported:
            return imported
        scope = "global" if what == "global" else "closure" if what == "deref" and name in closed else ""
        return {Read(scope, name, ())} if scope else set()

    def taken(number: int, start: int) -> tuple[tuple[str, ...], int]:
        """The attributes from `start` on; of getattr(it, "name") that one, too."""
        chain, end = _attributes(steps, start)
        by_name = steps[number - 1] in (("global", "getattr"), ("global", "hasattr"))
        if by_name and steps[end][0] == "constant" and isinstance(steps[end][1], str):
            chain = (*chain, steps[end][1])
        return chain, end

    finds: dict[int, tuple[set[Read], int]] = {}
    for number, what, name in loads:
        chain, end = _attributes(steps, number + 1)
        if (found := _found(steps, (name, *chain), end)) is None:
            continue
        made = {found[0]._replace(finder=(_of(root, chain, True),), used=False) for root in roots(what, name)}
        finds[number] = made, found[1]
        if steps[found[1]][0] == "store":
            bound[steps[found[1]][1]] |= made
    for reads in bound.values():
        yield from reads
    for number, what, name in loads:
        chain, end = taken(number, number + 1)
        used = steps[end][0] != "assign"
        resolved = number in finds or steps[end][0] == "in"
        for one in roots(what, name):
            yield _of(one, chain, used)._replace(resolved=resolved)
        if number in finds:
            made, start = finds[number]
            chain, end = taken(number, start)
            for one in made:
                yield _of(one, chain, steps[end][0] not in ("assign", "store", "drop"))
    own = frozenset(code.co_cellvars)
    visible = {name: found for name, found in outer.items() if name not in own}
    visible |= {name: found for name, found in bound.items() if name in own}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads(constant, visible, closed - own)
