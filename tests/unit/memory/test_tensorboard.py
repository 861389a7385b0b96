"""memopt.profile().tensorboard(): what TensorBoard's own reader finds in the event file is what the profile says."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from environment_python import run_there
from torch import nn

import memopt
from memopt._memory.recording.exports import step_scalars
from memopt._memory.recording.recording import CATEGORIES

MIB = 1 << 20

TRAIN = """
import json, sys
import memopt.sim
memopt.sim.activate(memory="256MiB")
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
import memopt
from memopt._memory.recording.exports import step_scalars

def trained(device, folder):
    model = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows):
        model(torch.ones(rows, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with memopt.profile(device) as memory:
        handler = memory.tensorboard(folder)
        written = []
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
            on_trace_ready=lambda profiler: (handler(profiler), written.append(profiler.step_num)),
        ) as profiler:
            for rows in (256, 512, 1024, 256, 256, 2048, 256, 256, 256):
                step(rows)
                profiler.step()
        name = memory.recording.device.replace(":", "_")
        between = EventAccumulator(folder).Reload().Scalars(f"memory_MiB/{name}/peak")
        blocks = memory.recording.blocks
        assert memory.peak and memory.recording.blocks == blocks, "reading records nothing"

    found = EventAccumulator(folder).Reload()
    tags = found.Tags()["scalars"]
    return {
        "written": written,
        "between": [event.step for event in between],
        "scalars": {tag: [[e.step, e.value, e.wall_time] for e in found.Scalars(tag)] for tag in tags},
        "steps": [one._asdict() for one in step_scalars(memory.recording)],
        "peak": memory.peak,
        "device": name,
    }

print(json.dumps({device: trained(device, f"{sys.argv[1]}/{device}") for device in ("cuda", "cpu")}))
"""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    return json.loads(run_there("extras", TRAIN, str(tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_step_of_a_profiled_training_is_there_once(device, trainings):
    told = trainings[device]
    assert told["written"] == [4, 8] and told["between"] == list(range(8))
    prefix = f"memory_MiB/{told['device']}/"
    names = {*CATEGORIES, "peak", "after_step"} | ({"held"} if device == "cuda" else set())
    assert set(told["scalars"]) == {prefix + name for name in names}
    peaks = told["scalars"][prefix + "peak"]
    assert [step for step, _, _ in peaks] == list(range(9))
    for n, expected in enumerate(told["steps"]):
        assert peaks[n][1] == pytest.approx(expected["peak"] / MIB, rel=1e-6)
        assert peaks[n][2] == pytest.approx(expected["time_us"] / 1e6, abs=1e-3)
        parts = [told["scalars"][prefix + name][n][1] for name in CATEGORIES]
        assert sum(parts) == pytest.approx(peaks[n][1], rel=1e-5)
        assert told["scalars"][prefix + "after_step"][n][1] == pytest.approx(
            expected["after"] / MIB, rel=1e-6
        )
    assert max(value for _, value, _ in peaks) == pytest.approx(told["peak"] / MIB, rel=1e-6)
    assert peaks[5][1] == max(value for _, value, _ in peaks), "the one with most rows"
    if device == "cuda":
        held = [value for _, value, _ in told["scalars"][prefix + "held"]]
        assert all(held[n] >= peaks[n][1] for n in range(9))


class Writer:
    def __init__(self) -> None:
        self.added: list[tuple[str, float, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        self.added.append((tag, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def peaks(self) -> list[int]:
        return [step for tag, _, step in self.added if tag.endswith("/peak")]


def test_a_writer_of_the_programs_own_is_used_and_stays_open():
    """It has no close() that could be called."""
    writer = Writer()
    with memopt.profile("cpu") as memory:
        handler = memory.tensorboard(writer)
        for _ in range(3):
            held = torch.ones(MIB // 4)
            memory.step()
        assert writer.peaks() == []
        handler()
        assert writer.peaks() == [0, 1, 2] and writer.flushed == 1
        del held
        memory.step()
    assert writer.peaks() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="has ended"):
        handler()


def test_of_steps_that_are_not_kept_the_numbers_are_right():
    writer = Writer()
    with memopt.profile("cpu", max_events=64) as memory:
        memory.tensorboard(writer)
        for _ in range(100):
            for _ in range(4):
                torch.ones(8)
            memory.step()
    steps = writer.peaks()
    assert 0 < len(steps) < 100 and steps == list(range(100 - len(steps), 100))


def test_without_a_profile_that_runs_or_without_tensorboard_it_says_so(monkeypatch, tmp_path):
    memory = memopt.profile("cpu")
    with pytest.raises(RuntimeError, match="within `with memopt.profile"):
        memory.tensorboard(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with memory, pytest.raises(ImportError, match=r"pip install 'memopt\[tensorboard\]'"):
        memory.tensorboard(tmp_path)


def test_scalars_of_a_step_are_those_of_its_highest_moment(one_thread):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memopt.profile("cpu") as prof:
        for rows in (64, 4096, 64):
            model(torch.ones(rows, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = step_scalars(prof.recording)
    live = prof.recording.live_bytes()
    ends = [mark.event for mark in prof.recording.marks if mark.kind == "step"]
    assert [step.event for step in steps] == ends and len(ends) == 3
    begin = -1
    for step, end in zip(steps, ends, strict=True):
        assert step.peak == max(live[begin + 1 : end + 2].tolist()) == sum(step.categories.values())
        assert step.after == int(live[end + 1])
        begin = end
    above = [step.peak - step.after for step in steps]  # what kernels keep to work in is after
    assert above[1] > 2 * above[0] and steps[1].held is None
