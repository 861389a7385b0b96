"""Files from strangers: damaged or forged, they end in one error that names the file, and in no other."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from environment_python import run_there
from made_recordings import figures, made, rank

from memopt.__main__ import main
from memopt._memory.recording import recording_file
from memopt._memory.recording.exports import as_torch_snapshot
from memopt.data import MmapDataset, MmapWriter
from memopt.data._mmap.safetensors_layout import Malformed

SEED = int(os.environ["MEMOPT_SEED"])
ROUNDS = 100 + 2000 * int(os.environ.get("MEMOPT_SOAK", "0"))

PLAIN = [
    None, True, -1, 0, 7, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1.5, float("inf"), float("nan"),
    "", "a", "a\ud800", "1", "a\0b", "../a", [], {}, [[]], {"a": 1}, [None], [1, 2, 3],
]  # fmt: skip


def places(value, path=()):
    """The paths to all that is in a nested value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for name, one in inner:
        yield (*path, name)
        yield from places(one, (*path, name))


def swapped(value, chance, others):
    """A copy in which something is of another kind or size, is gone, or is there twice."""
    value = copy.deepcopy(value)
    path = chance.choice([*places(value)])
    home = value
    for name in path[:-1]:
        home = home[name]
    if isinstance(home, tuple):
        return value
    way = chance.randrange(8)
    if way == 0:
        del home[path[-1]]
    elif way == 1 and isinstance(home, list):
        home.append(copy.deepcopy(home[path[-1]]))
    else:
        home[path[-1]] = copy.deepcopy(chance.choice(others))
    return value


def damaged(content, chance):
    content = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(content) or 1)
        way = chance.randrange(6)
        if way < 3:
            content[at : at + 1] = bytes([chance.randrange(256)])
        elif way == 3:
            del content[at : at + chance.randrange(1, 9)]
        elif way == 4:
            content[at:at] = chance.randbytes(chance.randrange(1, 5))
        elif chance.random() < 0.3:
            del content[at:]
    return bytes(content)


def snapshot():
    made_up = as_torch_snapshot([made(3)])
    made_up["device_traces"][0].append({"action": "oom", "size": 5, "addr": 0, "stream": 0})
    made_up["device_traces"][0].insert(0, {"action": "segment_alloc", "size": 5000, "addr": 0, "stream": 0})
    return made_up


def forged_snapshot(chance):
    if chance.random() < 0.3:
        return damaged(pickle.dumps(snapshot(), 4), chance)
    return pickle.dumps(swapped(snapshot(), chance, [*PLAIN, b"a", (1,), (0, 0)]), 4)


def forged_recording(chance):
    file = io.BytesIO()
    recording_file.save(made(3), f"{chance.folder}/whole.mopt")
    with zipfile.ZipFile(f"{chance.folder}/whole.mopt") as whole, zipfile.ZipFile(file, "w") as other:
        at = chance.choice([*whole.namelist(), *["recording.json"] * 8])
        for name in whole.namelist():
            content = whole.read(name)
            if name == at == "recording.json":
                content = json.dumps(swapped(json.loads(content), chance, PLAIN)).encode()
            elif name == at:
                numbers = np.frombuffer(content, "<i8").copy()
                numbers[:1] = chance.choice([-1, 0, 5, 2**62, -(2**63), 2**63 - 1])
                content = numbers.tobytes()
            other.writestr(name, content)
    return file.getvalue()


def told(argv, capsys):
    """The command line's answer: 2 with one line that names the file, or a report."""
    status = main(argv)
    said = capsys.readouterr().err
    if status == 2:
        assert len(said.splitlines()) == 1 and os.path.basename(argv[1]) in said, (
            f"MEMOPT_SEED={SEED}: {said}"
        )
    return status


def told_by_every_command(path, capsys):
    page = ["-o", str(path.with_name("page.html")), "-f", "-q"]
    for form in (["report", "--json"], ["report", "--text"], ["replay", "--json"], ["report", *page]):
        told([form[0], str(path), *form[1:]], capsys)
    told(["diff", str(path), str(path), *page], capsys)


def test_impossible_addresses_are_refused(tmp_path):
    path = tmp_path / "forged.mopt"
    recording = made(3)
    for address in (-1, -(2**63), 2**62, 2**63 - 1):
        recording.columns["address"][0] = address
        recording_file.save(recording, path)
        with pytest.raises(ValueError, match="impossible addresses"):
            recording_file.load_all(path)


@pytest.mark.sampled("forged files")
@pytest.mark.parametrize("forged", [forged_snapshot, forged_recording])
def test_forged_recordings_are_refused_in_one_line_or_shown(tmp_path, capsys, forged):
    chance = random.Random(SEED)
    chance.folder = tmp_path
    path = tmp_path / "forged.file"
    loaded = 0
    for _ in range(ROUNDS):
        path.write_bytes(forged(chance))
        try:
            recording_file.load_all(path)
        except ValueError as error:
            assert "forged.file" in str(error) and len(str(error)) < 1000, f"MEMOPT_SEED={SEED}"
        else:
            loaded += 1
            told_by_every_command(path, capsys)
    assert loaded


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "value",
    [10**400, float("inf"), float("nan"), [], "a" * 10_000, -1, 0, 2**55, 2**63],
    ids="{!r:.9}".format,
)
def test_each_number_of_a_snapshot_may_be_anything_and_the_error_is_the_same(tmp_path, capsys, value):
    path = tmp_path / "forged.pickle"
    for place in places(snapshot()):
        forged = snapshot()
        home = forged
        for name in place[:-1]:
            home = home[name]
        if isinstance(home, tuple):
            continue
        home[place[-1]] = value
        path.write_bytes(pickle.dumps(forged))
        try:
            recording_file.load_all(path)
        except ValueError as error:
            assert "forged.pickle" in str(error) and len(str(error)) < 1000, place
        else:
            told_by_every_command(path, capsys)


def test_a_snapshot_whose_allocator_would_have_held_less_than_nothing_does_not_say_what_it_held(tmp_path):
    forged = snapshot()
    forged["device_traces"][0].insert(0, {"action": "segment_map", "size": 10**9, "addr": 0, "stream": 0})
    path = tmp_path / "forged.pickle"
    path.write_bytes(pickle.dumps(forged))
    [found] = recording_file.load_all(path)
    assert found.blocks and not len(found.reserved_bytes) and not len(found.reserved_events)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_snapshot_whose_parts_are_in_one_another_over_and_over_has_an_end(tmp_path, kind):
    """Written out or hashed, sixty levels of two references each would take longer than anybody waits."""
    nested = kind([1])
    for _ in range(60):
        nested = kind([nested, nested])
    path = tmp_path / "nested.pickle"
    for key in ("action", "addr", "size", "stream", "frames", "user_metadata", "pool_id"):
        forged = snapshot()
        forged["device_traces"][0][1][key] = nested
        path.write_bytes(pickle.dumps(forged, 4))
        assert main(["replay" if key == "pool_id" else "report", str(path), "--json"]) == 2, key
    hashed = (
        pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 60
    )
    marked = hashed.replace(pickle.EMPTY_DICT, pickle.EMPTY_DICT + pickle.MARK, 1)
    unmade = hashed.replace(pickle.EMPTY_DICT, pickle.MARK, 1)
    for before, end in ((hashed, pickle.SETITEM), (marked, pickle.SETITEMS), (unmade, pickle.DICT)):
        path.write_bytes(before + pickle.NONE + end + pickle.STOP)
        with pytest.raises(ValueError, match="key of a dict"):
            recording_file.load_all(path)


def test_a_line_of_what_has_no_end_is_not_read(tmp_path):
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    path = tmp_path / "forged.pickle"
    for file in ("/dev/zero", str(pipe), "a\0b", "a\ud800.py"):
        forged = snapshot()
        for entry in forged["device_traces"][0]:
            entry["frames"] = [{"filename": file, "line": 1, "name": "f"}]
        path.write_bytes(pickle.dumps(forged))
        assert main(["report", str(path), "--text"]) == 0


HEADERS = [
    ("'<f4'", ["'<i9'", "'O'", "'<M8[ns]'", "[('a','<f4')]", "1", "None", "'>f4'", "'<f400000000000'", "{}", "[()]"]),
    ("(6, 4)", ["(2**63,)", "(-1,)", "()", "6", "(6.0,)", "(9223372036854775807, 4)", "(99999999999999999999999,)"]),
    ("(6, 4)", ["(0, 9223372036854775807)", "None", "(" * 200, "(6, 4", "(1" + ",1" * 70 + ")", "(1" + "+1" * 4000]),
    ("False", ["True", "1", "None", "'x'"]),
    ("'descr'", ["'desc'", "b'descr'", "1"]),
    ("{", ["", "[", "{{"]),
    ("}", ["", "}}", "\n}", "\\", "'''"]),
]  # fmt: skip


def forged_npy(chance):
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 4), }"
    for _ in range(chance.choice((1, 1, 2))):
        before, after = chance.choice(HEADERS)
        text = text.replace(before, chance.choice(after), 1)
    header, version = text.encode(), chance.choice((1, 1, 1, 2, 3, 9))
    length = chance.choice((len(header) + 1,) * 4 + (0, len(header) - 5, 65535))
    start = b"\x93NUMPY" + bytes([version, 0]) + length.to_bytes(2 if version == 1 else 4, "little")
    return damaged(start, chance) if chance.random() < 0.1 else start + header + b"\n" + bytes(96)


def forged_safetensors(chance):
    head = {
        "a": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]},
        "__metadata__": {"memopt.rows": "dict"},
    }
    header = json.dumps(swapped(head, chance, PLAIN)).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(96)
    return damaged(content, chance) if chance.random() < 0.3 else content


@pytest.mark.sampled("forged files")
@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of NumPy's at sizes beyond any, ours of rows that lie askew
@pytest.mark.parametrize(("name", "forged"), [("f.npy", forged_npy), ("f.safetensors", forged_safetensors)])
def test_forged_arrays_are_refused_with_their_names_or_read(tmp_path, name, forged):
    chance = random.Random(SEED)
    path = tmp_path / name
    for _ in range(5 * ROUNDS):
        path.write_bytes(forged(chance))
        try:
            dataset = MmapDataset(path)
            for index in range(-min(len(dataset), 9), 0):
                dataset[index]
        except ValueError as error:
            assert str(path) in str(error), f"MEMOPT_SEED={SEED}"
        except TypeError as error:
            assert str(path) in str(error) and "torch has no dtype" in str(error), f"MEMOPT_SEED={SEED}"


def test_an_array_whose_elements_have_no_bytes_is_refused(tmp_path):
    """NumPy's own reading of it ends the process (a division by zero)."""
    header = b"{'descr': {}, 'fortran_order': False, 'shape': (-1,), }\n"
    path = tmp_path / "f.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(96))
    with pytest.raises(ValueError, match="no bytes"):
        MmapDataset(path)


def test_an_empty_file_and_one_of_another_kind_are_refused_by_name(tmp_path):
    with MmapWriter(tmp_path / "whole.safetensors") as out:
        out.append({"a": torch.ones(3)})
    np.savez(tmp_path / "several.npz", a=np.ones(3))
    contents = [b"", (tmp_path / "whole.safetensors").read_bytes(), (tmp_path / "several.npz").read_bytes()]
    for ending in ("npy", "safetensors", "npz"):
        for content in contents:
            path = tmp_path / f"other.{ending}"
            path.write_bytes(content)
            if content == contents[1] and ending != "npy":
                continue
            with pytest.raises(Malformed, match=rf"other\.{ending}: "):
                MmapDataset(path)


HERE = Path(__file__).resolve()
FOLDERS = (str(HERE.parent), *(str(HERE.parents[2] / name) for name in ("helpers", "tooling")))
ARROW = """
import os, random, sys, pyarrow as pa
sys.path[:0] = sys.argv[1].split(':')
from test_hostile_files import SEED, ROUNDS, damaged
from memopt.data import MmapDataset
numbers = pa.array([float(n) for n in range(12)])
table = pa.table({"a": pa.array(range(6)), "b": pa.FixedSizeListArray.from_arrays(numbers, 2)})
chance, read = random.Random(SEED), 0
for make in (pa.ipc.new_file, pa.ipc.new_stream):
    sink = pa.BufferOutputStream()
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    whole = sink.getvalue().to_pybytes()
    for _ in range(5 * ROUNDS):
        with open("forged.arrow", "wb") as file:
            file.write(damaged(whole, chance))
        try:
            dataset = MmapDataset("forged.arrow")
            for index in range(-min(len(dataset), 9), 0):
                dataset[index]
            read += 1
        except (ValueError, TypeError) as error:
            assert os.path.abspath("forged.arrow") in str(error), error
        os.remove("forged.arrow")
assert read
"""


@pytest.mark.sampled("forged files")
def test_a_forged_arrow_file_ends_no_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_there("data", ARROW, ":".join(FOLDERS))


def test_a_damaged_trace_is_refused_by_line_or_replayed(tmp_path, capsys):
    chance = random.Random(SEED)
    whole = b"# a\na 1 1024 0\na 2 4096 1\nr 1 1\nw 0 1\nf 1 0\ns\na 3 70000 0 1 2\nf 2 1\ns\nf 3 0\n"
    path = tmp_path / "damaged.trace"
    for _ in range(ROUNDS):
        path.write_bytes(damaged(whole, chance))
        told(["replay", str(path), "--json"], capsys)


@pytest.mark.sampled("forged files")
def test_forged_ranks_of_a_job_are_refused_in_one_line_or_told(tmp_path, capsys):
    chance = random.Random(SEED)
    path = tmp_path / "rank1.json"
    for number in range(3):
        rank(
            tmp_path,
            number,
            3,
            figures=figures((5 + 4 * number) << 20),
            was_at=["a.py:3 in f"],
            progress={"steps": 3},
        )
    whole = json.loads(path.read_text())
    answers = set()
    for _ in range(5 * ROUNDS):
        path.write_text(json.dumps(swapped(whole, chance, PLAIN)))
        for form in ("--text", "--json"):
            status = main(["report", str(tmp_path), form])
            out, err = capsys.readouterr()
            out.encode()
            assert status == 0 or (len(err.splitlines()) == 1 and str(path) in err), (
                f"MEMOPT_SEED={SEED}: {err}"
            )
            answers.add(status)
    assert answers == {0, 2}
