"""The recorder on torch's own allocator: bytes as the allocator counts them, lines, modules, categories."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch
from torch import nn

import memopt
from memopt._memory.recording import recorder, torch_history
from memopt.sim._activation import wait_for_workers

SIM = {"memory": "256MiB", "devices": 2}
WORKSPACE = 8320 << 10


@pytest.fixture
def running():
    gc.collect()
    torch.cuda.empty_cache()
    recording = recorder.start("cuda")
    yield recording
    recording.stop()


class Net(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def train(model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(32, 64, device="cuda")
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wait_for_workers(60)  # autograd's threads drop what they hold after backward() has returned


def requested(device: int = 0) -> int:
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def test_every_byte_is_there_and_positions_are_events(running):
    before = requested()
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 4)
    seen = running.recording()
    assert int(seen.live_bytes()[0]) == before and int(seen.live_bytes()[-1]) == requested()
    assert running.position("cuda:0") == seen.events
    steps = [mark.event for mark in seen.marks if mark.kind == "step"]
    assert len(steps) == 4
    parameters = sum(p.nbytes for p in model.parameters())
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.is_cuda)
    for event in steps:
        at = seen.by_category(event)
        assert (at["parameters"], at["gradients"], at["optimizer"]) == (parameters, parameters, states)
        assert at["inputs"] == 32 * 64 * 4
        assert at["other"] in (before, before + WORKSPACE, before + 2 * WORKSPACE)
    assert seen.capacity == 256 << 20
    assert "simulated, not measured" in seen.source and seen.facts["peak_allocated"] >= seen.peak()[0]


def test_reserved_memory_is_followed_and_ends_as_the_allocator_says(running):
    x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    y = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    seen = running.recording()
    assert int(seen.reserved_bytes[-1]) == torch.cuda.memory_reserved()
    assert int(seen.reserved_bytes.max()) >= 30 << 20
    assert y.is_cuda


def test_lines_and_modules_are_named_in_forward_and_backward(running):
    model = Net().cuda()
    x = torch.randn(32, 64, device="cuda")
    loss = (model(x) ** 2).mean()
    loss.backward(); line = inspect.currentframe().f_lineno  # fmt: skip # noqa: E702
    seen = running.recording()
    rows = {row.name: row for row in seen.by_line(seen.events - 1)}
    gradients = sum(p.nbytes for p in model.parameters())
    assert rows[f"test_recorder_cuda.py:{line}"].bytes - gradients in (0, WORKSPACE)
    assert rows[f"test_recorder_cuda.py:{line}"].text.startswith("loss.backward()")
    made = {seen.modules[n] for n in seen.columns["module"].tolist()}
    assert {"Net", "Net.first", "Net.second"} <= made
    del loss


def test_a_ring_that_overflows_keeps_what_lives_and_what_it_is_for():
    recording = recorder.start("cuda", max_events=60)
    try:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 12)
        seen = recording.recording()
        assert seen.events <= 60 and seen.facts["events_lost"] > 0
        assert int(seen.live_bytes()[-1]) == requested()
        at = seen.by_category(seen.events - 1)
        assert at["parameters"] == sum(p.nbytes for p in model.parameters())
        assert at["optimizer"] >= 2 * at["parameters"]
    finally:
        recording.stop()


def test_counters_that_the_program_sets_back_do_not_shift_what_follows(running):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    running.position("cuda:0")
    torch.cuda.reset_accumulated_memory_stats()
    train(model, optimizer, 2)
    seen = running.recording()
    steps = [mark.event for mark in seen.marks if mark.kind == "step"]
    assert seen.by_category(steps[-1])["gradients"] == sum(p.nbytes for p in model.parameters())


def test_an_out_of_memory_is_marked(running):
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    seen = running.recording()
    assert [(mark.kind, mark.text) for mark in seen.marks] == [("oom", "requested 1.00 GiB")]


def test_each_device_has_its_own(running):
    x = torch.ones(1000, device="cuda:1")
    y = torch.ones(500, device="cuda:0")
    assert running.devices() == ["cuda:0", "cuda:1"]
    assert x.nbytes in running.recording("cuda:1").columns["size"].tolist()
    assert y.nbytes in running.recording("cuda:0").columns["size"].tolist()
    assert x.nbytes not in running.recording(0).columns["size"].tolist()


def test_a_programs_own_history_is_used_and_left_on():
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        recording = recorder.start("cuda")
        x = torch.ones(12345, device="cuda")
        assert x.nbytes in recording.recording().columns["size"].tolist()
        recording.stop()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_a_history_that_is_not_as_torch_writes_it_is_refused():
    for trace in ([{"action": "alloc"}], [{"action": "alloc", "addr": "x", "size": 1, "stream": 0}], 7):
        with pytest.raises(ValueError, match="not in torch's format"):
            torch_history.read({"device_traces": [trace], "segments": []}, 0)


def test_what_a_wrapper_wraps_is_for_what_the_wrapper_is(running):
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(512, 512, bias=False, device="cuda")
    halves = [torch.randn(512, 512, device="cuda") for _ in range(2)]
    model.weight = nn.Parameter(TwoTensor(*halves))
    model(torch.randn(4, 512, device="cuda"))
    seen = running.recording("cuda")
    assert seen.by_category(seen.events - 1)["parameters"] == 2 * halves[0].nbytes


def test_steps_are_compared_by_what_each_takes_of_the_device():
    def holding(mebibytes: int):
        def build():
            kept = torch.zeros(mebibytes << 20, dtype=torch.uint8, device="cuda")

            def step() -> None:
                torch.zeros(len(kept), dtype=torch.uint8, device="cuda")

            return step

        return build

    there_before = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    found = memopt.compare_steps({"32": holding(32), "16": holding(16), "200": holding(200)}, steps=3)
    assert [one.peak_bytes >> 20 for one in found.measured.values()] == [64, 32, 200]
    assert [bool(one.failed) for one in found.measured.values()] == [False, False, True]
    assert found["32"].held_bytes - found["16"].held_bytes == 32 << 20 and found["16"].held_bytes >= 40 << 20
    assert found.saved("16") == 0.5 and not found["16"].seconds
    assert recorder.active() is None
    del there_before
