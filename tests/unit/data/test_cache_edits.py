"""Edits of a program after which memopt.data.cached makes a value anew, and those after which it must not."""
# ruff: noqa: E501 - a program is a line

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import program_source
import pytest

from memopt.data import cached

# Each is a program with the function f, whose result hangs on K: 1 at first, then 2. `arg` is what f is given, or None.
NOTICED = {
    # ---- objects whose class has code
    "an enumeration's method": "class E(enum.Enum):\n A = 1\n def g(s): return K\ndef f(x): return E.A.g()",
    "an enumeration's method, of an argument": "class E(enum.Enum):\n A = 1\n def g(s): return K\narg = E.A\ndef f(x): return x.g()",
    "a member's attribute": "class E(enum.Enum):\n A = 1\n def __init__(s, n): s.more = K\narg = E.A\ndef f(x): return x.more",
    "a member's value": "class E(enum.IntEnum):\n A = K\ndef f(x): return E.A + 0",
    "another member": "class E(enum.Enum):\n A = 1\n B = K + 5\narg = E.A\ndef f(x): return [e.value for e in type(x)]",
    "an alias": "class E(enum.Enum):\n A = 1\n B = 2\n C = K\ndef f(x): return E.C.value",
    "a flag's method": "class E(enum.Flag):\n A = 1\n B = 2\n def g(s): return K\narg = E.A | E.B\ndef f(x): return x.g()",
    "_missing_": "class E(enum.Enum):\n A = 1\n B = 2\n @classmethod\n def _missing_(c, v): return c(K)\ndef f(x): return E(9).value",
    "a named tuple's method": "class N(typing.NamedTuple):\n a: int = 1\n def g(s): return K\nn = N()\ndef f(x): return n.g()",
    "a named tuple's method, of an argument": "class N(typing.NamedTuple):\n a: int = 1\n def g(s): return K\narg = N()\ndef f(x): return x.g()",
    "a named tuple's default": "class N(typing.NamedTuple):\n a: int = K\ndef f(x): return N().a",
    "a subclass of a named tuple": "class N(collections.namedtuple('N', 'a')):\n def g(s): return K\narg = N(1)\ndef f(x): return x.g()",
    "a named tuple's fields": "N = collections.namedtuple('N', ['a', 'b'] if K == 1 else ['b', 'a'])\narg = N(3, 4)\ndef f(x): return x.a",
    "a list's subclass": "class L(list):\n def g(s): return K\narg = L([1])\ndef f(x): return x.g()",
    "a list's subclass, its content": "class L(list): pass\nl = L([K])\ndef f(x): return l[0]",
    "a dict's subclass": "class D(dict):\n def __missing__(s, n): return K\nd = D()\ndef f(x): return d[3]",
    "a dict's subclass, its attribute": "class D(dict): pass\nd = D()\nd.k = K\ndef f(x): return d.k",
    "an int's subclass": "class I(int):\n def g(s): return K\narg = I(1)\ndef f(x): return x.g()",
    "a str's subclass": "class S(str):\n def g(s): return K\narg = S('a')\ndef f(x): return x.g()",
    "a str's subclass, its content": "class S(str):\n def __str__(s): return 'same'\ns = S('a' * K)\ndef f(x): return len(s)",
    "a float's subclass": "class F(float):\n k = K\narg = F(1)\ndef f(x): return x.k",
    "a path's subclass": "class P(type(pathlib.Path())):\n def g(s): return K\narg = P('no such')\ndef f(x): return x.g()",
    "a path's subclass, its attribute": "class P(type(pathlib.Path())): pass\np = P('no such')\np.k = K\ndef f(x): return p.k",
    "a partial's subclass": "class P(functools.partial):\n def g(s): return K\narg = P(len)\ndef f(x): return x.g()",
    "a partial's attribute": "p = functools.partial(len)\np.k = K\ndef f(x): return p.k",
    "a property's subclass": "class P(property):\n def __get__(s, i, o=None): return K\nclass C: p = P(len)\ndef f(x): return C().p",
    # ---- functions
    "a function's attribute": "def g(): return g.k\ng.k = K\ndef f(x): return g()",
    "its own attribute": "def f(x): return f.k\nf.k = K",
    "an attribute of what was decorated": "def d(h):\n @functools.wraps(h)\n def w(x): return h(x)\n return w\n@d\ndef f(x): return x.k\ndef g(): pass\ng.k = K\narg = g",
    "what __wrapped__ is": "def d(h):\n @functools.wraps(h)\n def w(): return 0\n return w\n@d\ndef g(): return K\ndef f(x): return g.__wrapped__()",
    "a decorator": "def d(h):\n @functools.wraps(h)\n def w(x): return K\n return w\n@d\ndef f(x): return x",
    "a default": "def f(x, y=K): return y",
    "a keyword's default": "def f(x, *, y=K): return y",
    "a default of what is called": "def g(y=K): return y\ndef f(x): return g()",
    "a closure": "def m(k): return lambda x: k\nf = m(K)",
    "a nested function": "def f(x):\n def g(): return [K for _ in range(1)][0]\n return g()",
    "a method of an object": "class C:\n def g(s): return K\ng = C().g\ndef f(x): return g()",
    "a method's object": "class C:\n def __init__(s): s.k = K\n def g(s): return s.k\ng = C().g\ndef f(x): return g()",
    "a method as argument": "class C:\n def g(s): return K\narg = C().g\ndef f(x): return x()",
    "a static method": "class C:\n @staticmethod\n def g(): return K\ndef f(x): return C.g()",
    "a class method": "class C:\n @classmethod\n def g(c): return K\ndef f(x): return C.g()",
    "a partial's argument": "p = functools.partial(int, K)\ndef f(x): return p()",
    "a generic function's case": "@functools.singledispatch\ndef g(x): return 0\n@g.register\ndef _(x: str): return K\narg = 'a'\ndef f(x): return g(x)",
    "a function's annotation": "def g(x: K): pass\ndef f(x): return int(g.__annotations__['x'])",
    "a function's name": "def m():\n def a(): pass\n def b(): pass\n return [a, b][K - 1]\narg = m()\ndef f(x): return x.__name__",
    # ---- classes
    "a base's attribute": "class B: k = K\nclass C(B): pass\ndef f(x): return C.k",
    "a metaclass's attribute": "class M(type): k = K\nclass C(metaclass=M): pass\ndef f(x): return C.k",
    "a metaclass's method": "class M(type):\n def __len__(c): return K\nclass C(metaclass=M): pass\ndef f(x): return len(C)",
    "a metaclass, of an argument": "class M(type):\n def g(c): return K\nclass C(metaclass=M): pass\narg = C()\ndef f(x): return type(x).g()",
    "a metaclass's base": "class L(type):\n def g(c): return K\nclass M(L): pass\nclass C(metaclass=M): pass\ndef f(x): return C.g()",
    "a metaclass of an abstract class": "class M(abc.ABCMeta):\n def g(c): return K\nclass C(metaclass=M): pass\ndef f(x): return C.g()",
    "a property": "class C:\n @property\n def p(s): return K\ndef f(x): return C().p",
    "a cached property": "class C:\n @functools.cached_property\n def p(s): return K\ndef f(x): return C().p",
    "a descriptor": "class D:\n def __get__(s, i, o): return K\nclass C: p = D()\ndef f(x): return C().p",
    "a descriptor's content": "class D:\n def __init__(s, k): s.k = k\n def __get__(s, i, o): return s.k\nclass C: p = D(K)\ndef f(x): return C().p",
    "__set_name__": "class D:\n def __set_name__(s, o, n): s.k = len(n) * K\n def __get__(s, i, o): return s.k\nclass C: p = D()\ndef f(x): return C().p",
    "__class_getitem__": "class C:\n def __class_getitem__(c, i): return K\ndef f(x): return C[0]",
    "__init_subclass__": "class B:\n def __init_subclass__(c): c.k = K\nclass C(B): pass\ndef f(x): return C.k",
    "__call__": "class C:\n def __call__(s): return K\nc = C()\ndef f(x): return c()",
    "__getattr__ of a class": "class C:\n def __getattr__(s, n): return K\narg = C()\ndef f(x): return x.k",
    "the bases' order": "class A: k = 1\nclass B: k = 2\nclass C(*([A, B] if K == 1 else [B, A])): pass\ndef f(x): return C.k",
    "__doc__": "class C: __doc__ = 'a' * K\ndef f(x): return len(C.__doc__)",
    "__doc__, of an argument": "class C: __doc__ = 'a' * K\narg = C()\ndef f(x): return len(type(x).__doc__)",
    "__doc__, by what is called later": "class C: __doc__ = 'a' * K\ndef a(): return C()\ndef b(c): return len(inspect.getdoc(c))\ndef f(x): return b(a())",
    "__doc__, by getattr": "class C: __doc__ = 'a' * K\ndef f(x): return len(getattr(C, '__doc__'))",
    "__annotations__": "class C: a: K\ndef f(x): return int(C.__annotations__['a'])",
    "what an annotation names": "class T:\n def g(s): return K\nclass C: a: T\ndef f(x): return typing.get_type_hints(C)['a']().g()",
    "what an annotation's text names": "class T:\n def g(s): return K\nclass C: a: 'T'\ndef f(x): return typing.get_type_hints(C)['a']().g()",
    "an annotation's parts": "class C: a: list[int] if K == 1 else dict[str, int]\ndef f(x): return len(typing.get_type_hints(C)['a'].__args__)",
    "__slots__": "class C: __slots__ = ('a', 'b')[:K]\ndef f(x): return len(C.__slots__)",
    "__match_args__": "class C:\n __match_args__ = ('a', 'b')[K - 1:]\n a, b = 1, 2\ndef f(x):\n match C():\n  case C(y): return y",
    "a field's metadata": "@dataclasses.dataclass\nclass C: a: int = dataclasses.field(default=1, metadata={'k': K})\ndef f(x): return dataclasses.fields(C)[0].metadata['k']",
    "a field's metadata, of an argument": "@dataclasses.dataclass\nclass C: a: int = dataclasses.field(default=1, metadata={'k': K})\narg = C()\ndef f(x): return dataclasses.fields(x)[0].metadata['k']",
    "a field's type": "@dataclasses.dataclass\nclass C: a: (int, float)[K - 1]\ndef f(x): return str(dataclasses.fields(C)[0].type(1))",
    "a field's default": "@dataclasses.dataclass\nclass C: a: int = K\ndef f(x): return C().a",
    "a field's factory": "@dataclasses.dataclass\nclass C: a: list = dataclasses.field(default_factory=lambda: [K])\ndef f(x): return C().a",
    "a field's repr": "@dataclasses.dataclass\nclass C: a: int = dataclasses.field(default=1, repr=K == 1)\ndef f(x): return str(C())",
    "a frozen dataclass's method": "@dataclasses.dataclass(frozen=True, slots=True)\nclass C:\n a: int = 1\n def g(s): return K\narg = C()\ndef f(x): return x.g()",
    # ---- globals
    "a global": "k = K\ndef f(x): return k",
    "a list's element": "k = [0, {'a': (K,)}]\ndef f(x): return k[1]['a'][0]",
    "a pattern": "p = re.compile('a' * K)\ndef f(x): return len(p.pattern)",
    "a pattern's flags": "p = re.compile('A', re.I if K == 1 else 0)\ndef f(x): return bool(p.match('a'))",
    "a counter": "c = collections.Counter({'a': K})\ndef f(x): return c['a']",
    "a namespace": "n = types.SimpleNamespace(a=types.SimpleNamespace(k=K))\ndef f(x): return n.a.k",
    "an item's getter": "g = operator.itemgetter(K)\ndef f(x): return g([0, 1, 2])",
    "an attribute's getter": "g = operator.attrgetter(('real', 'imag')[K - 1])\ndef f(x): return g(3)",
    "a method's caller": "g = operator.methodcaller('rjust', K)\ndef f(x): return g('')",
    "a layout": "s = struct.Struct('<' + 'b' * K)\ndef f(x): return s.size",
    "an array": "a = array.array('i', [K])\ndef f(x): return a[0]",
    "an array's type": "a = array.array('ih'[K - 1], [0])\ndef f(x): return a.itemsize",
    "a deque's length": "d = collections.deque([1, 2], maxlen=K + 1)\ndef f(x): return d.maxlen",
    "a date": "d = datetime.datetime(2020, 1, K, tzinfo=datetime.timezone.utc)\ndef f(x): return d.day",
    "a fold": "d = datetime.datetime(2020, 1, 1, fold=K - 1)\ndef f(x): return d.fold",
    "a decimal": "d = decimal.Decimal('1.0' + '0' * K)\ndef f(x): return str(d)",
    "a fraction": "d = fractions.Fraction(1, K)\ndef f(x): return str(d)",
    "a default dictionary's factory": "class C:\n def g(s): return K\nd = collections.defaultdict(C)\ndef f(x): return d['a'].g()",
    # ---- by names in source
    "a private name": "__k = K\nclass C:\n def g(s): return _C__k\n_C__k = K\nclass C:\n def g(s): return __k\ndef f(x): return C().g()",
    "one of two lambdas on a line": "a, b = lambda: 0, lambda: K\ndef f(x): return b()",
    "a lambda among its like": "a, b = (lambda: (lambda: 1)()), (lambda: (lambda: K)())\ndef f(x): return b()",
    "a lambda over several lines": "g = (lambda\n: (\n  K\n))\ndef f(x): return g()",
    "an imported name as a default": "def f(x, m=__import__('edited_ops').k): return m()",
    "an augmented attribute": "class C: k = K\ndef f(x):\n C.k += 0\n return C.k",
    "a module's attribute, augmented": "import edited_ops as o\no.n = K\ndef f(x):\n o.n += 0\n return o.n",
    "a name bound by a walrus": "import edited_ops as o\ndef f(x): return (k := o.k)()",
    "a subscripted global": "k = {'a': K}\ndef f(x): return k['a']",
    "a name in an f-string": "k = K\ndef f(x): return f'{k}'",
    "a constant's type": "def f(x): return repr((1, 1.0)[K - 1])",
    "a coroutine": "def run(c):\n try: c.send(None)\n except StopIteration as s: return s.value\nasync def g(): return K\ndef f(x): return run(g())",
    "a docstring": "def g():\n 'a'\ng.__doc__ = 'a' * K\ndef f(x): return len(g.__doc__)",
    "a private method": "class C:\n def __g(s): return K\n def g(s): return s.__g()\ndef f(x): return C().g()",
    "a generated method's default": "@dataclasses.dataclass(order=K == 1)\nclass C: a: int = 1\ndef f(x): return hasattr(C, '__lt__') and '__lt__' in vars(C)",
}  # fmt: skip

# Each is two programs that do the same.
ALIKE = {
    "nothing": ("def f(x): return 1",) * 2,
    "a comment": ("def f(x): return 1", "# a comment\n\n\ndef f(x):\n # another\n return 1"),
    "a global that nobody reads": ("u = 1\ndef f(x): return 1", "u = 2\ndef f(x): return 1"),
    "a function that nobody calls": ("def f(x): return 1", "def g(): pass\ndef f(x): return 1"),
    "a class's docstring": ("class C: 'a'\ndef f(x): return [C(), 1][1]", "class C: 'b'\ndef f(x): return [C(), 1][1]"),
    "a class that moved": ("class C:\n def g(s): return 1\ndef f(x): return C().g()", "\n\nclass C:\n\n def g(s): return 1\ndef f(x): return C().g()"),
    "an annotation": ("class C: a: int = 1\ndef f(x): return C().a", "class C: a: str = 1\ndef f(x): return C().a"),
    "an annotation of an argument": ("def f(x: int): return 1", "def f(x: str): return 1"),
    "a dataclass's comment": ("@dataclasses.dataclass\nclass C: a: int = 1\ndef f(x): return C().a", "@dataclasses.dataclass\nclass C: a: int = 1  # a\ndef f(x): return C().a"),
    "a composed flag": ("class E(enum.Flag):\n A = 1\n B = 2\ndef f(x): return E.A.value", "class E(enum.Flag):\n A = 1\n B = 2\nE.A | E.B, ~E.A\ndef f(x): return E.A.value"),
    "a value that was looked up": ("class E(enum.Enum):\n A = [1]\ndef f(x): return E.A.value", "class E(enum.Enum):\n A = [1]\nE([1])\ndef f(x): return E.A.value"),
    "a set's order": ("s = {'a', 'b', 'c'}\ndef f(x): return sorted(s)", "s = {'c', 'b', 'a'}\ndef f(x): return sorted(s)"),
    "calls that were counted elsewhere": ("@functools.lru_cache\ndef g(y): return 1\ndef f(x): return g(3)", "@functools.lru_cache\ndef g(y): return 1\ng(1)\ndef f(x): return g(3)"),
    "a dispatch that was remembered": ("@functools.singledispatch\ndef g(x): return 1\ndef f(x): return g(3)", "@functools.singledispatch\ndef g(x): return 1\ng(1)\ndef f(x): return g(3)"),
    "a logger's level": ("l = logging.getLogger('a')\ndef f(x): l.debug('a'); return 1", "l = logging.getLogger('a')\nl.setLevel(10)\ndef f(x): l.debug('a'); return 1"),
    "a generic that was used": ("L = list[int]\ndef f(x): return [L, 1][1]", "import typing\nL = list[int]\ntyping.List[int]\ndef f(x): return [L, 1][1]"),
    "what a module has beside": ("import edited_ops\ndef f(x):\n import edited_ops\n return edited_ops.one()", "import edited_ops\nedited_ops.more = 3\ndef f(x):\n import edited_ops\n return edited_ops.one()"),
    "a decorator's argument": ("def d(k): return lambda h: h\n@d(1)\ndef f(x): return 1", "def d(k): return lambda h: h\n@d(2)\ndef f(x): return 1"),
    "a function's docstring": ("def f(x):\n 'a'\n return 1", "def f(x):\n 'b'\n return 1"),
    "a variable of a global's name": ("y = 1\ndef f(x): y = 3; return y", "y = 2\ndef f(x): y = 3; return y"),
    "a path's text": ("p = pathlib.Path('no such/a')\ndef f(x): return p.name", "p = pathlib.Path('no such', 'a')\nstr(p), hash(p), p.parts\ndef f(x): return p.name"),
    "a pattern that was used": ("p = re.compile('a')\ndef f(x): return p.pattern", "p = re.compile('a')\np.match('a')\ndef f(x): return p.pattern"),
    "a date's hash": ("d = datetime.date(2020, 1, 1)\ndef f(x): return d.day", "d = datetime.date(2020, 1, 1)\nhash(d)\ndef f(x): return d.day"),
}  # fmt: skip

UNKNOWN = {
    "import_module, of a constant": "def f(x): return importlib.import_module('edited_ops').k()",
    "import_module, kept, of a constant": "def f(x):\n m = importlib.import_module('edited_ops')\n return [m.k() for _ in 'a'][0]",
    "import_module by its own name, of a constant": "from importlib import import_module\ndef f(x): return import_module('edited_ops').k()",
    "import_module imported within, of a constant": "def f(x):\n import importlib as i\n return i.import_module('edited_ops').k()",
    "__import__, of a constant": "def f(x): return __import__('edited_ops').k()",
    "sys.modules, of a constant": "def f(x): return sys.modules['edited_ops'].k()",
    "sys.modules.get, of a constant": "def f(x):\n m = sys.modules.get('edited_ops', None)\n return m.k()",
    "sys.modules of itself, of a constant": "k = K\ndef f(x): return sys.modules[__name__].k",
    "sys.modules of itself, getattr, of a constant": "k = K\ndef f(x): return getattr(sys.modules[__name__], 'k')",
    "globals, of a constant": "k = K\ndef f(x): return globals()['k']",
    "globals, a function, of a constant": "def k(): return K\ndef f(x): return globals()['k']()",
    "globals.get, of a constant": "k = K\ndef f(x): return globals().get('k', 0)",
    "getattr of a module, of a constant": "import edited_ops\ndef f(x): return getattr(edited_ops, 'k')()",
    "getattr with a default, of a constant": "import edited_ops as e\ndef f(x): return getattr(e, 'k', None)()",
    "a module in a variable, of a constant": "import edited_ops\ndef f(x):\n o = p = edited_ops\n return [p.k() for _ in 'a'][0]",
    "a module in a variable, bound twice, of a constant": "import edited_ops\ndef f(x):\n o = x\n o = edited_ops\n q = o\n return q.k()",
    "a module's own globals, of a constant": "import edited_ops\ndef f(x): return edited_ops.by_name()",
    "import_module": "def f(x): return importlib.import_module(x)",
    "__import__": "def f(x): return __import__(x)",
    "sys.modules": "def f(x): return sys.modules[x]",
    "all of sys.modules": "def f(x): return len(sys.modules)",
    "itself": "def f(x): return getattr(sys.modules[__name__], x)",
    "itself, kept": "def f(x):\n m = sys.modules[__name__]\n return getattr(m, x)",
    "globals": "def f(x): return globals()[x]",
    "globals.get": "def f(x): return globals().get(x)",
    "the values of globals": "def f(x): return list(globals().values())",
    "a closed-over finder": "def m(l): return lambda x: l(x)\nf = m(importlib.import_module)",
    "a finder of a library": "import edited_ops as o\no.sys = sys\ndef f(x): return o.sys.modules.values()",
    "a module's variables": "import edited_ops\ndef f(x): return vars(edited_ops)[x]",
    "a module's private name": "import edited_ops as o\no._C__k = 1\nclass C:\n def g(s): return o.__k\ndef f(x): return C().g()",
    "a private name for a module": "import edited_ops\ndef m():\n class C:\n  def g(s, x): return __o.k()\n _C__o = edited_ops\n return C().g\nf = m()",
    "a starred module": "import edited_ops\ndef f(x): return [getattr(m, x) for m in (edited_ops,)]",
    "getattr": "import edited_ops\ndef f(x): return getattr(edited_ops, x)",
    "eval": "def f(x): return eval(x)",
    "exec": "def f(x): exec(x)",
    "an alias": "load = importlib.import_module\ndef f(x): return load('edited_ops')",
    "run_path": "import runpy\ndef f(x): return runpy.run_path(x)",
    "by what is called": "def g(x): return importlib.import_module(x)\ndef f(x): return g(x)",
}

STANDARD = """abc array collections dataclasses datetime decimal enum fractions functools importlib inspect logging
operator pathlib re struct sys types typing""".split()


def program(
    monkeypatch: pytest.MonkeyPatch, source: str, k: int = 1, with_source: bool = True
) -> types.SimpleNamespace:
    """A program, and the module edited_ops beside it."""
    ops = types.ModuleType("edited_ops")
    ops.__file__ = "/a/program/edited_ops.py"
    beside = f"K = {k}\ndef k(): return {k}\ndef one(): return 1\ndef by_name(): return globals()['k']()"
    program_source.run(beside, ops.__dict__, with_source=with_source)
    monkeypatch.setitem(sys.modules, "edited_ops", ops)
    made = types.ModuleType("edited")
    made.__file__ = "/a/program/edited.py"
    monkeypatch.setitem(sys.modules, "edited", made)
    lines = source.replace("K", str(k)) if "K" in source else source
    whole = f"import {', '.join(STANDARD)}\n{lines}"
    program_source.run(whole, made.__dict__, with_source=with_source)
    return types.SimpleNamespace(f=made.f, arg=getattr(made, "arg", None))


@pytest.mark.parametrize("edit", NOTICED)
def test_after_an_edit_the_value_is_made_anew(monkeypatch, tmp_path, edit):
    expected, found, misses = [], [], []
    for k in (1, 1, 2):
        made = program(monkeypatch, NOTICED[edit], k)
        kept = cached(made.f, tmp_path)
        found.append(kept(made.arg))
        misses.append(kept.cache.statistics().misses)
        expected.append(made.f(made.arg))
    assert found == expected and expected[1] != expected[2]
    assert misses == [1, 0, 1]


@pytest.mark.parametrize("edit", NOTICED)
def test_without_source_a_value_is_made_anew_or_refused(monkeypatch, tmp_path, edit):
    expected, found = [], []
    try:
        for k in (1, 1, 2):
            made = program(monkeypatch, NOTICED[edit], k, with_source=False)
            found.append(cached(made.f, tmp_path)(made.arg))
            expected.append(made.f(made.arg))
    except TypeError as error:
        assert "cannot be part of a cache key" in str(error) and "give version=" in str(error)
    assert found == expected[: len(found)]


@pytest.mark.parametrize("edit", ALIKE)
def test_an_edit_that_changes_nothing_is_a_hit(monkeypatch, tmp_path, edit):
    misses = []
    for source in ALIKE[edit]:
        made = program(monkeypatch, source)
        kept = cached(made.f, tmp_path)
        kept(made.arg)
        misses.append(kept.cache.statistics().misses)
    assert misses == [1, 0]


@pytest.mark.parametrize("use", UNKNOWN)
def test_what_code_finds_by_a_name_that_it_is_given_is_refused_with_the_remedy(monkeypatch, tmp_path, use):
    made = program(monkeypatch, UNKNOWN[use])
    with pytest.raises(
        TypeError, match=r"(?s)which .*uses,.*(use an import statement|import the names).*version="
    ):
        cached(made.f, tmp_path)("edited_ops")
    cached(made.f, tmp_path, version=1).cache.key("edited_ops", "x")


def test_who_leaves_a_finder_out_of_the_key_is_not_refused(monkeypatch, tmp_path):
    made = program(monkeypatch, "def f(x): return importlib.import_module(x).k()")
    assert cached(made.f, tmp_path, ignore="importlib.import_module")("edited_ops") == 1
    own = program(
        monkeypatch, "class Box:\n modules = {'a': 3}\nbox = Box()\ndef f(x): return box.modules['a']"
    )
    assert cached(own.f, tmp_path)(1) == 3  # no sys.modules, though it is called so


HERE = Path(__file__).resolve()
FOLDERS = (str(HERE.parent), str(HERE.parents[2] / "helpers"))
KEYS = """
import sys, pytest
sys.path[:0] = sys.argv[1].split(':')
import test_cache_edits as edits
from memopt.data import cached
for name, source in sorted(edits.NOTICED.items()):
    with pytest.MonkeyPatch.context() as patch:
        made = edits.program(patch, source)
        print(name, cached(made.f, sys.argv[2]).cache.key({"x": made.arg}, "x"))
"""


def test_keys_are_the_same_in_processes_that_hash_differently(tmp_path):
    told = [
        subprocess.run(
            [sys.executable, "-c", KEYS, ":".join(FOLDERS), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(set(told[0])) == len(NOTICED)
