"""memopt.optim's optimizers under gradient scalers: torch's and memopt's."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_pairs import PAIRS, bits, both, distance, give_gradients, same_bits, scaled_step

import memopt.amp

KINDS = {
    "adamw": ("adamw", {}),
    "amsgrad": ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    "sgd": ("sgd", {"lr": 0.1}),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}
SCALERS = [torch.amp.GradScaler, memopt.amp.GradScaler]
HALF, TWO = torch.tensor(0.5), torch.tensor(2.0)


def scaler(kind=torch.amp.GradScaler, **options) -> torch.amp.GradScaler:
    made = kind("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})
    made.scale(torch.ones(()))
    return made


def scaled_gradients(lists, scale: float, number: int, poison: float | None) -> None:
    give_gradients(*lists, number=number)
    for params in lists:
        for p in params:
            p.grad.mul_(scale)
        if poison is not None:
            params[1].grad.view(-1)[5] = poison


def everything(optimizer, params) -> list[torch.Tensor]:
    kept = bits(params) + bits(p.grad for p in params)
    return kept + [bits([v])[0] for p in params for v in optimizer.state.get(p, {}).values()]


@pytest.mark.parametrize("scaling", SCALERS, ids=["torch", "memopt"])
@pytest.mark.parametrize("unscaled", [False, True], ids=["by the step", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_beside_a_loop_of_torchs(kind, unscaled, scaling):
    """A run with overflows, the first step's too. The oracle is torch's optimizer, not fused, with a scaler
    of its own that waits for the flag; the scale is a power of two, so dividing by it is exact."""
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    scalers = scaler(scaling), scaler()
    for number, poison in enumerate(
        [float("inf"), None, None, float("nan"), None, None, None, None, float("-inf"), None]
    ):
        scaled_gradients([ours, theirs], scalers[0].get_scale(), number, poison)
        before = everything(new, ours) if poison is not None else None
        for each, optimizer in zip(scalers, (new, old), strict=True):
            if unscaled:
                each.unscale_(optimizer)
            each.step(optimizer)
        if poison is not None:
            # States may have been made; those that were there, parameters and gradients are as they were.
            after = everything(new, ours)
            assert unscaled or all(
                torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=False)
            )
        elif not unscaled:
            assert same_bits(
                [p.grad for p in ours], [p.grad for p in theirs]
            )  # unscaled, as torch's fused steps do
        for each in scalers:
            each.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert distance(ours, theirs) < 1e-6
    assert not hasattr(new, "found_inf") and not hasattr(new, "grad_scale")
    for p, q in zip(ours, theirs, strict=True):
        if "step" in old.state.get(q, {}):
            assert new.state[p]["step"] == old.state[q]["step"] == 7


@pytest.mark.parametrize("unscaled_grads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_clips_too(kind, unscaled_grads):
    """memopt's scaler with max_norm: torch's unscale_, clip_grad_norm_ and step, in two passes, with the gradients left
    as they were, or as the optimizer used them. Some norms are above max_norm, some below."""
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    new_scaler, old_scaler = scaler(memopt.amp.GradScaler), scaler()
    poisons = [None, float("nan"), None, None, float("inf"), None]
    for number, poison in enumerate(poisons):
        scaled_gradients([ours, theirs], old_scaler.get_scale() * (number + 1) / 50, number, poison)
        given = bits(p.grad for p in ours)
        before = bits(ours)
        new_scaler.step(new, max_norm=1.5, unscaled_grads=unscaled_grads)
        old_scaler.unscale_(old)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.5)
        old_scaler.step(old)
        if poison is None:
            assert new_scaler.gradient_norm(new).item() == pytest.approx(norm.item(), rel=1e-5)
            expected = [q.grad for q in theirs] if unscaled_grads else given
            for p, grad in zip(ours, expected, strict=True):
                assert torch.allclose(p.grad, grad, rtol=1e-5 if unscaled_grads else 0, atol=0)
        else:
            assert same_bits(before, ours)
        assert bool(new_scaler.step_skipped(new)) == (poison is not None)
        new_scaler.update()
        old_scaler.update()
        assert new_scaler.state_dict() == old_scaler.state_dict()
        assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_power_of_two(kind):
    """Gradients are multiplied with the rounded reciprocal, as by GradScaler.unscale_."""
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    give_gradients(ours, theirs, number=0)
    for optimizer, params in ((new, ours), (old, theirs)):
        each = scaler(init_scale=3.0)
        if optimizer is old:
            each.unscale_(old)
        each.step(optimizer)
        assert all(torch.isfinite(p).all() for p in params)
    assert distance(ours, theirs) < 1e-7
    assert same_bits([p.grad for p in ours], [p.grad for p in theirs])


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_memopts_contract(kind, store):
    """Gradients are multiplied by the factor, whatever grad_scale is, and kept so only where that is asked for."""
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    for number in range(3):
        give_gradients(ours, theirs, number=number)
        given = bits(p.grad for p in ours)
        for q in theirs:
            q.grad.mul_(0.5)
        scaled_step(new, HALF, torch.zeros(()), grad_scale=torch.tensor(64.0), unscaled_grads=store)
        assert same_bits([p.grad for p in ours], [q.grad for q in theirs] if store else given)
        old.step()
    assert distance(ours, theirs) < 1e-6
    before = everything(new, ours)
    with pytest.raises(RuntimeError, match="gave no factor for cpu"):
        scaled_step(new, HALF, device="cuda:3")
    assert same_bits(before, everything(new, ours))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_torchs_obeys_the_scaler_too(kind):
    """Complex parameters, sparse gradients, gradients in another order; skipped, scaled, stored."""
    name, options = KINDS[kind]
    new_class, old_class = PAIRS[name]

    def made():
        make = torch.Generator().manual_seed(3)
        params = [
            torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=make)),
            torch.nn.Parameter(torch.randn(6, 4, generator=make)),
            torch.nn.Parameter(torch.randn(8, generator=make)),
        ]
        return params, [torch.randn(p.shape, dtype=p.dtype, generator=make) for p in params]

    (ours, grads), (theirs, _) = made(), made()
    new, old = new_class(ours, **options), old_class(theirs, foreach=False, **options)
    for skipped in (True, False, True, False):
        for p, q, g in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = g.clone(), g * 0.5
        ours[1].grad = grads[1].t().contiguous().t()
        if name == "sgd":
            ours[2].grad = grads[2].to_sparse()
        before = bits(ours)
        new.grad_scale, new.found_inf = TWO, torch.tensor(float(skipped))
        new.step()
        del new.grad_scale, new.found_inf
        if skipped:
            assert same_bits(before, ours)
            continue
        old.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.grad.to_dense() if p.grad.is_sparse else p.grad, q.grad)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5)


def test_an_optimizer_without_gradients_under_a_scaler():
    new, _, ours, _ = both("adamw")
    before = bits(ours)
    each = scaler()
    each.step(new)  # as torch's fused optimizers: update() is what raises
    assert same_bits(before, ours) and not new.state
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        each.update()


@pytest.mark.parametrize("kind", ["adamw", "momentum", "dampening"])
def test_a_failing_first_step_is_as_if_it_had_not_been(kind):
    """A gradient that torch refuses, beside one that is taken; then the same step again without it."""
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    give_gradients(ours, theirs, number=0)
    ours[0].data, kept = torch.zeros(9), ours[0].data  # of another shape than its gradient
    states = ("momentum_buffer", "exp_avg")
    before = bits(ours[1:])
    with pytest.raises(RuntimeError, match="size of tensor"):
        new.step()
    assert same_bits(before, ours[1:])
    ours[0].data = kept
    new.state.pop(ours[0], None)
    new.step()
    old.step()
    assert distance(ours, theirs) < 1e-6
    for name_ in states:
        for p, q in zip(ours, theirs, strict=True):
            if name_ in new.state[p] and p.numel():
                assert distance([new.state[p][name_]], [old.state[q][name_]]) < 1e-6


def test_found_inf_and_factor_must_be_fp32():
    new, _, ours, _ = both("adamw")
    give_gradients(ours, number=0)
    new.step()
    before = bits(ours)
    with pytest.raises(ValueError, match="factor must be a single float32 on the parameters' device"):
        scaled_step(new, torch.tensor(0.5, dtype=torch.float64))
    assert same_bits(before, ours)
    new.found_inf = torch.tensor(1.0, dtype=torch.float64)  # sums of flags may be of any type
    new.step()
    assert same_bits(before, ours)


def test_a_copy_of_an_optimizer_does_not_share_its_plan():
    new, _, ours, _ = both("adamw")
    give_gradients(ours, number=0)
    new.step()
    twin = copy.deepcopy(new)
    assert twin._plan is None
    before = bits(ours)
    copied = twin.param_groups[0]["params"]
    give_gradients(copied, number=1)
    twin.step()
    assert same_bits(before, ours) and not same_bits(before, copied)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_step_makes_no_states_so_that_the_parameters_type_may_change(kind):
    name, options = KINDS[kind]
    new, old, ours, theirs = both(name, **options)
    scalers = scaler(), scaler()
    scaled_gradients([ours, theirs], 1024.0, 0, float("inf"))
    for each, optimizer in zip(scalers, (new, old), strict=True):
        each.step(optimizer)
    assert not any(new.state.get(p) for p in ours)
    for p in (*ours, *theirs):
        p.grad = None
        p.data = p.data.double()
    give_gradients(ours, theirs, number=1)
    new.step()
    old.step()
    assert distance(ours, theirs) < 1e-12
