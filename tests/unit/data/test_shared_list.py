"""memopt.data.SharedList and SharedStrings beside the lists that they are built from."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_values import TEXT, VALUES, form

import memopt
from memopt import _C
from memopt.data import SharedList, SharedStrings

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = 2000 if os.environ.get("MEMOPT_SOAK") == "1" else 50
INDEX = st.one_of(st.none(), st.integers(-9, 9))


@given(st.lists(VALUES, max_size=8))
@settings(deadline=None, max_examples=EXAMPLES)
def test_a_list_comes_back_in_type_and_bits(items):
    shared = SharedList(items)
    assert form(list(shared)) == form(items)
    assert form([shared[i] for i in range(-len(items), len(items))]) == form(items + items)
    assert form(list(pickle.loads(pickle.dumps(shared)))) == form(items)


@given(
    st.lists(TEXT, max_size=9),
    INDEX,
    INDEX,
    st.sampled_from([None, 1, 2, 3, -1, -2, -9, 2**70, -(2**70)]),
    TEXT,
)
@settings(deadline=None, max_examples=EXAMPLES)
@pytest.mark.parametrize("kind", [SharedStrings, SharedList])
def test_strings_are_found_sliced_and_compared_as_in_a_list(kind, items, start, stop, step, other):
    shared = kind(items)
    assert list(shared) == items and shared == items and items == shared and shared == kind(items)
    assert len(shared) == len(items) and bool(shared) == bool(items)
    part, expected = shared[start:stop:step], items[start:stop:step]
    assert type(part) is kind and list(part) == expected and part == expected
    assert list(part[start:stop:-1]) == expected[start:stop:-1]
    assert list(reversed(part)) == expected[::-1]
    assert pickle.loads(pickle.dumps(part)) == expected
    for wanted in (other, *items[:2]):
        assert (wanted in shared) == (wanted in items)
        assert part.count(wanted) == expected.count(wanted)
        assert shared != [*items, wanted] and shared != [*items[1:], wanted, "x"]
        assert (shared.index(wanted) if wanted in items else None) == (
            items.index(wanted) if wanted in items else None
        )


def test_what_a_list_refuses_is_refused():
    for shared in (SharedStrings(["a", "b"]), SharedList(["a", 2])):
        for wrong in (2, -3, 2**70):
            with pytest.raises(IndexError):
                shared[wrong]
        for wrong in ("x", 1.5, None):
            with pytest.raises(TypeError):
                shared[wrong]
        with pytest.raises(ValueError):
            shared.index("c")
        with pytest.raises(ValueError):
            shared.index("a", 1)
        with pytest.raises(TypeError):
            shared[0] = "c"
        with pytest.raises(TypeError):
            hash(shared)
        with pytest.raises(ValueError):
            shared[::0]
        assert not hasattr(shared, "append")


@pytest.mark.parametrize("kind", [SharedStrings, SharedList])
def test_bounds_of_index_are_a_lists(kind):
    class Told(str):
        def __eq__(self, other):
            asked.append(other)
            return False

        __hash__ = str.__hash__

    items = ["a", "b", "a"]
    shared = kind(items)
    for bounds in ((0, 2**70), (-(2**70),), (-2, 2**70), (2**70,), (1, -(2**70)), (2, 3), (0, -3), (-9, 1)):
        try:
            expected = items.index("a", *bounds)
        except ValueError:
            expected = None
            with pytest.raises(ValueError):
                shared.index("a", *bounds)
        else:
            assert shared.index("a", *bounds) == expected
    for wrong in (None, 1.5, "0"):
        with pytest.raises(TypeError):
            shared.index("a", wrong)
    asked = []
    with pytest.raises(ValueError):
        shared.index(Told("c"), 0, 1)
    assert asked == ["a"]  # nothing behind the end was looked at


def test_other_parts_of_a_lists_interface():
    items = ["a", 1, "a", None]
    shared = SharedList(items)
    assert (
        shared + [3] == [*items, 3]  # noqa: RUF005
        and [3] + shared == [3, *items]  # noqa: RUF005
        and shared[:1] + shared[3:] == ["a", None]
    )
    assert copy.copy(shared) is shared and copy.deepcopy(shared) is shared
    assert shared.index("a", 1) == 2 and shared.index("a", -4, 1) == 0 and shared[np.int64(1)] == 1
    assert (
        sorted(SharedStrings("hello")) == sorted("hello") and random.sample(shared, 4) and [*shared] == items
    )
    assert shared != "a" and shared != tuple(items) and shared != SharedList(items[:3])
    assert json.dumps(list(shared)) == json.dumps(items)
    assert repr(shared) == f"SharedList(['a', 1, 'a', …], 4 items, {shared.nbytes} B)"
    assert list(SharedList()) == [] == list(SharedStrings([])) and SharedList() == []


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize(
    "dtype", ["<f4", ">i2", "?", "<c16", "S3", "U2", "<M8[ns]", "V5", [("a", "<i4"), ("b", "<f8", (2,))]]
)
def test_arrays_are_read_only_views(dtype, fortran):
    for shape in [(), (0, 3), (5,), (3, 4), (2, 3, 4)]:
        count = int(np.prod(shape))
        items = np.frombuffer(random.Random(1).randbytes(count * np.dtype(dtype).itemsize) + b"", np.uint8)
        array = (items & 1).view(dtype) if count else np.zeros(shape, dtype)
        array = np.asarray(array.reshape(shape), order="F" if fortran else "C")
        shared = SharedList([0, array, {"in": array[..., ::-1] if shape else array}])
        back = shared[1]
        assert back.dtype == array.dtype and back.shape == shape and back.tobytes() == array.tobytes()
        assert back.flags.f_contiguous == array.flags.f_contiguous and not back.flags.writeable
        assert shared[2]["in"].tobytes() == (array[..., ::-1] if shape else array).tobytes()
        if count:
            assert back.ctypes.data % 64 == 0 and np.shares_memory(back, shared[1])
            assert back.strides == array.strides
            with pytest.raises(ValueError, match="read-only"):
                back[...] = back


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64]
)
def test_tensors_are_views_whose_changes_stay_here(dtype):
    for shape in [(), (0, 2), (3,), (3, 4)]:
        tensor = (torch.arange(int(np.prod(shape))).reshape(shape) % 3).to(dtype)
        shared = SharedList([tensor, tensor.T if tensor.ndim == 2 else tensor])
        assert shared[0].dtype == dtype and shared[0].shape == shape and torch.equal(shared[0], tensor)
        assert torch.equal(shared[1], tensor.T if tensor.ndim == 2 else tensor)
        if tensor.numel():
            assert shared[0].data_ptr() % 64 == 0 and shared[0].data_ptr() == shared[0].data_ptr()
            view = shared[0]
            view.zero_()
            assert not shared[0].any() and bytes(shared._memory) == bytes(
                SharedList([tensor, shared[1]])._memory
            )


@pytest.mark.parametrize("kind", [SharedList, SharedStrings])
def test_an_iterator_ends_once_and_notices_a_close(kind):
    class Mine(kind):
        def __getitem__(self, index):  # as of a list's subclass, iterating does not ask it
            raise AssertionError(index)

    names = [f"é{n}" for n in range(5)]
    for shared in (kind(names), kind(names)[::-1][::-1], Mine(names)):
        each = iter(shared)
        assert [next(each), next(each), each.__length_hint__()] == ["é0", "é1", 3]
        assert list(each) == names[2:] and list(each) == [] and each.__length_hint__() == 0
        assert iter(each) is each
        other = iter(shared)
        shared.close()
        with pytest.raises(ValueError, match="closed"):
            next(other)
        assert list(each) == []  # at its end it holds nothing any more
    with pytest.raises(TypeError):
        type(each)()


def test_views_keep_the_memory_when_the_list_is_gone():
    shared = SharedList([np.arange(100000), torch.arange(100000)])
    array, tensor, part = shared[0], shared[1], shared[:1]
    shared.close()
    with pytest.raises(ValueError, match="closed"):
        shared[0]
    for use in (len, list, repr, lambda s: 1 in s, lambda s: s.index(1), pickle.dumps, lambda s: s[:]):
        if use is repr:
            assert repr(shared) == "SharedList(closed)"
        else:
            with pytest.raises(ValueError, match="closed"):
                use(shared)
    assert part[0][7] == 7
    del shared, part
    gc.collect()
    assert array.sum() == tensor.sum() == 4999950000


def test_memory_and_descriptor_go_with_the_last_view():
    def state():
        maps = Path("/proc/self/maps").read_text().count("memopt-shared")
        return maps, len(os.listdir("/proc/self/fd"))

    before = state()
    for _ in range(3):
        shared = SharedList([np.arange(10), torch.arange(10), "x"])
        kept = (shared[0], shared[1], shared[1:], iter(shared))
        assert state()[0] == before[0] + 2  # read-only, and the tensor's
        del shared, kept
        gc.collect()
        assert state() == before
    with pytest.raises(TypeError):
        SharedList([1, object()])
    assert state() == before


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"boxes": [1, 2, object()]}, r"item 1\['boxes'\]\[2\] is of type object: .*pickle=True"),
        (Point(1, 2), "item 1 is of type Point"),
        (OrderedDict(), "item 1 is of type OrderedDict"),
        ([{1: {(2, 3): {4, Path("x")}}}], r"item 1\[0\]\[1\]\[\(2, 3\)\]\{\.\.\.\} is of type P"),
        (np.array([None]), "item 1 is an array of object"),
        (torch.ones(1, requires_grad=True), r"requires grad: share its \.detach\(\)"),
        (torch.nn.Parameter(torch.ones(1)), "type Parameter"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), r"on meta: share its \.cpu\(\)"),
        (pytest, "item 1 is of type module"),
    ],
)
def test_what_cannot_be_shared_is_named_with_its_place(item, words):
    with pytest.raises(TypeError, match=words):
        SharedList([0, item])
    if item is not pytest and not isinstance(item, torch.Tensor) and not (isinstance(item, dict) and item):
        assert type(SharedList([0, item], pickle=True)[1]) is type(item)


def test_loops_and_depth_are_refused_by_name():
    loop: list[object] = [1]
    loop.append({"in": loop})
    with pytest.raises(ValueError, match=r"item 0\[1\]\['in'\]: a container that contains itself"):
        SharedList([loop])
    deep: object = 1
    for _ in range(200):
        deep = (deep,)
    assert form(SharedList([deep])[0]) == form(deep)
    with pytest.raises(ValueError, match="more than 200 nested containers"):
        SharedList([[deep]])
    twice = [1]
    assert SharedList([[twice, twice]])[0] == [[1], [1]]  # not a loop


@pytest.mark.parametrize("item", [b"x", None, 3, ["x"]])
def test_strings_hold_str_alone(item):
    with pytest.raises(TypeError, match="SharedStrings: item 2 is .*SharedList"):
        SharedStrings(["a", "b", item])
    assert SharedStrings([np.str_("a")])[0] == "a"


def test_an_error_of_the_iterable_is_its_own():
    def items():
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        SharedList(items())
    with pytest.raises(TypeError, match="not iterable"):
        SharedList(3)


def test_a_list_that_changes_while_it_is_shared_is_noticed():
    class Grows:
        def __reduce__(self):
            inner.append(1)
            return str, ()

    inner: list[object] = [Grows(), 2]
    with pytest.raises(RuntimeError, match="item 0 was changed while"):
        SharedList([inner], pickle=True)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_no_room_names_the_limit_and_the_mend(size):
    with pytest.raises(OSError, match="container's memory limit") as caught:
        _C.shared_build(1, "x", ("y" * 1000 for _ in range(2000)), lambda one: "no", size)
    assert caught.value.errno == 28
    assert memopt._C.format_size(size) in str(caught.value)


def test_foreign_memory_is_refused():
    with pytest.raises(memopt.Error, match="not sealed memory") as caught:
        fd = os.memfd_create("x")
        try:
            _C.SharedMemory(fd)
        finally:
            os.close(fd)
    assert caught.value.status == "MO_CORRUPT"
    for content in (b"", b"x" * 1000):
        with pytest.raises((memopt.Error, OSError)):
            _C.shared_copy(content)
    with pytest.raises(TypeError):
        _C.SharedItems(b"bytes", None)
    good = bytes(SharedList(["x"])._memory)
    with pytest.raises(memopt.Error, match="damaged"):
        _C.shared_copy(good[:-1])


def read_all(shared):
    """Everything, whatever it is; memopt.Error or an ordinary exception is an answer, a crash is none."""
    said = []
    for i in range(len(shared)):
        try:
            said.append(repr(shared[i]))
        except Exception as error:  # a byte may make a pickle of it, which raises what it likes
            said.append(error)
    return said


def test_damaged_memory_gives_errors_or_values():
    items = [
        "text",
        10**30,
        {"a": [1, 2.5, None]},
        np.arange(5),
        torch.arange(5),
        (1, {2, 3}),
        np.float32(2),
        b"q",
    ]
    good = bytes(SharedList(items)._memory)
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    attached = 0
    for _ in range(20000 if os.environ.get("MEMOPT_SOAK") == "1" else 400):
        broken = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 5])):
            broken[chance.randrange(128, len(broken))] = chance.choice([0, 1, 255, chance.randrange(256)])
        shared = SharedList._of(_C.shared_copy(broken))
        attached += len(read_all(shared)) == len(items)
    assert attached  # data and table are not in the header's sum


def test_building_takes_no_memory_of_its_own():
    """A generator of 150 MB: the builder's resident memory, of which the result (never mapped here) is no part."""
    code = """if True:
        import gc, sys
        from memopt.data import SharedStrings
        def peak():
            return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        SharedStrings(["x"] * 1000)
        before = peak()
        shared = SharedStrings(f"{i:0150d}" for i in range(1_000_000))
        print(peak() - before, shared.nbytes >> 10, shared[999_999] == f"{999_999:0150d}")
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    grown, size, right = done.stdout.split()
    assert right == "True" and int(size) > 140_000
    assert int(grown) < 5 * 1024  # KiB; 3 MiB are buffers
