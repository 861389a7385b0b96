"""memopt.data.MmapDataset and MmapWriter, against tensors in memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from memopt.data import MmapDataset, MmapWriter
from memopt.data._mmap import safetensors_layout
from memopt.data._mmap.mapped_writer import PADDING

DTYPES = [getattr(torch, name) for name in safetensors_layout.TORCH.values()]


def bits(tensor):
    """For comparison: NaNs too, and dtypes that know no ==."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_rows(draw_seed, count, dtype, shape):
    generator = torch.Generator().manual_seed(draw_seed)
    size = count * torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(count, *shape) if size else torch.empty((count, *shape), dtype=dtype)


fields_of = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda name: name not in ("__metadata__", PADDING)),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(fields=fields_of, count=st.integers(1, 30), seed=st.integers(0, 2**31), data=st.data())
def test_what_is_written_is_read_whatever_the_fields_and_indices(fields, count, seed, data):
    rows = {name: random_rows(seed + n, count, *kind) for n, (name, kind) in enumerate(fields.items())}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.safetensors"
        with MmapWriter(path) as out:
            at = 0
            while at < count:  # by rows and by batches, in any mixture
                step = data.draw(st.integers(0, 4))
                if step:
                    out.extend({name: one[at : at + step] for name, one in rows.items()})
                else:
                    out.append({name: one[at] for name, one in rows.items()})
                at += step or 1
        assert os.listdir(folder) == ["rows.safetensors"]
        dataset = MmapDataset(path)
        assert len(dataset) == count
        assert dataset.fields == {name: (one.dtype, tuple(one.shape[1:])) for name, one in rows.items()}
        which = st.integers(-count, count - 1)
        index = data.draw(which)
        several = data.draw(st.lists(which, max_size=12))
        cut = data.draw(st.slices(count))
        for name, one in rows.items():
            assert bits(dataset[index][name]) == bits(one[index])
            for chosen, expected in (
                (several, one[torch.tensor(several, dtype=torch.int64)]),
                (cut, one[torch.tensor(range(count)[cut], dtype=torch.int64)]),
            ):
                got = dataset[chosen][name]
                assert got.shape == expected.shape and got.dtype == expected.dtype
                assert bits(got) == bits(expected)
        del dataset


@pytest.fixture
def images(tmp_path):
    """(dataset, the same as tensors): rows of 12 KB and odd bytes, and labels that begin between two of their own."""
    x = torch.randint(0, 255, (21, 3, 61, 67), dtype=torch.uint8)
    with MmapWriter(tmp_path / "a.safetensors", {"made by": "a test"}) as out:
        for n in range(21):
            out.append((x[n], n))
    return MmapDataset(tmp_path / "a.safetensors"), (x, torch.arange(21))


def test_a_row_may_be_written_to_and_the_file_stays(images):
    dataset, (x, _) = images
    dataset[4][0].fill_(9)
    assert (dataset[4][0] == 9).all() and torch.equal(dataset[5][0], x[5])
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[4][0], x[4])


def test_a_batch_is_a_copy_and_a_row_is_not(images):
    dataset, _ = images
    dataset[2:4][0].zero_()
    dataset[[2, 3]][0].zero_()
    assert dataset[2][0].any()
    assert dataset[2][0].data_ptr() == dataset[2][0].data_ptr()
    assert dataset[0][1].data_ptr() % 8 == 0  # behind the padding


@pytest.mark.parametrize("context", [None, "fork"])
def test_a_loader_reads_it_by_rows_and_by_batches(images, context):
    dataset, (x, labels) = images
    workers = 2 if context else 0
    rows = DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context=context)
    batches = DataLoader(
        dataset,
        sampler=BatchSampler(SequentialSampler(dataset), 4, False),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
    )
    for loader in (rows, batches):
        seen = list(loader)
        assert torch.equal(torch.cat([one[0] for one in seen]), x)
        assert torch.equal(torch.cat([one[1] for one in seen]), labels)


def test_fields_are_chosen_by_name(tmp_path):
    path = tmp_path / "b.safetensors"
    with MmapWriter(path) as out:
        out.extend({"x": torch.arange(6.0).reshape(3, 2), "y": torch.tensor([True, False, True])})
    assert MmapDataset(path, "y")[0].item() is True
    y, x = MmapDataset(path, ["y", "x"])[1]
    assert not y and x.tolist() == [2, 3]
    with pytest.raises(KeyError, match="no field 'z'; there are"):
        MmapDataset(path, ["x", "z"])


def test_indices_that_are_none_are_refused_by_name(images):
    dataset, _ = images
    for wrong in (21, -22, [0, 21], torch.tensor([-22])):
        with pytest.raises(IndexError, match="of a dataset of 21 rows"):
            dataset[wrong]
    for wrong in ("3", None, 1.5, [1.5], [[1, 2]], [1j], torch.zeros(20, dtype=torch.bool), object()):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dataset[wrong]
    with pytest.raises(TypeError, match="got torch.complex128"):
        dataset[torch.zeros(2, dtype=torch.complex128)]
    assert len(dataset[torch.zeros(21, dtype=torch.bool)][0]) == 0 and len(dataset[[]][1]) == 0


# ---- sources ----------------------------------------------------------------------------------------------------


def test_memmaps_files_of_numpy_and_torchs_mapped_tensors_go_to_workers_by_path(tmp_path):
    array = np.arange(24, dtype=np.int16).reshape(6, 4)
    np.save(tmp_path / "c.npy", array)
    array.tofile(tmp_path / "raw.bin")
    mapped = np.load(tmp_path / "c.npy", mmap_mode="r")
    raw = np.memmap(tmp_path / "raw.bin", np.int16, "r", offset=8, shape=(5, 4))
    shared = torch.from_file(str(tmp_path / "raw.bin"), shared=True, size=24, dtype=torch.int16)
    for source, expected in (
        (tmp_path / "c.npy", array),
        (mapped, array),
        (mapped[2:5], array[2:5]),
        (raw, array[1:]),
        (raw[1:], array[2:]),
        (shared.view(6, 4), array),
        (shared[4:].view(5, 4), array[1:]),
    ):
        dataset = pickle.loads(pickle.dumps(MmapDataset(source)))
        assert len(dataset) == len(expected)
        assert dataset[:].tolist() == expected.tolist() and dataset[-1].tolist() == expected[-1].tolist()
    both = MmapDataset({"a": mapped, "b": shared.view(6, 4)})
    assert both[3]["a"].tolist() == both[3]["b"].tolist() == array[3].tolist()
    with pytest.raises(ValueError, match="differ in their number of rows"):
        MmapDataset({"a": mapped, "b": mapped[:3]})
    with pytest.raises(ValueError, match="not contiguous"):
        MmapDataset(mapped[:, 1:])
    private = torch.from_file(str(tmp_path / "raw.bin"), shared=False, size=24, dtype=torch.int16)
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(MmapDataset(private))
    read_only = np.arange(3)
    read_only.flags.writeable = False
    MmapDataset(read_only)[0].fill_(7)
    assert read_only[0] == 0


def test_numbers_of_sixteen_bytes_are_rows_too(tmp_path):
    array = np.arange(24).reshape(6, 4) * (1 + 2j)
    np.save(tmp_path / "wide.npy", array)
    dataset = MmapDataset(tmp_path / "wide.npy")
    for chosen in (3, slice(1, 3), slice(None, None, -2), slice(5, 1), [4, 0, -1], []):
        expected = array[np.asarray(chosen, np.int64) if isinstance(chosen, list) else chosen]
        assert torch.equal(dataset[chosen], torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("source", [3, object(), torch.tensor(3), np.array(3), {}, ()])
def test_what_has_no_rows_is_refused(source):
    with pytest.raises((TypeError, ValueError), match="MmapDataset"):
        MmapDataset(source)


# ---- files that are not whole -----------------------------------------------------------------------------------


def test_a_file_cut_short_or_grown_is_refused(images, tmp_path):
    dataset, _ = images
    path = tmp_path / "a.safetensors"
    whole = path.read_bytes()
    message = pickle.dumps(dataset)
    for content in (whole[:-1], whole + b"x", whole[:100], whole[:5], b""):
        path.write_bytes(content)
        with pytest.raises(safetensors_layout.Malformed, match="safetensors"):
            MmapDataset(path)
        with pytest.raises(safetensors_layout.Malformed, match="truncated or rewritten"):
            pickle.loads(message)


def test_a_file_written_or_replaced_since_is_refused_whatever_its_size(images, tmp_path):
    dataset, _ = images
    path = tmp_path / "a.safetensors"
    message, there = pickle.dumps(dataset), path.stat()
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns + 1))
    with pytest.raises(safetensors_layout.Malformed, match="has changed: it was truncated or rewritten"):
        pickle.loads(message)
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))
    assert len(pickle.loads(message)) == 21
    (tmp_path / "b").write_bytes(path.read_bytes())
    os.utime(tmp_path / "b", ns=(there.st_atime_ns, there.st_mtime_ns))
    os.replace(tmp_path / "b", path)
    with pytest.raises(safetensors_layout.Malformed, match="has changed"):
        pickle.loads(message)


HEADERS = [
    '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,3]}}',
    '{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}',
    '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}',
    '{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"U8","shape":[true,4],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}',
    '{"a":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}}',
    '{"__metadata__":{"memopt.rows":"tuple"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    '{"__metadata__":{"memopt.rows":"single"},"1":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    '{"__metadata__":{"memopt.rows":"other"},"0":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}}',
    '{"a":{"dtype":"U8","shape":[4]}}',
    '{"__metadata__":{"a":1}}',
    "[]",
    "{",
    "[" * 100_000,
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda text: text[:50])
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path, header):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"abcd")
    with pytest.raises(safetensors_layout.Malformed, match=r"bad\.safetensors"):
        MmapDataset(path)


# ---- the writer -------------------------------------------------------------------------------------------------


def test_rows_unlike_the_first_are_refused_and_an_exception_leaves_nothing(tmp_path):
    path = tmp_path / "d.safetensors"
    path.write_text("what was there before")
    with pytest.raises(ValueError, match="field 'x' of row 1 is torch.float32"):
        with MmapWriter(path) as out:
            out.append({"x": torch.zeros(3, dtype=torch.int8)})
            out.append({"x": torch.zeros(3)})
    for wrong, words in (
        ({"y": 1}, "has fields y where the first had x"),
        ((1,), "a tuple where the first was a dict"),
        ({"x": "text"}, "is a str, which cannot be converted to a tensor"),
        ({"x": torch.zeros(4, dtype=torch.int8)}, r"int8\[4\] where the first row's was"),
    ):
        with pytest.raises((ValueError, TypeError), match=words), MmapWriter(path) as out:
            out.append({"x": torch.zeros(3, dtype=torch.int8)})
            out.append(wrong)
    with pytest.raises(ValueError, match="got no row"), MmapWriter(path):
        pass
    assert os.listdir(tmp_path) == ["d.safetensors"] and path.read_text() == "what was there before"


def test_names_of_fields_that_the_file_cannot_have_are_refused(tmp_path):
    with MmapWriter(tmp_path / "names.safetensors") as out:
        for wrong, words in (
            ({1: 0, "1": 0}, "two fields of the same name"),
            ({"__metadata__": 0}, "called '__metadata__'"),
            ({PADDING: 0, "b": 0}, f"called '{PADDING}'"),
        ):
            with pytest.raises(ValueError, match=words):
                out.append(wrong)
        out.append({"a": 1})
    with pytest.raises(ValueError, match="two fields have the same name"):
        MmapDataset({1: torch.zeros(3), "1": torch.zeros(3)})
    with pytest.raises(ValueError, match="no tensor can be called '__metadata__'"):
        safetensors_layout.header_bytes({"__metadata__": ("U8", (1,))}, {})


@contextlib.contextmanager
def files_of_at_most(size):
    """As a disk that is full: what a file cannot take is an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_that_was_written_in_part_is_never_made_a_file_of(tmp_path):
    path = tmp_path / "torn.safetensors"
    path.write_text("what was there before")
    row = {"x": torch.ones(100), "y": torch.ones(1 << 19)}
    with pytest.raises(ValueError, match=r"row 1 was interrupted.*call abort\(\)"):
        with MmapWriter(path) as out:
            out.append(row)
            with files_of_at_most(3 << 20), pytest.raises(OSError):
                out.append(row)
            for again in (lambda: out.append(row), out.close):
                with pytest.raises(ValueError, match="row 1 was interrupted"):
                    again()
    assert os.listdir(tmp_path) == ["torn.safetensors"] and path.read_text() == "what was there before"


def test_a_disk_that_is_full_at_the_end_costs_no_row(tmp_path):
    path = tmp_path / "full.safetensors"
    rows = {"x": torch.arange(60_000.0).reshape(3, -1), "y": torch.arange(90_000).reshape(3, -1)}
    out = MmapWriter(path)
    out.extend(rows)
    for size in (1000, 730_000, 800_000):  # neither field, one of them, a part of the other
        with (
            files_of_at_most(size),
            pytest.raises(OSError, match=r"3 rows are kept: free space.*close\(\) again"),
        ):
            out.close()
        assert not path.exists() and len(os.listdir(tmp_path)) == 2
    out.close()
    assert os.listdir(tmp_path) == ["full.safetensors"]
    assert all(torch.equal(got, rows[name]) for name, got in MmapDataset(path)[:].items())


def test_a_killed_writer_leaves_what_was_there_before(tmp_path):
    path = tmp_path / "e.safetensors"
    rows = torch.zeros(1000, 1000)
    child = os.fork()
    if child == 0:
        out = MmapWriter(path)
        out.extend(rows)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not path.exists() and len(list(tmp_path.glob("*.part"))) == 1


def test_the_header_names_only_what_the_file_has(tmp_path):
    """Many rows more than the first header had place for digits of."""
    path = tmp_path / "f.safetensors"
    with MmapWriter(path, {"k": "v"}) as out:
        out.extend(torch.zeros(100_000, 1, dtype=torch.bool))
        assert "100000 rows, open" in repr(out)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        extents, metadata = safetensors_layout.parse(
            length.to_bytes(8, "little") + file.read(length), path.stat().st_size
        )
    assert extents["0"].shape == (100_000, 1) and metadata == {"k": "v", "memopt.rows": "single"}
    with pytest.raises(ValueError, match="is closed"):
        out.append(torch.zeros(1, dtype=torch.bool))


def test_page_cache_is_told_apart_from_memory_of_its_own(tmp_path):
    path = tmp_path / "g.safetensors"
    with MmapWriter(path) as out:
        out.extend(torch.ones(64, 16384, dtype=torch.uint8))
    dataset = MmapDataset(path)
    assert dataset.memory().copied == 0
    total = sum(int(row.sum()) for row in dataset)
    assert total == 64 * 16384
    seen = dataset.memory()
    assert seen.page_cache >= 64 * 16384 and seen.copied == 0
    for row in range(8):
        dataset[row].fill_(2)
    seen = dataset.memory()
    assert 8 * 16384 <= seen.copied <= 8 * 16384 + 3 * 4096
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    os.replace(tmp_path / "other", path)  # the mapping's file has no name any more
    other = np.memmap(path, mode="r")
    assert other.sum() == 0 and dataset.memory() == seen
    assert (
        "page cache" in str(seen) and "64 rows" in dataset._repr_html_() and "uint8[16384]" in repr(dataset)
    )
