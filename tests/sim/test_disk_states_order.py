"""The order of disk, copies and computation with states on a disk, on a device that does its work as late as it may or,
on one stream, as early, and with a disk that does so: each wait is needed."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt.optim
from memopt import _C, sim
from memopt._offload.pinned_memory import CopyIn
from memopt.optim import _disk_states, _turns
from memopt.optim._disk_states import DiskTrip, Passage
from memopt.optim._one_pass import OnePass
from tests.helpers.failing_disk import FailingDisk, Plan, ReadJob, WriteJob
from tests.helpers.stream_orders import run_ahead

SIM = {"memory": "1GiB"}

SEED = int(os.environ.get("MEMOPT_SEED", "0"))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
COUNT = 1 << 17  # elements of a parameter: not of the allocator's small ones
PARAMETERS = 8
DISKS = ["its time", "once", "last"]
AHEAD = ["computation", "computation, the others slowly", "copies", "copies in", "neither", "either"]


@pytest.fixture(autouse=True)
def a_turn_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 8 * COUNT)
    monkeypatch.setattr(_disk_states, "CHUNK", 4 * COUNT)
    monkeypatch.setattr(_disk_states, "AREA", 3 * 4 * COUNT)


def wrong_after(directory: Path, ahead: str, disk: str = "its time", steps: int = 3, seed: int = 0) -> int:
    """The number of parameters, of what was read of them after each step, and of states that are not what the steps
    should have made of them."""
    where: list[int] = []
    go = functools.partial(run_ahead, ahead, where, random.Random(seed))

    update = OnePass._update

    def ahead_of(self: OnePass, scaling: Any) -> None:
        go()
        update(self, scaling)
        go()

    ps = [nn.Parameter(torch.zeros(COUNT).cuda()) for _ in range(PARAMETERS)]
    made = [torch.zeros(COUNT).pin_memory() for _ in ps]
    seen: list[list[torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "Disk", Plan(at=disk).disk)
        patch.setattr(OnePass, "_update", ahead_of)
        optimizer = memopt.optim.SGD(ps, lr=1.0, momentum=0.5, offload_states=directory)
        for step in range(-1, steps):  # the first one takes what is taken once
            if step == 0:  # the device computes no zeros here
                held = optimizer.state_dict()
                zeros = {k: {"momentum_buffer": torch.zeros(COUNT)} for k in range(PARAMETERS)}
                optimizer.load_state_dict({**held, "state": zeros})
                for p in ps:
                    p.data.copy_(torch.zeros(COUNT))
                torch.cuda.synchronize()
                streams = _C.copy_counts(0)
                where += streams["stream_in"], streams["stream_out"]
                sim.lazy(True)
            if step >= 0:
                made = [torch.full((COUNT,), 100.0 * step + k).pin_memory() for k in range(PARAMETERS)]
            for p, gradient in zip(ps, made, strict=True):
                p.grad = torch.empty(COUNT, device="cuda")
                p.grad.copy_(gradient, non_blocking=True)
            optimizer.step()
            if step >= 0:
                seen.append([torch.empty(COUNT).pin_memory() for _ in ps])
                for p, read in zip(ps, seen[-1], strict=True):
                    read.copy_(p.detach(), non_blocking=True)
            for _ in range(50 if "slowly" in ahead else 1):
                go()
        torch.cuda.synchronize()
        sim.lazy(False)
        left = optimizer.state_dict()["state"]
    wrong = 0
    for k, p in enumerate(ps):
        value = buffer = 0.0
        for step in range(steps):
            buffer = 0.5 * buffer + 100.0 * step + k
            value -= buffer
            wrong += not torch.equal(seen[step][k], torch.full((COUNT,), value))
        wrong += not torch.equal(p.detach().cpu(), torch.full((COUNT,), value))
        wrong += not torch.equal(left[k]["momentum_buffer"], torch.full((COUNT,), buffer))
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_the_step_reads_what_the_last_one_wrote_whoever_is_ahead(
    ahead: str, disk: str, tmp_path: Path
) -> None:
    for n in range((100 if SOAK else 2) if ahead == "either" else 1):
        assert wrong_after(tmp_path, ahead, disk, seed=SEED + n) == 0, f"seed {SEED + n}"


def is_needed(tmp_path: Path) -> bool:
    """Return whether a run as above is wrong, or finds that bytes are not what was written."""

    def fails(ahead: str, disk: str) -> bool:
        try:
            return wrong_after(tmp_path, ahead, disk) > 0
        except OSError as error:
            torch.cuda.synchronize()
            sim.lazy(False)
            return "differ from the bytes that were written" in str(error)

    # The last disk first, which finds most.
    return any(fails(ahead, disk) for disk in reversed(DISKS) for ahead in AHEAD[:-1])


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize("job", [ReadJob, WriteJob])
def test_each_wait_for_the_disk_is_needed(job: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job, "finish", lambda _: None)
    assert is_needed(tmp_path)


@pytest.mark.sampled("waits that a step needs")
@pytest.mark.parametrize("way", ["read", "write"])
def test_each_wait_of_the_disk_for_a_copy_is_needed(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin: Callable[..., Any] = getattr(FailingDisk, way)
    monkeypatch.setattr(FailingDisk, way, lambda *args: begin(*args[:4], 0))
    assert is_needed(tmp_path)


@pytest.mark.sampled("waits that a step needs")
def test_what_comes_is_behind_the_copy_out_of_what_had_its_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = DiskTrip.begin
    monkeypatch.setattr(DiskTrip, "begin", lambda self, there, after: begin(self, there, 0))
    assert is_needed(tmp_path)


@pytest.mark.sampled("waits that a step needs")
def test_the_update_waits_for_what_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The end of the turns (Turns.end) has no wait of its own here: the step ends when all is written."""
    function = CopyIn.join

    def call(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_C, "copy_await", lambda *_: None)
            return function(*args)

    monkeypatch.setattr(CopyIn, "join", call)
    assert is_needed(tmp_path)


def test_reads_begin_while_earlier_turns_compute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a turn is updated, the next is here, and of those behind it as many are read as their area holds."""
    ahead: list[int] = []
    update, passages = OnePass._update, []
    made = Passage.ahead
    monkeypatch.setattr(Passage, "ahead", lambda self: passages.append(self) or made(self))
    monkeypatch.setattr(
        OnePass, "_update", lambda *args: (ahead.append(len(passages[-1]._reading)), update(*args))[1]
    )
    ps = [nn.Parameter(torch.zeros(COUNT).cuda()) for _ in range(PARAMETERS)]
    optimizer = memopt.optim.SGD(ps, lr=1.0, momentum=0.5, offload_states=tmp_path)
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert ahead == [3] * (PARAMETERS - 4) + [2, 1, 0, 0]
