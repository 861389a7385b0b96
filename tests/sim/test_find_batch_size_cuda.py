"""memopt.find_batch_size on a device: with real numbers, torch's allocator and one that is full, the largest size is
found, exactly, and everything is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
import memopt.sim
from memopt.batch_sizes import NoBatchSizeFits

SIM = {"memory": "128MiB", "context": "8MiB"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_workspaces():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    yield
    memopt.sim.set_memory("128MiB")


class Training:
    """A step in which activations, and not the optimizer, are the most."""

    def __init__(self, dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(128, 512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 8),
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.sizes: list[int] = []

    def step(self, n: int) -> None:
        self.sizes.append(n)
        x = torch.randn(n, 128, device="cuda")
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        rest = [torch.cuda.get_rng_state(), torch.get_rng_state()]
        return [t.detach().cpu().clone() for t in (*self.model.parameters(), *states, *rest)]


def runs(training: Training, n: int) -> bool:
    """Return whether two steps of n run, from an empty cache."""
    torch.cuda.empty_cache()
    try:
        training.step(n)
        training.step(n)
    except torch.OutOfMemoryError:
        return False
    finally:
        training.optimizer.zero_grad()
    return True


def test_everything_is_bit_for_bit_as_it_was():
    training = Training()
    with memopt.sim.Compute():
        training.step(4)
        before = training.values()
        found = memopt.find_batch_size(
            training.step, maximum=200, model=training.model, optimizer=training.optimizer
        )
        assert all(map(torch.equal, training.values(), before))
    assert found.batch_size == 200 and len(training.sizes) == 1 + 2 * len(found.tried)


def test_it_is_the_true_maximum():
    training = Training()
    found = memopt.find_batch_size(
        training.step, model=training.model, optimizer=training.optimizer, headroom=0
    )
    assert found.batch_size in training.sizes
    assert found.device == "cuda:0" and found.total_bytes == 128 * MIB
    tried = {trial.batch_size: trial for trial in found.tried}
    assert tried[found.batch_size].fits and not tried[found.batch_size + 1].fits
    assert "when it requested" in tried[found.batch_size + 1].why
    held = torch.cuda.memory_reserved()
    assert runs(training, found.batch_size) and not runs(training, found.batch_size + 1)
    assert held < 64 * MIB  # the last try's cache is given back


def test_states_that_the_first_step_makes_are_there_when_it_counts():
    """A first step runs without them; what would fit then may not in the second."""
    training = Training()
    found = memopt.find_batch_size(
        training.step, model=training.model, optimizer=training.optimizer, headroom=0
    )
    assert not training.optimizer.state
    assert runs(training, found.batch_size)
    training = Training()
    once = memopt.find_batch_size(
        training.step,
        found.batch_size + 100,
        model=training.model,
        optimizer=training.optimizer,
        headroom=0,
        steps=1,
    )
    assert once.batch_size >= found.batch_size


@pytest.mark.parametrize("headroom", [0.1, 0.5])
def test_headroom_is_free_at_the_peak(headroom: float):
    training = Training()
    found = memopt.find_batch_size(
        training.step, model=training.model, optimizer=training.optimizer, headroom=headroom, within=0
    )
    limit = int((1 - headroom) * 128 * MIB)
    best = [trial for trial in found.tried if trial.batch_size == found.batch_size]
    assert best[0].held_bytes <= limit == found.room_bytes
    memopt.sim.reset_peak()
    torch.cuda.empty_cache()
    runs(training, found.batch_size)
    assert memopt.sim.stats()["bytes_peak"] <= limit
    above = [trial for trial in found.tried if trial.batch_size == found.batch_size + 1]
    assert above and not above[0].fits and "not left free" in above[0].why


def test_memory_of_others_is_taken():
    training = Training()
    alone = memopt.find_batch_size(training.step, model=training.model, optimizer=training.optimizer)
    memopt.sim.set_memory("96MiB")
    less = memopt.find_batch_size(training.step, model=training.model, optimizer=training.optimizer)
    assert 0 < less.batch_size < alone.batch_size and less.total_bytes == 96 * MIB


def test_a_budget_is_of_what_lives():
    training = Training()
    found = memopt.find_batch_size(
        training.step, model=training.model, optimizer=training.optimizer, headroom=0, memory_budget="64MiB"
    )
    assert found.peak_bytes <= 64 * MIB
    above = [trial for trial in found.tried if trial.batch_size == found.batch_size + 1]
    assert above[0].peak_bytes > 64 * MIB and "of a budget of 64.0 MiB" in above[0].why


def test_the_least_bytes_are_told_where_none_fits():
    training = Training()
    memopt.sim.set_memory("32MiB")
    with pytest.raises(NoBatchSizeFits) as caught:
        memopt.find_batch_size(training.step, model=training.model, optimizer=training.optimizer, headroom=0)
    assert caught.value.least > 16 * MIB
    memopt.sim.set_memory("128MiB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert runs(training, 1) and torch.cuda.max_memory_allocated() >= caught.value.least


@pytest.mark.parametrize("k", range(0, 60, 7))
def test_an_allocation_that_fails_anywhere_leaves_all_as_it_was(k: int):
    """The device refuses the k-th request, once: whatever was being done, it is undone."""
    training = Training()
    with memopt.sim.Compute():
        training.step(4)
        before, live = training.values(), torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        memopt.sim.fail("cudaMalloc", after=k, count=2)  # torch asks twice
        found = memopt.find_batch_size(
            training.step, 8, maximum=64, model=training.model, optimizer=training.optimizer
        )
        assert all(map(torch.equal, training.values(), before))
        assert torch.cuda.memory_allocated() == live
    assert 1 <= found.batch_size <= 64


def test_a_size_that_adapts_gives_the_failed_steps_memory_back():
    size = memopt.BatchSize(64)

    def step(n: int) -> int:
        x = torch.empty(n, MIB, dtype=torch.uint8, device="cuda")
        y = torch.empty(n, 7 * MIB, dtype=torch.uint8, device="cuda")
        return len(x) + len(y)

    assert size.run(step) == 32 or int(size) < 32
    assert torch.cuda.memory_allocated() == 0 and int(size) <= 30
    size = memopt.BatchSize(64)
    with size.attempt() as attempt:
        step(64)
    assert attempt.failed and torch.cuda.memory_reserved() == 0
