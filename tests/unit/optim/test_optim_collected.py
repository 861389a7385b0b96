"""A clipped step collects its gradients once, for the scaler's pass and for its own; but twice where others' code
runs in between, which may change them."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from optim_pairs import bits, give_gradients, parameters, same_bits, scaled_step

import memopt.amp
import memopt.optim

MAX_NORM = 0.5


def scaler_of() -> memopt.amp.GradScaler:
    made = memopt.amp.GradScaler("cpu", init_scale=1024.0)
    made.scale(torch.ones(()))
    return made


def clipped(optimizer, scaler, params, number: int) -> torch.Tensor:
    give_gradients(params, number=number)
    scaler.step(optimizer, max_norm=MAX_NORM)
    norm = scaler.gradient_norm(optimizer)
    scaler.update()
    return norm


def plain(kind=memopt.optim.AdamW):
    """An optimizer whose step collects ahead."""
    params = parameters()
    return kind(params, lr=0.1), params


def with_hook():
    """The same beside it, that never does: its hook is anybody's."""
    optimizer, params = plain()
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer, params


def count_collected(optimizer, monkeypatch) -> list[bool]:
    ahead = []
    found = type(optimizer)._collect_ahead

    def count(self):
        gradients = found(self)
        ahead.append(gradients is not None)
        return gradients

    monkeypatch.setattr(type(optimizer), "_collect_ahead", count)
    return ahead


def test_both_ways_give_the_same_bits(monkeypatch):
    (one, ours), (other, theirs) = plain(), with_hook()
    ahead, scalers = count_collected(one, monkeypatch), (scaler_of(), scaler_of())
    for number in range(4):
        norms = [
            clipped(o, s, p, number) for o, s, p in zip((one, other), scalers, (ours, theirs), strict=True)
        ]
        assert same_bits(norms[:1], norms[1:]) and same_bits(ours, theirs)
        assert same_bits([p.grad for p in ours], [p.grad for p in theirs])
    assert ahead == [False, False] + [True, False] * 3  # the first step has yet to make its states


def test_a_schedulers_wrapper_of_step_is_known(monkeypatch):
    optimizer, params = plain()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ahead, scaler = count_collected(optimizer, monkeypatch), scaler_of()
    for number in range(3):
        clipped(optimizer, scaler, params, number)
    assert ahead == [False, True, True]


class Doubling(memopt.optim.AdamW):
    """Steps with other gradients than it was given."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad * 2
        return super().step(closure)


def doubled_by_hook(optimizer):
    def double(stepped, *_):
        for p in stepped.param_groups[0]["params"]:
            p.grad = p.grad * 2

    optimizer.register_step_pre_hook(double)


def doubled_by_wrapper(optimizer):
    """Made with functools.wraps, so that it bears every mark of what it is around, a scheduler's wrapper too."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    step = optimizer.step

    @functools.wraps(step)
    def double(*args, **kwargs):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad * 2
        return step(*args, **kwargs)

    optimizer.step = double


@pytest.mark.parametrize(
    "how", [None, doubled_by_hook, doubled_by_wrapper], ids=["override", "hook", "wrapper"]
)
def test_gradients_that_change_before_the_step_are_those_it_takes(how):
    """The norm is that of what was there before, the step is of what was put in its place, as with torch's calls. The
    oracle: plain steps, of doubled gradients and half of the gradient's factor."""
    optimizer, params = plain(Doubling if how is None else memopt.optim.AdamW)
    if how is not None:
        how(optimizer)
    expected, others = plain()
    scaler = scaler_of()
    for number in range(3):
        norm = clipped(optimizer, scaler, params, number)
        give_gradients(others, number=number)
        total = torch.stack([p.grad.double().norm() for p in others]).norm() / 1024
        assert float(norm) == pytest.approx(float(total), rel=1e-6)
        factor = torch.tensor(1 / 1024) * torch.clamp(MAX_NORM / (norm.double() + 1e-6), max=1.0).float()
        for p in others:
            p.grad = p.grad * 2
        scaled_step(expected, factor)
        assert same_bits(params, others)


def test_nothing_is_kept_of_a_step_that_failed(monkeypatch):
    optimizer, params = plain()
    scaler = scaler_of()
    clipped(optimizer, scaler, params, 0)
    give_gradients(params, number=1)
    before = bits(params)

    def fail(*_, **__):
        raise KeyError("planted")

    for owner, name in ((memopt.amp.GradScaler, "_measure"), (memopt.optim.AdamW, "_collect")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(KeyError, match="planted"):
                scaler.step(optimizer, max_norm=MAX_NORM)
        assert not optimizer._is_collected
        assert same_bits(before, params)
    gone = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_what_the_step_cannot_take_is_collected_by_others():
    """A gradient twice, one in another order, one of fp64: as without collecting ahead."""

    def twice(params):
        params[3].grad = params[0].grad[:0]
        params[4].grad = params[0].grad[:1].view(1, 1)

    def order(params):
        params[1].grad = params[1].grad.t().contiguous().t()

    def negative(params):
        params[0].grad = torch._neg_view(params[0].grad)

    for change in (twice, order, negative):
        (one, ours), (other, theirs) = plain(), with_hook()
        scalers = scaler_of(), scaler_of()
        for number in range(3):
            for optimizer, params, scaler in zip((one, other), (ours, theirs), scalers, strict=True):
                give_gradients(params, number=number)
                change(params)
                scaler.step(optimizer, max_norm=MAX_NORM)
                scaler.update()
            assert same_bits(ours, theirs), change


def test_a_plan_tells_the_gradients_that_it_has_taken():
    optimizer, params = plain()
    give_gradients(params, number=0)
    optimizer.step()
    params[2].grad = None
    gradients = optimizer._collect_ahead()
    expected = [p.grad for p in params if p.grad is not None]
    assert gradients is not None and gradients.devices == (-1,) and gradients.dtypes == {torch.float32}
    assert (
        all(a is b for a, b in zip(gradients.tensors(-1), expected, strict=True)) and gradients.others == []
    )
    optimizer._forget_collected()
    assert optimizer._plan.gradients().devices == ()
