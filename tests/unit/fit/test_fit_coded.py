"""memopt.fit(allow={"8bit-activations"}): planned where nothing more exact fits, and never unasked."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt._run.plan import CODED_ACTIVATIONS
from tests.helpers.fit_models import Training, peak_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")
ALLOW = {"8bit-activations"}


class Deep(nn.Module):
    """A stage that saves much more than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = F.gelu(layer(y))
        return x + self.dropout(y)


def deep() -> Training:
    """It draws random numbers, so that micro-batches would draw others; and gradients are as large as activations."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Deep(256) for _ in range(6)), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    sample = torch.randn(256, 256), torch.randint(0, 10, (256,))
    return Training("deep", model, optimizer, sample, F.cross_entropy)


def fit(one: Training, budget: int, **options) -> memopt.types.Fit:
    return one.fit(budget, reads_gradients=True, **options)


@pytest.fixture(scope="module")
def budget() -> int:
    """Between the least budget of a schedule that recomputes and the one of a schedule that codes too."""
    least = [fit(deep(), 33 << 19, allow=allow).least_budget for allow in ((), ALLOW)]
    assert 33 << 19 < least[1] < 0.99 * least[0]
    return (least[0] + least[1]) // 2


def test_it_is_planned_where_nothing_more_exact_fits_and_only_if_allowed(budget: int) -> None:
    refused = fit(deep(), budget)
    assert not refused.fits and refused.refused[CODED_ACTIVATIONS] == (
        "changes results: allow={'8bit-activations'}"
    )
    found = fit(deep(), budget, allow=ALLOW)
    assert found.names == {CODED_ACTIVATIONS} and found.tier == "other numbers"
    assert found.peak_bytes <= budget and found.rows[0].evidence == "tested by steps"
    assert "stages are kept in 8 bits or run again" in str(found)
    assert "to='8bit'" in found.code() and found.planned.plan.offloaded
    larger = fit(deep(), 2 * budget, allow=ALLOW)
    assert not larger.names  # it fits as it is
    between = fit(deep(), int(1.1 * budget), allow=ALLOW)
    assert between.names == {"checkpoint"} and between.tier == "bit-equal"


def gradients(one: Training, step) -> tuple[float, torch.Tensor]:
    torch.manual_seed(1)
    loss = step()
    grads = torch.cat([p.grad.flatten() for p in one.model.parameters()])
    one.model.zero_grad()
    return float(loss), grads


def plain(one: Training) -> torch.Tensor:
    loss = one.compute(*one.batch)
    loss.backward()
    return loss.detach()


def test_applied_it_trains_within_the_budget_and_removed_it_is_gone(budget: int) -> None:
    one = deep()
    found = fit(one, budget, allow=ALLOW)
    before = copy.deepcopy(one.model.state_dict())
    loss, wanted = gradients(one, lambda: plain(one))
    with found.apply() as handle:
        got_loss, got = gradients(one, lambda: handle.backward(*one.batch))
        assert got_loss == loss  # the forward pass is the plain one
        assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.02

        def step() -> None:
            handle.backward(*one.batch)
            handle.optimizer.step()
            handle.optimizer.zero_grad()

        assert peak_on_cpu(one.standing(), step) <= budget
        assert one.model.plan.offload == "8bit" and one.model.plan.check().within
    one.model.load_state_dict(before)
    assert not hasattr(one.model, "plan")
    assert torch.equal(gradients(one, lambda: plain(one))[1], wanted)


def test_the_lines_do_what_apply_does(budget: int) -> None:
    one = deep()
    found = fit(one, budget, allow=ALLOW)
    room = {"memopt": memopt, "model": one.model, "optimizer": one.optimizer, "sample": one.sample}
    exec(found.code(), room | {"loss": one.loss, "torch": torch})
    assert one.model.plan.offload == "8bit" and one.model.plan.peak_bytes <= budget
    memopt.undo_checkpoint(one.model)


class Whole(nn.Module):
    """Calls no module: it has no stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def test_a_model_without_stages_is_told_why_it_is_not_tried() -> None:
    model = Whole()
    sample = torch.randn(64, 64), torch.randint(0, 10, (64,))
    one = Training("", model, torch.optim.SGD(model.parameters(), lr=0.1), sample, F.cross_entropy)
    refused = fit(one, 1 << 30, allow=ALLOW).refused
    assert refused[CODED_ACTIVATIONS] == refused["checkpoint"] != ""
