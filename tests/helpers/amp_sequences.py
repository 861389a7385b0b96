"""Random sequences of calls on two gradient scalers side by side, and everything that can be seen of them compared
after each call: what came back or was raised, in words; the scalers' state; parameters, gradients and optimizers, in
bits.

A sequence is made from a seed alone; so the pair that differs is made again from the seed that a failure prints."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CALLS_A_SEQUENCE = 14

# Frames of calls: the classes are found by name when a scaler is unpickled.
Scaler = Callable[..., torch.amp.GradScaler]


class Counting(torch.optim.Optimizer):
    """An optimizer that hands back how often it stepped and what it was given."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})
        self.steps = 0

    def step(self, *args, **kwargs):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=-group["lr"])
        return (
            self.steps,
            [a for a in args if not callable(a)],
            sorted(k for k in kwargs if k != "grad_scaler"),
        )


class Apexlike(Counting):
    """Takes the scaler itself."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        if not grad_scaler._found_inf_per_device(self):
            grad_scaler._check_inf_per_device(self)
        return (
            super().step()
            if not any(v.item() for v in grad_scaler._found_inf_per_device(self).values())
            else None
        )


class Attributed(Counting):
    """Takes grad_scale and found_inf, and tells what they were."""

    _step_supports_amp_scaling = True

    def step(self):
        scale = self.grad_scale
        return super().step(), None if scale is None else float(scale), float(self.found_inf)


OPTIMIZERS: list[Callable[[list], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    Counting,
    Apexlike,
    Attributed,
]


class World:
    """One of the two: parameters, optimizers and a scaler, all from the same draws."""

    def __init__(self, make: Scaler, seed: int) -> None:
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.parameters: list[torch.nn.Parameter] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            groups = []
            for _ in range(draw.choice([1, 1, 2])):
                dtypes = draw.choice([DTYPES[:1], DTYPES[:3], DTYPES[:3], DTYPES])
                own = []
                for _ in range(draw.choice([0, 1, 2, 5])):
                    shape = draw.choice([(), (0,), (1,), (3,), (4, 5), (33,), (2, 3, 4), (700,)])
                    data = torch.randn(shape, generator=generator).to(draw.choice(dtypes))
                    own.append(torch.nn.Parameter(data))
                self.parameters += own
                groups.append({"params": own})
            if not any(group["params"] for group in groups):
                spare = torch.nn.Parameter(torch.ones(2))
                self.parameters.append(spare)
                groups[0]["params"].append(spare)
            try:
                self.optimizers.append(draw.choice(OPTIMIZERS)(groups))
            except RuntimeError:  # fused, and a type that it does not know
                self.optimizers.append(Counting(groups))
        settings = {
            "init_scale": draw.choice([2.0**16, 1.0, 3.0, 1000.1, 2.0**-20, 3e38, 1e-45, 0.0]),
            "growth_factor": draw.choice([2.0, 1.5, 1e30]),
            "backoff_factor": draw.choice([0.5, 0.3, 0.0]),
            "growth_interval": draw.choice([1, 2, 2, 3, 2000]),
            "enabled": draw.random() > 0.03,
        }
        self.scaler = make("cpu", **settings)
        self.strange: list[Any] = []

    def optimizer(self, draw: random.Random) -> torch.optim.Optimizer:
        return draw.choice(self.optimizers)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradient(p: torch.Tensor, draw: random.Random, generator: torch.Generator) -> torch.Tensor | None:
    kind = draw.choice(
        ["dense"] * 6 + ["none", "transposed", "gaps", "misaligned", "expanded", "sparse", "sparse"]
    )
    values = torch.randn(p.shape, generator=generator) * draw.choice([1.0, 1e4, 1e-7, 1e30])
    values = values.to(p.dtype)
    if values.numel() and draw.random() < 0.12:
        values.view(-1)[draw.randrange(values.numel())] = draw.choice([math.inf, -math.inf, math.nan])
    if kind == "none":
        return None
    if kind == "transposed" and p.dim() == 2:
        return values.t().contiguous().t()
    if kind == "gaps":
        return torch.zeros((*p.shape, 2), dtype=p.dtype)[..., 0].copy_(values)
    if kind == "misaligned":
        return torch.zeros(p.numel() + 3, dtype=p.dtype)[3:].view(p.shape).copy_(values)
    if kind == "expanded" and p.numel() > 1 and draw.random() < 0.2:
        # With memory behind it: torch's fused optimizers read as if it were dense.
        return torch.full((p.numel(),), 2.0, dtype=p.dtype)[0].expand(p.shape)
    if kind == "sparse" and p.dim() >= 1 and p.shape[0] > 0:
        rows = torch.tensor([[0, 0, p.shape[0] - 1]])
        grad = torch.sparse_coo_tensor(rows, values[rows[0]], p.shape, check_invariants=False)
        return grad.coalesce() if draw.random() < 0.5 and p.dtype != torch.float16 else grad
    return values


# ---- calls -----------------------------------------------------------------------------------------------------------
# Each takes a world and a source of draws, which is in the same state for both worlds.


def backward(world: World, draw: random.Random) -> None:
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    for i, p in enumerate(world.parameters):
        p.grad = gradient(p, draw, generator)
        earlier = world.parameters[draw.randrange(i + 1)]
        if (
            draw.random() < 0.03
            and earlier.grad is not None
            and earlier.shape == p.shape
            and earlier.dtype == p.dtype
        ):
            p.grad = earlier.grad  # one tensor, twice


def scale(world: World, draw: random.Random) -> Any:
    one = torch.tensor(draw.choice([1.0, 2.5]), dtype=draw.choice(DTYPES))
    outputs = draw.choice(
        [one, one, one, [one, one[None]], (one, [one]), iter([one]), 3, "x", None, [one, 4]]
    )
    return world.scaler.scale(outputs)


def first_scale(world: World, draw: random.Random) -> Any:
    return world.scaler.scale(torch.ones(()))


def unscale(world: World, draw: random.Random) -> Any:
    return world.scaler.unscale_(world.optimizer(draw))


def clip(world: World, draw: random.Random) -> Any:
    """torch's on both sides: what is compared is that the scaler goes on from there."""
    grads = [
        p
        for p in world.parameters
        if p.grad is not None and p.dtype == torch.float32 and not p.grad.is_sparse
    ]
    return torch.nn.utils.clip_grad_norm_(grads, 1.0, foreach=False)


def step(world: World, draw: random.Random) -> Any:
    optimizer = world.optimizer(draw)
    how = draw.random()
    if how < 0.04:
        return world.scaler.step(optimizer, closure=lambda: 1.0)
    if how < 0.08:
        return world.scaler.step(optimizer, lambda: torch.zeros(()))
    if how < 0.12:
        optimizer.grad_scale = torch.tensor(2.0)
    return world.scaler.step(optimizer)


def update(world: World, draw: random.Random) -> Any:
    new = draw.choice(
        [None] * 8 + [4.0, 3, torch.tensor(8.0), torch.ones(2), torch.ones((), requires_grad=True)]
    )
    return world.scaler.update() if new is None else world.scaler.update(new)


def iteration(world: World, draw: random.Random) -> Any:
    """A whole one, so that sequences go somewhere."""
    world.scaler.scale(torch.ones(()))
    backward(world, draw)
    results = []
    for optimizer in world.optimizers:
        if draw.random() < 0.5:
            world.scaler.unscale_(optimizer)
        results.append(world.scaler.step(optimizer))
    world.scaler.update()
    return results


def check(world: World, draw: random.Random) -> Any:
    return world.scaler._check_inf_per_device(world.optimizer(draw))


def found(world: World, draw: random.Random) -> Any:
    return world.scaler._found_inf_per_device(world.optimizer(draw))


def unscale_grads(world: World, draw: random.Random) -> Any:
    inverse, fp16 = torch.tensor(draw.choice([1.0, 0.25, 0.3])), draw.random() < 0.5
    return world.scaler._unscale_grads_(world.optimizer(draw), inverse, torch.zeros(()), fp16)


def strange_parameter(world: World, draw: random.Random) -> Any:
    class Strange:
        param_groups = [{"params": (p for p in [*world.parameters[:1], "not a tensor"])}]  # noqa: RUF012

    world.strange.append(
        Strange()
    )  # kept: scalers know optimizers by id(), which the next one could have else
    return world.scaler.unscale_(world.strange[-1])


def setters(world: World, draw: random.Random) -> Any:
    world.scaler.set_growth_interval(draw.choice([1, 2, 3]))
    world.scaler.set_growth_factor(draw.choice([2.0, 4.0]))
    world.scaler.set_backoff_factor(draw.choice([0.5, 0.25]))
    return (
        world.scaler.get_growth_interval(),
        world.scaler.get_growth_factor(),
        world.scaler.get_backoff_factor(),
    )


def getters(world: World, draw: random.Random) -> Any:
    s = world.scaler
    return s.get_scale(), s.is_enabled(), s.state_dict(), s._get_growth_tracker()


def load(world: World, draw: random.Random) -> Any:
    state = world.scaler.state_dict()
    state = draw.choice([state, {}, {**state, "scale": 5.0, "_growth_tracker": 1}, {"scale": 1.0}])
    return world.scaler.load_state_dict(state)


def pickled(world: World, draw: random.Random) -> Any:
    world.scaler = (
        pickle.loads(pickle.dumps(world.scaler)) if draw.random() < 0.5 else copy.deepcopy(world.scaler)
    )


def saved(world: World, draw: random.Random) -> Any:
    file = io.BytesIO()
    torch.save(world.scaler.state_dict(), file)
    file.seek(0)
    return world.scaler.load_state_dict(torch.load(file))


CALLS: list[tuple[Callable[[World, random.Random], Any], int]] = [
    (backward, 10), (scale, 3), (first_scale, 4), (unscale, 9), (clip, 2), (step, 12), (update, 8), (iteration, 14),
    (check, 2), (found, 1), (unscale_grads, 2), (strange_parameter, 1), (setters, 2), (getters, 2), (load, 2),
    (pickled, 2), (saved, 1),
]  # fmt: skip


# ---- what is seen ----------------------------------------------------------------------------------------------------

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Any) -> Any:
    """A value as something that compares equal if and only if the value is the same, NaNs being one."""
    if isinstance(x, torch.Tensor):
        if x.is_sparse:
            return "sparse", x.is_coalesced(), bits(x._indices()), bits(x._values())
        plain = torch.where(x.isnan(), torch.full_like(x, math.nan), x) if x.is_floating_point() else x
        plain = plain.detach().contiguous()
        return str(x.dtype), tuple(x.shape), plain.reshape(-1).view(_INTEGER[x.element_size()]).tolist()
    if isinstance(x, dict):
        return [(str(k), bits(v)) for k, v in x.items()]
    if isinstance(x, map):
        return "map", [bits(v) for v in x]
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [bits(v) for v in x]
    if isinstance(x, float) and math.isnan(x):
        return "nan"
    return type(x).__name__, repr(x)


def seen(world: World, gradients: bool) -> dict[str, Any]:
    scaler, number = world.scaler, {id(o): i for i, o in enumerate(world.optimizers)}
    states = getattr(scaler, "_per_optimizer_states", {})
    return {
        "scale": bits(getattr(scaler, "_scale", None)),
        "tracker": bits(getattr(scaler, "_growth_tracker", None)),
        "settings": bits([getattr(scaler, n, None) for n in (
            "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval", "_init_growth_tracker", "_device",
        )]),
        "stages": sorted(
            (number.get(key, -1), state["stage"].name, bits(state["found_inf_per_device"]))
            for key, state in states.items()
        ),
        "parameters": bits([p.data for p in world.parameters]),
        "gradients": bits([p.grad for p in world.parameters]) if gradients else None,
        "optimizers": bits([list(o.state_dict()["state"].values()) for o in world.optimizers]),
        "left": [sorted(n for n in ("grad_scale", "found_inf") if hasattr(o, n)) for o in world.optimizers],
    }  # fmt: skip


def called(call: Callable[[World, random.Random], Any], world: World, seed: int) -> tuple[Any, bool]:
    """The outcome of a call, and whether it was an error of the op's, which may leave gradients half done."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = bits(call(world, random.Random(seed)))  # a lazy result is worked through here
            half_done = False
        except Exception as error:  # compared, whatever it is
            result = type(error).__name__, str(error)
            half_done = "written-to tensor" in str(error)
    return (result, sorted({str(w.message) for w in heard})), half_done


def difference(make: Scaler, seed: int, stock: Scaler = torch.amp.GradScaler) -> str | None:
    """Plays the sequence of a seed on `stock` and on what `make` makes: the first thing that differs, in words, or
    None."""
    worlds = World(stock, seed), World(make, seed)
    draw = random.Random(seed ^ 0x5EED)
    calls, weights = zip(*CALLS, strict=True)
    history = []
    order = draw.choices(calls, weights, k=CALLS_A_SEQUENCE)
    if draw.random() < 0.9:
        order[:0] = [first_scale, backward]
    for call in order:
        call_seed = draw.getrandbits(30)
        (ours, _), (theirs, half_done) = (called(call, world, call_seed) for world in reversed(worlds))
        history.append(call.__name__)
        where = f"seed {seed}, after {' '.join(history)}: "
        if ours != theirs:
            return f"{where}came {ours}, torch's {theirs}"
        if half_done:  # torch's op stopped in the midst of a list; both go on from new gradients
            for world in worlds:
                backward(world, random.Random(call_seed))
        left, right = (seen(world, True) for world in worlds)
        for key in left:
            if left[key] != right[key]:
                return f"{where}{key} {right[key]}, torch's {left[key]}"
    return None
