"""memopt.data.FolderStream: every item once, whatever reads it, from wherever it was left."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from memopt.data import FolderStream, cached
from memopt.data.folder_blocks import FolderBlocks


def write(folder, **contents):
    for name, content in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines_in(folder, pattern="*"):
    """As Python reads text."""
    found = []
    for path in sorted(one for one in folder.rglob(pattern) if one.is_file()):
        lines = path.read_text("utf-8").split("\n")
        found += lines[:-1] if not lines[-1] else lines
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    long = "".join(f"{n} {'é' * (n % 37)}\n" for n in range(700))
    return write(
        folder, a=long, b__c="one\r\ntwo\rthree", b__d="", b__e="\n\n", z="x" * 5000 + "\nend", _hidden=""
    )


@given(
    st.lists(st.text("a\n\ré", max_size=60), min_size=1, max_size=4),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([None, 3]),
)
@settings(max_examples=60, deadline=None)
def test_each_line_is_read_once_however_files_are_cut_and_divided(tmp_path_factory, texts, size, parts, seed):
    folder = write(tmp_path_factory.mktemp("lines"), **{f"{n}.txt": text for n, text in enumerate(texts)})
    expected = lines_in(folder)
    if not any(texts):
        with pytest.raises(ValueError, match="nothing to read"):
            FolderStream(folder, split="lines")
        return
    found = []
    for rank in range(parts):
        options = {"split": "lines", "block_size": size, "shuffle": seed, "rank": rank, "world_size": parts}
        found += FolderStream(folder, "*.txt", **options)
    assert sorted(found) == sorted(expected)
    if parts == 1 and seed is None:
        assert found == expected


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_windows_are_each_files_bytes_in_a_row(tmp_path_factory, contents, window, block):
    folder = write(
        tmp_path_factory.mktemp("windows"), **{f"{n}": content for n, content in enumerate(contents)}
    )
    if not any(contents):
        return
    cut = [content[at : at + window] for content in contents for at in range(0, len(content), window)]
    found = list(FolderStream(folder, split=window, block_size=block))
    assert [bytes(one.tolist()) for one in found] == cut
    assert all(one.dtype == torch.uint8 and one.untyped_storage().nbytes() == len(one) for one in found)
    whole = FolderStream(folder, split=window, block_size=block, drop_last=True)
    assert [len(one) for one in whole] == [window for one in cut if len(one) == window]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_ranks_divide_the_items_among_them(corpus, workers):
    found = []
    for rank in range(2):
        stream = FolderStream(corpus, split="lines", block_size=512, rank=rank, world_size=2)
        found += [line for batch in DataLoader(stream, batch_size=7, num_workers=workers) for line in batch]
    assert sorted(found) == sorted(lines_in(corpus))


@pytest.mark.parametrize("shuffle", [None, 5])
@pytest.mark.parametrize("split", ["lines", 300, "files"])
def test_it_goes_on_from_any_item(corpus, split, shuffle):
    options = {"split": split, "block_size": 900, "shuffle": shuffle, "rank": 1, "world_size": 2}

    def plain(items):
        return [one.tolist() if isinstance(one, torch.Tensor) else one for one in items]

    stream = FolderStream(corpus, **options)
    stream.set_epoch(3)
    whole = plain(stream)
    assert len(whole) > 1
    for count in range(0, len(whole) + 1, max(1, len(whole) // 25)):
        items = iter(stream)
        begun = plain(islice(items, count))
        state = json.loads(json.dumps(stream.state_dict()))
        other = FolderStream(corpus, **options)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert begun + plain(other) == whole
        assert plain(other) == whole  # the next epoch begins at the start


def test_epochs_differ_in_order_alone(corpus):
    stream = FolderStream(corpus, split="lines", block_size=400, shuffle=1)
    first, same = list(stream), list(stream)
    stream.set_epoch(1)
    second = list(stream)
    assert first == same != second and sorted(first) == sorted(second) == sorted(lines_in(corpus))


def test_a_state_of_another_stream_is_refused(corpus, tmp_path):
    stream = FolderStream(corpus, split="lines", block_size=512)
    next(iter(stream))
    state = stream.state_dict()
    others = [
        (FolderStream(corpus, split="lines", block_size=256), "block_size was 512, here it is 256"),
        (FolderStream(corpus, split="lines", block_size=512, rank=1, world_size=2), r"parts was \[0, 1\]"),
        (FolderStream(write(tmp_path, a="other"), split="lines", block_size=512), "files was"),
    ]
    for other, words in others:
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=words):
            iter(other)


def test_memory_is_a_block_whatever_the_files(tmp_path):
    write(tmp_path, large=b"0123456789abcde\n" * (1 << 16))  # 1 MiB
    stream = FolderStream(tmp_path, split="lines", block_size="8KiB")
    next(iter(stream))
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 1 << 16 and peak < 256 << 10  # a line of 16 bytes is a str of 64


def test_image_files_go_through_decode_and_the_cache(tmp_path):
    folder = write(tmp_path / "images", a__1="1", a__2="22", b__3="333")
    made = tmp_path / "made"

    def load(path):
        with open(made, "a") as out:
            out.write(path + "\n")
        with open(path, "rb") as file:
            return torch.tensor(list(file.read()))

    stream = FolderStream(folder, decode=cached(load, tmp_path / "cache", ignore="made"))
    for _ in range(2):
        assert [one.tolist() for one in stream] == [[49], [50, 50], [51, 51, 51]]
    assert len(made.read_text().splitlines()) == 3 and stream.files == 3 and stream.nbytes == 6


def test_what_decode_raises_names_the_file(tmp_path):
    write(tmp_path, a="1\nx\n")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(FolderStream(tmp_path, split="lines", decode=int))
    assert str(tmp_path / "a") in caught.value.__notes__[0]


def test_it_goes_to_a_spawned_worker_with_its_rank_and_its_names_shared(corpus, monkeypatch):
    stream = FolderStream(corpus, split="lines", block_size=512)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    sent = ForkingPickler.dumps(stream)
    monkeypatch.undo()
    there = ForkingPickler.loads(sent)
    assert (there.rank, there.world_size) == (1, 3) and (stream.rank, stream.world_size) == (None, None)
    assert list(there) == list(FolderStream(corpus, split="lines", block_size=512, rank=1, world_size=3))


def test_files_are_found_below_in_order_and_by_name(tmp_path):
    write(tmp_path, b__y="1", b__x="2", a="33", **{".hidden": "4", ".git__x": "5"})
    blocks = FolderBlocks(str(tmp_path), ("x", "a"), 1)
    assert [
        (one.path[len(str(tmp_path)) + 1 :], one.begin) for one in map(blocks.__getitem__, range(len(blocks)))
    ] == [
        ("a", 0),
        ("a", 1),
        ("b/x", 0),
    ]


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    write(tmp_path, a="x" * 300_000, b=b"\xff\n")
    with pytest.raises(ValueError, match=r"a: the line in bytes 0 to 100 is longer than 1.00 KiB"):
        list(FolderStream(tmp_path, "a", split="lines", block_size=100, longest_line="1KiB"))
    with pytest.raises(ValueError, match=r"b, bytes 0 to 2: no utf-8"):
        list(FolderStream(tmp_path, "b", split="lines"))
    cut = FolderStream(tmp_path, "a", split=1000)
    write(tmp_path, a="x")
    with pytest.raises(ValueError, match="is shorter than the 300000 bytes"):
        list(cut)
    for arguments, words in [
        ({"split": "words"}, "split='words'"),
        ({"split": 0}, "split=0"),
        ({"split": True}, "split=True"),
        ({"split": "lines", "encoding": "utf-16"}, "encoding='utf-16'"),
        ({"split": "lines", "encoding": "klingon"}, "encoding='klingon'"),
        ({"split": "lines", "block_size": 0}, "block_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": 0}, "world_size=None"),
        ({"pattern": "*.none"}, "no file's name is like *.none".replace("*", r"\*")),
    ]:
        with pytest.raises(ValueError, match=words):
            FolderStream(tmp_path, **arguments)
