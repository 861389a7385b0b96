"""The script's loops, compiled so that they ask before each iteration whether to go on (loops.py).

What they do every so many iterations is due in the last one. The script's files stay as they are, and so do line
numbers. Loops that cannot reach a step are left alone: those without calls, and those of a module's forward, of
generators and of functions that another compiler reads.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import runpy
import threading
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch

from memopt._estimate.loops import For, Loops, While
from memopt._memory.recording.user_code import is_user_file

# Libraries' own training loops, beside the script's.
_TRAINERS = re.compile(
    r"[/\\](site|dist)-packages[/\\](?!torch[/\\]).*\b(\w*trainer|fit_loop|engine|learner)\.py$"
)
_FOR, _WHILE, _DUE = "_memopt_for", "_memopt_while", "_memopt_due"
_LEFT_ALONE = {"forward", "__getitem__", "__len__"}
_COMPILERS = re.compile(r"jit|compile|kernel|script", re.IGNORECASE)

Asserts = dict[tuple[str, int], bool]


class _Always:
    """A while loop's, of what is compiled."""

    def goes_on(self) -> bool:
        return True

    def ended(self) -> None:
        return


_ALWAYS = _Always()


def install(loops: Loops, asserts: Asserts) -> None:
    """Compile loops so in modules imported from now on, and in what the loader of a script compiles.

    `asserts` gets each line of an assert statement, and whether it asserts that something holds.
    """
    compiled, loaded = SourceFileLoader.source_to_code, SourceFileLoader.get_code
    from_file = runpy._get_code_from_file  # type: ignore[attr-defined]  # of a script in a process that it spawns
    main = threading.main_thread()

    def for_(iterable: Iterable[Any], where: str, periodic: bool) -> Iterable[Any]:
        if torch.compiler.is_compiling() or threading.current_thread() is not main:
            return iterable
        return For(loops, iterable, where, periodic)

    def while_(where: str, periodic: bool) -> Any:
        if torch.compiler.is_compiling() or threading.current_thread() is not main:
            return _ALWAYS
        return While(loops, where, periodic)

    def source_to_code(self: Any, data: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_chosen(str(path)):
            return compiled(self, data, path, *args, **kwargs)
        tree = ast.parse(data, path)
        _note_asserts(tree, str(path), asserts)
        tree = ast.fix_missing_locations(_Asking(str(path)).visit(tree))
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self: Any, name: str) -> Any:
        path = self.get_filename(name)
        if not _is_chosen(path):
            return loaded(self, name)
        # Past the files of bytecode, which are the script's.
        return source_to_code(self, self.get_data(path), path)

    def get_code_from_file(*given: str) -> Any:
        path = os.path.abspath(given[-1])
        made = from_file(*given)
        if not _is_chosen(path) or not path.endswith((".py", ".pyw")):
            return made
        code = source_to_code(SourceFileLoader("__main__", path), Path(path).read_bytes(), path)
        return (code, *made[1:]) if isinstance(made, tuple) else code  # before CPython 3.12

    for name, function in ((_FOR, for_), (_WHILE, while_), (_DUE, loops.due)):
        setattr(builtins, name, function)
    runpy._get_code_from_file = get_code_from_file  # type: ignore[attr-defined]
    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def _is_chosen(path: str) -> bool:
    return is_user_file(path) or _TRAINERS.search(path) is not None


def _note_asserts(tree: ast.AST, path: str, asserts: Asserts) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            holds = not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not))
            asserts.update(
                ((path, line), holds) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            )


class _Asking(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path = path

    def _where(self, node: ast.For | ast.While) -> list[ast.expr]:
        """The arguments that name a loop, whose tests for every so many iterations are changed."""
        where = f"{self._path}:{node.lineno}"
        due = _Due(where)
        node.body = [due.visit(each) for each in node.body]
        return [ast.Constant(where), ast.Constant(due.found)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        named = [part for decorator in node.decorator_list for part in ast.walk(decorator)]
        names = [getattr(part, "id", "") or getattr(part, "attr", "") for part in named]
        if node.name in _LEFT_ALONE or any(map(_COMPILERS.search, names)) or _is_generator(node):
            return node
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if _calls(node.body):
            name = ast.Name(_FOR, ast.Load())
            node.iter = ast.copy_location(ast.Call(name, [node.iter, *self._where(node)], []), node.iter)
        return node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        if not _calls([node.test, *node.body]):
            return node
        variable = f"{_WHILE}_{node.lineno}_{node.col_offset}"

        def ask(method: str) -> ast.Call:
            return ast.Call(ast.Attribute(ast.Name(variable, ast.Load()), method, ast.Load()), [], [])

        made = ast.Call(ast.Name(_WHILE, ast.Load()), self._where(node), [])
        begin = ast.Assign([ast.Name(variable, ast.Store())], made)
        node.test = ast.BoolOp(ast.And(), [node.test, ask("goes_on")])
        return [ast.copy_location(each, node) for each in (begin, node, ast.Expr(ask("ended")))]


class _Due(ast.NodeTransformer):
    """A rewriter of tests such as `step % n == 0` in a loop, but not in inner ones: in its last iteration they hold."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.found = False

    def visit_If(self, node: ast.If) -> ast.AST:
        if _calls(node.body) or any(isinstance(each, ast.Continue) for each in node.body):
            node.test = self._changed(node.test)
        return self.generic_visit(node)

    def _changed(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self._changed(value) for value in test.values]
            return test
        never = isinstance(test, ast.BinOp) or (
            isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq)
        )
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            asked: ast.expr = test.operand
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            asked = test.left
        else:
            asked = test
        if not (isinstance(asked, ast.BinOp) and isinstance(asked.op, ast.Mod)):
            return test
        self.found = True
        every = (
            asked.right
            if isinstance(asked.right, ast.Name | ast.Attribute | ast.Constant)
            else ast.Constant(0)
        )
        line = ast.Constant(f"{self._where.rpartition(':')[0]}:{test.lineno}")
        due: ast.expr = ast.Call(ast.Name(_DUE, ast.Load()), [ast.Constant(self._where), line, every], [])
        if never:
            due = ast.UnaryOp(ast.Not(), due)
        return ast.copy_location(ast.BoolOp(ast.And() if never else ast.Or(), [test, due]), test)

    def _as_it_is(self, node: ast.AST) -> ast.AST:
        return node

    visit_For = visit_While = visit_AsyncFor = _as_it_is  # their own
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _as_it_is


def _calls(body: Iterable[ast.AST]) -> bool:
    return any(isinstance(part, ast.Call) for node in body for part in ast.walk(node))


def _is_generator(function: ast.FunctionDef) -> bool:
    """Return whether the function itself yields, not only a function within it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False
