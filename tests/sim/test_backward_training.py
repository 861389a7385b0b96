"""Training by memopt.backward on less memory than a plain step takes: what comes out, what it remembers, and that
nothing stays."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt import sim
from tests.helpers.backward_steps import MEMORY, MIB, SAMPLES, SOAK, Net, Trial, trial  # noqa: F401

SIM = {"memory": "1GiB"}


def between(trial: Trial, share: float) -> int:  # noqa: F811
    """A capacity between what one sample takes and what all do."""
    least, most = trial.needed(1), trial.needed(SAMPLES)
    return int(least + share * (most - least))


def ooms() -> int:
    return torch.cuda.memory_stats()["num_ooms"]


def test_the_size_is_remembered_and_grows_back_when_there_is_room(trial: Trial) -> None:  # noqa: F811
    sim.set_memory(between(trial, 0.5))
    trial.run()
    failed, pieces = ooms(), [n for n in trial.calls if n < SAMPLES]
    assert failed and pieces
    trial.model.zero_grad()
    trial.run()
    assert ooms() == failed and max(trial.calls) < SAMPLES
    sim.set_memory(MEMORY)
    trial.model.zero_grad()
    trial.run()
    assert trial.calls == [SAMPLES] and trial.difference() < 1e-6


def test_one_failure_of_a_device_that_has_room_does_not_cut_the_next_step(trial: Trial) -> None:  # noqa: F811
    trial.run()
    trial.forget()
    sim.fail("cudaMalloc", after=0, count=3)
    trial.run()
    assert min(trial.calls) < SAMPLES
    trial.model.zero_grad()
    trial.run()
    assert trial.calls[0] == SAMPLES
    assert trial.difference() < 1e-6


def test_a_larger_input_is_cut_at_once_where_a_smaller_one_had_to_be(trial: Trial) -> None:  # noqa: F811
    sim.set_memory(between(trial, 0.5))
    trial.run()
    longer = torch.cat([trial.x, trial.x], 1)
    trial.calls.clear()
    with sim.Compute():
        memopt.backward(trial.fn, longer, trial.y, model=trial.model)
    assert trial.calls[0] < SAMPLES


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_gradients_at_entry_are_added_to_and_stay_who_they_are(trial: Trial, share: float) -> None:  # noqa: F811
    sim.set_memory(between(trial, share))
    trial.run()
    before = [p.grad for p in trial.model.parameters()]
    for n in range(2, 5):
        trial.run()
        assert trial.difference(n) < 1e-6
    assert all(p.grad is grad for p, grad in zip(trial.model.parameters(), before, strict=True))


def test_an_accumulation_that_does_not_fit_leaves_the_gradients_as_they_were(trial: Trial) -> None:  # noqa: F811
    with sim.Compute():
        trial.run_plain()
    long = trial.x.repeat(1, 64, 1)  # 16 MiB an activation
    torch.cuda.empty_cache()
    sim.set_memory(sim.stats()["bytes"] + MIB)
    random = torch.cuda.get_rng_state()
    words = r"even one sample \(of 8\) does not fit: it needs at least .* of device memory"
    with sim.Compute(), pytest.raises(torch.OutOfMemoryError, match=words):
        memopt.backward(trial.fn, long, trial.y, model=trial.model)
    assert trial.difference() == 0
    assert torch.equal(random, torch.cuda.get_rng_state())


class Parked(nn.Module):
    """Parameters that are most of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(2048, 2048) / 45)  # 16 MiB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean(1)


def test_gradients_at_entry_go_to_the_host_where_one_sample_does_not_fit_beside_them(trial: Trial) -> None:  # noqa: F811
    model = Parked().cuda()
    x = torch.randn(1, 2048, device="cuda")
    with sim.Compute():
        model(x).mean().backward()
    expected, entry = 2 * model.weight.grad.cpu(), model.weight.grad
    torch.cuda.empty_cache()
    # What there is, and less than the step's gradients beside.
    sim.set_memory(sim.stats()["bytes"] + 12 * MIB)
    with sim.Compute():
        memopt.backward(model, x, model=model)
    assert model.weight.grad is entry
    assert torch.allclose(model.weight.grad.cpu(), expected, rtol=1e-6)


def losses(steps: int, capacity: int, amp: bool) -> list[float]:
    """As a script would be: AMP, clipping, a schedule; one line is memopt's."""
    model = Net().cuda()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    data = torch.randn(4, SAMPLES, 256, 32, generator=generator)
    labels = torch.randint(4, (4, SAMPLES), generator=generator)
    found = []
    sim.set_memory(capacity)

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=amp):
            return F.cross_entropy(model(x), y)

    with sim.Compute():
        for number in range(steps):
            x, y = data[number % 4].cuda(), labels[number % 4].cuda()
            optimizer.zero_grad()
            loss = memopt.backward(compute_loss, x, y, model=model, scaler=scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            found.append(loss.item())
            if number == 3:
                first_epoch = ooms()
    sim.set_memory(MEMORY)
    return [*found, ooms() - first_epoch]


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "amp"])
def test_a_training_run_in_less_memory_has_the_plain_ones_losses(trial: Trial, amp: bool) -> None:  # noqa: F811
    steps = max(6, (200 if SOAK else 12) // (8 if amp else 1))  # half precision is slow on a CPU
    capacity = between(trial, 0.3)
    *plain, _ = losses(steps, MEMORY, amp)
    *cut, later = losses(steps, capacity, amp)
    assert later == 0
    assert max(abs(a - b) for a, b in zip(plain, cut, strict=True)) < (2e-2 if amp else 1e-4)


def test_nothing_stays_of_cut_steps(trial: Trial) -> None:  # noqa: F811
    sim.set_memory(between(trial, 0.5))
    held = []
    for number in range(40 if SOAK else 8):
        trial.model.zero_grad()
        if number % 2:
            sim.fail("cudaMalloc", count=3)
            torch.cuda.empty_cache()
        trial.run()
        sim.fail_clear()
        gc.collect()
        held.append((torch.cuda.memory_allocated(), sum(type(o) is torch.Tensor for o in gc.get_objects())))
    assert held[-1] == held[3]
