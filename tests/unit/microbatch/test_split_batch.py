"""The samples of a batch, and its micro-batches."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch

from memopt._microbatch.split_batch import Cutting, SplitBatch


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str = "p"


class Encoding(UserDict):
    """As transformers' BatchEncoding."""

    def __init__(self, data, extra=None):
        super().__init__(data)
        self.extra = extra


Named = namedtuple("Named", ["x", "y"])
X = torch.arange(12.0).reshape(4, 3)


def split(*args, cutting: Cutting | None = None, **named) -> SplitBatch:
    return SplitBatch(args, named, cutting or Cutting())


def test_every_container_is_cut_and_stays_what_it_is() -> None:
    encoding = Encoding({"ids": X, "label": "s"}, extra=7)
    found = split(
        X, (X, None), {"a": X, "k": 2}, Named(X, X), Pair(X), encoding, ["a", "b", "c", "d"], mask=X.numpy()
    )
    assert found.samples == 4
    args, named = found.micro_batch(1, 3)
    x, pair, mapping, point, data, cut, names = args
    for piece in (x, pair[0], mapping["a"], point.x, point.y, data.x, cut["ids"]):
        assert torch.equal(piece, X[1:3])
        assert piece.untyped_storage().data_ptr() == X.untyped_storage().data_ptr()  # a view
    assert pair[1] is None and mapping["k"] == 2 and cut["label"] == "s" and names == ["b", "c"]
    assert type(point) is Named and type(data) is Pair and type(cut) is Encoding and cut.extra == 7
    assert encoding["ids"] is X
    assert isinstance(named["mask"], numpy.ndarray) and named["mask"].shape == (2, 3)


def test_the_whole_batch_is_what_was_given() -> None:
    found = split(X, y=X)
    assert found.micro_batch(0, 4)[0][0] is X and found.micro_batch(0, 4)[1]["y"] is X


def test_samples_in_another_dimension() -> None:
    found = split(X.T, X, cutting=Cutting(batch_dim={0: 1}))
    (a, b), _ = found.micro_batch(2, 4)
    assert torch.equal(a, X.T[:, 2:]) and a.is_contiguous() and torch.equal(b, X[2:])
    last = split(torch.zeros(2, 3, 5), cutting=Cutting(batch_dim=-1))
    assert last.samples == 5 and last.micro_batch(1, 3)[0][0].shape == (2, 3, 2)
    assert last.shapes == (((2, 3), "torch.float32"),)


@pytest.mark.parametrize("name", [1, "mask", "inner"])
def test_what_is_unbatched_is_given_whole(name: int | str) -> None:
    mask = torch.zeros(7, 7)
    args = {1: (X, mask), "mask": (X,), "inner": (X, {"inner": mask})}[name]
    named = {"mask": mask} if name == "mask" else {}
    found = split(*args, cutting=Cutting(unbatched=(name,)), **named)
    cut, others = found.micro_batch(0, 2)
    whole = {1: lambda: cut[1], "mask": lambda: others["mask"], "inner": lambda: cut[1]["inner"]}[name]()
    assert whole is mask and len(cut[0]) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((X, torch.zeros(7, 7)), r"argument 1 \(shape \(7, 7\)\) has 7, and argument 0 4.*unbatched=\(1,\)"),
        ((X, {"t": torch.zeros(())}), r"argument 1\['t'\] \(shape \(\)\) has no such dimension"),
        ((X, ["a", "b"]), "argument 1 is a list of 2, but the batch has 4 samples"),
        (([X, X],), "lists='samples' if each element is a sample"),
        ((3, "a"), "no tensor, and therefore no samples"),
        ((["a"], ["a", "b"]), "differ in their number of samples"),
    ],
)
def test_samples_that_cannot_be_told_are_refused(args: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(*args)


def test_what_nobody_knows_how_to_cut_is_refused() -> None:
    with pytest.raises(TypeError, match=r"argument 1\['g'\] is a object, and .*register_pytree_node"):
        split(X, {"g": object()})


def test_lists_are_of_samples_or_hold_tensors_of_all() -> None:
    images = [torch.zeros(3, k, k) for k in (4, 5, 6)]
    targets = [{"boxes": torch.zeros(k, 4)} for k in (1, 0, 2)]
    told = split(images, targets, cutting=Cutting(lists="samples"))
    (some, others), _ = told.micro_batch(1, 3)
    assert told.samples == 3 and len(some) == 2 and some[0] is images[1] and others[1] is targets[2]
    held = split([X, X + 1], cutting=Cutting(lists="tensors"))
    assert held.samples == 4 and torch.equal(held.micro_batch(0, 1)[0][0][1], X[:1] + 1)
    beside = split(X, [X, X], ["a"] * 4)
    (_, pair, names), _ = beside.micro_batch(0, 3)
    assert len(pair) == 2 and len(pair[0]) == 3 and len(names) == 3


def test_a_list_that_is_either_by_chance_is_refused_only_when_it_is_cut() -> None:
    two = X[:2]
    found = split(two, [two, two])
    assert found.micro_batch(0, 2)[0][1][0] is two
    with pytest.raises(ValueError, match="a list of 2 tensors of 2 samples"):
        found.micro_batch(0, 1)
