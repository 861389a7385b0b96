"""The names that a function reads, by its source, and their values.

The source is a syntax tree, which is the same on every CPython, as bytecode is not. It is taken for a function's only
if it compiles to that function's very code, so a file edited since it was imported is not mistaken for what runs.
Names are followed through the program's own modules as far as the source says. Functions that find modules and globals
by name (import_module, sys.modules, globals) are refused.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import linecache
import pkgutil
import runpy
import sys
import sysconfig
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.data._cache.cache_key import KeyDigest

Chain = tuple[str, ...]
"""A dotted name, as ("a", "b") of a.b. The name of a module that is imported within begins with IMPORT."""
IMPORT = "import "
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def node_of(function: types.FunctionType, digest: Callable[[types.CodeType], bytes]) -> ast.AST | None:
    """The definition of a function, or None where its source is not at hand, or no longer what it was compiled from.

    Args:
        function: A function written in Python.
        digest: A digest of compiled code that leaves out where it stands.
    """
    code = function.__code__
    wanted = digest(code)
    for _ in range(2):
        text = "".join(linecache.getlines(code.co_filename, function.__globals__))
        for node, compiled in _functions_in(text, bool(code.co_flags & __future__.annotations.compiler_flag)):
            alike = (compiled.co_name, compiled.co_code) == (code.co_name, code.co_code)
            if alike and digest(compiled) == wanted:
                return node
        linecache.checkcache(code.co_filename)  # the module may have been reloaded
    return None


@functools.lru_cache(16)
def _functions_in(text: str, future_annotations: bool) -> list[tuple[ast.AST, types.CodeType]]:
    """The functions of a source, each with its code. They are told apart by lines, of which each is given
    its own."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if future_annotations:
        flags |= __future__.annotations.compiler_flag
    try:
        tree = compile(text, "<source>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        nodes = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
        lines = text.count("\n") + 2
        for number, node in enumerate(nodes):
            for one in ast.walk(node):
                if isinstance(
                    one, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.pattern | ast.excepthandler
                ):
                    one.lineno = one.lineno % lines + (number + 1) * lines
                    one.end_lineno = (one.end_lineno or one.lineno) % lines + (number + 1) * lines
        module = compile(tree, "<source>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = [code for code in codes_in(module) if code.co_firstlineno >= lines]
    paired = [(nodes[code.co_firstlineno // lines - 1], code) for code in found]
    return [(node, code) for node, code in paired if getattr(node, "name", "<lambda>") == code.co_name]


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Compiled code and the functions, comprehensions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def body_of(node: ast.AST) -> list[ast.AST]:
    """The statements or the expression that a call runs: no decorators, defaults, annotations or docstring."""
    if isinstance(node, ast.Lambda):
        return [node.body]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return [*node.body[ast.get_docstring(node, clean=False) is not None :]]


def text_of(nodes: list[ast.AST]) -> str:
    """Syntax trees as one text, without positions, comments and what only some versions of Python note."""
    words: list[str] = []
    stack: list[object] = [nodes]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.JoinedStr):  # Python 3.12 ends some with an empty text
            one.values = [part for part in one.values if getattr(part, "value", None) != ""]
        if isinstance(one, ast.AST):
            fields = sorted((name, value) for name, value in ast.iter_fields(one) if value not in (None, []))
            words.append(f"{type(one).__name__} {len(fields)}")
            for name, value in reversed(fields):
                stack += [value, _Word(name)]
        elif isinstance(one, list):
            words.append(f"list {len(one)}")
            stack += reversed(one)
        else:
            words.append(one if isinstance(one, _Word) else repr(one))
    return "\n".join(words)


class _Word(str):
    """A word of a text, beside constants of the program."""


class _Reader(ast.NodeVisitor):
    """Collects the dotted names of a function's body, wherever in it they stand and whatever its variables hide."""

    def __init__(self) -> None:
        self.reads: set[Chain] = set()
        self.imported: dict[str, set[Chain]] = defaultdict(set)

    def visit_Name(self, node: ast.Name) -> None:
        self.reads.add((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, owner = [node.attr], node.value
        while isinstance(owner, ast.Attribute):
            names.append(owner.attr)
            owner = owner.value
        if not isinstance(owner, ast.Name):
            self.visit(owner)
        elif isinstance(node.ctx, ast.Load):
            self.reads.add((owner.id, *reversed(names)))
        elif len(names) > 1:  # an assignment does not read the attribute itself
            self.reads.add((owner.id, *reversed(names[1:])))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute):
            node.target.ctx = ast.Load()
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name if alias.asname else alias.name.partition(".")[0]
            self.imported[alias.asname or package].add((f"{IMPORT}{package}",))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = f"{IMPORT}{'.' * node.level}{node.module or ''}"
        for alias in node.names:
            self.imported[alias.asname or alias.name].add((module, alias.name))


def reads_of(nodes: list[ast.AST]) -> set[Chain]:
    """The dotted names that a function's body may read, those of modules that it imports as names of these too."""
    reader = _Reader()
    for node in nodes:
        reader.visit(node)
    of_imports = {(*one, *read[1:]) for read in reader.reads for one in reader.imported.get(read[0], ())}
    return reader.reads | of_imports


# ---- values, and the modules that are the program's own --------------------------------------------------------------


_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_own(module_name: str | None) -> bool:
    """Return whether a module is the program's: not built in, of the standard library or of an installed package."""
    module = sys.modules.get(module_name or "")
    if (module_name or "").partition(".")[0] == "memopt":
        return False  # wherever it lies: its version counts
    if module is None:
        return True  # made at run time: no package has it
    path = getattr(module, "__file__", None)
    if path is None:
        return module_name in ("__main__", "__mp_main__") or not _built_in(module)
    return not (path.startswith(_INSTALLED) or "/site-packages/" in path or "/dist-packages/" in path)


def is_own_module(value: object) -> bool:
    return isinstance(value, types.ModuleType) and is_own(value.__name__)


def _built_in(module: types.ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", "built-in") in ("built-in", "frozen")


def version_named(module_name: str) -> str:
    """A module's name, and the version of the package that it belongs to."""
    package, *within = module_name.split(".")
    version = getattr(sys.modules.get(package), "__version__", None)
    if package.lstrip("_") in sys.stdlib_module_names:  # private modules differ between versions of Python
        module_name = ".".join([package.lstrip("_"), *(name for name in within if name[0] != "_")])
    return f"{name_of_main(module_name)} {version if isinstance(version, str) else _distribution_version(package)}"


@functools.cache
def _distribution_version(package: str) -> str:
    if package not in sys.stdlib_module_names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            return importlib.metadata.version(package)
    return ""


def name_of_main(module_name: str | None) -> str:
    return "__main__" if module_name == "__mp_main__" else str(module_name)  # a spawned worker's __main__


_FINDERS = (
    sys.modules, builtins.__import__, importlib.__import__, importlib.import_module, importlib.reload,
    importlib.util.module_from_spec, pkgutil.resolve_name, runpy.run_module, runpy.run_path, builtins.globals,
    builtins.eval, builtins.exec,
)  # fmt: skip
"""Functions and data by which code finds modules and globals by name."""
FINDER_ATTRIBUTES = {"modules", "__import__", "import_module", "reload", "module_from_spec", "resolve_name"}
FINDER_ATTRIBUTES |= {"run_module", "run_path"}
_FINDS = "its names are not known before it runs: use an import statement, or pass the result as an argument"


def read(
    digest: KeyDigest, function: types.FunctionType, chain: Chain, path: str
) -> Iterator[tuple[str, Any]]:
    """The value that a dotted name leads to, as far as it leads through the program's own modules, with the part that
    was followed; or nothing."""
    if _ignored(digest, chain):
        return
    value = _first(function, chain[0])
    if value is None:
        return
    for taken, step in enumerate([*chain[1:], ""], 1):
        finder = _finder_in(value, chain[taken:])
        if finder is not None:
            if not digest.versioned:
                raise digest.refused(f"{'.'.join(chain)!r}, which {path} uses,", finder, _FINDS)
            return
        private = step.startswith("__") and not step.endswith("__")  # within a class it has another name
        if not step or private or not is_own_module(value):
            yield ".".join(chain[:taken]), value
            return
        if not _has(value, step):
            return  # the call itself will say so
        value = getattr(value, step)


def _first(function: types.FunctionType, name: str) -> Any:
    """The value of a chain's first name: None if it is none or counts elsewhere."""
    if name.startswith(IMPORT):
        return _imported(function, name.removeprefix(IMPORT))
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        with contextlib.suppress(ValueError):  # not bound yet
            if is_own_module(cell.cell_contents) or _is_finder(cell.cell_contents):
                return cell.cell_contents
        return None  # counts with what the function closes over
    if name in function.__globals__:
        return function.__globals__[name]
    built_in = vars(builtins).get(name)
    return built_in if _is_finder(built_in) else None


def _has(module: Any, name: str) -> bool:
    """Return whether a module has an attribute, or a submodule that nobody has imported yet."""
    if not hasattr(module, name) and hasattr(module, "__path__") and name.isidentifier():
        with contextlib.suppress(ImportError):
            importlib.import_module(f"{module.__name__}.{name}")
    return hasattr(module, name)


def _imported(function: types.FunctionType, name: str) -> types.ModuleType | None:
    """A module that a function imports: imported now, as its code is not known without. None if it is not there: the
    function does without, or says so itself."""
    package = function.__globals__.get("__package__")
    with contextlib.suppress(ImportError, ValueError):
        return importlib.import_module(importlib.util.resolve_name(name, package))
    return None


def _is_finder(value: object) -> bool:
    return any(value is finder for finder in _FINDERS)


def _finder_in(value: Any, steps: Chain) -> Any:
    """The finder that a value is or, through modules, leads to; or None."""
    for step in (*steps, ""):
        if _is_finder(value):
            return value
        value = getattr(value, step, None) if isinstance(value, types.ModuleType) else None
    return None


def _ignored(digest: KeyDigest, chain: Chain) -> bool:
    """Return whether a name is ignored: by itself, by the name of anything it is read of, or, for `from a import b`, as
    b."""
    parts = (chain[0].removeprefix(IMPORT), *chain[1:])
    names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not digest.ignore.isdisjoint({*names, *(parts[1:2] if chain[0] != parts[0] else ())})


_read_ahead: set[str] = set()


def read_ahead() -> None:
    """Reads the program's files while they are likely to be what was imported: a long run may outlast an edit."""
    for name in sys.modules.keys() - _read_ahead:
        _read_ahead.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_own_module(module):
            linecache.getlines(file)
