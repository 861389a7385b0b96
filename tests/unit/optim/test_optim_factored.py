"""memopt.optim's Adam and AdamW with factored=True: beside the formula in double, in every form of the
first moment, exchanged with whole second moments, and what it makes of gradients that are no numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from optim_pairs import PAIRS, SEED, bits, distance, generator, give_gradients, same_bits, scaled_step

import memopt.optim
from memopt import _C

FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")
# Of each parameter, if it is factored, rows and columns: tiles of 256 and parts of them; torch's layers; and others.
MATRICES = {
    (64, 70): (64, 70),
    (300, 517): (300, 517),
    (64, 32, 3, 3): (64, 288),
    (4, 32, 64): (128, 64),
    (7, 1024): None,  # its vectors would take more than half a byte an element
    (1, 8192): None,
    (5000,): None,
    (60, 60): None,  # fewer than 4096
}


def made(kind="adamw", shapes=MATRICES, dtype=torch.float32, number=0, **options):
    make = generator(number)
    params = [torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in shapes]
    return PAIRS[kind][0](params, **{"factored": True, **options}), params


def run(pairs, steps, start=0) -> None:
    for number in range(start, start + steps):
        give_gradients(*[params for _, params in pairs], number=number)
        for optimizer, _ in pairs:
            optimizer.step()


def states(optimizer, params) -> list[torch.Tensor]:
    return [value for p in params for _, value in sorted(optimizer.state[p].items())]


class Reference:
    """One matrix in double: Adam's first moment and step, Adafactor's second moment."""

    def __init__(self, p, kind, lr, betas, eps, weight_decay, maximize):
        self.p, self.decoupled = p.detach().double(), kind == "adamw"
        self.lr, self.betas, self.eps, self.decay, self.sign = (
            lr,
            betas,
            eps,
            weight_decay,
            -1 if maximize else 1,
        )
        self.t, self.m, self.row, self.column = 0, 0.0, 0.0, 0.0

    def step(self, grad, factor):
        (first, second), self.t = self.betas, self.t + 1
        x = self.sign * factor * grad.double() + (0 if self.decoupled else self.decay) * self.p
        self.m = first * self.m + (1 - first) * x
        self.row = second * self.row + (1 - second) * x.square().mean(1, keepdim=True)
        self.column = second * self.column + (1 - second) * x.square().mean(0)
        root = (self.row * self.column / self.row.mean() / (1 - second**self.t)).sqrt()
        p = self.p * (1 - self.lr * self.decay) if self.decoupled else self.p
        self.p = p - self.lr / (1 - first**self.t) * self.m / (root + self.eps)


def test_random_sequences_are_the_formula_in_double():
    rng = np.random.default_rng(SEED)
    for round_number in range(40):
        kind, maximize, decay = (
            rng.choice(["adam", "adamw"]),
            bool(rng.random() < 0.3),
            float(rng.choice([0, 0.1])),
        )
        shape = tuple(int(n) for n in rng.integers(32, 600, 2))
        betas = (float(rng.choice([0.9, 0.5])), float(rng.choice([0.999, 0.9])))
        dtype = [torch.float32, torch.bfloat16, torch.float16][rng.integers(3)]
        options = {"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": decay, "maximize": maximize}
        optimizer, (p,) = made(
            kind, [shape], dtype, round_number, master_weights=True, min_8bit_size=64, **options
        )
        reference = Reference(p, kind, **options)
        for number in range(4):
            make = generator(100 * round_number + number)
            sizes = torch.rand(shape[0], 1, generator=make) * torch.rand(shape[1], generator=make)
            p.grad = (torch.randn(shape, generator=make) * sizes).to(dtype)
            grad, factor = p.grad.clone(), float(np.float32(rng.choice([1, 0.25, 1 / 3])))
            stored = bool(rng.random() < 0.3)
            scaled_step(optimizer, torch.tensor(factor), torch.zeros(()), unscaled_grads=stored)
            reference.step(grad, factor)
        held = optimizer.state[p]
        got = held.get("master_param", p).detach().double()
        where = f"seed {SEED}, round {round_number}: {kind}, {shape}, {dtype}, {options}"
        assert (got - reference.p).abs().max() < 2e-5, where
        assert torch.allclose(held["exp_avg_sq_row"].double(), reference.row[:, 0], rtol=3e-6), where
        assert torch.allclose(held["exp_avg_sq_col"].double(), reference.column, rtol=3e-6), where


@pytest.mark.parametrize("width, most", [(32, 4.1), (8, 1.1), (4, 0.55)])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_large_matrices_have_two_vectors_and_others_what_they_have_without(kind, width, most):
    (ours, a), (whole, b) = made(kind, state_bits=width), made(kind, state_bits=width, factored=False)
    run([(ours, a), (whole, b)], 2)
    for p, q, vectors in zip(a, b, MATRICES.values(), strict=True):
        held = ours.state[p]
        if vectors is None:
            assert {k: v.shape for k, v in held.items()} == {k: v.shape for k, v in whole.state[q].items()}
            assert torch.equal(p, q)
            continue
        assert set(held) == {"step", "exp_avg", *FACTORS, *(["exp_avg_scale"] if width < 32 else [])}
        assert tuple(held[name].numel() for name in FACTORS) == vectors
        assert all(held[name].dtype is torch.float32 for name in FACTORS)
        assert sum(v.nbytes for v in held.values()) <= p.numel() * (most - 0.03) + 4 * (1 + sum(vectors))


def test_a_matrix_of_512_by_512_takes_at_most_055_bytes_a_parameter():
    ours, (p,) = made(shapes=[(512, 512)], state_bits=4)
    run([(ours, [p])], 1)
    assert sum(v.nbytes for v in ours.state[p].values()) <= 0.55 * p.numel()


def test_other_orders_fp64_and_groups_that_say_no_keep_whole_second_moments():
    shapes = [(64, 64, 3, 3), (64, 64), (64, 64), (64, 64)]
    make = generator()
    a, b, c, d = (torch.nn.Parameter(torch.randn(shape, generator=make)) for shape in shapes)
    a.data, b.data = a.data.to(memory_format=torch.channels_last), b.data.double()
    ours = memopt.optim.AdamW(
        [{"params": [a, b]}, {"params": [c], "factored": False}, {"params": [d], "min_8bit_size": 4097}],
        factored=True,
    )
    for p in (a, b, c, d):
        p.grad = torch.ones_like(p)
    ours.step()
    assert all(set(ours.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in (a, b, c, d))


@pytest.mark.parametrize("width", [32, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e20, -3e38, math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_huge_or_no_number_changes_its_own_parameter_alone(value, dtype, width):
    """The same bits elsewhere as with a gradient of 0 there, in the vectors and in later steps too."""
    shapes = [(64, 70), (300, 517)]
    (one, a), (other, b) = (made(shapes=shapes, dtype=dtype, state_bits=width) for _ in range(2))
    bad = [(5, 3), (257, 300)]
    for number in range(6):
        give_gradients(a, b, number=number)
        for p, q, at in zip(a, b, bad, strict=True):
            p.grad[at] = value if number == 1 else 0
            q.grad[at] = 0
        one.step()
        other.step()
        for p, q, at in zip(a, b, bad, strict=True):
            assert (p != q).nonzero().tolist() in ([], [list(at)]), number
            assert all(torch.equal(one.state[p][name], other.state[q][name]) for name in FACTORS)
            assert q.isfinite().all() and all(one.state[p][name].isfinite().all() for name in FACTORS)
            assert p[at].isfinite() or (number >= 1 and not math.isfinite(value))
    for p, q, at in zip(a, b, bad, strict=True):
        assert p[at].isfinite() == math.isfinite(value)
        if math.isfinite(value):  # as if it had had no gradient but for what its moment did before
            assert abs(p[at] - q[at]) < 0.01
        if width == 32:
            assert one.state[p]["exp_avg"][at] == 0


@pytest.mark.parametrize("width", [32, 4])
def test_gradients_of_zero_and_near_it_move_nothing_they_should_not(width):
    ours, (p,) = made(shapes=[(64, 70)], state_bits=width, weight_decay=0)
    before = bits([p])
    for grad in (0.0, 1e-30):
        p.grad = torch.full_like(p, grad)
        ours.step()
        assert same_bits(before, [p])
    p.grad = torch.zeros_like(p)
    p.grad[3, 4] = 1.0
    ours.step()
    moved = (p != before[0]).nonzero().tolist()
    assert moved == [[3, 4]] and p.isfinite().all()


@pytest.mark.parametrize("width", [32, 8, 4])
def test_a_skipped_step_changes_nothing(width):
    ours, a = made(state_bits=width)
    run([(ours, a)], 2)
    before = bits([*a, *states(ours, a)])
    give_gradients(a, number=5)
    scaled_step(ours, torch.tensor(0.5), torch.ones(()))
    assert same_bits(before, [*a, *states(ours, a)])


def test_amsgrad_is_refused_by_name():
    with pytest.raises(
        ValueError, match="amsgrad=True keeps a maximum .* rows and columns .* use factored=False"
    ):
        made(amsgrad=True)


def test_the_plan_refuses_a_step_without_the_memory_that_it_needs():
    ours, a = made(shapes=[(64, 70)])
    run([(ours, a)], 1)
    plan = _C.UpdatePlan(ours.state, ours.param_groups)
    before = bits([*a, *states(ours, a)])
    assert plan.collect(ours.state, ours.param_groups) == []
    needed = plan.scratch(-1)
    assert needed == 4 * (1 + 64 + 70)
    for wrong in (None, torch.empty(needed - 1, dtype=torch.uint8), torch.empty(needed)):
        with pytest.raises(ValueError, match=f"scratch must be {needed} bytes of uint8 on device -1"):
            plan.run(-1, None, None, False, 0, wrong)
    assert same_bits(before, [*a, *states(ours, a)])


# ---- state dicts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [32, 8, 4])
def test_factored_states_are_loaded_exactly_and_go_on(width):
    ours, a = made(state_bits=width)
    run([(ours, a)], 3)
    other, b = made(state_bits=width, number=1)
    for p, q in zip(a, b, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(ours.state_dict())
    assert same_bits(states(ours, a), states(other, b))
    other.state = {p: {k: v.clone() for k, v in s.items()} for p, s in other.state.items()}
    run([(ours, a), (other, b)], 3, start=3)
    assert same_bits([*a, *states(ours, a)], [*b, *states(other, b)])


@pytest.mark.parametrize("width", [32, 8, 4])
@pytest.mark.parametrize("before", [32, 8, 4])
def test_whole_moments_become_the_means_of_rows_and_columns(before, width):
    whole, a = made(factored=False, state_bits=before)
    run([(whole, a)], 3)
    ours, b = made(state_bits=width)
    ours.load_state_dict(whole.state_dict())
    full = whole.state_dict(full=True)["state"]
    for number, (p, matrix) in enumerate(zip(b, MATRICES.values(), strict=True)):
        if matrix is None:
            assert not {*FACTORS} & {*ours.state[p]}
            continue
        v = full[number]["exp_avg_sq"].double().reshape(matrix)
        for name, dim in zip(FACTORS, (1, 0), strict=True):
            assert torch.allclose(ours.state[p][name].double(), v.mean(dim), rtol=1e-6)
        assert "exp_avg_sq" not in ours.state[p] and "exp_avg_sq_scale" not in ours.state[p]
    run([(ours, b)], 1, start=3)


@pytest.mark.parametrize("width", [32, 8, 4])
def test_the_two_vectors_become_their_product(width):
    ours, a = made(state_bits=4)
    run([(ours, a)], 3)
    whole, b = made(factored=False, state_bits=width)
    whole.load_state_dict(ours.state_dict())
    full = whole.state_dict(full=True)["state"]
    for number, (p, matrix) in enumerate(zip(a, MATRICES.values(), strict=True)):
        if matrix is None:
            continue
        row, column = (ours.state[p][name].double() for name in FACTORS)
        wanted = (row[:, None] * column / row.mean()).reshape(p.shape)
        assert distance([full[number]["exp_avg_sq"]], [wanted]) < {32: 1e-6, 8: 0.02, 4: 0.3}[width]
        assert not {*FACTORS} & {*whole.state[b[number]]}
    run([(whole, b)], 1, start=3)


def test_torch_loads_the_full_form_and_steps_alike_and_refuses_the_short_one():
    ours, a = made()
    run([(ours, a)], 3)
    stock = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in a])
    b = stock.param_groups[0]["params"]
    stock.load_state_dict(ours.state_dict(full=True))
    run([(ours, a), (stock, b)], 1, start=3)
    assert distance(a, b) < 1e-3
    stock.load_state_dict(ours.state_dict())
    give_gradients(b, number=4)
    before = bits(b)
    with pytest.raises(KeyError, match="exp_avg_sq"):
        stock.step()
    assert same_bits(before, b)


def test_states_that_are_not_finite_stay_out_of_the_means():
    stock = torch.optim.AdamW([torch.nn.Parameter(torch.ones(64, 70))])
    (p,) = stock.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    p.grad[3, 4], p.grad[5, 6] = 1e30, math.nan
    stock.step()
    ours, (q,) = made(shapes=[(64, 70)])
    ours.load_state_dict(stock.state_dict())
    assert all(ours.state[q][name].isfinite().all() for name in FACTORS)
    assert ours.state[q]["exp_avg"][[3, 5], [4, 6]].tolist() == [0, 0]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda s: s.pop(FACTORS[0]), "only the state 'exp_avg_sq_col', without 'exp_avg_sq_row'"),
        (lambda s: s.pop("exp_avg"), "only the state 'exp_avg_sq', without 'exp_avg'"),
        (
            lambda s: s.update({FACTORS[0]: torch.ones(70)}),
            r"'exp_avg_sq_row' is of torch.float32, .70,., not 64 floating-point numbers",
        ),
        (lambda s: s.update({FACTORS[1]: [1.0] * 70}), "'exp_avg_sq_col' is list, not 70"),
        (lambda s: s.update({FACTORS[1]: torch.ones(70).int()}), "'exp_avg_sq_col' is of torch.int32"),
    ],
)
def test_vectors_that_cannot_be_the_parameters_are_refused_before_anything_changes(change, said):
    ours, a = made(shapes=[(64, 70)])
    run([(ours, a)], 1)
    held = ours.state_dict()
    wrong = {**held, "state": {0: dict(held["state"][0])}}
    change(wrong["state"][0])
    before = bits(states(ours, a))
    with pytest.raises(ValueError, match=rf"^parameter 0 of param group 0, of shape \(64, 70\): .*{said}"):
        ours.load_state_dict(wrong)
    assert same_bits(before, states(ours, a))


# ---- learning --------------------------------------------------------------------------------------------------------
def test_factored_second_moments_learn_a_small_task_as_well_as_whole_ones(one_thread):
    """A regression with a known answer; the mean loss of three seeds, and with 4 bits."""
    losses = {(32, False): [], (32, True): [], (4, True): []}
    for seed in range(3):
        for width, factored in losses:
            torch.manual_seed(seed)
            x, hidden = torch.randn(512, 32), torch.randn(32, 1)
            y = torch.tanh(x @ hidden) + 0.1 * torch.randn(512, 1)
            model = torch.nn.Sequential(torch.nn.Linear(32, 160), torch.nn.GELU(), torch.nn.Linear(160, 1))
            optimizer = memopt.optim.AdamW(
                model.parameters(), lr=3e-3, state_bits=width, factored=factored, min_8bit_size=64
            )
            for _ in range(150):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            losses[width, factored].append(loss.item())
    means = {key: float(np.mean(found)) for key, found in losses.items()}
    assert means[32, False] < 0.01
    assert max(means.values()) < 1.1 * means[32, False], means
