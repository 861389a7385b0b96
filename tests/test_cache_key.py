"""What memopt.data.cached tells apart, what it takes for the same, and what it refuses."""

from __future__ import annotations

import io
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.data import cached
from memopt.data.cache_key import KeyDigest, Unkeyable


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


def test_alike_is_not_the_same():
    values = [
        0, 0.0, -0.0, False, None, "", b"", [], (), {}, set(), frozenset(), "0", b"0", 0j, [[]], [()], [0], (0,),
        {0: 0}, range(0), slice(0), bytearray(), ["a", "b"], ["ab"], ["", "ab"], [["a"], "b"], [["a", "b"]],
        np.float32(0), np.float64(0), np.zeros(0), np.zeros(1), np.zeros((1, 1)), np.zeros(1, np.int64),
        np.zeros(1, ">i8"), torch.zeros(0), torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.bfloat16), torch.float32, torch.device("cpu"), int, float, len, dict.get,
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
    [threading.Lock(), io.BytesIO(), (n for n in "ab"), memoryview(b"a"), object()],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_content_is_refused_by_its_path(value):
    with pytest.raises(Unkeyable, match=r"it\['a'\]\[1\] \("):
        key({"a": [0, value]})


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
    exec(SOURCE.format(**BASE | changed), made.__dict__)
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
