"""The source of a function as a syntax tree, and the dotted names that it reads.

Source, not bytecode: the tree is the same on every CPython. It is only taken for a function's if it compiles to that
function's very code, so a file that was edited since it was imported is not mistaken for what runs."""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import types
from collections import defaultdict
from collections.abc import Callable, Iterator

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
