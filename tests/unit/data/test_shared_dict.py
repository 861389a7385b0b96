"""memopt.data.SharedDict beside the dict that it is built from."""

from __future__ import annotations

import copy
import enum
import multiprocessing
import operator
import os
import pickle
import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_values import KEYS, VALUES, form

import memopt
from memopt import _C
from memopt.data import SharedDict, _shared_containers

EXAMPLES = 2000 if os.environ.get("MEMOPT_SOAK") == "1" else 60


@given(st.lists(st.tuples(KEYS, VALUES), max_size=12), st.lists(KEYS, max_size=4))
@settings(deadline=None, max_examples=EXAMPLES)
def test_a_dict_comes_back_and_is_found_as_in_it(pairs, others):
    plain = dict(pairs)
    shared = SharedDict(pairs)
    assert form(list(shared.items())) == form(list(plain.items()))
    assert form(list(shared)) == form(list(plain)) and form(list(shared.values())) == form(
        list(plain.values())
    )
    assert form(list(reversed(shared))) == form(list(reversed(plain)))
    assert len(shared) == len(plain) and bool(shared) == bool(plain)
    for key in [*plain, *others]:
        assert (key in shared) == (key in plain)
        assert form(shared.get(key, "none")) == form(plain.get(key, "none"))
        if key in plain:
            assert form(shared[key]) == form(plain[key])
    assert form(list(pickle.loads(pickle.dumps(shared)).items())) == form(list(plain.items()))


def test_equal_numbers_are_one_key_whatever_their_type():
    shared = SharedDict(
        {1: "int", 2.0: "float", True + 2: "three", "1": "text", b"1": "bytes", (1, 2): "pair", None: 0}
    )
    for key in (1, 1.0, True, np.int64(1), np.float64(1), enum.IntEnum("E", "A").A):
        assert shared[key] == "int" and key in shared
    assert shared[2] == "float" and type(list(shared)[1]) is float
    assert shared[(1.0, 2)] == "pair" == shared[(True, np.uint8(2))]
    assert shared["1"] == shared[np.str_("1")] == "text" and shared[b"1"] == "bytes" and shared[None] == 0
    assert SharedDict([(True, 1), (1, 2)]) == {True: 2} and list(SharedDict([(True, 1), (1, 2)])) == [True]
    for key in (4, 1.5, float("nan"), float("inf"), 1j, object(), (), (1,), frozenset(), 10**400, 1e300):
        assert key not in shared and shared.get(key) is None
        with pytest.raises(KeyError) as caught:
            shared[key]
        assert caught.value.args == (key,)


@pytest.mark.parametrize("key", [[], {}, (1, []), np.zeros(2), bytearray(b"1")])
def test_what_is_not_hashable_is_a_type_error(key):
    shared = SharedDict({1: 2})
    for use in (shared.__getitem__, shared.get, shared.__contains__):
        with pytest.raises(TypeError, match="unhashable"):
            use(key)
    with pytest.raises(TypeError, match="unhashable"):
        SharedDict([(key, 1)])


@pytest.mark.parametrize(
    ("items", "kind", "words"),
    [
        ({1j: 0}, TypeError, "SharedDict: key 1j: keys must be str"),
        ({(1, frozenset()): 0}, TypeError, r"key \(1, frozenset\(\)\): keys must be"),
        ({float("nan"): 0}, ValueError, "nan equals nothing"),
        ({"a": {"b": [object()]}}, TypeError, r"the value of key 'a'\['b'\]\[0\] is of type object"),
        ([1], TypeError, "element 0 .* not a pair"),
        ([("a", 1), ("b",)], TypeError, r"element 1 of .* not a pair \(key, value\): \('b',\)"),
        (3, TypeError, "not iterable"),
    ],
)
def test_what_cannot_be_shared_is_named(items, kind, words):
    with pytest.raises(kind, match=words):
        SharedDict(items)


def test_what_an_element_raises_is_the_callers():
    class Interrupted:
        def __iter__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SharedDict([("a", 1), Interrupted()])


@pytest.mark.parametrize("free", [0, 100])
def test_a_machine_with_nothing_free_has_a_limit_too(monkeypatch, free):
    monkeypatch.setattr(_shared_containers, "available", lambda: free)
    with pytest.raises(OSError, match="without running out of memory"):
        SharedDict({"a": bytes(5 << 20)})
    monkeypatch.setattr(_shared_containers, "available", lambda: None)
    assert SharedDict({"a": 1}) == {"a": 1}


def test_other_parts_of_a_dicts_interface():
    plain = {"a": 1, "b": [2], "c": np.arange(3)}
    shared = SharedDict(plain)
    assert shared.keys() == plain.keys() and shared.keys() & {"a", "z"} == {"a"} and "a" in shared.keys()  # noqa: SIM118
    assert ("a", 1) in shared.items() and 1 in SharedDict({"a": 1}).values()
    assert {**SharedDict({"a": 1}), "b": 2} == {"a": 1, "b": 2} and dict(SharedDict(plain))["b"] == [2]
    assert SharedDict({"a": 1}) == {"a": 1} == SharedDict({"a": 1}) and SharedDict({"a": 1}) != {"a": 2}
    assert (
        SharedDict({"a": 1}) != {"b": 1}
        and SharedDict({"a": 1}) != 3
        and SharedDict() == {} == SharedDict([])
    )
    assert copy.copy(shared) is shared and copy.deepcopy(shared) is shared
    assert not shared["c"].flags.writeable and shared["c"].ctypes.data % 64 == 0
    assert repr(SharedDict({"a": 1})) == "SharedDict({'a': 1}, 1 entry, 208 B)"
    with pytest.raises(TypeError):
        shared["a"] = 2
    with pytest.raises(TypeError):
        hash(shared)
    assert type(SharedDict({"a": OrderedDict()}, pickle=True)["a"]) is OrderedDict
    view = shared["c"]
    shared.close()
    for use in (len, list, lambda d: d["a"], lambda d: "a" in d, lambda d: d.get("a"), pickle.dumps):
        with pytest.raises(ValueError, match="closed"):
            use(shared)
    assert view.sum() == 3 and repr(shared) == "SharedDict(closed)"


def test_many_keys_of_all_lengths_are_found():
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    plain = {chance.randbytes(chance.randrange(40)): i for i in range(20000)} | {
        f"{i:x}": -i for i in range(20000)
    }
    shared = SharedDict(plain)
    assert dict(shared.items()) == plain and shared == plain
    assert not any(f"{i:x} " in shared for i in range(20000))


def look_up(shared, queue) -> None:
    queue.put((shared["a"], list(shared)))


@pytest.mark.parametrize("method", ["fork"])
def test_a_process_gets_it_by_descriptor(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=look_up, args=(SharedDict({"a": 1, 2: 3}), queue))
    process.start()
    assert queue.get(timeout=600) == (1, ["a", 2])
    process.join()
    from multiprocessing.reduction import ForkingPickler

    large = SharedDict(dict.fromkeys(range(1000), "x" * 100))
    assert len(ForkingPickler.dumps(large)) < 1000 and pickle.loads(ForkingPickler.dumps(large)) == large


def test_damaged_memory_gives_errors_or_values():
    plain = {"text": 10**30, 2: {"a": [1, 2.5]}, (1, b"q"): np.arange(5), 1.5: None}
    good = bytes(SharedDict(plain)._memory)
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    whole = 0
    for _ in range(20000 if os.environ.get("MEMOPT_SOAK") == "1" else 400):
        broken = bytearray(good)
        for _ in range(chance.choice([1, 2, 5, 40])):
            broken[chance.randrange(128, len(broken))] = chance.choice([0, 1, 255, chance.randrange(256)])
        shared = SharedDict._of(_C.shared_copy(broken))
        uses = [(operator.getitem, shared, key) for key in plain] + [(list, shared.items()), (repr, shared)]
        for use, *arguments in uses:
            try:
                use(*arguments)
                whole += 1
            except Exception as error:  # a byte may make a pickle of a value, which raises what it likes
                assert not isinstance(error, SystemError)
    assert whole
    with pytest.raises(TypeError, match="is not a dict"):
        SharedDict._of(memopt.data.SharedList([1])._memory)
    with pytest.raises(TypeError, match="is a dict, not a list"):
        memopt.data.SharedList._of(SharedDict({})._memory)
