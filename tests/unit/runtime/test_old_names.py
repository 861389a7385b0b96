"""Files of memopt 0.1, read by this version: tests/reference/version_0_1."""

from __future__ import annotations

import gzip
import importlib
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import memopt
import memopt.amp
import memopt.optim
from memopt._runtime import old_names
from memopt.data import cached

BEFORE = Path(__file__).parents[2] / "reference" / "version_0_1"


@pytest.fixture(scope="module")
def objects():
    with (
        gzip.open(BEFORE / "objects.pickle.gz") as file,
        pytest.warns(DeprecationWarning, match="memopt 0.1"),
    ):
        return pickle.load(file)


def test_objects_are_of_todays_classes(objects):
    for name in ("AdamW", "Adam", "SGD"):
        assert type(objects[name]) is getattr(memopt.optim, name)
        objects[name].step()
    assert type(objects["GradScaler"]) is memopt.amp.GradScaler
    assert objects["FoundBatchSize"] is memopt.types.FoundBatchSize
    for name in ("Plan", "Report", "SparseReport", "Duplicates", "Released", "StepComparison"):
        assert isinstance(objects[name], getattr(memopt.types, name)) and str(objects[name])
    for name in ("pruned", "sparse"):
        assert objects[name](torch.ones(2, 4)).shape == (2, 4)


def test_objects_saved_again_name_no_old_module(objects, recwarn):
    again = pickle.loads(pickle.dumps(objects))
    assert again.keys() == objects.keys()
    assert not [warned for warned in recwarn if warned.category is DeprecationWarning]


def test_state_dicts_are_loaded():
    states = torch.load(BEFORE / "states.pt", weights_only=True)
    torch.manual_seed(0)
    for name, options in (("AdamW", {}), ("Adam", {"state_bits": 8}), ("SGD", {"momentum": 0.9})):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        optimizer = getattr(memopt.optim, name)(model.parameters(), lr=1.0, **options)
        optimizer.load_state_dict(states[name])
        assert optimizer.param_groups[0]["lr"] == 0.1
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    scaler = memopt.amp.GradScaler("cpu")
    scaler.load_state_dict(states["GradScaler"])
    assert scaler.state_dict() == states["GradScaler"]
    size = memopt.BatchSize(16)
    size.load_state_dict(states["BatchSize"])
    assert size.state_dict() == states["BatchSize"]


def square(n):
    return torch.full((4,), float(n * n))


def test_a_cache_folder_is_used_further(tmp_path):
    folder = shutil.copytree(BEFORE / "cache", tmp_path / "cache")
    of = cached(square, dir=folder)
    assert [of(n).tolist() for n in (3, 5, 7, 3)] == [[n * n] * 4 for n in (3, 5, 7, 3)]


@pytest.mark.parametrize("old", old_names.MODULES)
def test_each_module_is_found_where_it_is_now(old):
    module = importlib.import_module(f"memopt.{old}")
    assert importlib.import_module(f"memopt.{old_names.MODULES[old]}") and not hasattr(module, "__wrapped__")


def test_other_names_are_missing_as_ever():
    for name in ("memopt.nothing", "memopt.checkpointing.nothing"):
        with pytest.raises(ModuleNotFoundError, match="nothing"):
            importlib.import_module(name)
    with pytest.raises(AttributeError, match="checkpointing"):
        importlib.import_module("memopt.checkpointing").plan_of_something  # noqa: B018
