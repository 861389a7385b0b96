"""Keys of memopt.data.cached: what differs, what is the same, and what is refused."""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import sys
import threading
import types

import numpy as np
import program_source
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.data import cached
from memopt.data._cache.cache_key import KeyDigest, Unkeyable


def key(value):
    digest = KeyDigest()
    digest.add(value, "it")
    return digest.digest()


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(one=plain, other=plain)
def test_keys_are_equal_just_where_values_and_types_are(one, other):
    """repr tells plain values apart, types and all; of sets it does not keep the order."""

    def told(value):
        if isinstance(value, frozenset):
            return "set", sorted(map(repr, value))
        if isinstance(value, dict):
            return "dict", [(told(name), told(held)) for name, held in value.items()]
        if isinstance(value, list | tuple):
            return type(value).__name__, [told(held) for held in value]
        return repr(value)

    if "nan" not in repr((one, other)):
        assert (key(one) == key(other)) == (told(one) == told(other))
    assert key(one) == key(one)


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})


def test_alike_is_not_the_same():
    values = [
        0, 0.0, -0.0, False, None, "", b"", [], (), {}, set(), frozenset(), "0", b"0", 0j, [[]], [()], [0], (0,),
        {0: 0}, range(0), slice(0), bytearray(), ["a", "b"], ["ab"], ["", "ab"], [["a"], "b"], [["a", "b"]],
        np.float32(0), np.float64(0), np.zeros(0), np.zeros(1), np.zeros((1, 1)), np.zeros(1, np.int64),
        np.zeros(1, ">i8"), torch.zeros(0), torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64),
        np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])[0], np.zeros(1, [("a", "i4")])[0], np.zeros(2, "V0"),
        np.zeros(1, OVERLAPPING), torch.zeros(1, dtype=torch.bfloat16), torch.float32, torch.device("cpu"),
        int, float, len, dict.get, np.add, np.multiply, np.random.default_rng, np.dtype("i4"), np.dtype(">i4"),
        np.dtype([("a", "i4")]), np.dtype([("b", "i4")]), list[int], list[str], int | None, int | str,
    ]  # fmt: skip
    assert len({key(value) for value in values}) == len(values)


def test_what_contains_itself_has_an_end_and_shared_parts_do_not_count():
    loop = [1]
    loop.append(loop)
    assert key(loop) == key(loop) != key([1, [1]])
    part = [1, 2]
    assert key([part, part]) == key([[1, 2], [1, 2]])


def test_the_same_content_in_another_place_is_the_same():
    big = torch.arange(12).reshape(3, 4)
    assert key(big[:, 1:3]) == key(big[:, 1:3].clone())
    assert key(np.arange(12)[::2]) == key(np.arange(12)[::2].copy())


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), io.BytesIO(), (n for n in "ab"), memoryview(b"a"), object(), np.frompyfunc(len, 1, 1)],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_content_is_refused_by_its_path(value):
    with pytest.raises(Unkeyable, match=r"it\['a'\]\[1\] \("):
        key({"a": [0, value]})


class Slots:
    __slots__ = ("__x", "members", "open")

    def __init__(self, x=0):
        self.__x, self.members = x, {0}


class MoreSlots(Slots):
    __slots__ = ("__x", "open")


def test_slots_count_private_ones_and_hidden_ones_too():
    assert key(Slots(1)) == key(Slots(1)) != key(Slots(2))
    assert key(MoreSlots(1)) != key(MoreSlots(2))
    one, other = MoreSlots(), MoreSlots()
    Slots.open.__set__(one, 1)
    Slots.open.__set__(other, 2)
    assert key(one) != key(other)
    for name in ("__x", "_Slots__x"):
        digests = [KeyDigest((name,)), KeyDigest((name,))]
        for digest, x in zip(digests, (1, 2), strict=True):
            digest.add(Slots(x), "it")
        assert digests[0].digest() == digests[1].digest()


def test_a_loop_through_a_set_has_an_end_and_what_is_too_deep_is_named():
    def looped(members):
        made = Slots()
        made.members = {made, *members}
        return made

    assert key(looped({1, 2})) == key(looped({2, 1})) != key(looped({1}))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unkeyable, match=r"^it\['a'\]\[0\].*… \(list\) .*nested too deeply"):
        key({"a": deep})
    assert key(range(0, 2**70)) == key(range(0, 2**70)) != key(range(0, 2**71))


def test_a_path_stands_for_its_file_too(tmp_path):
    file = tmp_path / "a"
    keys = [key(file)]
    for content in ("1", "12"):
        file.write_text(content)
        keys.append(key(file))
    assert len(set(keys)) == 3


# ---- functions --------------------------------------------------------------------------------------------------

SOURCE = """
import math
FACTOR = {factor}
def inner(x):
    return x + {step}
class Part:
    def of(self, x):
        return x * {part}
def f(x, default={default}):
    {comment}
    return inner(x) * FACTOR + Part().of(x) + default + (lambda y: y - {nested})(x)
def close(held):
    def g(x):
        return x + held
    return g
"""
BASE = {"factor": 2, "step": 1, "part": 3, "default": 0, "comment": "", "nested": 1}


def module(**changed):
    made = types.ModuleType("program_of_a_test")
    program_source.run(SOURCE.format(**BASE | changed), made.__dict__)
    return made


@pytest.mark.parametrize("changed", [{name: 9} for name in BASE if name != "comment"], ids=str)
def test_a_change_of_code_default_global_or_what_is_called_is_another_function(changed):
    assert key(module().f) == key(module().f) != key(module(**changed).f)


def test_a_comment_is_no_change():
    assert key(module().f) == key(module(comment="# a comment").f)


def test_closures_count_by_value():
    assert key(module().close(1)) == key(module().close(1)) != key(module().close(2))
    assert key(module().close([1, 2])) != key(module().close([1, 3]))


def test_what_a_function_uses_and_cannot_be_keyed_is_named_with_its_mend(tmp_path):
    lock = threading.Lock()

    def f(x):
        with lock:
            return x

    with pytest.raises(TypeError, match=r"'lock', which .*f closes over, \(_thread.lock\).*ignore=\(name,\)"):
        cached(f, tmp_path)(1)
    assert cached(f, tmp_path, ignore="lock")(1) == 1
    with pytest.raises(TypeError, match="the arguments of .*'x'"):
        cached(f, tmp_path, ignore="lock")(lock)


def test_a_version_takes_the_place_of_code_and_not_of_values(tmp_path):
    first, second = module().close(1), module().close(2)
    calls = [cached(one, tmp_path, version=1) for one in (first, second)]
    assert [call(1) for call in calls] == [2, 3]
    old, new = module(), module(step=9)
    assert cached(old.f, tmp_path, version=1)(1) == cached(new.f, tmp_path, version=1)(1)
    assert cached(old.f, tmp_path, version=1)(1) != cached(new.f, tmp_path, version=2)(1)


# ---- what is reached by way of a module -------------------------------------------------------------------------

USES = {
    "by two attributes": "import prog_pkg.ops\ndef f(x): return prog_pkg.ops.f(x)",
    "in a comprehension": "import prog_pkg.ops\ndef f(x): return [prog_pkg.ops.f(y) for y in x]",
    "beside an assignment": "from prog_pkg import ops\ndef f(x):\n ops.seen = x\n return ops.f(x)",
    "imported from": "def f(x):\n from prog_pkg.ops import f\n return f(x)",
    "imported whole": "def f(x):\n import prog_pkg.ops\n return prog_pkg.ops.f(x)",
    "imported as": "def f(x):\n import prog_pkg.ops as o\n return [o.f(y) for y in x], o.f(x)",
    "a submodule": "def f(x):\n from prog_pkg import ops as a, user as b\n return (lambda: a.f(x))()",
    "relative": "from prog_pkg.user import f",
    "closed over": "def g():\n import prog_pkg.ops as o\n return lambda x: [o.f(y) for y in x]\nf = g()",
    "or not there": "def f(x):\n try: import no_such as a\n except ImportError: import prog_pkg.ops as a\n a.f(x)",
}


def program(monkeypatch, folder, source, step=1, unread=0):
    """The function f of a source, beside a package whose f adds `step`."""
    package = folder / f"{step} {unread}" / "prog_pkg"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(f"def f(x): return x + {step}\nUNREAD = {unread}")
    (package / "user.py").write_text("def f(x):\n from .ops import f\n return f(x)")
    for name in ("prog_pkg", "prog_pkg.ops", "prog_pkg.user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(package.parent)
    made = {"__name__": "program_of_a_test"}
    program_source.run(source, made)
    return made["f"]


@pytest.mark.parametrize("use", USES)
def test_code_counts_by_whichever_way_it_is_reached(monkeypatch, tmp_path, use):
    keys = [
        key(program(monkeypatch, tmp_path, USES[use], **changed))
        for changed in ({}, {"unread": 1}, {"step": 2})
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n o = ops\n return o.f(x)",
        "def f(x, o=ops): return o.f(x)",
        "held = [ops]\ndef f(x): held",
    ],
)
def test_a_module_in_a_variable_is_refused_with_its_mend(monkeypatch, tmp_path, source):
    f = program(monkeypatch, tmp_path, f"import prog_pkg.ops as ops\n{source}")
    with pytest.raises(TypeError, match=r"(?s)\(module\) .* import the names that are used.*give version="):
        cached(f, tmp_path)(1)
    cached(f, tmp_path, version=1)(1)


# ---- source ------------------------------------------------------------------------------------------------------


def test_a_file_edited_since_its_import_is_not_taken_for_what_runs(monkeypatch, tmp_path):
    """A long run whose script is edited meanwhile: its workers ask for the source after the edit."""
    file = tmp_path / "edited_since.py"
    file.write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited_since

    imported = edited_since.f
    file.write_text("# longer\ndef f(x):\n    return x + 2\n")
    linecache.clearcache()
    stale = key(imported)
    linecache.clearcache()
    importlib.reload(edited_since)
    assert edited_since.f(1) == 3 and key(edited_since.f) not in (stale, key(imported))
    kept = cached(imported, tmp_path / "cache")
    assert kept(1) == 2 and cached(edited_since.f, tmp_path / "cache")(1) == 3 and kept(1) == 2


def test_an_edit_during_a_run_costs_no_entry(monkeypatch, tmp_path):
    """Workers that begin after the edit ask for the source of what was imported before it."""
    (tmp_path / "edited_during.py").write_text("def g(x):\n    return x + 1\ndef f(x):\n    return g(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited_during

    kept = [cached(edited_during.f, tmp_path / "cache") for _ in range(2)]
    before = kept[0].cache.key({"x": 1}, "x")
    (tmp_path / "edited_during.py").write_text("# longer\ndef f(x):\n    return x + 2\n")
    assert kept[1].cache.key({"x": 1}, "x") == before


def test_a_function_that_moved_in_its_file_is_the_same(monkeypatch):
    source = "def f(x):\n    return [y + 1 for y in x]\n"
    keys = []
    for before in ("", "import math\n\n\ndef other(): pass\n\n"):
        made = {"__name__": "program_of_a_test"}
        program_source.run(before + source, made)
        keys.append(key(made["f"]))
    assert keys[0] == keys[1]


def test_deep_code_has_a_key():
    for statement in ("if x == {}: return {}\n el", "if x == {}: return {}\n"):
        lines = [statement.format(number, number) for number in range(400)]
        made = {"__name__": "program_of_a_test"}
        body = " ".join(lines)
        program_source.run(f"def f(x):\n {body} if x: return 5".replace("el if", "elif"), made)
        assert key(made["f"]) == key(made["f"])


def test_an_import_without_source_is_refused_with_its_remedy(tmp_path):
    made = {"__name__": "program_of_a_test"}
    program_source.run("def f(x):\n import cached_squares\n return x", made, with_source=False)
    with pytest.raises(TypeError, match="source is not available.*give version="):
        cached(made["f"], tmp_path)(1)
    assert cached(made["f"], tmp_path, version=1)(1) == 1


def test_without_source_a_name_is_no_attribute_of_the_same_name(tmp_path):
    made = {"__name__": "program_of_a_test"}
    program_source.run(
        "open_file = open('/dev/null')\ndef f(x): return x.open_file, x.eval()", made, with_source=False
    )
    model = types.SimpleNamespace(open_file=1, eval=functools.partial(int, 2))
    assert cached(made["f"], tmp_path)(model) == (1, 2)
    with pytest.raises(TypeError, match="'eval', which .*uses"):
        program_source.run("def f(x): return eval(x)", made, with_source=False)
        cached(made["f"], tmp_path)("1")


def test_a_module_called_as_named_tuples_are_is_the_programs(monkeypatch):
    keys = []
    for k in (1, 2):
        made = {"__name__": "namedtuple_tools"}
        program_source.run(f"class C:\n g = lambda s: {k}\ndef f(x): return C().g()", made)
        keys.append(key(made["f"]))
    assert keys[0] != keys[1]


PORTABLE = """
import collections, dataclasses, enum, pathlib
class Color(enum.Enum):
    RED = 1
    def shown(self): return f"{self.name:>{self.value}}"
Pair = collections.namedtuple("Pair", "a b")
@dataclasses.dataclass(order=True)
class Point(Base := object):
    x: int = 1
    y: list = dataclasses.field(default_factory=lambda: [1.5, 2j, b"3"])
def f(x, *more, y=None, **named):
    with open(pathlib.Path(x)) as file:
        match [line.strip() for line in file if line]:
            case [first, *_]: return first, Color.RED, Pair(1, 2), Point(), lambda: y
"""


def test_the_key_of_a_function_is_the_same_on_every_cpython():
    """Found by 3.11, 3.12 and 3.13. A Flag's key has its boundary, of which 3.11.2 takes another than 3.11.7."""
    made = {"__name__": "program_of_a_test"}
    program_source.run(PORTABLE, made)
    assert key(made["f"]).hex() == "25376371b6e58cce701c18f70a5718b6928bc714"


# ---- callables that are objects ----------------------------------------------------------------------------------


class Times:
    def __init__(self, f, k):
        functools.update_wrapper(self, f)
        self.k = k

    def __call__(self, x):
        return self.__wrapped__(x) * self.k


def test_a_decorator_that_is_an_object_counts_with_its_attributes_and_its_class(monkeypatch, tmp_path):
    def f(x: list[int]):
        return x

    assert key(Times(f, 1)) == key(Times(f, 1)) != key(Times(f, 2))
    assert key(Times(f, 1)) != key(Times(lambda x: x + 1, 1))
    before = key(Times(f, 1))
    monkeypatch.setattr(Times, "__call__", lambda self, x: x)
    assert key(Times(f, 1)) != before
    first, second = functools.lru_cache(f), functools.lru_cache(maxsize=3)(f)
    first(1)
    assert key(first) == key(second) != key(functools.lru_cache(lambda x: x + 1))
    inner = [cached(f, tmp_path), cached(f, tmp_path), cached(f, tmp_path, version=1)]
    inner[0](1)
    assert key(inner[0]) == key(inner[1]) != key(inner[2])
