"""Pickles of memopt.data's objects that versions before the modules moved have written."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from cached_squares import Squares

from memopt.data import MmapDataset, MmapWriter, SharedDict, SharedList, SharedStrings, cached

# By module, and where one has taken in several by class.
BEFORE = {
    "_shared_containers": "passing",
    "SharedList": "shared_list",
    "SharedStrings": "shared_strings",
    "SharedDict": "shared_dict",
    "_mmap.mapped_dataset": "mapped_dataset",
    "_mmap.mapped_file": "mapped_file",
    "_cache.caching": "caching",
    "_cache.cache_folder": "cache_folder",
    "_cache.cache_counters": "cache_counters",
}


def as_written_before(value: object) -> bytes:
    """Protocol 0 has the names of modules as lines of text."""
    written = pickle.dumps(value, 0).decode("latin-1")
    named = set(re.findall(r"c(memopt\.data\.(\S+)\n(\w+))\n", written))
    assert named
    for both, module, name in named:
        written = written.replace(
            f"c{both}\n", f"cmemopt.data.{BEFORE.get(name) or BEFORE[module]}\n{name}\n"
        )
    return written.encode("latin-1")


@pytest.mark.parametrize(
    "value",
    [SharedList([1, "a"]), SharedStrings(["a", "b"]), SharedDict({"a": 1})],
    ids=lambda one: type(one).__name__,
)
def test_shared_containers_load(value):
    loaded = pickle.loads(as_written_before(value))
    assert type(loaded) is type(value) and loaded == value


def test_datasets_load(tmp_path):
    with MmapWriter(tmp_path / "rows.safetensors") as out:
        out.append({"x": torch.arange(3)})
    mapped = MmapDataset(tmp_path / "rows.safetensors")
    assert torch.equal(pickle.loads(as_written_before(mapped))[0]["x"], torch.arange(3))
    kept = cached(Squares(), tmp_path / "cache")
    assert kept[3]["index"] == 3
    assert pickle.loads(as_written_before(kept))[3]["index"] == 3 and kept.cache.statistics().hits == 1
