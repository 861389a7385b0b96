"""memopt.data.cached: what a hit is, what it is not, and what a folder that fails costs."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cached_squares import Squares
from torch.utils.data import DataLoader, Subset

import memopt
from memopt.data import cached
from memopt.data._cache import cache_folder, caching

ROOT = Path(__file__).resolve().parents[3]


def entries(folder):
    return sorted(path for path, _ in cache_folder.entries(str(folder)))


def test_a_second_call_is_read_and_equal_however_its_arguments_are_written(tmp_path):
    made = []

    @cached(dir=tmp_path, ignore="made")
    def double(x, factor=2, made=made):
        made.append(x)
        return torch.as_tensor(x) * factor

    first = double(torch.arange(3))
    for again in (double(x=torch.arange(3)), double(torch.arange(3), 2), double(torch.arange(3), factor=2)):
        assert torch.equal(first, again) and first.dtype == again.dtype
    assert len(made) == 1 and double.cache.statistics().hits == 3
    for other in (
        torch.arange(4),
        torch.arange(3.0),
        torch.arange(3).int(),
        [0, 1, 2],
        np.arange(3),
        (0, 1, 2),
    ):
        double(other)
    double(torch.arange(3), 3)
    assert len(made) == 8


def test_a_hit_may_be_written_to_and_the_file_stays(tmp_path):
    dataset = cached(Squares(), tmp_path, compress=False)
    _ = dataset[3]
    hit = dataset[3]["x"]
    hit += 7
    assert hit[0, 0] == 10 and dataset[3]["x"].min() == dataset[3]["x"].max() == 3


def test_mapped_hits_hold_no_descriptor_and_too_many_open_files_are_named(tmp_path):
    dataset = cached(Squares(), tmp_path, compress=False)
    _ = dataset[3]
    before = len(os.listdir("/proc/self/fd"))
    hits = [dataset[3]["x"] for _ in range(30)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(hits) == dataset.cache.statistics().hits == 30
    with open("/proc/self/maps") as maps:
        assert sum(str(tmp_path) in line for line in maps) == 30
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.warns(RuntimeWarning, match="too many files are open: raise the limit") as said:
            assert dataset[3]["index"] == 3 and dataset[4]["index"] == 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(said) == 2  # what cannot be read, and what cannot be written


def test_a_dataset_keeps_its_length_its_order_its_attributes_and_its_errors(tmp_path):
    dataset = cached(Squares(5), tmp_path)
    assert len(dataset) == 5 and dataset.scale == 1.0
    for _ in range(2):
        assert [item["index"] for item in dataset] == [0, 1, 2, 3, 4]
    assert dataset[-1]["index"] == 4 and dataset[np.int64(2)]["name"] == "é2"
    assert dataset.cache.statistics().misses == 5
    with pytest.raises(IndexError):
        dataset[5]
    with pytest.raises(AttributeError):
        _ = dataset.transforms
    assert [item["index"] for item in Subset(dataset, [4, 1])] == [4, 1]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_fill_and_read_it_and_their_counts_are_told(tmp_path, context):
    dataset = cached(Squares(12), tmp_path)
    workers = 2 if context == "fork" else 1  # a spawned one takes seconds to import torch
    loader = DataLoader(
        dataset, 4, num_workers=workers, multiprocessing_context=context, persistent_workers=True
    )
    for epoch in range(2):
        seen = [int(index) for batch in loader for index in batch["index"]]
        assert seen == list(range(12)), epoch
    counts = dataset.cache.statistics()
    assert (counts.misses, counts.hits, counts.damaged) == (12, 12, 0)
    assert counts.bytes_written > 12 and counts.bytes_read > 12
    assert "12 hits of 24 (50.0 %)" in str(counts) and "12" in counts._repr_html_()


def test_another_state_of_the_dataset_is_another_entry(tmp_path):
    assert cached(Squares(scale=1.0), tmp_path)[2]["x"][0, 0] == 2
    assert cached(Squares(scale=3.0), tmp_path)[2]["x"][0, 0] == 6
    versions = [cached(Squares(scale=scale), tmp_path, version=1) for scale in (1.0, 3.0)]
    assert [dataset[2]["x"][0, 0].item() for dataset in versions] == [2, 6]


def test_a_cached_dataset_within_another_counts_as_what_is_in_it(tmp_path):
    for _ in range(2):
        inner = cached(Squares(6), tmp_path)
        assert inner[0]["index"] == 0  # its counts are no part of it
        outer = cached(Subset(inner, [4, 1]), tmp_path)
        assert [item["index"] for item in outer] == [4, 1]
    assert outer.cache.statistics().hits == 2
    other = cached(Subset(cached(Squares(6, 3.0), tmp_path), [4, 1]), tmp_path)
    assert other[1]["x"][0, 0] == 3 and other.cache.statistics().hits == 0


def test_functions_and_datasets_pickle(tmp_path):
    dataset = pickle.loads(pickle.dumps(cached(Squares(), tmp_path)))
    assert dataset[1]["index"] == 1
    wrapped = pickle.loads(pickle.dumps(cached(plain, tmp_path)))
    assert wrapped(4) == 5


def plain(x):
    return x + 1


@pytest.mark.parametrize("compress", [False, True])
def test_arrays_and_scalars_come_back_with_their_dtype(tmp_path, compress):
    aligned = np.dtype(
        [("a", "i1"), ("b", "f8", (2,)), ("in", np.dtype([("c", "i1"), ("d", "i4")], align=True))]
    )
    padded = np.dtype([("a", "i1"), ("b", "f8", (2,)), (("title", "t"), ">i2")], align=True)
    values = [
        np.ones(3, aligned), np.ones(3, padded), np.ones((), padded)[()], np.str_(""), np.bytes_(b""), np.void(b""),
        np.ndarray((2, 3), "U0"), np.zeros(2, "V0"), np.zeros((0, 2), padded), np.str_("é"),
        np.datetime64("2020-01-01"), np.zeros(2, ">c16"), np.arange(6).reshape(2, 3).T,
    ]  # fmt: skip
    call = cached(lambda n: values[n], tmp_path, version=1, ignore="values", compress=compress)
    for number, value in enumerate(values):
        for again in (call(number), call(number)):
            assert type(again) is type(value) and again.dtype == value.dtype and again.shape == value.shape
            assert again.tobytes() == value.tobytes()
    counts = call.cache.statistics()
    assert (counts.misses, counts.hits, counts.damaged) == (len(values), len(values), 0)


# ---- damage -----------------------------------------------------------------------------------------------------


def test_each_damaged_byte_is_noticed_and_the_entry_made_again(tmp_path):
    small = cached(lambda x: {"x": torch.arange(x), "y": "text"}, tmp_path)
    value = small(9)
    (path,) = entries(tmp_path)
    whole = Path(path).read_bytes()
    for at in range(len(whole)):
        Path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        again = small(9)
        assert torch.equal(again["x"], value["x"]) and again["y"] == "text"
        assert small.cache.statistics().damaged == at + 1, at
        assert Path(path).read_bytes() == whole  # written anew


@pytest.mark.parametrize("left", [0, 1, 7, 8, 40, 200, -1])
def test_an_entry_cut_short_or_grown_is_made_again(tmp_path, left):
    dataset = cached(Squares(), tmp_path, compress=False)
    _ = dataset[1]
    (path,) = entries(tmp_path)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:left])
    assert dataset[1]["x"][0, 0] == 1 and dataset.cache.statistics().damaged == 1
    Path(path).write_bytes(whole + b"more")
    assert dataset[1]["x"][0, 0] == 1 and dataset.cache.statistics().damaged == 2


def test_an_entry_under_anothers_name_is_not_taken_for_it(tmp_path):
    dataset = cached(Squares(), tmp_path)
    _ = dataset[1]
    (one,) = entries(tmp_path)
    _ = dataset[2]
    (other,) = set(entries(tmp_path)) - {one}
    os.replace(one, other)
    assert dataset[2]["index"] == 2 and dataset.cache.statistics().damaged == 1


def test_nothing_in_a_folder_is_run(tmp_path):
    """A pickle in an entry's place, and an entry that is whole and names what is not a value's kind."""
    from memopt.data._cache import cache_entry

    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "ran"),)

    call = cached(plain, tmp_path)
    call(1)
    (path,) = entries(tmp_path)
    key = Path(path).parent.name + Path(path).stem
    forged = b"".join(cache_entry.encode(["eval", "1"], key, False)).replace(b'\\"list\\",', b"")
    start = bytearray(forged)
    start[cache_entry._CRC_AT : cache_entry._CRC_END] = b"%08x" % cache_entry._checksum(bytes(start))
    for content in (pickle.dumps(Evil()), bytes(start)):
        Path(path).write_bytes(content)
        assert call(1) == 2
    assert not (tmp_path / "ran").exists()


# ---- size -------------------------------------------------------------------------------------------------------


def test_the_folder_keeps_to_its_size_and_what_was_used_lately_stays(tmp_path):
    dataset = cached(Squares(150), tmp_path, max_size="4MiB", compress=False)
    size = 200 * 100 * 4
    for index in range(150):
        assert dataset[index]["index"] == index
        if index:
            os.utime(path_of(dataset, index), (10**9 + index,) * 2)  # their order is in no doubt
        assert dataset[0]["index"] == 0  # used again and again
        assert cache_folder.total_size(str(tmp_path)) <= 4 << 20
    counts = dataset.cache.statistics()
    kept = len(entries(tmp_path))
    assert counts.misses == 150, "the entry in use was evicted"
    assert counts.evicted == 150 - kept and kept * size > 0.8 * (4 << 20)
    assert [index for index in range(150) if os.path.exists(path_of(dataset, index))] == [
        0,
        *range(151 - kept, 150),
    ]


def path_of(dataset, index):
    return dataset.cache.folder.path(dataset.cache.key(index, "the index"))


def test_several_writers_keep_to_the_size_together(tmp_path):
    writers = [
        cached(Squares(900, scale), tmp_path, max_size="3MiB", compress=False) for scale in range(1, 7)
    ]
    for index in range(40):
        for dataset in writers:
            _ = dataset[index]
        assert cache_folder.total_size(str(tmp_path)) <= 1.05 * (3 << 20)


def test_a_value_larger_than_all_is_returned_and_not_kept(tmp_path):
    dataset = cached(Squares(), tmp_path, max_size="10KiB", compress=False)
    with pytest.warns(RuntimeWarning, match="larger than max_size=10.0 KiB"):
        assert dataset[1]["index"] == 1
    assert dataset[1]["index"] == 1 and entries(tmp_path) == []


def test_clear_removes_entries_and_nothing_else(tmp_path):
    dataset = cached(Squares(), tmp_path, max_size="1GiB")
    for index in range(6):
        _ = dataset[index]
    (tmp_path / "notes.txt").write_text("mine")
    shard = Path(entries(tmp_path)[0]).parent
    (shard / "mine.safetensors").write_text("mine")
    assert dataset.cache.clear() == 6 and dataset.cache.clear() == 0
    assert (tmp_path / "notes.txt").exists() and (shard / "mine.safetensors").exists()
    assert dataset[1]["index"] == 1


def test_what_killed_processes_left_is_removed_once_it_is_old(tmp_path):
    dataset = cached(Squares(), tmp_path, max_size="1GiB")
    _ = dataset[0]
    shard = Path(entries(tmp_path)[0]).parent
    old, new = shard / f"{'0' * 38}.{'a' * 32}.part", shard / f"{'1' * 38}.{'a' * 32}.part"
    for path in (old, new):
        path.write_bytes(b"half of an entry")
    os.utime(old, (1, 1))
    assert cache_folder.total_size(str(tmp_path)) == os.path.getsize(entries(tmp_path)[0])
    assert not old.exists() and new.exists()


def test_clear_beside_a_writer_costs_one_entry_and_no_pause(tmp_path, monkeypatch, recwarn):
    dataset, replace = cached(Squares(), tmp_path), os.replace

    def cleared_before(part, path):
        monkeypatch.setattr(os, "replace", replace)
        cache_folder.remove_all(str(tmp_path))
        replace(part, path)

    monkeypatch.setattr(os, "replace", cleared_before)
    for index in (1, 2, 2, 1):
        assert dataset[index]["index"] == index
    counts = dataset.cache.statistics()
    assert (counts.hits, counts.failed, len(entries(tmp_path)), len(recwarn)) == (1, 1, 2, 0)


def test_files_of_another_user_stay_and_keep_nobody_from_writing(tmp_path, monkeypatch, recwarn):
    dataset, unlink = cached(Squares(150), tmp_path, max_size="1MiB", compress=False), os.unlink
    _ = dataset[0]
    (first,) = entries(tmp_path)
    left = Path(first).parent / f"{'0' * 38}.{'a' * 32}.part"
    left.touch()
    for path in (first, left):
        os.utime(path, (1, 1))

    def refuse(path, **named):
        if str(path) in (first, str(left)):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, **named)

    monkeypatch.setattr(os, "unlink", refuse)
    for index in range(150):
        assert dataset[index]["index"] == index
    counts = dataset.cache.statistics()
    assert (counts.failed, len(recwarn)) == (0, 0) and counts.evicted > 100
    assert os.path.exists(first) and cache_folder.total_size(str(tmp_path)) <= 1 << 20
    with pytest.warns(RuntimeWarning, match="2 files of .* belong to another user"):
        assert dataset.cache.clear() > 5
    assert entries(tmp_path) == [first]


# ---- folders that fail ------------------------------------------------------------------------------------------

CHILD = """
import os, resource, sys, warnings
sys.path[:0] = [{root!r}, {tests!r}]
from cached_squares import Squares
from memopt.data import cached
{before}
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    dataset = cached(Squares(), {folder!r}, compress=False)
    for epoch in range(3):
        for index in range(20):
            item = dataset[index]
            assert item["index"] == index and item["x"].min() == item["x"].max() == index
print(len(said), *(one.message for one in said), dataset.cache.statistics(), sep="\\n")
"""


def in_child(folder, before=""):
    source = CHILD.format(
        root=str(ROOT), tests=str(ROOT / "tests/helpers"), folder=str(folder), before=before
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def full_disk(tmp_path):
    """A file system with room for three items. Who may not mount one has the limit on a file's size, below."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "memopt-test", str(tmp_path)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk_costs_one_warning_and_the_run_goes_on(full_disk):
    count, said, counts = in_child(full_disk / "cache")
    assert (
        count == "1"
        and "the disk is full: free some space" in said
        and "The run continues without the cache" in said
    )
    assert re.search(r"6 hits of 60 .* 51 not written", counts), (
        counts
    )  # three fit, and are read in two epochs
    assert not list(full_disk.rglob("*.part"))


def test_a_file_size_limit_costs_one_warning_and_the_run_goes_on(tmp_path):
    count, said, counts = in_child(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))")
    assert count == "1" and "ulimit -f" in said and "60 not written" in counts and "0 hits of 60" in counts
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    count, said, _ = in_child(tmp_path / "file" / "cache")
    assert count == "1" and "give another dir=" in said


def test_a_read_only_mount_is_still_read(tmp_path):
    filled = cached(Squares(3), tmp_path)
    _ = [filled[index] for index in range(3)]
    bind = subprocess.run(["mount", "--bind", str(tmp_path), str(tmp_path)], capture_output=True, text=True)
    if bind.returncode != 0:
        pytest.skip(
            f"nothing can be mounted here: {bind.stderr.strip()}; the next test says the same without"
        )
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path)], check=True)
        with pytest.warns(RuntimeWarning, match="mounted read-only: give another dir=") as said:
            dataset = cached(Squares(4), tmp_path, version=1)
            kept = cached(Squares(3), tmp_path)
            assert [dataset[index]["index"] for index in range(4)] == [0, 1, 2, 3]
            assert [kept[index]["index"] for index in range(3)] == [0, 1, 2]
        assert (dataset.cache.statistics().hits, kept.cache.statistics().hits) == (0, 3)
        assert len(said) == 2  # one for each cache
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_written_is_still_read(tmp_path, monkeypatch):
    filled = cached(Squares(3), tmp_path)
    items = [filled[index] for index in range(3)]
    _ = items

    def refuse(path, mode="r", *more, **named):
        if "x" in mode or "w" in mode:
            raise OSError(30, "Read-only file system")
        return open(path, mode, *more, **named)

    monkeypatch.setattr(cache_folder, "open", refuse, raising=False)
    with pytest.warns(RuntimeWarning, match="mounted read-only: give another dir=") as said:
        dataset = cached(Squares(3), tmp_path)
        assert [dataset[index]["index"] for index in range(3)] == [0, 1, 2]
        other = cached(Squares(2, 5.0), tmp_path)
        assert other[1]["x"][0, 0] == 5
    assert dataset.cache.statistics().hits == 3 and len(said) == 2  # one for each cache


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "the result is a builtins.object"),
        ({"a": [1, range(3)]}, r"the result\['a'\]\[1\] is a builtins.range"),
        (torch.ones(2, requires_grad=True), r"return value.detach\(\)"),
        (torch.eye(3).to_sparse(), r"return value.to_dense\(\)"),
        (torch.empty(2, device="meta"), r"is on meta; return value.cpu\(\)"),
        (np.array([object()]), "objects cannot be kept"),
        (
            np.zeros(1, {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}),
            "NumPy has no description",
        ),
    ],
)
def test_a_result_that_cannot_be_kept_is_refused_by_name(tmp_path, value, words):
    call = cached(lambda n: value, tmp_path, version=1, ignore="value")
    with pytest.raises(TypeError, match=words):
        call(1)


def test_wrong_uses_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="needs dir="):
        cached(plain)
    with pytest.raises(ValueError, match="lots"):
        cached(plain, tmp_path, "lots")
    with pytest.raises(ValueError, match="max_size=0"):
        cached(plain, tmp_path, 0)
    with pytest.raises(TypeError, match="int is neither a function nor a map-style dataset"):
        cached(3, tmp_path)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        cached(plain, tmp_path)()


def test_an_exception_of_the_function_is_the_callers_and_leaves_no_lease(tmp_path):
    def fails(x):
        raise KeyError(x)

    call = cached(fails, tmp_path)
    for _ in range(2):
        with pytest.raises(KeyError):
            call(1)
    assert not list(tmp_path.rglob("*.lease"))


def test_a_method_is_keyed_by_its_object(tmp_path):
    @dataclasses.dataclass
    class Reader:
        factor: int

        @cached(dir=tmp_path)
        def read(self, x):
            return self.factor * x

    assert Reader(2).read(3) == 6 and Reader(3).read(3) == 9 and Reader(2).read(3) == 6
    assert Reader.read.cache.statistics().hits == 1


def test_it_says_what_it_is(tmp_path):
    call = cached(plain, tmp_path, "1GiB")
    call(1)
    assert repr(call).startswith(
        f"memopt.data.cached(plain kept in {tmp_path}, at most 1.00 GiB; cache: 0 hits of 1"
    )
    assert "<table>" in call._repr_html_() and call.__name__ == "plain"
    assert memopt.data.cached is caching.cached
