"""memopt.optim.Muon, and momentum of 8 bits in it and in SGD: beside torch's steps, in state dicts, under scalers."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random

import pytest
import torch
from optim_pairs import SEED, bits, distance, generator, give_gradients, same_bits

import memopt.amp
import memopt.optim
from memopt.optim._state_bytes import passing_bytes, state_bytes
from memopt.optim._state_layout import decoded

SHAPES = [(40, 33), (33, 40), (64, 64), (1, 300), (300, 1), (1, 1), (0, 3)]
CODED = {"state_bits": 8, "min_8bit_size": 2}
KINDS = {
    "Muon": (memopt.optim.Muon, torch.optim.Muon, {"lr": 0.02}),
    "SGD": (memopt.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.95, "nesterov": True}),
}


def parameters(dtype=torch.float32, shapes=SHAPES) -> list[torch.nn.Parameter]:
    make = generator()
    return [torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in shapes]


def both(kind: str, dtype=torch.float32, shapes=SHAPES, **more):
    """One of memopt's and one of torch's, of the same parameters."""
    new, old, options = KINDS[kind]
    ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    return new(ours, **{**options, **more}), old(theirs, **options), ours, theirs


def run(pairs, steps: int, start: int = 0) -> None:
    for number in range(start, start + steps):
        give_gradients(*[params for _, params in pairs], number=number)
        for optimizer, _ in pairs:
            optimizer.step()


def momentum(optimizer, p) -> torch.Tensor:
    """As fp64."""
    state = optimizer.state[p]
    value, scale = state["momentum_buffer"], state.get("momentum_buffer_scale")
    return (value if scale is None else decoded(value, scale, False, p)).double()


def reloaded(state_dict):
    """As from a file."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- 32 bits ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", range(12))
def test_with_32_bits_muon_has_torchs_bits(part):
    draw = random.Random(f"{SEED} {part}")
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    options = {
        "lr": draw.choice([0.02, torch.tensor(0.02)]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "momentum": draw.choice([0.0, 0.5, 0.95]),
        "nesterov": draw.random() < 0.5,
        "ns_steps": draw.choice([1, 5]),
        "ns_coefficients": draw.choice([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
        "eps": draw.choice([1e-7, 1e-2]),
        "adjust_lr_fn": draw.choice([None, "original", "match_rms_adamw"]),
    }
    ours, theirs = parameters(dtype), parameters(dtype)
    for params in (ours, theirs):
        params[2].data = params[2].data.t()  # another order
    pairs = [(memopt.optim.Muon(ours, **options), ours), (torch.optim.Muon(theirs, **options), theirs)]
    for number in range(4):
        give_gradients(ours, theirs, number=number)
        for params in (ours, theirs):
            params[number].grad = None
            params[3].grad = torch.ones(1, 1).to(dtype).expand(1, 300) if number != 3 else None
        for optimizer, _ in pairs:
            optimizer.step()
        assert same_bits(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(pairs[0][0].state[p]["momentum_buffer"], pairs[1][0].state[q]["momentum_buffer"])


def test_subclasses_that_are_no_plain_tensors_have_torchs_bits():
    class Named(torch.Tensor):
        pass

    made = []
    for kind in KINDS["Muon"][:2]:
        p = torch.nn.Parameter(torch.randn(8, 9, generator=generator()).as_subclass(Named))
        optimizer = kind([p], lr=0.1)
        for number in range(3):
            p.grad = torch.randn(8, 9, generator=generator(number)).as_subclass(Named)
            optimizer.step()
        made.append(p)
    assert same_bits(made[:1], made[1:])


# ---- 8 bits ----------------------------------------------------------------------------------------------------------
def reference(p, m, g, *, lr, beta, damped, nesterov, orthogonal):
    """A step in fp64 from an exact momentum: of SGD, or of Muon with orthogonal."""
    m = beta * m + damped * g
    x = damped * g + beta * m if nesterov else m
    if orthogonal:
        x = x.bfloat16().double()
        x = x / x.norm().clamp(min=1e-7)
        tall, x = x.size(0) > x.size(1), x.t() if x.size(0) > x.size(1) else x
        for _ in range(5):
            gram = x @ x.t()
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * (gram @ gram)) @ x
        x = (x.t() if tall else x) * math.sqrt(max(1, p.size(0) / max(1, p.size(1))))
        p = p * (1 - lr * 0.1)
    return p - lr * x, m


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_8_bits_is_the_formulas_from_what_its_codes_say(kind, dtype, nesterov):
    beta, muon = 0.95, kind == "Muon"
    new, _, ours, _ = both(kind, dtype, SHAPES[:5], momentum=beta, nesterov=nesterov, **CODED)
    run([(new, ours)], 6)
    before = [(p.detach().double(), momentum(new, p)) for p in ours]
    give_gradients(ours, number=6)
    new.step()
    for (p, m), q in zip(before, ours, strict=True):
        lr, damped = new.param_groups[0]["lr"], 1 - beta if muon else 1.0
        wanted, exact = reference(
            p, m, q.grad.double(), lr=lr, beta=beta, damped=damped, nesterov=nesterov, orthogonal=muon
        )
        moved, off = (wanted - p).norm(), (q.double() - wanted).norm()
        rounding = p.norm() * (2**-8 if dtype is torch.bfloat16 else 2**-22)
        assert off <= (0.03 if muon else 1e-5) * moved + rounding
        largest = torch.zeros(-(-m.numel() // 256) * 256, dtype=torch.float64)
        largest[: m.numel()] = exact.flatten().abs()
        scale = largest.view(-1, 256).amax(1).repeat_interleave(256)[: m.numel()].view(m.shape)
        assert ((momentum(new, q) - exact).abs() <= (exact.abs() + scale / 247) / 15.9 + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_8_bits_stay_beside_32(kind):
    new, old, ours, theirs = both(kind, shapes=[(64, 48), (48, 64)], **CODED)
    start = bits(ours)
    run([(new, ours), (old, theirs)], 50)
    moved = [p - q for p, q in zip(theirs, start, strict=True)]
    assert distance([p - q for p, q in zip(ours, start, strict=True)], moved) < 0.1


def test_a_momentum_that_decays_by_less_than_half_a_code_decays_in_the_mean():
    """To nearest it would stand still."""
    p = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = memopt.optim.SGD([p], lr=0.0, momentum=0.99, **CODED)
    p.grad = torch.randn(64, 256, generator=generator()).exp2()
    optimizer.step()
    first = momentum(optimizer, p)
    p.grad = torch.zeros_like(p)
    for _ in range(100):
        optimizer.step()
    assert abs(momentum(optimizer, p).sum() / first.sum() / 0.99**100 - 1) < 0.01


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_of_a_gradient_that_is_no_number_the_momentum_of_others_knows_nothing(value):
    made = []
    for bad in (value, 0.0):
        for kind in KINDS:
            optimizer, _, (p,), _ = both(kind, shapes=[(32, 40)], **CODED)
            for number in range(3):
                give_gradients([p], number=number)
                p.grad[7, 8] = bad if number == 1 else 0.0
                optimizer.step()
            state = optimizer.state[p]
            assert state["momentum_buffer"].view(-1)[7 * 40 + 8] & 0x7F == 0
            assert state["momentum_buffer_scale"].isfinite().all()
            lost = ~p.isfinite()
            assert not lost.any() if bad == 0 else lost.all() if kind == "Muon" else lost.sum() == 1
            made.append((state["momentum_buffer"], state["momentum_buffer_scale"]))
    for one, other in zip(made[:2], made[2:], strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_momentum_of_8_bits_takes_a_quarter_and_is_foretold(kind):
    optimizer, _, ours, _ = both(kind, shapes=[(256, 512), (32, 64)], state_bits=8)
    foretold = state_bytes(optimizer)
    run([(optimizer, ours)], 1)
    assert foretold == state_bytes(optimizer)
    large, small = (optimizer.state[p] for p in ours)
    coded = sum(v.nbytes for name, v in large.items() if name != "step")
    assert coded / ours[0].numel() == 1 + 4 / 256
    assert small["momentum_buffer"].dtype is torch.float32  # below min_8bit_size
    fp64, _, (p,), _ = both(kind, torch.float64, shapes=[(64, 65)], **CODED)
    run([(fp64, [p])], 1)
    assert fp64.state[p]["momentum_buffer"].dtype is torch.float64


def test_a_gradient_in_another_order_is_taken_and_kept_unscaled():
    made = []
    for turned in (False, True):
        optimizer, _, (p,), _ = both("Muon", shapes=[(32, 40)], **CODED)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        grad = torch.randn(32, 40, generator=generator(1)) * 4
        p.grad = grad.t().contiguous().t() if turned else grad.clone()
        scaler.step(optimizer)
        assert torch.equal(p.grad, grad / 4)
        made.append(p)
    assert same_bits(made[:1], made[1:])


# ---- state dicts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_states_go_to_torch_and_come_from_it(kind):
    new, old, ours, theirs = both(kind, **CODED)
    whole, *_ = both(kind)
    run([(new, ours), (old, theirs)], 3)
    full, codes = reloaded(new.state_dict(full=True)), reloaded(new.state_dict())
    old.load_state_dict(full)
    whole.load_state_dict(codes)
    for p, q, r in zip(ours, theirs, whole.param_groups[0]["params"], strict=True):
        exact = momentum(new, p)
        assert torch.equal(momentum(old, q), exact) and torch.equal(momentum(whole, r), exact)
    new.load_state_dict(reloaded(whole.state_dict()))
    for p, r in zip(ours, whole.param_groups[0]["params"], strict=True):
        assert p.numel() < 2 or new.state[p]["momentum_buffer"].dtype is torch.uint8
        assert (
            (momentum(new, p) - momentum(whole, r)).abs().max() <= momentum(whole, r).abs().max() / 31
            if (p.numel())
            else True
        )
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    before = bits(ours)
    run([(new, ours), (old, theirs)], 1, start=3)
    moved = distance(
        [p - q for p, q in zip(ours, before, strict=True)],
        [p - q for p, q in zip(theirs, before, strict=True)],
    )
    assert moved < 0.05


@pytest.mark.parametrize("coded", [{}, CODED], ids=["32", "8"])
@pytest.mark.parametrize("kind", KINDS)
def test_pickles_copies_and_state_dicts_go_on_as_if_nothing_had_been(kind, coded):
    new, _, ours, _ = both(kind, **coded)
    run([(new, ours)], 3)
    loaded = both(kind, **coded)[0]
    for p, q in zip(ours, loaded.param_groups[0]["params"], strict=True):
        q.data.copy_(p.data)
    loaded.load_state_dict(reloaded(new.state_dict()))
    for twin in (pickle.loads(pickle.dumps(new)), copy.deepcopy(new), loaded):
        again, copied = copy.deepcopy(new), twin.param_groups[0]["params"]
        run([(again, again.param_groups[0]["params"]), (twin, copied)], 3, start=3)
        assert same_bits(again.param_groups[0]["params"], copied)


def test_torch_begins_with_new_momentum_where_it_is_given_codes():
    new, old, ours, theirs = both("Muon", shapes=SHAPES[:3], **CODED)
    run([(new, ours)], 2)
    old.load_state_dict(reloaded(new.state_dict()))
    assert all("momentum_buffer" not in old.state[q] for q in theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(momentum_buffer_codes=s["momentum_buffer_codes"][:3]), "are not codes"),
        (lambda s: s.pop("momentum_buffer_scale"), "are not codes"),
        (
            lambda s: s.update(momentum_buffer_scale=s["momentum_buffer_scale"][:1]),
            r"'momentum_buffer_scale' has the shape \(1,\), not \(6,\)",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_states_that_cannot_be_their_parameters_are_refused_before_anything_changes(kind, change, said):
    new, _, ours, _ = both(kind, **CODED)
    run([(new, ours)], 1)
    held, before = copy.deepcopy(new.state_dict()), copy.deepcopy(new.state_dict())
    change(held["state"][0])
    with pytest.raises(ValueError, match=rf"(?s)parameter 0 of param group 0, of shape \(40, 33\).*{said}"):
        new.load_state_dict(held)
    for number, state in new.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][name]) for name, value in state.items())


# ---- schedulers, hooks, closures, scalers ----------------------------------------------------------------------------
@pytest.mark.parametrize("coded", [{}, CODED], ids=["32", "8"])
def test_schedulers_closures_hooks_and_groups(coded):
    new, old, ours, theirs = both("Muon", shapes=[(40, 33), (33, 40)], **coded)
    start, calls = bits(ours), []
    for optimizer, params in ((new, ours), (old, theirs)):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=True)
        for number in range(3):

            def closure(params=params, number=number):
                give_gradients(params, number=number)
                return 5.0

            assert optimizer.step(closure) == 5.0
            schedule.step()
        p = torch.nn.Parameter(torch.ones(8, 9))
        optimizer.add_param_group({"params": [p], "lr": 0.5, "momentum": 0.5})
        p.grad = torch.eye(8, 9)
        optimizer.step()
        params.append(p)
    assert calls == ["before", "after"] * 8
    assert new.param_groups[0]["lr"] == old.param_groups[0]["lr"]
    assert new.param_groups[1].get("state_bits", 32) == coded.get("state_bits", 32)
    if not coded:
        assert same_bits(ours, theirs)
    start.append(torch.ones(8, 9))
    moved = [[p - q for p, q in zip(params, start, strict=True)] for params in (ours, theirs)]
    assert distance(*moved) < 0.05


@pytest.mark.parametrize(
    ("scaling", "clip"),
    [(torch.amp.GradScaler, False), (memopt.amp.GradScaler, False), (memopt.amp.GradScaler, True)],
)
@pytest.mark.parametrize("coded", [{}, CODED], ids=["32", "8"])
def test_under_a_scaler(coded, clip, scaling):
    """Beside the same without a scaler, and torch's scaler with torch's optimizer: a scale that is a power of two."""
    shapes = [(40, 33), (33, 40)]
    new, old, ours, theirs = both("Muon", shapes=shapes, **coded)
    plain, _, bare, _ = both("Muon", shapes=shapes, **coded)
    scalers = [kind("cpu", init_scale=1024.0, growth_interval=2) for kind in (scaling, torch.amp.GradScaler)]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    for number, poison in enumerate([math.inf, None, None, math.nan, None, None]):
        give_gradients(ours, theirs, bare, number=number)
        for p, q in zip(ours, theirs, strict=True):
            for grad in (p.grad, q.grad):
                grad.mul_(scalers[0].get_scale())
                if poison is not None:
                    grad[3, 4] = poison
        before = bits(ours), copy.deepcopy(new.state_dict()["state"])
        if clip:
            scalers[0].step(new, max_norm=1.0, unscaled_grads=True)
            scalers[1].unscale_(old)
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            torch.nn.utils.clip_grad_norm_(bare, 1.0)
        else:
            scalers[0].step(new)
        scalers[1].step(old)
        for scaler in scalers:
            scaler.update()
        if poison is not None:
            assert same_bits(ours, before[0]) and new.state_dict()["state"].keys() == before[1].keys()
            continue
        assert distance([p.grad for p in ours], [q.grad for q in theirs]) < 1e-6
        plain.step()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    if not clip:
        assert same_bits(ours, bare)
    if not coded and not clip:
        assert same_bits(ours, theirs)
    assert distance(ours, theirs) < 0.02


# ---- memory, errors --------------------------------------------------------------------------------------------------
def test_a_step_takes_as_much_as_torchs_or_less():
    taken = [
        sum(passing_bytes(optimizer, kinds_of(optimizer)))
        for optimizer in (
            torch.optim.Muon(parameters(shapes=[(64, 128)] * 3)),
            memopt.optim.Muon(parameters(shapes=[(64, 128)] * 3)),
            memopt.optim.Muon(parameters(shapes=[(64, 128)] * 3), state_bits=8),
        )
    ]
    assert taken[1] == taken[0] and taken[2] < taken[0]


def kinds_of(optimizer):
    from memopt.optim._state_bytes import Kind

    return [
        Kind(0, tuple(p.shape), p.stride(), p.dtype, p.device) for p in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize("state_bits", [7, 4, 16, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_other_widths_are_refused(kind, state_bits):
    with pytest.raises(ValueError, match=rf"Invalid state_bits value: {state_bits} \(8 or 32\)"):
        both(kind, state_bits=state_bits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_momentum_that_is_not_there_has_no_8_bits(kind):
    more = {"nesterov": False} if kind == "SGD" else {}
    with pytest.raises(ValueError, match=r"there is none: give momentum=, or use state_bits=32"):
        both(kind, state_bits=8, momentum=0, **more)
    both(kind, momentum=0, **more)
    optimizer, _, _, _ = both(kind, state_bits=8)
    with pytest.raises(ValueError, match="give momentum="):
        optimizer.add_param_group({"params": parameters(), "momentum": 0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "x"}, {"lr": torch.ones(2)}],
)
def test_what_torchs_muon_refuses_is_refused_in_its_words(options):
    said = []
    for cls in KINDS["Muon"][:2]:
        with pytest.raises(ValueError) as error:
            cls(parameters(), **options)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_parameters_that_are_no_matrices_are_refused(shape):
    words = r"only supports 2D parameters .*give it to memopt\.optim\.AdamW"
    with pytest.raises(ValueError, match=words):
        memopt.optim.Muon([torch.nn.Parameter(torch.ones(shape))])
    optimizer = memopt.optim.Muon(parameters())
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(shape))]})
    assert len(optimizer.param_groups) == 1
    run([(optimizer, optimizer.param_groups[0]["params"])], 1)


def test_sparse_gradients_and_complex_parameters_are_refused_before_anything_changes():
    for wrong, said in (
        (torch.nn.Parameter(torch.ones(4, 5)), "does not support sparse gradients"),
        (torch.nn.Parameter(torch.ones(4, 5, dtype=torch.complex64)), "does not support complex parameters"),
    ):
        first = torch.nn.Parameter(torch.ones(4, 5))
        optimizer = memopt.optim.Muon([first, wrong])
        first.grad = torch.ones(4, 5)
        wrong.grad = torch.ones_like(wrong).detach()
        if not wrong.is_complex():
            wrong.grad = wrong.grad.to_sparse()
        with pytest.raises(RuntimeError, match=said):
            optimizer.step()
        assert torch.equal(first, torch.ones(4, 5)) and not optimizer.state


def test_sgds_sparse_gradients_have_a_momentum_of_their_own_type():
    p = torch.nn.Parameter(torch.ones(40, 50))
    optimizer = memopt.optim.SGD([p], lr=0.1, momentum=0.9, **CODED)
    for _ in range(3):
        p.grad = torch.ones(40, 50).to_sparse()
        optimizer.step()
    assert torch.allclose(p, torch.full((40, 50), 1 - 0.1 * (1 + 1.9 + 2.71)))


def test_a_parameter_that_was_replaced_is_told_what_to_do():
    optimizer, _, (p,), _ = both("Muon", shapes=[(32, 40)], **CODED)
    run([(optimizer, [p])], 1)
    p.grad, p.data = None, torch.ones(40, 32).t()
    give_gradients([p], number=2)
    with pytest.raises(RuntimeError, match=r"8-bit momentum of a parameter of shape \(32, 40\).*load the"):
        optimizer.step()
    assert torch.equal(p, torch.ones(32, 40))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert not torch.equal(p, torch.ones(32, 40))


def test_without_gradients_nothing_happens():
    optimizer = memopt.optim.Muon(parameters())
    before = bits(optimizer.param_groups[0]["params"])
    optimizer.step()
    assert same_bits(before, optimizer.param_groups[0]["params"]) and not optimizer.state
