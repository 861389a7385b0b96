"""memopt.data.Prefetcher on the CPU: values, nesting, exceptions, positions. What travels: sim/test_prefetcher.py."""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from environment_python import run_there

from memopt import _C
from memopt.data import Prefetcher

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    names: list[str]
    weight: float = 1.0


class Knows:
    """Goes to a device by a method of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Knows:
        return Knows(self.x.to(device))


def images(count: int = 4, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Any bits that are a finite number."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max + 1, (count, 3, 9, 11), dtype=bits, generator=generator).view(dtype)
    return torch.where(x.isfinite(), x, torch.zeros((), dtype=dtype)) if dtype.is_floating_point else x


def on_the_host(
    x: torch.Tensor, scale: Any, dtype: torch.dtype = torch.float32, dim: int = -3
) -> torch.Tensor:
    """As a program would do it."""
    shape = [3 if d == dim % x.dim() else 1 for d in range(x.dim())]
    x = x.float().div(255) if scale is True else x.float().mul(scale)
    return x.sub(torch.tensor(MEAN).view(shape)).div(torch.tensor(STD).view(shape)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


# ---- widening -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16], ids=str
)
def test_what_is_widened_is_what_torch_makes_of_it_bit_for_bit(
    dtype: torch.dtype, target: torch.dtype
) -> None:
    for count in (4, 64):  # bytes: one by one, and by a table
        x = images(count, dtype=dtype)
        for scale in (1 / 255, 0.3, True if dtype is torch.uint8 else 1.0):
            for layout in (torch.contiguous_format, torch.channels_last):
                (got,) = Prefetcher(
                    [x.to(memory_format=layout)],
                    "cpu",
                    widen=True,
                    mean=MEAN,
                    std=STD,
                    scale=scale,
                    dtype=target,
                )
                assert same_bits(got, on_the_host(x, scale, target))
                assert got.is_contiguous(memory_format=layout)


def test_other_dimensions_of_channels_and_orders_of_memory() -> None:
    x = images()
    for dims in ((0, 2, 3, 1), (2, 0, 1, 3), (3, 1, 0, 2)):
        y = x.permute(dims)
        dim = dims.index(1)
        for one in (y, y.contiguous(), y[:, :, ::1], y.flip(0)):
            (got,) = Prefetcher([one], "cpu", widen=True, mean=MEAN, std=STD, scale=True, channel_dim=dim)
            assert same_bits(got, on_the_host(one, True, dim=dim))
    gaps = images(8)[::2, :, ::3, 1:7]
    (got,) = Prefetcher([gaps], "cpu", widen=True, mean=MEAN, std=STD, scale=True)
    assert same_bits(got, on_the_host(gaps, True)) and got.is_contiguous()
    (got,) = Prefetcher([gaps[:1].expand(5, -1, -1, -1)], "cpu", widen=True, mean=MEAN, std=STD, scale=True)
    assert same_bits(got, on_the_host(gaps[:1], True).expand(5, -1, -1, -1))


def test_parts_of_a_formula_and_single_numbers() -> None:
    x = images()
    for mean, std, scale, want in [
        (None, None, None, x.float()),
        (None, None, True, x.float().div(255)),
        (0.5, None, True, x.float().div(255).sub(0.5)),
        (None, STD, None, x.float().div(torch.tensor(STD).view(3, 1, 1))),
        (0.5, STD, None, x.float().sub(0.5).div(torch.tensor(STD).view(3, 1, 1))),
        (
            torch.tensor(MEAN, dtype=torch.float64),
            2.0,
            None,
            x.float().sub(torch.tensor(MEAN).view(3, 1, 1)).div(2.0),
        ),
    ]:
        (got,) = Prefetcher([x], "cpu", widen=True, mean=mean, std=std, scale=scale)
        assert same_bits(got, want)
    (got,) = Prefetcher([torch.empty(0, 3, 5, 5, dtype=torch.uint8)], "cpu", widen=True, mean=MEAN)
    assert got.shape == (0, 3, 5, 5) and got.dtype == torch.float32


def test_what_is_named_is_widened_and_nothing_else() -> None:
    image, mask, label = images(), images()[:, 0], torch.arange(4)
    batch = {
        "views": [image, image.clone()],
        "mask": mask,
        "label": label,
        "name": "x",
        "pair": Pair(image, label),
    }
    for keys, wide in [
        ("views", {"views.0", "views.1"}),
        ("views.1", {"views.1"}),
        (["views.0", "mask"], {"views.0", "mask"}),
        (True, {"views.0", "views.1", "mask", "pair.0"}),
        (None, set()),
        (False, set()),
    ]:
        (got,) = Prefetcher([batch], "cpu", widen=keys)
        leaves = {
            "views.0": got["views"][0],
            "views.1": got["views"][1],
            "mask": got["mask"],
            "pair.0": got["pair"][0],
        }
        assert {name for name, leaf in leaves.items() if leaf.dtype == torch.float32} == wide
        assert got["label"] is label and got["name"] == "x" and type(got["pair"]) is Pair
    (got,) = Prefetcher([(image, label)], "cpu", widen=0)
    assert got[0].dtype == torch.float32 and got[1] is label
    assert batch["views"][0] is image, "the loader's batch is left alone"


def test_a_tensor_that_is_there_twice_is_there_twice_afterwards() -> None:
    x = images()
    (got,) = Prefetcher([{"a": x, "b": [x]}], "cpu", widen=True)
    assert got["a"] is got["b"][0]


class MadeAtEachAccess(UserDict[str, Any]):
    def __getitem__(self, key: str) -> torch.Tensor:
        value = self.data[key]
        return torch.tensor(value, dtype=torch.uint8) if isinstance(value, list) else value


def test_a_mapping_may_make_its_tensors_at_each_access() -> None:
    """A tensor that is made for one look is gone after it, and another tensor has its id."""
    made = {str(n): [n, n + 1] for n in range(20)}
    (got,) = Prefetcher([MadeAtEachAccess(made)], "cpu", widen=True)
    assert type(got) is MadeAtEachAccess
    assert all(one.dtype == torch.float32 for one in got.values())
    assert {key: one.tolist() for key, one in got.items()} == made


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"mean": 0.5}, ValueError, "give widen=0"),
        ({"scale": True}, ValueError, "give widen=0"),
        ({"widen": True, "std": [1.0, 0.0]}, ValueError, "std contains a zero"),
        ({"widen": True, "mean": [1.0, float("nan")]}, ValueError, "finite"),
        ({"widen": True, "mean": []}, ValueError, "finite numbers"),
        ({"widen": True, "mean": [1.0, 2.0], "std": [1.0, 2.0, 3.0]}, ValueError, "2 means, but 3"),
        ({"widen": True, "scale": float("inf")}, ValueError, "scale=inf"),
        ({"widen": True, "dtype": torch.float64}, ValueError, "dtype=torch.float64"),
        ({"depth": 0}, ValueError, "depth=0"),
        ({"depth": True}, ValueError, "depth=True"),
        ({"device": "meta"}, ValueError, "device=meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(
    arguments: dict[str, Any], error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        Prefetcher([], **{"device": "cpu", **arguments})


@pytest.mark.parametrize(
    ("widen", "more", "error", "says"),
    [
        (
            "imgs",
            {},
            ValueError,
            r"widen='imgs' is not in this batch, which has 'image' \(torch.uint8 \(4, 3, 9, 11\)\)",
        ),
        ("label", {}, TypeError, "'label' is of torch.int64"),
        ("object", {}, TypeError, "'object' is of type Knows"),
        (
            "image",
            {"mean": [0.0, 1.0]},
            ValueError,
            r"\(4, 3, 9, 11\) does not have 2 channels in dimension -3",
        ),
        ("image", {"mean": MEAN, "channel_dim": 7}, ValueError, "dimension 7"),
    ],
)
def test_a_batch_that_does_not_fit_is_an_error_once(widen: str, more: Any, error: type, says: str) -> None:
    bad = {"image": images(), "label": torch.arange(4), "object": Knows(images())}
    it = iter(Prefetcher([bad], "cpu", widen=widen, **more))
    with pytest.raises(error, match=says):
        next(it)
    with pytest.raises(StopIteration):
        next(it)


def test_the_engine_refuses_what_is_no_source_or_target() -> None:
    x, wide = images(), torch.empty(4, 3, 9, 11)
    _C.widen(x, wide, None, None, 1, 1.0, False)
    for source, target in [
        (x, wide.double()),
        (x, wide[:2]),
        (x.to(memory_format=torch.channels_last), wide),
        (x.long(), wide),
        (x[:, :, ::2], wide[:, :, ::2]),
        (x.tolist(), wide),
    ]:
        with pytest.raises((ValueError, TypeError)):
            _C.widen(source, target, None, None, 1, 1.0, False)
    for mean, std, inner in [
        (torch.ones(3), torch.ones(2), 99),
        (torch.ones(3), None, 0),
        (torch.ones(7), None, 99),
    ]:
        with pytest.raises(ValueError, match="means|not a multiple"):
            _C.widen(x, wide, mean, std, inner, 1.0, False)
    with pytest.raises(ValueError, match="mean: expected"):
        _C.widen(x, wide, torch.ones(3).double(), None, 99, 1.0, False)


# ---- nesting --------------------------------------------------------------------------------------------------------


def test_every_kind_of_container_keeps_its_kind() -> None:
    x = images()
    made = [
        {"a": x},
        OrderedDict(a=x),
        defaultdict(list, a=x),
        UserDict(a=x),
        MappingProxyType({"a": x}),
        [x, 1],
        (x, "text", None, 2.5, b"bytes"),
        Pair(x, 3),
        Sample(x, ["one"], 2.0),
    ]
    for got, before in zip(Prefetcher(made, "cpu", widen=True), made, strict=True):
        assert type(got) is type(before)
        first = (
            got.image if hasattr(got, "image") else got["a"] if not isinstance(got, list | tuple) else got[0]
        )
        assert same_bits(first, x.float())
    assert got.names is before.names and got.weight == 2.0 and isinstance(before.image, torch.Tensor)


def test_what_holds_nothing_to_change_is_given_out_as_it_is() -> None:
    batches = [{"text": "x", "n": [1, 2]}, None, "text", 5, Sample(None, []), (1, (2, 3)), torch.arange(3)]
    assert all(a is b for a, b in zip(Prefetcher(batches, "cpu"), batches, strict=True))


# ---- iterating ------------------------------------------------------------------------------------------------------


def test_it_is_the_loader_in_all_else() -> None:
    dataset = torch.utils.data.TensorDataset(images(10), torch.arange(10))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    batches = Prefetcher(loader, "cpu")
    assert len(batches) == 3 and batches.dataset is dataset and batches.batch_size == 4
    for _ in range(2):  # begins anew
        assert [len(y) for _, y in batches] == [4, 4, 2]
    with pytest.raises(TypeError):
        len(Prefetcher((x for x in range(3)), "cpu"))
    assert not hasattr(batches, "state_dict") and not hasattr(batches, "nothing")
    again = pickle.loads(pickle.dumps(Prefetcher([1, 2], "cpu", 3)))
    assert list(again) == [1, 2] and again.depth == 3
    assert batches.pinned_bytes == 0


def test_two_iterators_of_one_loader_are_two() -> None:
    batches = Prefetcher([1, 2, 3], "cpu")
    assert list(zip(batches, batches, strict=True)) == [(1, 1), (2, 2), (3, 3)]


def test_what_can_be_iterated_once_goes_on_behind_a_break() -> None:
    batches = Prefetcher((n for n in range(5)), "cpu")
    for n in batches:
        if n == 1:
            break
    assert list(batches) == [2, 3, 4] and list(batches) == []


def test_closing_closes_the_generator() -> None:
    closed = []

    def numbers():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    with Prefetcher(numbers(), "cpu") as batches:
        assert next(iter(batches)) == 0
    assert closed and list(batches) == []


def test_a_second_thread_and_a_loader_that_asks_itself_are_refused() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert go_on.wait(600)
        yield 1

    it = iter(Prefetcher(slow(), "cpu"))
    thread = threading.Thread(target=lambda: next(it))
    thread.start()
    assert entered.wait(600)
    with pytest.raises(ValueError, match="already being requested"):
        next(it)
    go_on.set()
    thread.join(600)
    with pytest.raises(StopIteration):
        next(it)


class Fails(torch.utils.data.Dataset):
    """Raises at the number 3."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> int:
        if n == 3:
            raise KeyError("number 3")
        return n


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_the_loader_is_raised_in_its_place(workers: int) -> None:
    it = iter(Prefetcher(torch.utils.data.DataLoader(Fails(), num_workers=workers), "cpu"))
    seen: list[object] = []
    for _ in range(6):
        try:
            seen.append(int(next(it)))
        except KeyError:
            seen.append("KeyError")
    assert seen == [0, 1, 2, "KeyError", 4, 5]
    with pytest.raises(StopIteration):
        next(it)


# ---- positions ------------------------------------------------------------------------------------------------------

POSITIONS = """
import json
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from memopt.data import Prefetcher
from memopt.data._prefetch import batch_transport

batch_transport.ToCpu.ahead = True  # as on a CUDA device: two batches are fetched that were not given out

class Counts(torch.utils.data.IterableDataset):
    def __init__(self):
        self.state = {"n": 0, "buffer": []}  # one object for ever: its state_dict() is no copy
    def __iter__(self):
        while self.state["n"] < 7:
            self.state["n"] += 1
            yield self.state["n"] - 1
        self.state["n"] = 0
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = dict(state)

def plain(workers):
    return StatefulDataLoader(list(range(7)), batch_size=1, num_workers=workers)

def counting(workers):
    return StatefulDataLoader(Counts(), batch_size=None, num_workers=workers)

found = {}
for make in (plain, counting):
    for workers in (0, 1):
        for stop in ((0, 1, 4, 6, 7) if workers == 0 else (3,)):
            first = Prefetcher(make(workers), "cpu")
            it = iter(first)
            given = [int(next(it)) for _ in range(stop)]
            state = first.state_dict()
            second = Prefetcher(make(workers), "cpu")
            second.load_state_dict(state)
            given += [int(n) for n in second]
            found[f"{make.__name__} {workers} {stop}"] = given == list(range(7))

print(json.dumps(found))
"""


def test_the_position_is_behind_what_was_given_out() -> None:
    """By torchdata's own loader; a dataset whose state is one object for ever too."""
    found = json.loads(run_there("data", POSITIONS))
    assert len(found) == 12 and all(found.values()), found
