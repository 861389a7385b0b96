"""Paths from the program's variables to an object: the shortest from a frame's locals, a module's globals, the last
exception's traceback or a hook, through containers, attributes and closures.

Only values are followed, through accesses that run none of the program's code: no property, no __getattr__, no __iter__
of a class. A search stops after some time; then `complete` is False, and an object without a path may have one.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memopt._memory.recording.user_code import NOTEBOOK, is_users

_Step = tuple[
    Any, str, "Anchor | None"
]  # a value, how it is written after its holder, where its name is bound


class Anchor(NamedTuple):
    """A place in the source that binds a name.

    kind: "global", "local" (also a closure's variable; `scope` is the first line of the function), or "attribute"
    (`owner` is the class).
    """

    kind: str
    name: str
    file: str
    scope: int = 0
    line: int = 0  # of a local of a running frame: the line it is at
    owner: str = ""


class Path(NamedTuple):
    """A path from a variable to an object.

    `text`: as in source, "trainer.losses[3]"; `note`: a remark on its beginning, such as "closure of hook"; `anchor`:
    of the last name in it; `inside`: whether the object is an element of the bound object; `library`: whether it begins
    with a local of a library's running function.
    """

    text: str
    note: str
    anchor: Anchor | None
    inside: bool
    library: bool


_RUNNING = "while it runs, in "


class _PathNode(NamedTuple):
    parent: _PathNode | None
    text: str
    anchor: Anchor | None
    note: str | None = None  # not None: the text begins here

    def path(self) -> Path:
        entries: list[_PathNode] = []
        entry: _PathNode | None = self
        while entry is not None:
            entries.append(entry)
            entry = None if entry.note is not None else entry.parent
        anchor = next((one.anchor for one in entries if one.anchor is not None), None)
        text = "".join(one.text for one in reversed(entries))
        note = entries[-1].note or ""
        return Path(text.lstrip("."), note, anchor, self.anchor is None, note.startswith(_RUNNING))


class Variables:
    """Paths to objects that are given by identity. It holds nothing of the program once it is made.

    seconds: CPU time of this thread, so that a busy machine finds as much as an idle one.
    """

    def __init__(self, wanted: set[int], seconds: float = 0.3) -> None:
        self._found: dict[int, _PathNode] = {}
        self.complete = True
        self._end = time.thread_time() + seconds
        self._looks = 0
        self._missing = set(wanted)
        self._seen: dict[int, Any] = {}  # with the objects, so that no identity is used twice
        # All that the program's own names lead to; then what is near in a library's functions that run.
        self._follow(_roots(), depth=1_000)
        self._follow(_library_roots(), depth=4)
        del self._seen, self._missing

    def _follow(self, roots: Iterator[tuple[Any, _PathNode]], depth: int) -> None:
        """Follow values breadth first, so that the shortest path is found first."""
        level: list[tuple[Any, _PathNode]] = []
        for value, entry in roots:
            self._enter(value, entry, level)
        while level and self._missing and depth:
            following: list[tuple[Any, _PathNode]] = []
            for holder, entry in level:
                note = _beginning(holder)
                for value, text, anchor in _steps(holder):
                    self._looks += 1
                    if self._looks % 256 == 0 and time.thread_time() > self._end:
                        self.complete = False
                        return
                    self._enter(value, _PathNode(entry, text, anchor, note), following)
            level, depth = following, depth - 1

    def _enter(self, value: Any, entry: _PathNode, level: list[tuple[Any, _PathNode]]) -> None:
        identity, kind = id(value), type(value)
        if kind in _ATOMS or identity in self._seen:
            return
        self._seen[identity] = value
        if identity in self._missing:
            self._missing.discard(identity)
            self._found[identity] = entry
        if not issubclass(kind, torch.Tensor) or kind is torch.nn.Parameter:
            level.append((value, entry))

    def __contains__(self, value: object) -> bool:
        return id(value) in self._found

    def rank(self, value: object) -> int:
        """Return 0 for an object that a name of the program leads to, 1 if only a library's function has it, else 2."""
        path = self.path(value)
        return 2 if path is None else int(path.library)

    def path(self, value: object) -> Path | None:
        entry = self._found.get(id(value))
        return None if entry is None else entry.path()


_ATOMS: frozenset[type] = frozenset(
    (
        *(int, float, bool, str, bytes, complex, range, slice, type(None), type(...)),
        *(types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType),
        *(types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType),
        *(torch.dtype, torch.device, torch.Size),
    )
)


# ---- where to begin --------------------------------------------------------------------------------------------------


def _roots() -> Iterator[tuple[Any, _PathNode]]:
    """The user's frames, innermost first; globals; the last exception."""
    frames = _frames()
    for frame in frames:
        if is_users(frame.f_code.co_filename):
            yield from _of_frame(frame, "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if type(module) is types.ModuleType and (name == "__main__" or (file and is_users(file))):
            yield from _of_globals(name, vars(module), file or NOTEBOOK)
    for name in ("last_exc", "last_value"):
        error = getattr(sys, name, None)
        if error is not None:
            yield error, _PathNode(None, f"sys.{name}", None, "")


def _library_roots() -> Iterator[tuple[Any, _PathNode]]:
    """Yield the frames of libraries, and torch's hooks."""
    frames = _frames()
    for frame in frames:
        file = frame.f_code.co_filename
        if not is_users(file):
            yield from _of_frame(frame, f"{_RUNNING}{frame.f_code.co_name}")
    hooks = sys.modules.get("torch.nn.modules.module")
    for name, value in vars(hooks).items() if hooks is not None else ():
        if name.startswith("_global_") and name.endswith("_hooks"):
            yield value, _PathNode(None, f"torch.nn.modules.module.{name}", None, "")


def _frames() -> list[types.FrameType]:
    """Return the frames of all threads, without this package's own.

    A list of frames that one of its own frames holds would keep everything alive until the garbage collector runs.
    """
    return [frame for first in sys._current_frames().values() for frame in _outwards(first)]


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] != "memopt":
            yield frame
        frame = frame.f_back


def _of_globals(module: str, names: dict[str, Any], file: str) -> Iterator[tuple[Any, _PathNode]]:
    """Yield a module's globals, names with an underscore last: a notebook's _ and __ are second names."""
    begin = "" if module == "__main__" else f"{module}."
    for name in sorted(
        (name for name in names if not name.startswith("__")), key=lambda n: n.startswith("_")
    ):
        yield names[name], _PathNode(None, begin + name, Anchor("global", name, file), "")


def _of_frame(frame: types.FrameType, note: str) -> Iterator[tuple[Any, _PathNode]]:
    code = frame.f_code
    for name, value in _locals(frame).items():
        anchor = (
            Anchor("local", name, code.co_filename, code.co_firstlineno, frame.f_lineno)
            if code.co_flags & _OPTIMIZED
            else Anchor("global", name, code.co_filename, line=frame.f_lineno)
        )
        yield value, _PathNode(None, name, anchor, note)


_OPTIMIZED = 1  # inspect.CO_OPTIMIZED: a function's, whose locals are no dict


def _locals(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's locals.

    Until Python 3.13 a function's frame keeps the dict that it returns, and would keep alive what the function drops
    later. The dict is therefore cleared again, unless other code has it (from locals()).
    """
    names = frame.f_locals
    found = dict(names)
    if frame.f_code.co_flags & _OPTIMIZED and type(names) is dict and sys.getrefcount(names) <= 3:
        names.clear()
    return found


# ---- from a holder to what it holds ----------------------------------------------------------------------------------


def _steps(holder: Any) -> Iterator[_Step]:
    kind = type(holder)
    for family, steps in _FAMILIES:
        if issubclass(kind, family):
            yield from steps(holder)
            break
    else:
        if issubclass(kind, type):
            yield from _of_class(holder)
        else:
            yield from _attributes(holder)


def _beginning(holder: Any) -> str | None:
    if type(holder) is types.FunctionType:
        return f"closure of {holder.__qualname__}"
    if type(holder) is types.TracebackType:
        return f"in the traceback of an exception, in {holder.tb_frame.f_code.co_name}"
    if type(holder) is types.GeneratorType:
        return f"in the generator {holder.__name__}"
    return None


def _of_dict(holder: dict[Any, Any]) -> Iterator[_Step]:
    if not _only_atoms(list(dict.values(holder))):
        for key, value in list(dict.items(holder)):
            if gc.is_tracked(value):
                yield value, f"[{key!r}]" if type(key) in (str, int, bool) else "[…]", None
    if type(holder) is not dict:
        yield from _attributes(holder)


def _of_sequence(holder: Any) -> Iterator[_Step]:
    family: Any = next(one for one in (list, tuple, deque) if issubclass(type(holder), one))
    values = list(family.__iter__(holder))  # not a subclass's own
    if not _only_atoms(values):
        for i, value in enumerate(values):
            if gc.is_tracked(value):
                yield value, f"[{i}]", None
    if type(holder) is not family:
        yield from _attributes(holder)


def _of_set(holder: Any) -> Iterator[_Step]:
    family: Any = set if issubclass(type(holder), set) else frozenset
    for value in list(family.__iter__(holder)):
        yield value, "{…}", None


def _only_atoms(values: list[Any]) -> bool:
    """Return whether a container has only texts, numbers and rows of them, as a dataset has: they need not be
    followed."""
    return not any(map(gc.is_tracked, values))


def _of_function(holder: types.FunctionType) -> Iterator[_Step]:
    code = holder.__code__
    for name, cell in zip(code.co_freevars, holder.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield value, name, Anchor("local", name, code.co_filename, code.co_firstlineno)
    for i, value in enumerate(holder.__defaults__ or ()):
        yield value, f"default {i}", Anchor("local", holder.__name__, code.co_filename, code.co_firstlineno)
    for name, value in (holder.__kwdefaults__ or {}).items():
        yield value, f"default {name}", Anchor("local", name, code.co_filename, code.co_firstlineno)
    yield from _named(vars(holder), holder.__qualname__, code.co_filename)


def _of_method(holder: types.MethodType) -> Iterator[_Step]:
    yield holder.__self__, ".__self__", None
    yield holder.__func__, ".__func__", None


def _of_partial(holder: functools.partial[Any]) -> Iterator[_Step]:
    yield holder.func, ".func", None
    yield holder.args, ".args", None
    yield holder.keywords, ".keywords", None


def _of_generator(holder: types.GeneratorType[Any, Any, Any]) -> Iterator[_Step]:
    if holder.gi_frame is not None:
        yield from _frame_steps(holder.gi_frame)


def _of_traceback(holder: types.TracebackType) -> Iterator[_Step]:
    yield from _frame_steps(holder.tb_frame)
    if holder.tb_next is not None:
        yield holder.tb_next, "", None


def _frame_steps(frame: types.FrameType) -> Iterator[_Step]:
    for value, entry in _of_frame(frame, ""):
        yield value, entry.text, entry.anchor


def _of_exception(holder: BaseException) -> Iterator[_Step]:
    for name in ("__traceback__", "__cause__", "__context__", "args"):
        value = getattr(holder, name)
        if value is not None:
            yield value, f".{name}", None
    yield from _attributes(holder)


def _of_module(holder: torch.nn.Module) -> Iterator[_Step]:
    kind: Any = type(holder)
    for table in ("_parameters", "_buffers", "_modules"):
        for name, value in (holder.__dict__.get(table) or {}).items():
            yield value, f".{name}", None
    for name, value in holder.__dict__.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield value, f".{name}", _attribute(kind, name)


def _of_parameter(holder: torch.nn.Parameter) -> Iterator[_Step]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        value = getattr(holder, name, None)
        if value:
            yield value, f".{name}", None
    yield from _named(holder.__dict__, "Parameter", "")


def _of_class(holder: Any) -> Iterator[_Step]:
    file = _file(holder)
    if holder.__module__ == "__main__" or (file and is_users(file)):
        for name, value in list(vars(holder).items()):
            if not name.startswith("__"):
                yield value, f".{name}", _attribute(holder, name)


def _attributes(holder: Any) -> Iterator[_Step]:
    kind: Any = type(holder)
    try:
        names = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        names = {}
    if type(names) is dict:
        for name, value in list(names.items()):
            if type(value) not in _ATOMS:
                yield value, f".{name}", _attribute(kind, name)
    for name, descriptor in _slots(kind).items():
        try:
            yield descriptor.__get__(holder), f".{name}", _attribute(kind, name)
        except AttributeError:  # not set
            continue


@functools.lru_cache(4096)
def _slots(kind: Any) -> dict[str, Any]:
    return {
        name: value
        for base in kind.__mro__
        if not base.__module__.startswith("builtins")
        for name, value in vars(base).items()
        if type(value) is types.MemberDescriptorType
    }


def _named(names: dict[str, Any], owner: str, file: str) -> Iterator[_Step]:
    for name, value in list(names.items()):
        yield value, f".{name}", Anchor("attribute", name, file, owner=owner)


@functools.lru_cache(4096)
def _attribute(kind: Any, name: str) -> Anchor:
    return Anchor("attribute", name, _file(kind), owner=kind.__qualname__)


def _file(kind: type) -> str:
    """Return the file of the class's first method; a class in a notebook has no module with a file."""
    for value in vars(kind).values():
        if type(value) is types.FunctionType and not value.__code__.co_filename.startswith("<"):
            return value.__code__.co_filename
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or NOTEBOOK


_FAMILIES: tuple[tuple[Any, Callable[[Any], Iterator[_Step]]], ...] = (
    (dict, _of_dict),
    ((list, tuple, deque), _of_sequence),
    ((set, frozenset), _of_set),
    (torch.nn.Module, _of_module),
    (torch.nn.Parameter, _of_parameter),
    (types.FunctionType, _of_function),
    (types.MethodType, _of_method),
    (functools.partial, _of_partial),
    (types.GeneratorType, _of_generator),
    (types.TracebackType, _of_traceback),
    (types.FrameType, _frame_steps),
    (BaseException, _of_exception),
)
