"""Clipping: memopt.amp.clip_grad_norm_, GradScaler.unscale_and_clip_() and step(max_norm=…), beside torch's and beside
the formula in double."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from amp_sequences import Attributed, Counting, bits
from torch.utils._python_dispatch import TorchDispatchMode

from memopt import optim
from memopt.amp import GradScaler, clip_grad_norm_

torchs = torch.nn.utils.clip_grad_norm_
FAST = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 3, 64, 1000, 30_001]


def parameters(
    dtype: torch.dtype = torch.float32, size: float = 1.0, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n in SIZES:
        p = torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype))
        p.grad = (torch.randn(n, generator=generator) * size).to(dtype)
        made.append(p)
    made.append(torch.nn.Parameter(torch.zeros(5, dtype=dtype)))  # without a gradient
    return made


def grads(made: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in made if p.grad is not None]


def as_double(made: list[torch.nn.Parameter]) -> np.ndarray:
    return np.concatenate([g.to_dense().double().numpy().ravel() for g in grads(made)])


def norm_of(x: np.ndarray, norm_type: float) -> float:
    return float(np.abs(x).max() if math.isinf(norm_type) else np.sqrt((x * x).sum()))


# ---- clip_grad_norm_ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.7, 1e9])
@pytest.mark.parametrize("norm_type", [2.0, 2, math.inf, "inf"])
@pytest.mark.parametrize("dtype", FAST, ids=str)
def test_norm_and_gradients_are_those_of_the_formula_in_double(
    dtype: torch.dtype, norm_type, max_norm: float
):
    made = parameters(dtype, 3.0)
    before = as_double(made)
    expected = norm_of(before, float(norm_type))
    norm = clip_grad_norm_(made, max_norm, norm_type)
    assert norm.dtype == torch.float32 and norm.shape == () and norm.device.type == "cpu"
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    wanted = before * min(1.0, max_norm / (expected + 1e-6))
    assert np.allclose(as_double(made), wanted, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_within_the_norm_nothing_changes_by_a_bit():
    made = parameters()
    before = bits(grads(made))
    clip_grad_norm_(made, 1e9)
    assert bits(grads(made)) == before


def test_fp16_gradients_are_not_zeroed_because_their_norm_overflows_in_fp16():
    ours, theirs = torch.nn.Parameter(torch.zeros(1000).half()), torch.nn.Parameter(torch.zeros(1000).half())
    ours.grad, theirs.grad = torch.full((1000,), 4000.0).half(), torch.full((1000,), 4000.0).half()
    assert torchs([theirs], 1.0).isinf() and theirs.grad.count_nonzero() == 0
    assert clip_grad_norm_([ours], 1.0).item() == pytest.approx(4000 * math.sqrt(1000), rel=1e-6)
    assert as_double([ours]) == pytest.approx(np.full(1000, 1 / math.sqrt(1000)), rel=1e-3)


def test_squares_neither_overflow_nor_vanish():
    for size in (1e30, 1e-30):
        made = parameters(size=size)
        assert clip_grad_norm_(made, 1.0).item() == pytest.approx(
            norm_of(as_double(parameters(size=size)), 2), rel=1e-6
        )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_spreads_as_in_torch(norm_type: float, bad: float):
    seen = []
    for clip in (torchs, clip_grad_norm_):
        made = parameters()
        made[0].grad = None  # of nothing torch knows no maximum
        made[3].grad[17] = bad
        seen.append((bits(clip(made, 1.0, norm_type)), bits(grads(made))))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_it_is_refused_in_torchs_words_before_anything_changes(norm_type: float, bad: float):
    words = []
    for clip in (torchs, clip_grad_norm_):
        made = parameters()
        made[0].grad = None  # of nothing torch knows no maximum
        made[3].grad[17] = bad
        before = bits(grads(made))
        with pytest.raises(RuntimeError) as caught:
            clip(made, 1.0, norm_type, error_if_nonfinite=True)
        assert bits(grads(made)) == before
        words.append(str(caught.value))
    assert words[0] == words[1]


def fp64(made):
    made[2].grad = None
    made[2].data = made[2].data.double()
    made[2].grad = torch.randn(made[2].shape, generator=torch.Generator().manual_seed(1)).double()


def gaps(made):
    made[3].grad = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))[:, 0]


def shared(made):
    made[1].grad = made[3].grad[:1]


THEIRS = {
    "fp64": (fp64, {}),
    "gaps": (gaps, {}),
    "memory shared": (shared, {}),
    "norm 1": (None, {"norm_type": 1}),
    "norm 0": (None, {"norm_type": 0.0}),
    "norm -inf": (lambda made: setattr(made[0], "grad", None), {"norm_type": -math.inf}),
    "foreach=False": (None, {"foreach": False}),
    "several types": (lambda made: setattr(made[2], "grad", made[2].grad.clone()), {"norm_type": 3.0}),
}


@pytest.mark.parametrize("case", THEIRS)
def test_what_is_torchs_is_torchs_bit_for_bit(case: str):
    change, named = THEIRS[case]
    seen = []
    for clip in (torchs, clip_grad_norm_):
        made = parameters()
        if change:
            change(made)
        seen.append((bits(clip(made, 0.5, **named)), bits(grads(made))))
    assert seen[0] == seen[1]


def test_an_empty_gradient_is_no_obstacle_to_the_maximum():
    """It is to torch's."""
    made = parameters()
    assert clip_grad_norm_(made, 9.0, math.inf).item() == pytest.approx(norm_of(as_double(made), math.inf))


def test_one_tensor_no_tensor_and_an_empty_generator():
    for clip in (torchs, clip_grad_norm_):
        p = torch.nn.Parameter(torch.zeros(2))
        assert clip([], 1.0).item() == clip(p, 1.0).item() == 0.0
        p.grad = torch.tensor([3.0, 4.0])
        assert clip(p, 1.0).item() == 5.0 and p.grad.tolist() == pytest.approx([0.6, 0.8])
        assert clip((q for q in [p]), 9.0).item() == pytest.approx(1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clip((q for q in []), 1.0)
        assert [str(w.message) for w in caught] == [
            "`parameters` is an empty generator, no gradient clipping will occur."
        ]
        assert caught[0].filename == __file__


def test_autograd_is_told_that_gradients_have_changed():
    for clip in (torchs, clip_grad_norm_):
        p, w = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
        p.grad = torch.tensor([3.0, 4.0])
        kept = (p.grad * w).sum()
        clip([p], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


# ---- unscale_and_clip_ -----------------------------------------------------------------------------------------------


def scaler_of(scale: float = 1000.1, **options) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize("scale", [1.0, 1000.1, 65536.0])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("dtype", FAST, ids=str)
def test_unscaled_and_clipped_they_are_those_of_the_formula(
    dtype: torch.dtype, norm_type: float, scale: float
):
    for max_norm in (0.7, 1e9):
        made, scaler = parameters(dtype, 300.0), scaler_of(scale, allow_fp16=True)
        optimizer = torch.optim.SGD(made, 1.0)
        before = as_double(made) / scaler.get_scale()
        norm = scaler.unscale_and_clip_(optimizer, max_norm, norm_type)
        expected = norm_of(before, norm_type)
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        wanted = before * min(1.0, max_norm / (expected + 1e-6))
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert np.allclose(as_double(made), wanted, rtol=2 * torch.finfo(dtype).eps, atol=tiny)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
            scaler.unscale_and_clip_(optimizer, 1.0)
        scaler.update()
        assert not scaler.step_skipped(optimizer)


def test_where_nothing_is_clipped_it_is_unscale_bit_for_bit():
    one, other = parameters(size=1e4), parameters(size=1e4)
    scaler = scaler_of()
    optimizers = torch.optim.SGD(one, 1.0), torch.optim.SGD(other, 1.0)
    scaler.unscale_and_clip_(optimizers[0], 1e9)
    scaler.unscale_(optimizers[1])
    assert bits(grads(one)) == bits(grads(other))


@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_an_inf_is_found_and_the_step_skipped(error_if_nonfinite: bool):
    made, scaler = parameters(), scaler_of()
    made[4].grad[999] = math.inf
    optimizer = Counting(made)
    if error_if_nonfinite:
        with pytest.raises(RuntimeError, match="The total norm of order 2.0 for gradients from `parameters`"):
            scaler.unscale_and_clip_(optimizer, 1.0, error_if_nonfinite=True)
        again = parameters()
        torch._amp_foreach_non_finite_check_and_unscale_(grads(again), torch.zeros(()), scaler._inverse())
        assert bits(made[3].grad) == bits(again[3].grad)  # unscaled, not clipped, as torch's would be
    else:
        assert scaler.unscale_and_clip_(optimizer, 1.0).isinf()
    assert scaler.step(optimizer) is None and optimizer.steps == 0
    scaler.update()
    assert scaler.step_skipped(optimizer) and scaler.get_scale() == pytest.approx(1000.1 / 2)


@pytest.mark.parametrize("case", [fp64, gaps, shared], ids=lambda change: change.__name__)
def test_what_is_torchs_is_unscaled_and_clipped_as_by_torch(case):
    seen = []
    for ours in (False, True):
        made, scaler = parameters(size=1e4), scaler_of()
        case(made)
        optimizer = torch.optim.SGD(made, 1.0)
        if ours:
            norm = scaler.unscale_and_clip_(optimizer, 0.5)
        else:
            scaler.unscale_(optimizer)
            norm = torchs(made, 0.5)
        seen.append((bits(norm), bits(grads(made)), bits(scaler._found_inf_per_device(optimizer))))
    assert seen[0] == seen[1]


def test_fp16_is_refused_unless_it_is_allowed():
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler_of().unscale_and_clip_(torch.optim.SGD(parameters(torch.float16), 1.0), 1.0)


# ---- step(max_norm=…) ------------------------------------------------------------------------------------------------

STEPPING = {
    "torch's": (lambda p: torch.optim.AdamW(p, 0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    "torch's fused": (lambda p: torch.optim.AdamW(p, 0.01, fused=True),) * 2,
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.01), lambda p: optim.AdamW(p, 0.01)),
    "Adam": (lambda p: torch.optim.Adam(p, 0.01), lambda p: optim.Adam(p, 0.01)),
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.SGD(p, 0.1, momentum=0.9)),
}


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("case", STEPPING)
def test_a_clipped_step_is_unscale_clip_step(case: str, unscale_first: bool):
    one, other = parameters(), parameters()
    theirs, ours = (make(made) for make, made in zip(STEPPING[case], (one, other), strict=True))
    scaler = scaler_of(growth_interval=3)
    for iteration in range(8):
        for made in (one, other):
            for p, fresh in zip(made, parameters(size=500.0, seed=iteration), strict=True):
                p.grad = fresh.grad
            if iteration == 4:
                made[3].grad[0] = math.nan
        scaler.unscale_(theirs)
        norm = torchs(one, 0.5)
        if unscale_first:
            scaler.unscale_(ours)
        scaler.step(theirs)
        scaler.step(ours, max_norm=0.5)
        assert bool(scaler.step_skipped(ours)) == (iteration == 4)
        measured = scaler.gradient_norm(ours)
        scaler.update()
        assert measured is scaler.gradient_norm(ours)
        if iteration != 4:
            assert measured.item() == pytest.approx(norm.item(), rel=1e-5)
        for name in ("grad_scale", "found_inf"):
            assert not hasattr(ours, name) and getattr(ours, "_scaled", None) is None
        for p, q in zip(one, other, strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam, optim.SGD])
def test_memopts_optimizers_read_the_gradients_and_nothing_waits(make):
    """Reading a number from a tensor would be waiting, were it on a GPU."""

    class Watch(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Watch.reads += "_local_scalar_dense" in str(function) or "is_nonzero" in str(function)
            return function(*args, **(kwargs or {}))

    made, scaler = parameters(size=1e3), scaler_of()
    optimizer = make(made, lr=0.1)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    before, old = bits(grads(made)), bits(made)
    with Watch():
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        skipped = scaler.step_skipped(optimizer)
        assert Watch.reads == 0
        assert not skipped
        assert Watch.reads == 1  # the control
    assert bits(grads(made)) == before and bits(made) != old


def test_unscaled_grads_are_left_behind_where_they_are_asked_for():
    made, scaler = parameters(size=1e3), scaler_of()
    expected = as_double(made) / scaler.get_scale()
    expected *= 0.5 / (norm_of(expected, 2) + 1e-6)
    scaler.step(optim.AdamW(made, lr=0.1), max_norm=0.5, unscaled_grads=True)
    assert np.allclose(as_double(made), expected, rtol=1e-6, atol=0)


def test_memopts_optimizers_with_what_is_torchs():
    for change in (fp64, gaps):
        one, other = parameters(size=1e3), parameters(size=1e3)
        change(one), change(other)
        scaler, theirs, ours = scaler_of(), torch.optim.SGD(one, 0.1), optim.SGD(other, 0.1)
        scaler.unscale_(theirs)
        torchs(one, 0.5)
        scaler.step(theirs)
        scaler.step(ours, max_norm=0.5)
        assert all(torch.allclose(p, q, rtol=1e-6, atol=1e-7) for p, q in zip(one, other, strict=True))


def test_a_scale_that_the_user_set_counts_too():
    """As with torch: the optimizer divides by it, after the clip."""
    made, scaler = parameters(size=1e3), scaler_of()
    optimizer = Attributed(made)
    optimizer.grad_scale = torch.tensor(2.0)
    _, scale, _ = scaler.step(optimizer, max_norm=0.5)
    assert scale == 2.0 and norm_of(as_double(made), 2) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("make", [optim.AdamW, lambda made: torch.optim.AdamW(made, fused=True)])
def test_hooks_of_a_clipped_step_see_what_torchs_scaler_sets(make):
    """found_inf, and no grad_scale where the gradients are unscaled."""
    made, scaler = parameters(size=1e3), scaler_of()
    optimizer, seen = make(made), []

    def see(stepped, *_):
        seen.append((float(stepped.found_inf), stepped.grad_scale))

    optimizer.register_step_pre_hook(see)
    scaler.unscale_(optimizer)
    scaler.step(optimizer, max_norm=1.0)
    assert seen == [(0.0, None)]


def test_a_hook_may_have_a_clipped_step_skipped():
    made, scaler = parameters(size=1e3), scaler_of()
    optimizer = optim.SGD(made, 0.1)
    before = bits(made)

    def skip(stepped, *_):
        stepped.found_inf.fill_(1)

    hook = optimizer.register_step_pre_hook(skip)
    scaler.step(optimizer, max_norm=1.0)
    assert bits(made) == before
    hook.remove()
    scaler.update()
    scaler.step(optimizer, max_norm=1.0)
    assert bits(made) != before


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_a_clipped_step_has_torchs_errors(make):
    scaler, made = scaler_of(), parameters()
    optimizer = make(made, 0.1)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        GradScaler("cpu").step(optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, max_norm=1.0, closure=lambda: 0)
    scaler.step(optimizer, max_norm=1.0)
    before = bits([made, grads(made)])
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer, max_norm=1.0)
    assert bits([made, grads(made)]) == before
    scaler.update()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"gradient_norm\(\) needs a step that clips"):
        scaler.gradient_norm(optimizer)


def test_a_step_that_fails_leaves_nothing_on_the_optimizer():
    made, scaler = parameters(), scaler_of()
    optimizer = optim.SGD(made, 0.1)

    def fail(*_):
        raise KeyError("planted")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="planted"):
        scaler.step(optimizer, max_norm=1.0)
    assert not hasattr(optimizer, "grad_scale") and optimizer._scaled is None
    hook.remove()
    scaler.step(optimizer, max_norm=1.0)
