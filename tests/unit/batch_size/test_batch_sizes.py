"""memopt.BatchSize and its sampler, accumulation that keeps the effective batch, learning rates for another size."""

from __future__ import annotations

import gc
import json
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import memopt
from memopt.batch_sizes import Accumulation, rescale_learning_rate_, scaled_learning_rate


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


# ---- a size that adapts ----------------------------------------------------------------------------------------------


def simulated(size: memopt.BatchSize, steps: int, largest) -> list[tuple[int, bool]]:
    """Steps on a device that holds largest(step) samples."""
    seen = []
    for step in range(steps):
        with size.attempt() as attempt:
            seen.append((int(size), int(size) <= largest(step)))
            if not seen[-1][1]:
                out_of_memory()
        assert attempt.failed is not seen[-1][1] and attempt.size == seen[-1][0]
    return seen


@pytest.mark.parametrize("seed", range(50))
def test_it_ends_at_the_largest_that_fits_and_runs_out_no_more(seed: int):
    chance = random.Random(seed)
    largest = chance.randrange(1, 300)
    size = memopt.BatchSize(
        chance.randrange(1, 300),
        maximum=300,
        shrink=chance.choice([0.5, 0.9]),
        grow_after=3,
        forget_after=10**9,
    )
    seen = simulated(size, 600, lambda step: largest)
    assert int(size) == min(largest, 300)
    assert all(fitted for _, fitted in seen[300:])
    assert size.failures == sum(not fitted for _, fitted in seen)


def test_it_takes_more_again_when_there_is_more_and_rarely_asks():
    size = memopt.BatchSize(64, grow_after=5, forget_after=100)
    seen = simulated(size, 1000, lambda step: 40 if step < 500 else 64)
    assert int(size) == 64 and all(fitted for _, fitted in seen[750:])
    # 41 is tried again a while after each failure, twice as long each time.
    assert [step for step, (n, fitted) in enumerate(seen) if not fitted and step > 60] == sorted(
        step for step, (n, fitted) in enumerate(seen) if not fitted and step > 60 and n == 41
    )
    assert sum(not fitted for _, fitted in seen[60:]) <= 3


def test_growing_too_far_falls_back_to_what_fitted():
    size = memopt.BatchSize(8, maximum=64, grow_after=2)
    seen = simulated(size, 10, lambda step: 30)
    assert [n for n, _ in seen[:4]] == [8, 8, 36, 8] and int(size) > 8


def test_run_repeats_with_fewer_from_the_same_random_state():
    size, drawn = memopt.BatchSize(10), []
    torch.manual_seed(3)
    expected = torch.rand(2)

    def step(n: int) -> torch.Tensor:
        drawn.append((n, torch.rand(2)))
        if n > 3:
            out_of_memory()
        return drawn[-1][1]

    torch.manual_seed(3)
    assert torch.equal(size.run(step), expected)
    assert [n for n, _ in drawn] == [10, 5, 2] and all(torch.equal(numbers, expected) for _, numbers in drawn)
    assert size.failures == 2 and int(size) == 2


def test_the_least_size_passes_it_on_and_other_errors_too():
    size = memopt.BatchSize(4, minimum=4)
    with pytest.raises(torch.OutOfMemoryError):
        size.run(lambda n: out_of_memory())
    size = memopt.BatchSize(4)
    with pytest.raises(KeyError):
        size.run(lambda n: {}["x"])
    with pytest.raises(KeyboardInterrupt), size.attempt():
        raise KeyboardInterrupt
    assert int(size) == 4 and size.failures == 0


def test_a_failed_step_holds_nothing_when_the_block_is_over():
    """While `with` has its exception still: the cache is emptied there, which helps only if the frames hold nothing."""
    size, held = memopt.BatchSize(8), []

    def step() -> None:
        x = torch.ones(1000, requires_grad=True)
        graph = [x * 2]
        graph.append(graph)  # in a cycle
        held.append(weakref.ref(graph[0]))
        out_of_memory()

    seen = []
    before = gc.collect

    def collect(*arguments: object) -> int:
        found = before(*arguments)
        seen.append(held[0]() is None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", collect)
        with size.attempt() as attempt:
            step()
    assert attempt.failed and seen == [True]


def test_its_state_goes_through_json_and_on():
    size = memopt.BatchSize(64, grow_after=5, forget_after=100)
    other = memopt.BatchSize(64, grow_after=5, forget_after=100)
    simulated(size, 37, lambda step: 40)
    other.load_state_dict(json.loads(json.dumps(size.state_dict())))
    assert simulated(size, 400, lambda step: 40) == simulated(other, 400, lambda step: 40)
    for wrong in ({}, {**size.state_dict(), "value": 65}):
        before = size.state_dict()
        with pytest.raises(ValueError):
            size.load_state_dict(wrong)
        assert size.state_dict() == before


@pytest.mark.parametrize("named", [{"size": 0}, {"size": 4, "maximum": 3}, {"size": 4, "shrink": 1.0},
                                   {"size": 4, "grow_after": 0}])  # fmt: skip
def test_sizes_that_make_no_sense_are_refused(named: dict[str, object]):
    with pytest.raises(ValueError):
        memopt.BatchSize(**named)


# ---- data that follow it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_each_sample_trains_once_an_epoch_whatever_fails(workers: int, seed: int):
    chance = random.Random(seed)
    data = TensorDataset(torch.arange(97))
    size = memopt.BatchSize(16, grow_after=4, forget_after=10)
    sampler = size.sampler(RandomSampler(data))
    fitting = chance.randrange(3, 12)
    trained: list[int] = []
    attempts = 0
    for epoch in range(3):
        for (x,) in DataLoader(data, batch_sampler=sampler, num_workers=workers):
            with size.attempt():
                attempts += 1
                if len(x) > fitting:
                    out_of_memory()
                trained += x.tolist()
        if not workers:  # with them, what fails last is the next epoch's
            assert sorted(trained) == sorted(list(range(97)) * (epoch + 1))
    waiting = list(sampler._again)
    assert sorted(trained + waiting) == sorted(list(range(97)) * 3)
    assert size.failures and attempts > 3 * 97 / 16


def test_length_and_a_dropped_end():
    size = memopt.BatchSize(10)
    sampler = size.sampler(range(25), drop_last=True)
    assert len(sampler) == 2 and [len(batch) for batch in sampler] == [10, 10]
    assert len(size.sampler(range(25))) == 3
    with pytest.raises(TypeError, match="no length"):
        len(size.sampler(iter(range(25))))


# ---- accumulation ----------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(("effective", "batch_size"), [(32, 32), (32, 8), (33, 8), (7, 3), (5, 8)])
def test_accumulated_gradients_are_the_whole_batchs(effective: int, batch_size: int):
    torch.manual_seed(0)
    model, loss = nn.Linear(5, 3).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(effective, 5).double(), torch.randint(3, (effective,))
    loss(model(x), y).backward()
    whole = gradients(model)
    accumulation = Accumulation(effective, batch_size)
    pieces = list(accumulation.micro_batches(x, y))
    assert len(pieces) == accumulation.steps and [len(p[0]) for p, _ in pieces] == accumulation.sizes
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    groups = list(accumulation.groups(loader))
    assert len(groups) == 1
    for parts in (pieces, groups[0]):
        model.zero_grad()
        for (a, b), weight in parts:
            assert len(a) <= batch_size
            (loss(model(a), b) * weight).backward()
        assert torch.allclose(gradients(model), whole, rtol=1e-13, atol=1e-15)


def test_the_last_group_of_an_epoch_is_weighed_by_what_it_has():
    groups = list(Accumulation(6, 2).groups(torch.arange(15).split(2)))
    assert [[len(batch) for batch, _ in group] for group in groups] == [[2, 2, 2], [2, 2, 2], [2, 1]]
    assert all(abs(sum(weight for _, weight in group) - 1) < 1e-12 for group in groups)
    assert groups[-1][0][1] == 2 / 3


def test_a_mean_over_tokens_is_weighed_by_tokens():
    torch.manual_seed(0)
    model, loss = nn.Linear(5, 3).double(), nn.CrossEntropyLoss(ignore_index=-100)
    x, y = torch.randn(6, 4, 5).double(), torch.randint(3, (6, 4))
    y[0] = -100
    y[3, 1:] = -100
    loss(model(x).flatten(0, 1), y.flatten()).backward()
    whole = gradients(model)
    model.zero_grad()
    batches = [(x[:2], y[:2]), (x[2:4], y[2:4]), (x[4:], y[4:])]
    for (a, b), weight in next(
        Accumulation(6, 2).groups(batches, count=lambda batch: int((batch[1] >= 0).sum()))
    ):
        (loss(model(a).flatten(0, 1), b.flatten()) * weight).backward()
    assert torch.allclose(gradients(model), whole, rtol=1e-13, atol=1e-15)


def test_accumulation_says_what_it_cannot_do():
    assert Accumulation(64, 8, ranks=4).steps == 2 and Accumulation(64, 8, ranks=4).sizes == [8, 8]
    for wrong in ({"effective": 0, "batch_size": 1}, {"effective": 6, "batch_size": 1, "ranks": 4}):
        with pytest.raises(ValueError):
            Accumulation(**wrong)
    with pytest.raises(ValueError, match="no tensor"):
        list(Accumulation(4, 2).micro_batches("no tensor"))
    with pytest.warns(DeprecationWarning, match="micro_batches"):
        assert [weight for _, weight in Accumulation(4, 2).pieces(torch.zeros(4, 1))] == [0.5, 0.5]
    with pytest.raises(ValueError, match="gives no weights"):
        list(Accumulation(4, 2).groups([torch.ones(2)], count=lambda batch: 0))


# ---- learning rates --------------------------------------------------------------------------------------------------


def test_rules():
    assert scaled_learning_rate(0.1, 256, 1024) == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, 256, 1024, "sqrt") == scaled_learning_rate(0.1, 256, 1024, "adam") == 0.2
    with pytest.raises(ValueError, match="not one of 'linear'"):
        scaled_learning_rate(0.1, 1, 2, "cubic")
    with pytest.raises(ValueError, match="to_batch=0"):
        scaled_learning_rate(0.1, 1, 0)


def test_an_optimizers_groups_are_rescaled_in_place():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(sgd, 1)
    assert rescale_learning_rate_(sgd, 32, 64) == {"before": [0.1, 0.5], "after": [0.2, 1.0]}
    assert [group["initial_lr"] for group in sgd.param_groups] == [0.2, 1.0]
    rate = torch.tensor(0.1)
    adam = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99))
    rescale_learning_rate_(adam, 16, 64)
    assert adam.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.2)
    rescale_learning_rate_(adam, 16, 64, "adam")
    group = adam.param_groups[0]
    assert group["betas"] == pytest.approx((0.6, 0.96)) and group["eps"] == pytest.approx(5e-9)
    before = dict(group)
    with pytest.raises(ValueError, match="does not hold"):
        rescale_learning_rate_(adam, 1, 64, "adam")
    with pytest.raises(ValueError, match="SGD has none"):
        rescale_learning_rate_(sgd, 1, 64, "adam")
    assert {**group, "lr": 0} == {**before, "lr": 0} and float(rate) == pytest.approx(0.4)
