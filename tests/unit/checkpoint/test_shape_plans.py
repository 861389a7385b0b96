"""Plans for batches of other sizes and kinds: within the budget in every step, with the plain run's bits."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
import memopt.optim
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt.chain import InfeasibleBudget

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 32
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.inner, self.outer = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 128),
            nn.Linear(128, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            one.view(rows, length, 4, -1).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(rows, length, -1))
        return x + F.dropout(self.outer(F.gelu(self.inner(x))), 0.1, self.training)


class Language(nn.Module):
    """Its memory grows with the rows, and with the length and its square."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.token = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.token(tokens) * scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length))


def least_budget(model: nn.Module, sample: torch.Tensor) -> int:
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, sample, memory_budget=1, loss=loss)
    return error.value.least_budget


def planned(
    rows: int, length: int, room: float = 1.05, **options: object
) -> tuple[nn.Module, nn.Module, int]:
    """Return a planned model, a plain copy, and the budget, in which a batch of that size fits with some room."""
    torch.manual_seed(1)
    model, sample = Language(), tokens(rows, length)
    plain = copy.deepcopy(model)
    budget = int(least_budget(copy.deepcopy(model), sample) * room)
    memopt.auto_checkpoint(model, tokens(4, 16), memory_budget=budget, loss=loss, **options)
    return model, plain, budget


def step(model: nn.Module, batch: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model(batch))
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def peak_of(model: nn.Module, batch: torch.Tensor) -> int:
    loss(
        model(batch)
    )  # what is planned is planned here: a meter around trial steps hides their peaks from them
    standing = [*model.parameters(), batch]
    meter = Meter(torch.device("cpu"))
    meter.ignore(standing)
    model.zero_grad()
    with meter:
        loss(model(batch)).backward()
    model.zero_grad()
    return bytes_of(standing) + meter.peak


def same_steps(model: nn.Module, plain: nn.Module, batch: torch.Tensor) -> None:
    assert all(map(torch.equal, step(model, batch), step(plain, batch)))


def test_each_batch_of_a_training_is_within_the_budget_from_its_first_step() -> None:
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    model, plain, budget = planned(12, 48)
    plans = set()
    with no_warning():
        for _ in range(60 if SOAK else 12):
            batch = tokens(chance.randint(1, 12), chance.randint(1, 48))
            same_steps(model, plain, batch)
            assert model.plan.check().within and model.plan.check().measured_bytes is not None
            assert peak_of(model, batch) <= budget
            plans.add(id(model.plan))
    assert len(plans) > 1
    assert peak_of(plain, tokens(12, 48)) > budget


def test_a_batch_that_is_smaller_in_each_dimension_runs_by_the_plan() -> None:
    model, _, _ = planned(8, 32)
    step(model, tokens(8, 32))
    plan = model.plan
    for rows, length in ((8, 31), (7, 32), (5, 30)):
        step(model, tokens(rows, length))
        assert model.plan is plan
    step(model, tokens(9, 20))
    assert model.plan is not plan
    step(model, tokens(8, 32))
    assert model.plan is plan


def test_much_smaller_batches_get_a_plan_once_recomputation_has_cost_more() -> None:
    model, plain, _ = planned(12, 48)
    step(model, tokens(12, 48))
    large = model.plan
    assert large.runner is not None
    step(model, tokens(4, 15))  # by the plan of the sample, which keeps all
    assert model.plan is not large
    step(model, tokens(3, 40))
    assert model.plan is large
    entry = next(one for one in model.forward.plans if one.plan is large)
    before = entry.lost_seconds
    step(model, tokens(3, 40))
    assert entry.lost_seconds - before == pytest.approx(
        (large.seconds - large.plain_seconds) * 3 * 40 / (12 * 48)
    )
    entry.planning_seconds = 0.0
    with no_warning():
        same_steps(model, plain, tokens(3, 40))
    assert model.plan is not large
    assert model.plan.runner is None  # all of it fits


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "evaluation": lambda model: model.eval(),
    "a type": lambda model: model.double(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_of_call_is_planned(kind: str) -> None:
    model, plain, _ = planned(8, 32, room=3)
    batch = tokens(4, 16)
    same_steps(model, plain, batch)
    plan = model.plan
    for one in (model, plain):
        KINDS[kind](one)
    with no_warning():
        same_steps(model, plain, batch)
    assert (model.plan is plan) == (kind == "a type")  # the tokens are what they were
    with torch.autocast("cpu", torch.bfloat16), no_warning():
        same_steps(model, plain, batch)
    assert model.plan is not plan


def test_what_fits_no_plan_is_an_error_or_runs_by_the_least() -> None:
    strict, plain, budget = planned(4, 16, room=1, strict=True)
    large = tokens(16, 64)
    plan = strict.plan
    with pytest.raises(InfeasibleBudget, match=f"memory_budget is {budget} bytes"):
        strict(large)
    assert strict.plan is plan
    same_steps(strict, plain, tokens(4, 16))
    model, plain, _ = planned(4, 16, room=1)
    with pytest.warns(UserWarning, match="This batch runs by a plan for little more than that"):
        same_steps(model, plain, large)
    assert budget < peak_of(model, large) <= model.plan.memory_budget < peak_of(plain, large)
    with no_warning():
        same_steps(model, plain, large)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_the_plans_made_so_far(way: Callable[[nn.Module], nn.Module]) -> None:
    model, plain, budget = planned(8, 32)
    step(model, tokens(8, 32))
    other = way(model)
    with no_warning():
        assert peak_of(other, tokens(8, 32)) <= budget
        same_steps(other, plain, tokens(4, 16))
        same_steps(other, plain, tokens(8, 32))
    with pytest.warns(UserWarning, match="cannot be planned for now, since the model is a copy"):
        same_steps(other, plain, tokens(9, 32))
    assert other.forward.model is other
    memopt.undo_checkpoint(other)
    assert not any("forward" in module.__dict__ for module in other.modules())


def test_parameters_that_hooks_step_are_stepped_by_no_trial() -> None:
    model, _, _ = planned(8, 32)
    calls = []
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    plans = len(model.forward.plans)
    step(model, tokens(8, 32))
    assert len(calls) == 1 and len(model.forward.plans) > plans


def test_an_optimizer_that_steps_in_the_backward_pass_steps_in_no_trial() -> None:
    model, plain, _ = planned(8, 32)
    optimizers = [
        memopt.optim.AdamW(one.parameters(), lr=0.01, step_in_backward=one is model) for one in (model, plain)
    ]
    for batch in (tokens(4, 32), tokens(8, 32)):  # the larger one is planned for
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            step(one, batch)
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    memopt.undo_checkpoint(model)
    memopt.auto_checkpoint(model, tokens(8, 32), memory_budget="1GiB", optimizer=optimizers[0])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_what_cannot_be_planned_runs_with_a_warning_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain, _ = planned(8, 32)
    tried = []

    def refuse(*_: object) -> None:
        tried.append(1)
        raise ValueError("no reason")

    monkeypatch.setattr(type(model.forward.request), "plan", refuse)
    with pytest.warns(
        UserWarning, match="cannot be planned for, and its step's peak may exceed .*: no reason"
    ):
        same_steps(model, plain, tokens(8, 32))
    same_steps(model, plain, tokens(9, 32))
    assert len(tried) == 1


def test_a_loss_of_the_samples_targets_alone_is_replaced_with_a_warning() -> None:
    targets = torch.randn(4, 16, 50)

    def own_loss(out: torch.Tensor) -> torch.Tensor:
        return (out - targets).square().mean()

    for strict in (False, True):
        torch.manual_seed(1)
        model, sample = Language(), tokens(4, 16)
        plain = copy.deepcopy(model)
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=own_loss, strict=strict)
        if strict:
            with pytest.raises(
                ValueError, match="cannot be computed for a batch of another size: The size of"
            ):
                model(tokens(8, 16))
        else:
            with pytest.warns(UserWarning, match="planned for with the sum of the output"):
                same_steps(model, plain, tokens(8, 16))
        same_steps(model, plain, tokens(2, 16))


def test_where_the_loss_takes_no_other_batch_smaller_ones_run_by_the_plan_there_is() -> None:
    torch.manual_seed(1)
    model, sample, targets = Language(), tokens(8, 32), torch.randn(8, 32, 50)
    plain = copy.deepcopy(model)
    budget = int(1.05 * least_budget(copy.deepcopy(model), sample))
    memopt.auto_checkpoint(
        model, sample, memory_budget=budget, loss=lambda out: (out - targets).square().mean()
    )
    model.forward.plans[0].planning_seconds = 0.0
    plan = model.plan
    with no_warning():
        for _ in range(3):
            same_steps(model, plain, tokens(2, 16))
    assert model.plan is plan


def test_the_forward_has_the_models_signature() -> None:
    model, plain, _ = planned(8, 32)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_what_another_library_put_around_the_forward_stays_there_when_a_batch_is_planned() -> None:
    model, _, _ = planned(8, 32)
    inner, dtypes = model.forward, []

    def forward(*args: object) -> torch.Tensor:  # as accelerate does
        with torch.autocast("cpu", torch.bfloat16):
            out = inner(*args)
        dtypes.append(out.dtype)
        return out.float()

    model.forward = forward
    for rows in (8, 4):
        step(model, tokens(rows, 32))  # the first is planned for: under autocast it is another call
    assert dtypes == 2 * [torch.bfloat16] and model.forward is forward


def test_a_batch_planned_between_others_adds_its_gradients_to_theirs() -> None:
    model, plain, _ = planned(8, 32, room=1.5)
    batches = [tokens(4, 16), tokens(8, 32), tokens(6, 20)]

    def added(one: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one.zero_grad()
        for batch in batches:
            loss(one(batch)).backward()
        return [*(p.grad for p in one.parameters()), torch.get_rng_state()]

    with no_warning():
        assert all(map(torch.equal, added(model), added(plain)))
    assert len(model.forward.plans) == 2


def test_the_state_of_an_optimizer_that_is_gone_counts_as_it_did() -> None:
    torch.manual_seed(1)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters())
    memopt.auto_checkpoint(model, tokens(4, 16), memory_budget="1GiB", loss=loss, optimizer=optimizer)
    with_state = model.plan.fixed_bytes
    del optimizer
    gc.collect()
    batch = tokens(8, 16)
    step(model, batch)
    assert model.plan.fixed_bytes - batch.nbytes == pytest.approx(with_state - batch.nbytes // 2, abs=8192)
    assert with_state > 3 * sum(p.nbytes for p in model.parameters())
