"""`python -m memopt replay`: what it prints, what it refuses; torch's snapshots, of which nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from memopt import _C
from memopt.__main__ import main
from memopt._memory.recording import snapshot_file

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
# One step needs 40 MiB and frees all of it; two smaller blocks take its place.
TRACE = "a 1 41943040 0\ns\nf 1 0\na 2 20971520 0\na 3 20971520 0\ns\nf 2 0\ns\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text(TRACE)
    return path


def answer(capsys, *arguments, status=0):
    assert main(["replay", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_the_json_has_the_documented_keys(capsys, trace):
    found = answer(capsys, trace, "--frontier")
    for key in (
        "live_peak",
        "peak_reserved",
        "frontier",
        "stitches",
        "granules_moved",
        "driver_calls_last_step",
    ):
        assert type(found[key]) is int, key
    assert type(found["ns_per_op"]) is float and found["ns_per_op"] > 0
    assert 0 < found["request_ns_p50"] <= found["request_ns_p99"] <= found["request_ns_max"]
    assert found["completed"] is True
    assert found["live_peak"] == found["frontier"] == 40 * MIB
    assert found["peak_reserved"] >= found["live_peak"]
    assert found["steps"] == 3 and found["driver_calls_last_step"] == 0
    assert found["at_frontier"]["peak_reserved"] == 40 * MIB
    assert "driver_calls_per_step" not in found


def test_without_frontier_there_is_none(capsys, trace):
    found = answer(capsys, trace)
    assert found["frontier"] is None and "at_frontier" not in found


def test_figures_by_step_add_up(capsys, trace):
    found = answer(capsys, trace, "--steps", "--lazy", "--check")
    assert len(found["driver_calls_per_step"]) == len(found["held_per_step"]) == 3
    assert sum(found["driver_calls_per_step"]) == found["driver_calls"] > 0
    assert (
        len(found["host_waits_per_step"]) == 3
        and sum(found["host_waits_per_step"]) == found["host_waits"] == 0
    )
    assert max(found["granules_moved_per_step"]) == found["granules_moved_per_step_max"]


def test_a_budget_that_is_too_small_is_a_no(capsys, trace):
    found = answer(capsys, trace, "--budget", "38MiB", status=1)
    assert found["completed"] is False and found["failed_line"] == 1
    assert found["failure"].startswith("CUDA out of memory. Tried to allocate")
    assert main(["replay", str(trace), "--budget", "38MiB"]) == 1
    assert "CUDA out of memory" in capsys.readouterr().out


def test_every_option_is_taken(capsys, trace, tmp_path):
    for option in (
        ["--no-recall"],
        ["--no-double-map"],
        ["--slack", "0"],
        ["--small-limit", "64KiB"],
        ["--device", "0"],
    ):
        assert answer(capsys, trace, *option)["completed"]
    out = tmp_path / "answer.txt"
    assert main(["replay", str(trace), "--frontier", "-o", str(out)]) == 0
    assert "smallest device" in out.read_text() and "40.0 MiB" in out.read_text()


@pytest.mark.parametrize(
    "text, said",
    [
        ("a 1 2\n", "line 1: the stream is missing"),
        ("a 1 2 3\n\nf 2 3\n", "line 3: there is no block 2: no earlier line allocated it"),
        ("a 1 2 3\na 1 2 3\n", "line 2: id 1 was already used in line 1: give every block its own id"),
        ("# nothing\n", "the trace has no requests: there is nothing to replay"),
        ("a 1 2 3\na 2 2 3 5\n", "several devices, 0 and 5 among them: select the one to replay"),
        ("\x00\x01", "line 1: a line must begin with"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(capsys, tmp_path, text, said):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    assert main(["replay", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"memopt replay: {path}: ") and said in told


def test_a_file_that_is_not_there_and_options_that_make_no_sense_are_refused(capsys, tmp_path, trace):
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    for option in (["--budget", "much"], ["--slack", "-1"], ["--device", "x"], []):
        with pytest.raises(SystemExit) as end:
            main(["replay", *([str(trace), *option] if option else [])])
        assert end.value.code == 2


def test_the_module_is_a_command(trace):
    command = [sys.executable, "-m", "memopt", "replay", str(trace), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and json.loads(done.stdout)["live_peak"] == 40 * MIB


# ---- snapshots ------------------------------------------------------------------------------------------------


def entry(action, address, size, stream=0, **more):
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": 1,
        "frames": [],
        **more,
    }


def segment(address, *blocks, device=0, stream=0):
    return {
        "device": device,
        "address": address,
        "total_size": sum(size for size, _, _ in blocks),
        "stream": stream,
        "segment_pool_id": (0, 0),
        "blocks": [{"size": size, "requested_size": asked, "state": state} for size, asked, state in blocks],
    }


def trace_of(*histories, segments=()):
    content = pickle.dumps({"segments": list(segments), "device_traces": [list(h) for h in histories]})
    lines = snapshot_file.read(content).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_history_becomes_requests_and_frees():
    history = [
        entry("segment_alloc", 0x1000, 4096),
        entry("alloc", 0x1000, 1000),
        entry("alloc", 0x1400, 300, 7),
        entry("free_requested", 0x1000, 1000),
        entry("free_completed", 0x1000, 1000),
        entry("alloc", 0x1000, 500),
        entry("snapshot", 0, 0),
    ]
    assert trace_of(history) == ["a 0 1000 0", "a 1 300 7", "f 0 0", "a 2 500 0"]


def test_what_was_live_before_the_history_comes_first():
    history = [entry("alloc", 0x5000, 64), entry("free_requested", 0x9000, 700, 3)]
    held = segment(
        0x4800, (0x800, 2000, "active_allocated"), (512, 64, "active_allocated"), (512, 0, "inactive")
    )
    assert trace_of(history, segments=[held]) == ["a 1 700 3", "a 2 2000 0", "a 0 64 0", "f 1 3"]


def test_private_pools_are_pools_of_the_trace_and_devices_keep_their_numbers():
    first = [entry("alloc", 0x1000, 10, pool_id=(0, 0)), entry("alloc", 0x2000, 20, pool_id=(0, 4))]
    second = [entry("alloc", 0x1000, 30, pool_id=(1, 0))]
    assert trace_of(first, second) == ["a 0 10 0", "a 1 20 0 0 1", "a 2 30 0 1 1"]


def test_a_free_that_history_missed_is_put_where_the_address_is_used_again():
    assert trace_of([entry("alloc", 8, 10), entry("alloc", 8, 20)]) == ["a 0 10 0", "f 0 0", "a 1 20 0"]


def test_a_random_history_is_replayed_with_its_live_peak(capsys, tmp_path):
    seed = int(os.environ["MEMOPT_SEED"])
    chance = random.Random(seed)
    live, history, peak, address = {}, [], 0, 1 << 20
    for _ in range(2000):
        if live and chance.random() < 0.48:
            at = chance.choice(list(live))
            history.append(entry("free_requested", at, live.pop(at)))
        else:
            size = chance.choice([100, 5000, 3 * MIB, 11 * MIB])
            history.append(entry("alloc", address, size))
            live[address] = size
            address += size + 512
        peak = max(peak, sum(live.values()))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], history]}))
    found = answer(capsys, path, "--check")
    assert found["live_peak"] == peak and found["operations"] == 2000


class Weapon:
    def __reduce__(self):
        return exec, ("import sys; sys.memopt_was_fooled = True",)


def refused(content):
    with pytest.raises(ValueError) as error:
        snapshot_file.read(content)
    assert not hasattr(sys, "memopt_was_fooled")
    return str(error.value)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_code_is_refused_unrun(protocol, tmp_path, capsys):
    content = pickle.dumps({"device_traces": [Weapon()]}, protocol)
    said = refused(content)
    assert "it holds more than numbers, texts, lists and dicts (pickle's " in said
    assert "GLOBAL" in said and "none of it was executed" in said
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err and not hasattr(sys, "memopt_was_fooled")


def test_the_weapon_works():
    """Else the tests above show nothing."""
    pickle.loads(pickle.dumps(Weapon()))
    assert sys.__dict__.pop("memopt_was_fooled")


@pytest.mark.parametrize(
    "code", ["REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "GLOBAL", "STACK_GLOBAL"]
)
@pytest.mark.parametrize("before", [b"", pickle.EMPTY_LIST, pickle.EMPTY_DICT + pickle.NONE])
def test_no_instruction_that_calls_is_known(code, before):
    assert code in refused(pickle.PROTO + b"\x04" + before + getattr(pickle, code) + b"os\nsystem\n.")


@pytest.mark.parametrize(
    "code", ["EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"]
)
def test_no_instruction_that_looks_things_up_is_known(code):
    assert code in refused(pickle.PROTO + b"\x05N" + getattr(pickle, code) + b"\1\0\0\0.")


def test_damaged_files_and_other_pickles_are_refused_with_a_reason():
    good = pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1, 2)]]})
    for end in range(2, len(good) - 1):
        assert "damaged" in refused(good[:end]) or "unlike any snapshot" in refused(good[:end])
    assert "no 'device_traces'" in refused(pickle.dumps([1, 2]))
    assert "_record_memory_history" in refused(pickle.dumps({"device_traces": [[], []]}))
    for wrong in ([[{"action": "alloc"}]], [[7]], 7 * [[[]]], [[entry("alloc", [], 1)]]):
        said = refused(pickle.dumps({"segments": [], "device_traces": wrong}))
        assert "not in torch's format" in said


def test_a_pickle_that_claims_to_be_huge_takes_no_memory():
    for bomb in (
        pickle.LONG_BINPUT + b"\xff\xff\xff\xff",
        pickle.BINUNICODE8 + (1 << 50).to_bytes(8, "little") + b"x",
        pickle.LONG4 + b"\xff\xff\xff\x7f",
        pickle.FRAME + (1 << 60).to_bytes(8, "little"),
    ):
        refused(pickle.PROTO + b"\x04" + pickle.NONE + bomb + b".")


def test_random_bytes_are_refused_or_read_and_never_run():
    seed = int(os.environ["MEMOPT_SEED"])
    chance = random.Random(seed)
    good = pickle.dumps(
        {"segments": [segment(64, (512, 3, "active_allocated"))], "device_traces": [[entry("alloc", 1, 2)]]}
    )
    for _ in range(3000):
        content = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            content[chance.randrange(1, len(content))] = chance.randrange(256)
        try:
            text = snapshot_file.read(bytes(content))
        except ValueError:
            continue
        try:
            _C.replay(text, 0, 20, 0, True, True, False, True, -1, False)
        except (ValueError, _C.Error, MemoryError):
            continue
