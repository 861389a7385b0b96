"""memopt.optim's steps beside the written formula in double and beside torch's own optimizers: types, layouts,
options, and what is left to torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed.tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optim_pairs import (
    MOMENTS,
    PAIRS,
    bits,
    both,
    distance,
    generator,
    give_gradients,
    parameters,
    same_bits,
    scaled_step,
)

import memopt.optim
from memopt.optim._state_layout import like


# ---- the formula ---------------------------------------------------------------------------------------------------
def rounded(x: float) -> float:
    return float(np.float32(x))


def adam_in_double(p, g, state, group):
    """(p after the step, the largest term of each element's formula), in double from constants rounded as in
    C."""
    beta1, beta2 = group["betas"]
    lr, decay, decoupled = float(group["lr"]), group["weight_decay"], group["decoupled_weight_decay"]
    t = float(state["step"]) + 1
    size, root = rounded(lr / (1 - beta1**t)), rounded((1 - beta2**t) ** -0.5)
    beta1, rest1, beta2, rest2 = map(rounded, (beta1, 1 - beta1, beta2, 1 - beta2))
    before, v = state["exp_avg"].double().numpy(), state["exp_avg_sq"].double().numpy()
    x = -g if group["maximize"] else g
    decayed = 0.0 * p if decoupled else rounded(decay) * p
    parts = [beta1 * np.abs(before), rest1 * np.abs(x), rest1 * np.abs(decayed)]
    x = x + decayed
    m, v = beta1 * before + rest1 * x, beta2 * v + rest2 * x * x
    top = np.maximum(v, state["max_exp_avg_sq"].double().numpy()) if group["amsgrad"] else v
    under = np.sqrt(top) * root + rounded(group["eps"])
    kept = p * rounded(1 - lr * decay) if decoupled else p
    largest = np.abs(kept)
    for part in (*parts, np.abs(m)):
        largest = np.maximum(largest, size * part / under)
    return kept - size * m / under, largest


def sgd_in_double(p, g, state, group):
    lr, decay, momentum = rounded(group["lr"]), rounded(group["weight_decay"]), rounded(group["momentum"])
    x = -g if group["maximize"] else g
    parts = [np.abs(x), np.abs(decay * p)]
    x = x + decay * p
    if momentum:
        before = momentum * state["momentum_buffer"].double().numpy()
        m = before + rounded(1 - group["dampening"]) * x
        parts += [np.abs(before), np.abs(m)]
        x = x + momentum * m if group["nesterov"] else m
    largest = np.abs(p)
    for part in (*parts, np.abs(x)):
        largest = np.maximum(largest, lr * part)
    return p - lr * x, largest


ADAM_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.02},
    {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-3, "lr": 0.01},
]
SGD_OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.01, "momentum": 0.9, "dampening": 0.25},
    {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
]
CASES = [(kind, o) for kind in ("adamw", "adam") for o in ADAM_OPTIONS] + [("sgd", o) for o in SGD_OPTIONS]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_one_step_from_an_equal_state_is_the_written_formula(kind, options):
    """|p - p_ref| at most 1 ulp of p and 3 ulp of the largest term of the formula, which is evaluated in double: where
    the update is as large as the parameter, a dozen roundings in fp32 come to more than 2 now and then."""
    optimizer = PAIRS[kind][0](parameters(), **options)
    ours = optimizer.param_groups[0]["params"]
    group = optimizer.param_groups[0]
    for number in range(4):
        give_gradients(ours, number=number)
        if number < 3:
            optimizer.step()
    before = [(bits([p])[0], copy.deepcopy(optimizer.state.get(p, {}))) for p in ours]
    optimizer.step()
    oracle = sgd_in_double if kind == "sgd" else adam_in_double
    for p, (was, state) in zip(ours, before, strict=True):
        expected, largest = oracle(was.double().numpy(), p.grad.double().numpy(), state, group)
        allowed = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
        allowed = allowed + 3 * np.spacing(largest.astype(np.float32)).astype(np.float64)
        assert (np.abs(p.detach().double().numpy() - expected) <= allowed).all()
        assert p.numel() == 0 or not torch.equal(p, was)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_hundred_steps_stay_beside_torchs(kind, options):
    new, old, ours, theirs = both(kind, **options)
    for number in range(100):
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
    assert distance(ours, theirs) < 1e-5
    for p, q in zip(ours, theirs, strict=True):
        assert set(new.state.get(p, {})) == {k for k, v in old.state.get(q, {}).items() if v is not None}
    for name in ("step", *MOMENTS):
        pairs = [(new.state.get(p, {}), old.state.get(q, {})) for p, q in zip(ours, theirs, strict=True)]
        pairs = [(one[name], other[name]) for one, other in pairs if name in one]
        assert all(a.dtype is b.dtype for a, b in pairs)
        # Of all as one vector: of a single moment next to nothing may be left, and of that the roundings are much.
        assert not pairs or distance(*zip(*pairs, strict=True)) < 1e-5, name


def test_plain_sgd_is_torchs_bit_for_bit():
    new, old, ours, theirs = both("sgd", lr=0.125)
    for number in range(5):
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("kind", PAIRS)
def test_fp64_is_computed_in_fp64(kind):
    options = {"momentum": 0.9} if kind == "sgd" else {}
    new, old, ours, theirs = both(kind, torch.float64, **options)
    for number in range(20):
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
    assert distance(ours, theirs) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", PAIRS)
def test_16_bits_are_computed_in_fp32_and_rounded_once(kind, dtype):
    """Beside the formula in double, that is half a unit of the parameter's type. (The first step of torch
    2.13's fused SGD with momentum is not, on the CPU, so it is no oracle.)"""
    options = {"momentum": 0.9, "lr": 0.1} if kind == "sgd" else {"lr": 0.01, "eps": 1e-4}
    ours = parameters(dtype)
    optimizer = PAIRS[kind][0](ours, **options)
    give_gradients(ours, number=0)
    before = bits(ours)
    optimizer.step()
    zero = {name: torch.zeros(()) for name in ("step", *MOMENTS)}
    oracle = sgd_in_double if kind == "sgd" else adam_in_double
    for p, was in zip(ours, before, strict=True):
        expected, _ = oracle(was.double().numpy(), p.grad.double().numpy(), zero, optimizer.param_groups[0])
        half = torch.finfo(dtype).eps / 2 * np.maximum(np.abs(expected), torch.finfo(dtype).tiny)
        assert (np.abs(p.detach().double().numpy() - expected) <= 1.001 * half).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_options_any_groups(data):
    """Two param groups with options of their own, some parameters without a gradient, some steps."""
    kind = data.draw(st.sampled_from(sorted(PAIRS)))
    real = st.floats(0, 0.9)
    if kind == "sgd":
        one = st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-4, 0.1),
                "momentum": real,
                "dampening": real,
                "weight_decay": st.floats(0, 0.1),
                "maximize": st.booleans(),
            },
        )
    else:
        one = st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-4, 0.1),
                "betas": st.tuples(real, st.floats(0.5, 0.999)),
                "eps": st.floats(1e-8, 1e-3),
                "weight_decay": st.floats(0, 0.1),
                "amsgrad": st.booleans(),
                "maximize": st.booleans(),
            },
        )
    first, second = data.draw(one), data.draw(one)
    present = data.draw(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4))
    made = []
    for cls in PAIRS[kind]:
        params = parameters()
        made.append((cls([{"params": params[:3], **first}, {"params": params[3:], **second}]), params))
    (new, ours), (old, theirs) = made
    for number, there in enumerate(present):
        give_gradients(ours, theirs, number=number)
        for p, q, is_there in zip(ours, theirs, there, strict=True):
            if not is_there:
                p.grad = q.grad = None
        new.step()
        old.step()
    assert distance(ours, theirs) < 1e-5


# ---- layouts and types that need care ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", PAIRS)
def test_layouts_are_those_of_the_parameter(kind):
    """Parameters in another order of dimensions, gradients in another than theirs, with gaps, expanded,
    negated."""
    make = generator()
    base = torch.randn(6, 5, 4, 4, generator=make)
    shaped = [base, base.to(memory_format=torch.channels_last), base.transpose(0, 1), base[:, ::2]]
    grad = torch.randn(6, 5, 4, 4, generator=make)
    odd = torch.randn(6, 5, 4, 8, generator=make)[..., ::2]
    options = {"momentum": 0.9} if kind == "sgd" else {}

    def gradients(p):
        yield (
            grad.clone() if p.shape == grad.shape else grad.reshape(-1)[: p.numel()].reshape(p.shape).clone()
        )
        yield grad.reshape(-1)[: p.numel()].reshape(p.shape).to(memory_format=torch.channels_last)
        yield odd.reshape(-1)[: p.numel()].reshape(p.shape).transpose(-1, -2)
        yield torch.ones(()).expand(p.shape)
        yield torch._neg_view(grad.reshape(-1)[: p.numel()].reshape(p.shape).clone())

    ours = [torch.nn.Parameter(like(t, t.dtype, t.clone())) for t in shaped[:3]]
    ours.append(torch.nn.Parameter(base.clone()[:, ::2]))
    theirs = [torch.nn.Parameter(t.detach().clone(memory_format=torch.preserve_format)) for t in ours]
    assert [p.is_contiguous() for p in ours] == [True, False, False, False]
    new, old = PAIRS[kind][0](ours, **options), PAIRS[kind][1](theirs, **options)
    for _ in range(2):
        for each in zip(*[gradients(p) for p in ours], strict=True):
            for p, q, g in zip(ours, theirs, each, strict=True):
                p.grad, q.grad = g, g
            new.step()
            old.step()
    assert distance(ours, theirs) < 1e-6
    for p in ours[:3]:
        for name in MOMENTS:
            if name in new.state[p]:
                assert new.state[p][name].stride() == p.stride()


@pytest.mark.parametrize("kind", PAIRS)
def test_what_is_not_plain_is_torchs(kind):
    """Complex parameters, a subclass, a misaligned one, beside plain ones."""

    class Own(torch.Tensor):
        pass

    def made():
        make = generator()
        whole = torch.randn(3, generator=make)
        raw = bytearray(4 * 6 + 1)
        crooked = torch.frombuffer(raw, dtype=torch.uint8)[1:]
        misaligned = torch.frombuffer(memoryview(raw)[1:], dtype=torch.float32)
        assert misaligned.data_ptr() % 4 == crooked.data_ptr() % 4 != 0
        misaligned.copy_(torch.randn(6, generator=make))
        return [
            torch.nn.Parameter(whole),
            torch.nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=make)),
            torch.randn(4, generator=make).as_subclass(Own).requires_grad_(),
            misaligned.requires_grad_(),
        ]

    ours, theirs = made(), made()
    new, old = PAIRS[kind][0](ours), PAIRS[kind][1](theirs, foreach=False)
    for number in range(3):
        make = generator(number)
        for p, q in zip(ours, theirs, strict=True):
            g = torch.randn(p.shape, dtype=p.dtype, generator=make)
            p.grad, q.grad = g.clone(), g.clone()
        new.step()
        old.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=0), p


def test_sparse_gradients_are_torchs():
    def made(cls, **options):
        table = torch.nn.Embedding(20, 4, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.randn(20, 4, generator=generator()))
        return table, cls(table.parameters(), **options)

    for options in ({"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}):
        (ours, new), (theirs, old) = made(memopt.optim.SGD, **options), made(torch.optim.SGD, **options)
        for _ in range(3):
            for table, optimizer in ((ours, new), (theirs, old)):
                optimizer.zero_grad()
                table(torch.tensor([1, 5, 5])).square().sum().backward()
                optimizer.step()
        assert torch.allclose(ours.weight, theirs.weight, rtol=1e-6)
    for cls in (memopt.optim.Adam, torch.optim.Adam):
        table, optimizer = made(cls)
        other = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [other]})
        other.grad = torch.ones(3)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="^Adam does not support sparse gradients, please consider Sp"):
            optimizer.step()
        assert torch.equal(other, torch.ones(3))


def test_a_gradient_of_another_type_than_its_parameter():
    p = torch.nn.Parameter(torch.ones(8))
    q = torch.nn.Parameter(torch.ones(8))
    p.grad_dtype = None
    p.grad = torch.full((8,), 0.5, dtype=torch.bfloat16)
    q.grad = torch.full((8,), 0.5)
    for tensor, cls in ((p, memopt.optim.AdamW), (q, torch.optim.AdamW)):
        cls([tensor]).step()
    assert torch.allclose(p, q, rtol=1e-7)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", PAIRS)
def test_dtensors_are_torchs(kind, one_rank):
    """With the factor and the flag of a scaler, beside torch's optimizer on gradients that were multiplied
    before."""
    options = {"momentum": 0.9} if kind == "sgd" else {}
    place = [torch.distributed.tensor.Shard(0)]

    def made():
        whole = parameters(shapes=[(6, 4), (8,)])
        return [
            torch.nn.Parameter(torch.distributed.tensor.distribute_tensor(p.detach(), one_rank, place))
            for p in whole
        ] + parameters(shapes=[(5,)])

    ours, theirs = made(), made()
    new, old = PAIRS[kind][0](ours, **options), PAIRS[kind][1](theirs, foreach=False, **options)
    for number, bad in enumerate([1.0, 0.0, 0.0]):
        make = generator(number)
        for p, q in zip(ours, theirs, strict=True):
            g = torch.randn(p.shape, generator=make)
            if type(p.data) is not torch.Tensor:
                g = torch.distributed.tensor.distribute_tensor(g, one_rank, place)
            p.grad, q.grad = g.clone(), g * 0.5
        scaled_step(new, torch.tensor(0.5), torch.tensor(bad))
        if not bad:
            old.step()
        local = [[getattr(p, "_local_tensor", p) for p in params] for params in (ours, theirs)]
        assert distance(*local) < 1e-6
    assert type(ours[0].data).__name__ == "DTensor"
