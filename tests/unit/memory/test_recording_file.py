"""Files of recordings: what was saved comes back, and what is damaged, foreign or hostile is refused by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import zipfile

import pytest
import torch
from made_recordings import made

from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import COLUMNS, Recording

SEED = int(os.environ.get("MEMOPT_SEED", "0")) or random.randrange(1 << 30)


def same(a: Recording, b: Recording) -> bool:
    tensors = [*((a.columns[n], b.columns[n]) for n in COLUMNS), (a.times_us, b.times_us)]
    tensors += [(a.reserved_events, b.reserved_events), (a.reserved_bytes, b.reserved_bytes)]
    plain = ("device", "source", "stacks", "modules", "marks", "capacity", "facts")
    return all(torch.equal(x, y) for x, y in tensors) and all(
        getattr(a, name) == getattr(b, name) for name in plain
    )


def rewritten(path, change) -> None:
    """The file, with what change(name, content) gives in the place of each content; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            content = change(name, content)
            if content is not None:
                archive.writestr(name, content)


def described(path, change) -> None:
    def of_json(name, content):
        if name != "recording.json":
            return content
        head = json.loads(content)
        change(head)
        return json.dumps(head)

    rewritten(path, of_json)


def test_what_was_saved_comes_back(tmp_path):
    for n, blocks in enumerate((0, 1, 5, 300)):
        recording_file.save(made(blocks), tmp_path / f"{n}.mopt")
        assert same(recording_file.load(tmp_path / f"{n}.mopt"), made(blocks))
    assert sorted(os.listdir(tmp_path)) == [f"{n}.mopt" for n in range(4)]


def test_a_file_holds_several_devices_and_the_fullest_is_loaded(tmp_path):
    both = [made(3, "cuda:0"), made(200, "cuda:1")]
    recording_file.save(both, tmp_path / "both.mopt")
    loaded = recording_file.load_all(tmp_path / "both.mopt")
    assert [same(a, b) for a, b in zip(loaded, both, strict=True)] == [True, True]
    assert recording_file.load(tmp_path / "both.mopt").device == "cuda:1"


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    recording_file.save(made(), tmp_path / "a.mopt")
    bad = made(6)
    bad.facts["command"] = object()
    with pytest.raises(TypeError):
        recording_file.save(bad, tmp_path / "a.mopt")
    assert same(recording_file.load(tmp_path / "a.mopt"), made()) and os.listdir(tmp_path) == ["a.mopt"]


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path):
    path = tmp_path / "cut.mopt"
    recording_file.save(made(40), path)
    whole = path.read_bytes()
    for length in {0, 1, 2, 3, 4, 30, *range(5, len(whole), max(1, len(whole) // 40)), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.mopt: "):
            recording_file.load(path)


def test_damage_is_refused_or_harmless_and_never_anything_else(tmp_path):
    random.seed(SEED)
    path = tmp_path / "damaged.mopt"
    recording_file.save(made(40), path)
    whole = path.read_bytes()
    for _ in range(int(os.environ.get("MEMOPT_SOAK", "0")) * 3000 + 200):
        content = bytearray(whole)
        for _ in range(random.randrange(1, 4)):
            content[random.randrange(len(content))] = random.randrange(256)
        path.write_bytes(content)
        try:
            recording_file.load(path).by_line()
        except ValueError as error:
            assert "damaged.mopt: " in str(error), f"MEMOPT_SEED={SEED}"


def test_foreign_files_are_refused(tmp_path):
    cases = {
        "text": (b"epoch,loss\n1,2\n", "neither a memopt recording"),
        "empty": (b"", "it is empty"),
        "pickle": (pickle.dumps({"a": 1}), "no 'device_traces'"),
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as other:
        other.writestr("data.pkl", "x")
    cases["checkpoint"] = (archive.getvalue(), "not a recording")
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            recording_file.load(tmp_path / name)
    with pytest.raises(OSError, match="nowhere"):
        recording_file.load(tmp_path / "nowhere.mopt")


def test_a_pickle_that_would_execute_code_is_refused_and_does_not(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "hostile.pickle"
    for protocol in (2, 4, 5):
        path.write_bytes(pickle.dumps({"device_traces": [Hostile()]}, protocol))
        with pytest.raises(ValueError, match="none of it was executed|refers to"):
            recording_file.load(path)
    assert not (tmp_path / "made").exists()


def impossible():
    def at(head):
        return head["recordings"][0]

    yield "columns take more than", lambda h: at(h)["lengths"].update(size=1 << 60)
    yield "columns take more than", lambda h: at(h)["lengths"].update(size=1 << 27)  # for so small a file
    yield "not have the stated length", lambda h: at(h)["lengths"].update(size=4)
    yield "the length of the column 'born'", lambda h: at(h)["lengths"].pop("born")
    yield "the length of the column 'born'", lambda h: at(h)["lengths"].update(born=-1)
    yield "the length of the column 'born'", lambda h: at(h).update(lengths=[])
    yield "missing lines", lambda h: at(h)["stacks"].append([99])
    yield "missing lines", lambda h: at(h)["stacks"].append(["x"])
    yield "'stacks'", lambda h: at(h).update(stacks="abc")
    yield "not a source line", lambda h: at(h)["frames"].append(["f", "1", "g"])
    yield "indices out of range", lambda h: at(h).update(modules=[])
    yield "'modules'", lambda h: at(h).update(modules=[1])
    yield "not a mark", lambda h: at(h)["marks"].append([1, 2, 3])
    yield "event that does not exist", lambda h: at(h)["marks"].append([999, "step", ""])
    yield "name its device", lambda h: at(h).update(device=None)
    yield "capacity", lambda h: at(h).update(capacity="24GiB")
    yield "facts", lambda h: at(h).update(facts=[])
    yield "version is 7", lambda h: h.update(version=7)
    yield "not a memopt recording", lambda h: h.update(format="x")
    yield "'recordings'", lambda h: h.update(recordings={})
    yield "holds no recording", lambda h: h.update(recordings=[])


@pytest.mark.parametrize("message,change", list(impossible()))
def test_claims_that_cannot_be_are_refused(tmp_path, message, change):
    path = tmp_path / "claims.mopt"
    recording_file.save(made(), path)
    described(path, change)
    with pytest.raises(ValueError, match=rf"claims\.mopt: .*{message}"):
        recording_file.load(path)


@pytest.mark.parametrize(
    "column,value,message",
    [
        ("born", 10, "born at an event"),
        ("died", 999, "die later"),
        ("size", -5, "impossible sizes"),
        ("size", 1 << 60, "impossible sizes"),
        ("stack", 3, "'stack' has indices out of range"),
        ("module", -1, "'module' has indices out of range"),
        ("category", 6, "'category' has indices out of range"),
    ],
)
def test_columns_that_cannot_be_are_refused(tmp_path, column, value, message):
    path = tmp_path / "columns.mopt"
    recording_file.save(made(), path)
    rewritten(
        path,
        lambda name, content: (
            content[:-8] + value.to_bytes(8, "little", signed=True) if name == f"0/{column}" else content
        ),
    )
    with pytest.raises(ValueError, match=message):
        recording_file.load(path)


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "lacks.mopt"
    recording_file.save(made(), path)
    rewritten(path, lambda name, content: None if name == "0/died" else content)
    with pytest.raises(ValueError, match="0/died"):
        recording_file.load(path)


def test_json_that_nests_for_ever_or_is_none_is_refused(tmp_path):
    path = tmp_path / "json.mopt"
    for text in ("[" * 200_000, "{", "7", "null"):
        recording_file.save(made(), path)
        rewritten(path, lambda name, content, text=text: text if name == "recording.json" else content)
        with pytest.raises(ValueError, match=r"json\.mopt: "):
            recording_file.load(path)


def test_reserved_memory_below_nothing_is_refused(tmp_path):
    wrong = made(5)
    wrong.reserved_bytes = torch.tensor([0, -1])
    recording_file.save(wrong, tmp_path / "wrong.mopt")
    with pytest.raises(ValueError, match=r"wrong\.mopt.*reserved memory"):
        recording_file.load_all(tmp_path / "wrong.mopt")
