"""The training workloads of the benchmarks, and their traces: repeatable, as large as they claim, truly recorded."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.record_trace import MARK, ROOT, Marks, convert
from benchmarks.workloads import WORKLOADS

SIM = {"memory": "40GiB", "blank": True}
GIB = 1 << 30

every_workload = pytest.mark.parametrize("name", WORKLOADS)


@pytest.fixture(autouse=True)
def no_workspaces_left():
    """cuBLAS workspaces are torch's to keep; nothing else is live before a test or after it."""
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 0


def history_of(name: str, scale: float = 0.125, count: int = 3) -> list[str]:
    """The trace of one small run; only its steps are marked."""
    marks, steps = Marks(), []

    def step_done(step: int) -> None:
        steps.append(step)
        marks.mark("s")

    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1 << 40)
    WORKLOADS[name].run(step_done, scale, count)
    (history,) = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(None)
    assert steps == list(range(count))
    return convert(history, marks.events).lines


def frees_sorted(lines: list[str]) -> list[str]:
    """The trace with frees that follow each other in order of their ids: autocast drops its casts in any order."""
    runs = itertools.groupby(lines, lambda line: line.startswith("f "))
    return [line for frees, run in runs for line in (sorted(run) if frees else run)]


def of_each_step(lines: list[str]) -> list[list[str]]:
    """The requests of each step, without ids: sizes of what was asked for, in order."""
    steps: list[list[str]] = [[]]
    for line in lines:
        if line == "s":
            steps.append([])
        elif line.startswith("a "):
            steps[-1].append(line.split()[2])
    return steps


@every_workload
def test_two_runs_ask_for_the_same(name):
    first, second = history_of(name), history_of(name)
    assert len(first) > 100
    assert frees_sorted(first) == frees_sorted(second)


@every_workload
def test_fixed_workloads_repeat_and_varying_ones_do_not(name):
    steps = of_each_step(history_of(name))
    second, third = steps[1], steps[2]  # the first makes the optimizer's state, too
    assert (second == third) == (WORKLOADS[name].kind == "fixed" or name == "train_eval_generate")


@every_workload
def test_live_peak_at_full_scale(name):
    steps = WORKLOADS[name].steps if os.environ.get("MEMOPT_SOAK") == "1" else 5
    WORKLOADS[name].run(lambda step: None, steps=steps)
    assert 2 * GIB < torch.cuda.memory_stats()["requested_bytes.all.peak"] < 7 * GIB


def test_generation_asks_for_a_larger_cache_each_time():
    sizes = of_each_step(history_of("train_eval_generate", 0.25, 4))[3]
    assert len(set(sizes)) > 2 * len(set(of_each_step(history_of("train_eval_generate", 0.25, 3))[2]))


# ---- the recording script -------------------------------------------------------------------------


def record(tmp_path: Path, *arguments: str) -> tuple[str, list[list[str]]]:
    """The script's output, and the events that it writes."""
    output = tmp_path / "trace.txt"
    command = [sys.executable, str(ROOT / "benchmarks/record_trace.py"), *arguments, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, events(output)


def events(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]


def live_peak(trace: list[list[str]]) -> int:
    """The largest sum of live requests; asserts that the trace is one."""
    live: dict[str, tuple[int, str]] = {}
    seen, streams, peak = set(), set(), 0
    for what, *numbers in trace:
        assert all(number.isdecimal() for number in numbers)
        if what == "a":
            number, size, stream = numbers
            assert number not in seen
            assert int(size) > 0
            seen.add(number)
            live[number] = int(size), stream
            streams.add(stream)
        elif what == "f":
            assert live.pop(numbers[0])[1] == numbers[1]
        elif what == "r":
            assert numbers[0] in live
            streams.add(numbers[1])
        elif what == "w":
            assert numbers[0] != numbers[1]
            streams.update(numbers)
        else:
            assert (what, numbers) == ("s", [])
        peak = max(peak, sum(size for size, _ in live.values()) if what == "a" else 0)
    assert streams == {str(stream) for stream in range(len(streams))}
    return peak


def test_a_recorded_trace_tells_of_streams_and_steps(tmp_path):
    said, trace = record(tmp_path, "two_streams", "--scale", "0.125", "--steps", "4")
    assert f"live peak {live_peak(trace)} bytes, 4 steps" in said
    kinds = [what for what, *_ in trace]
    assert kinds.count("s") == 4
    assert kinds.count("r") == 8  # images and labels
    assert kinds.count("w") == 4
    copying, computing = next(numbers for what, *numbers in trace if what == "w")
    assert all(numbers[1] == computing for what, *numbers in trace if what == "r")
    used = {numbers[2] for what, *numbers in trace if what == "a"}
    assert used == {copying, computing}


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks/traces").glob("*.txt")), ids=lambda f: f.stem)
def test_the_traces_kept_for_tests_are_traces(file):
    head = file.read_text().partition("\n")[0]
    assert file.stem in WORKLOADS
    assert f"live peak {live_peak(events(file))} bytes" in head


def entry(action: str, address: int, size: int) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_marks_are_replaced_by_what_they_stand_for():
    history = [
        entry("alloc", 10, 100),
        entry("segment_alloc", 0, 1 << 21),
        entry("alloc", 20, MARK),
        entry("free_requested", 20, MARK),
        entry("free_completed", 20, MARK),
        entry("alloc", 20, MARK),
        entry("free_requested", 20, MARK),
        entry("alloc", 20, 50),
        entry("free_requested", 10, 100),
    ]
    trace = convert(history, [("r", 10, 7), ("s", 0, 0)])
    assert trace.lines == ["a 0 100 0", "r 0 1", "s", "a 1 50 0", "f 0 0"]
    assert (trace.live_peak, trace.live_bytes, trace.marks) == (150, 50, 100 + MARK)


@pytest.mark.parametrize(
    ("history", "marks", "complaint"),
    [
        ([entry("alloc", 10, MARK)], [], "may: choose another MARK"),
        ([entry("alloc", 10, 8)], [("s", 0, 0)], "has lost marks"),
        ([entry("free_requested", 10, 8)], [], "which it has not allocated"),
        ([entry("alloc", 10, 8), entry("alloc", 10, 8)], [], "allocates 0xa twice"),
    ],
    ids=["a tensor of a mark's size", "a mark lost", "a request lost", "a free lost"],
)
def test_a_history_that_does_not_add_up_is_refused(history, marks, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        convert(history, marks)
