"""memopt.data.watch: how much the workers copy, and which container it is."""

from __future__ import annotations

import logging
import os
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from memopt.data import Prefetcher, SharedStrings, watch
from memopt.data._tuning import worker_watch
from memopt.data._tuning.worker_watch import process_memory


class Inner:
    __slots__ = ("boxes", "unset")

    def __init__(self) -> None:
        self.boxes = {i: (i, i + 1) for i in range(5000)}


class Names(Dataset):
    def __init__(self, names) -> None:
        self.names = names
        self.array = np.zeros(100000)
        self.few = ["a"] * 10

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


class Strict(Names):
    def __getattr__(self, name: str):
        raise AssertionError(f"{name} was asked for")


def test_large_containers_are_found_by_path_with_size_and_mend():
    dataset = Strict([f"name {i:06d}" for i in range(20000)])
    dataset.parts = [{"in": Inner()}, dataset]
    dataset.mixed = tuple([1, "x"] * 1000)
    found = worker_watch.containers_of(dataset)
    assert [one.path for one in found] == ["dataset.names", "dataset.parts[0]['in'].boxes", "dataset.mixed"]
    names, boxes, mixed = found
    assert (names.kind, names.length, names.items) == ("list", 20000, "str")
    assert abs(names.nbytes - (dataset.names.__sizeof__() + 20000 * sys.getsizeof(dataset.names[0]))) < 10000
    assert names.remedy == "dataset.names = memopt.data.SharedStrings(dataset.names)"
    assert boxes.remedy.endswith("SharedDict(dataset.parts[0]['in'].boxes)") and boxes.items == "tuple"
    assert mixed.items == "mixed" and "SharedList" in mixed.remedy
    assert worker_watch.containers_of(Names(SharedStrings(dataset.names))) == []


def test_a_process_is_measured_by_kind_and_a_dead_one_is_none(tmp_path):
    here = process_memory(os.getpid())
    assert here is not None and here.resident >= here.pss >= here.dirty > 0
    assert process_memory(2**22 + 1) is None
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(
        "0-1 ---p 0 00:00 0 [rollup]\nRss: 100 kB\nPss: 50 kB\nPss_File: 8 kB\nPss_Shmem: 4 kB\n"
        "Pss_Anon: 38 kB\nPrivate_Dirty: 16 kB\n"
    )
    expected = tuple(kib << 10 for kib in (100, 50, 16, 8, 4, 38))
    assert process_memory(7, str(tmp_path)) == expected


def test_the_list_that_workers_copy_is_named_and_the_shared_one_is_not(caplog):
    caplog.set_level(logging.WARNING, "memopt")

    def watched(names):
        loader = DataLoader(
            Names(names),
            batch_size=5000,
            num_workers=1,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        found = watch(loader, interval=0)
        assert len(found) == len(loader) and sum(int(batch.sum()) for batch in found) == sum(map(len, names))
        return found

    plain = [f"{i:0100d}" for i in range(200_000)]  # 30 MiB
    copied = watched(plain)
    assert copied.copied > 10 << 20 and copied.suspects[0].path == "dataset.names"
    assert "dataset.names: list of 200000 str" in str(copied) and "(page cache, no leak)" in str(copied)
    assert "dataset.names = memopt.data.SharedStrings(dataset.names)" in caplog.text
    caplog.clear()
    shared = watched(SharedStrings(plain))
    assert not shared.suspects and caplog.text == ""


def test_the_workers_behind_a_prefetcher_are_seen():
    loader = DataLoader(Names(["a"] * 4), batch_size=2, num_workers=1, multiprocessing_context="fork")
    found = watch(Prefetcher(loader, "cpu"), interval=0)
    assert [batch.tolist() for batch in found] == [[1, 1], [1, 1]]
    assert len(found.workers) == 1 and "1 workers have" in str(found)


def test_without_workers_it_says_so():
    found = watch(DataLoader(Names(["a"] * 3)))
    assert [int(batch) for batch in found] == [1, 1, 1] and "num_workers is 0" in str(found)
    with pytest.raises(ValueError, match="interval=-1"):
        watch([], interval=-1)


def test_a_short_epoch_is_looked_at_before_its_workers_are_gone():
    names = [f"name {i:07d}" for i in range(200_000)]
    loader = DataLoader(
        Names(names), batch_size=500, shuffle=True, num_workers=2, multiprocessing_context="fork"
    )
    found = watch(loader)  # by itself a look a second, and the epoch takes less
    for _ in found:
        pass
    assert found.copied_bytes > 1 << 20
