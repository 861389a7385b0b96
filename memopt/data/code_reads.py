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


_BETWEEN = {"CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "NOT_TAKEN", "RESUME"}
_STEPS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "deref"),
    **dict.fromkeys(("STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"), "store"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), "attribute"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "assign"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), "constant"),
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


def _reads(code: types.CodeType, outer: _Bound, closed: frozenset[str]) -> Iterator[Read]:
    """outer: what functions around this code have imported; closed: the names of the outermost one's closure."""
    steps = [*_steps(code)]
    bound = _imports(steps)
    for found in bound.values():
        yield from found
    cells = {*code.co_cellvars, *code.co_freevars}
    for number, (what, name) in enumerate(steps):
        if what not in ("global", "deref", "fast") or (what == "fast" and name in cells):
            continue  # such a load of a cell hands it to a function made here
        end = number + 1
        while end < len(steps) and steps[end][0] == "attribute":
            end += 1
        chain = tuple(str(value) for _, value in steps[number + 1 : end])
        used = end == len(steps) or steps[end][0] != "assign"
        imported = bound.get(name) or (outer.get(name) if what == "deref" else None)
        if imported:
            for one in imported:
                yield one._replace(chain=(*one.chain, *chain), used=used)
        elif what == "global":
            yield Read("global", name, chain, used=used)
        elif what == "deref" and name in closed:
            yield Read("closure", name, chain, used=used)
    own = frozenset(code.co_cellvars)
    visible = {name: found for name, found in outer.items() if name not in own}
    visible |= {name: found for name, found in bound.items() if name in own}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _reads(constant, visible, closed - own)
