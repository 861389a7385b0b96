"""The stream over a folder in notebook 06: every line once, whatever reads it, from wherever it was left."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import memopt.data

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks/06_data_path.ipynb"
CELL = next(
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text())["cells"]
    if cell["id"] == "folder-stream-class"
)
example = {"memopt": memopt, "os": os, "Path": Path, "torch": torch, "__name__": __name__}
exec(CELL, example)
LineStream = example["LineStream"]


def write(folder, texts):
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return folder


def lines_of(texts):
    return [line for text in texts for line in text.removesuffix("\n").split("\n") if text]


TEXTS = ["".join(f"{n} {'é' * (n % 37)}\n" for n in range(700)), "", "\n\n", "x" * 5000 + "\nend"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write(tmp_path_factory.mktemp("corpus"), TEXTS)


@given(
    st.lists(st.text("a\né", max_size=60), min_size=1, max_size=4).filter(any),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([None, 3]),
)
@settings(max_examples=60, deadline=None)
def test_each_line_is_read_once_however_files_are_cut_and_divided(
    tmp_path_factory, texts, block, parts, seed
):
    folder = write(tmp_path_factory.mktemp("lines"), texts)
    found = []
    for rank in range(parts):
        found += LineStream(folder, block=block, seed=seed, rank=rank, world_size=parts)
    assert sorted(found) == sorted(lines_of(texts))
    if parts == 1 and seed is None:
        assert found == lines_of(texts)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_ranks_divide_the_lines_among_them(corpus, workers):
    found = []
    for rank in range(2):
        stream = LineStream(corpus, block=512, rank=rank, world_size=2)
        found += [line for batch in DataLoader(stream, batch_size=7, num_workers=workers) for line in batch]
    assert sorted(found) == sorted(lines_of(TEXTS))


@pytest.mark.parametrize("seed", [None, 5])
def test_it_goes_on_from_any_line_and_epochs_differ_in_order(corpus, seed):
    options = {"block": 900, "seed": seed, "rank": 1, "world_size": 2}
    stream = LineStream(corpus, **options)
    first = list(stream)
    stream.set_epoch(3)
    whole = list(stream)
    assert (first == whole) == (seed is None)
    for count in range(0, len(whole) + 1, 20):
        begun = list(islice(stream, count))
        other = LineStream(corpus, **options)
        other.load_state_dict(
            json.loads(json.dumps(stream.state_dict() if count else {"epoch": 3, "position": [0, 0]}))
        )
        assert begun + list(other) == whole
        assert list(other) == whole  # the next epoch begins at the start


def test_memory_is_a_block_whatever_the_files(tmp_path):
    (tmp_path / "large.txt").write_bytes(b"0123456789abcde\n" * (1 << 16))  # 1 MiB
    stream = LineStream(tmp_path, block=8 << 10)
    next(iter(stream))
    tracemalloc.start()
    try:
        count = sum(1 for _ in stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 1 << 16 and peak < 256 << 10  # a line of 16 bytes is a str of 64


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to read"):
        LineStream(tmp_path)


def test_the_name_in_the_package_says_where_the_example_is():
    with pytest.raises(AttributeError, match="notebooks/06_data_path.ipynb"):
        _ = memopt.data.FolderStream
    assert "FolderStream" not in dir(memopt.data)
