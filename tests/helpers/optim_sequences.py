"""Random sequences of what a program does with an optimizer, on memopt's and on torch's in lockstep. After each call
both must have raised the same or nothing, and every parameter and state must be within a bound of torch's that is kept
beside it, element by element: what roundings of both can have made of the inputs so far.

    u           half of the distance of two numbers of the parameter's type, relative
    B(m)        beta1 B(m) + (1 - beta1) B(x) + c u (|m| + |x|)
    B(v)        beta2 B(v) + (1 - beta2) (2 |x| B(x) + B(x)^2) + c u v
    B(p)        B(p) + lr (B(m) / d + |m| (1 / d(v - B(v)) - 1 / d(v + B(v)))) + c u (|p| + lr |m| / d)

and likewise for SGD. Parameters of 16 bits are compared with torch's fused step, which rounds once, as memopt's does.

A sequence is made from a seed alone; so the pair that differs is made again from the seed that a failure prints."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from optim_pairs import PAIRS
from torch import Tensor

import memopt.amp
from memopt.optim._one_pass import OnePass
from memopt.optim._state_layout import is_plain

CALLS_A_SEQUENCE = 10
ROUNDINGS = 6  # c
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (3,), (4, 5), (2, 3, 4), (2, 3, 4, 5), (70,)]
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


class Difference(Exception):
    pass


# ---- what a sequence is played on ------------------------------------------------------------------------------------
def drawn(p: Tensor, draw: random.Random, scale: float = 1.0) -> Tensor:
    make = torch.Generator().manual_seed(draw.getrandbits(40))
    return (torch.randn(p.shape, generator=make, dtype=torch.float64) * scale).to(p.dtype)


def arranged(side: Side, value: Tensor, draw: random.Random) -> Tensor:
    """The same numbers, sometimes in another order of dimensions or with gaps. Not for torch's fused step: on the CPU
    it pairs elements by their place in memory, whatever their strides are."""
    how = draw.choice(["plain"] * 5 + ["transposed", "gaps", "channels last"])
    if side.options.get("fused"):
        return value
    if how == "transposed":
        return value.mT.contiguous().mT if value.dim() >= 2 else value
    if how == "gaps":
        return torch.zeros((*value.shape, 2), dtype=value.dtype)[..., 0].copy_(value)
    if how == "channels last" and value.dim() == 4:
        return value.to(memory_format=torch.channels_last)
    return value


class Side:
    """One of the two: an optimizer and its parameters."""

    def __init__(self, which: int, seed: int) -> None:
        draw = random.Random(seed)
        self.which = which
        self.kind = draw.choice(["adamw", "adamw", "adam", "sgd"])
        self.dtypes = draw.choice([DTYPES[:1], DTYPES[:1], DTYPES[:2], DTYPES])
        self.sizes = draw.choice([(1.0,), (1.0,), (1.0, 1e-8, 1e4), (1.0, 1e-30, 1e-20, 1e15, 1e20, 1e30)])
        self.options = self.draw_options(draw)
        self.held: dict[str, Any] = {}  # its state dict before the call
        groups = [self.new_group(draw) for _ in range(draw.choice([1, 1, 2]))]
        self.optimizer = self.made(groups)

    def draw_options(self, draw: random.Random) -> dict[str, Any]:
        lr = draw.choice([1e-3, 1e-2, 0.1, 0.0, 1.0])
        options: dict[str, Any] = {
            "lr": torch.tensor(lr, dtype=draw.choice(DTYPES[:2])) if draw.random() < 0.15 else lr,
            "weight_decay": draw.choice([0, 0, 0.01, 0.5]),
            "maximize": draw.random() < 0.2,
            "foreach": draw.choice([None, None, True, False]),
        }
        # Of torch 2.13's fused steps on the CPU SGD's leaves parameters of 16 bits as they are.
        narrow = self.dtypes == DTYPES
        if self.kind != "sgd" if narrow else draw.random() < 0.15:
            options |= {"foreach": None, "fused": True}
        if isinstance(options["lr"], Tensor):
            options["foreach"] = None
        if self.kind == "sgd":
            options["momentum"] = draw.choice([0, 0.5, 0.9])
            options["nesterov"] = options["momentum"] > 0 and draw.random() < 0.4
            if options["nesterov"]:
                options["foreach"] = (
                    None  # torch's adds the momentum to p.grad itself, which the next step may take
                )
            options["dampening"] = 0 if options["nesterov"] else draw.choice([0, 0, 0.3])
            return options
        if self.kind == "adam":
            options["decoupled_weight_decay"] = draw.random() < 0.3
        options["betas"] = draw.choice(
            [(0.9, 0.999)] * 3 + [(0.0, 0.5), (0.5, 0.9), (0.95, 0.99), (0.0, 0.0)]
        )
        options["eps"] = draw.choice([1e-8, 1e-8, 1e-3])
        options["amsgrad"] = (
            not options.get("fused") and draw.random() < 0.25
        )  # torch's fused one overlooks a NaN
        return options

    def new_group(self, draw: random.Random) -> dict[str, Any]:
        params = []
        for _ in range(draw.choice([1, 2, 4])):
            value = drawn(torch.empty(draw.choice(SHAPES), dtype=draw.choice(self.dtypes)), draw)
            params.append(torch.nn.Parameter(arranged(self, value, draw)))
        group: dict[str, Any] = {"params": params}
        if draw.random() < 0.3:
            group["lr"] = draw.choice([1e-3, 0.05])
        if draw.random() < 0.3:
            group["weight_decay"] = draw.choice([0, 0.1])
        return group

    def made(self, groups: list[dict[str, Any]], **other: Any) -> torch.optim.Optimizer:
        return PAIRS[self.kind][self.which](groups, **{**self.options, **other})

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


# ---- calls -----------------------------------------------------------------------------------------------------------
# Each is made on both sides, with the same draws; `other` is the other side.
def gradient(side: Side, p: Tensor, draw: random.Random) -> Tensor | None:
    kind = draw.choice(["dense"] * 12 + ["none", "zeros", "poisoned", "sparse"])
    value = drawn(p, draw, draw.choice(side.sizes))
    if kind == "none":
        return None
    if kind == "zeros":
        return torch.zeros_like(value)
    if kind == "poisoned" and p.numel():
        value.view(-1)[draw.randrange(p.numel())] = draw.choice([math.inf, -math.inf, math.nan])
    if kind == "sparse" and side.kind == "sgd" and p.dim() == 2 and not side.options.get("fused"):
        return value.to_sparse(1)
    return arranged(side, value, draw)


def backward(side: Side, other: Side, draw: random.Random) -> None:
    for p in side.params:
        p.grad = gradient(side, p, draw)


def step(side: Side, other: Side, draw: random.Random) -> Any:
    return side.optimizer.step()


def closure(side: Side, other: Side, draw: random.Random) -> Any:
    def evaluate() -> float:
        backward(side, other, draw)
        return 2.5

    return side.optimizer.step(evaluate)


def iteration(side: Side, other: Side, draw: random.Random) -> None:
    backward(side, other, draw)
    step(side, other, draw)


def scaled(side: Side, other: Side, draw: random.Random) -> None:
    """Through torch's scaler, which unscales for torch's loops, as memopt's step does itself. Not with what torch's
    steps differ in among themselves: fp16 gradients and none at all, which only the fused ones take, and a skipped
    first step, which leaves their momentum buffers undefined."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** draw.choice([0, 4, 10]))
    scaler.scale(torch.ones(()))
    backward(side, other, draw)
    for p in side.params:
        if p.grad is not None:
            p.grad = p.grad * scaler.get_scale()
        if p.dtype is torch.float16:
            p.grad = None
        elif side.options.get("fused") and side.kind == "sgd" and p.grad is not None:
            p.grad.nan_to_num_(0, 0, 0)
    if all(p.grad is None for p in side.params):
        return
    if draw.random() < 0.5:
        scaler.unscale_(side.optimizer)
    scaler.step(side.optimizer)
    # Skipped: unscaled by torch's loops only.
    if any(p.grad is not None and not all_finite(p.grad) for p in side.params):
        side.optimizer.zero_grad()


def clipped(side: Side, other: Side, draw: random.Random) -> None:
    """By torch's function on both sides; what is compared is the step after it."""
    backward(side, other, draw)
    torch.nn.utils.clip_grad_norm_([p for p in side.params if p.grad is None or not p.grad.is_sparse], 1.0)
    step(side, other, draw)


def clipped_by_scaler(side: Side, other: Side, draw: random.Random) -> None:
    """memopt's scaler clips in the step, torch's before it. Of fp32, whose norm both have to 1e-6, and of sizes at
    which torch's sum of squares does not overflow."""
    if side.dtypes != DTYPES[:1]:
        return iteration(side, other, draw)
    size = draw.choice([1e-3, 1.0, 1e3])
    scaler = (memopt.amp.GradScaler if side.which == 0 else torch.amp.GradScaler)("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for p in side.params:
        p.grad = drawn(p, draw, size) * 1024
    if side.which == 0:
        scaler.step(side.optimizer, max_norm=1.0, unscaled_grads=True)
        return None
    scaler.unscale_(side.optimizer)
    torch.nn.utils.clip_grad_norm_(side.params, 1.0)
    scaler.step(side.optimizer)
    return None


def zero_grad(side: Side, other: Side, draw: random.Random) -> None:
    side.optimizer.zero_grad(set_to_none=draw.random() < 0.5)


def add_group(side: Side, other: Side, draw: random.Random) -> None:
    side.optimizer.add_param_group(side.new_group(draw))


def copied(state_dict: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return copy.deepcopy(state_dict)
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def exchange(side: Side, other: Side, draw: random.Random) -> None:
    """Each loads the other's: `held` is what it had before either loaded."""
    side.optimizer.load_state_dict(copied(other.held, draw))


def load_into_another(side: Side, other: Side, draw: random.Random) -> None:
    groups = [{"params": group["params"]} for group in side.optimizer.param_groups]
    held = draw.choice([side, other]).held
    side.optimizer = side.made(groups, lr=0.7)
    side.optimizer.load_state_dict(copied(held, draw))


def duplicate(side: Side, other: Side, draw: random.Random) -> None:
    side.optimizer = (
        copy.deepcopy(side.optimizer) if draw.random() < 0.5 else pickle.loads(pickle.dumps(side.optimizer))
    )


def convert(side: Side, other: Side, draw: random.Random) -> None:
    """Of some parameters the type; their states stay unless they are loaded anew, as a program must."""
    dtype, reload = draw.choice(side.dtypes), draw.random() < 0.6
    for p in side.params:
        if draw.random() < 0.6:
            p.grad = None
            p.data = p.data.to(dtype)
    if reload:
        side.optimizer.load_state_dict(copied(side.optimizer.state_dict(), draw))


def change_options(side: Side, other: Side, draw: random.Random) -> None:
    group = draw.choice(side.optimizer.param_groups)
    group["lr"] = draw.choice([0.0, 1e-3, 0.3])
    group["weight_decay"] = draw.choice([0, 0.02])
    group["maximize"] = draw.random() < 0.5


def freeze(side: Side, other: Side, draw: random.Random) -> None:
    for p in side.params:
        p.requires_grad_(draw.random() < 0.7)


CALLS: list[tuple[Callable[[Side, Side, random.Random], Any], int]] = [
    (iteration, 12), (backward, 2), (step, 2), (closure, 1), (scaled, 2), (clipped, 2), (clipped_by_scaler, 1),
    (zero_grad, 1), (add_group, 1),
    (exchange, 2), (load_into_another, 1), (duplicate, 1), (convert, 1), (change_options, 1), (freeze, 1),
]  # fmt: skip


# ---- the bound -------------------------------------------------------------------------------------------------------
class Bounds:
    """The largest allowed difference of each number of one parameter from torch's."""

    def __init__(self, p: Tensor) -> None:
        self.of = {name: torch.zeros(p.shape, dtype=torch.float64) for name in ("p", *STATES)}
        # Where a gradient's square is no fp32, and where one ever was.
        self.lost = self.is_beyond = self.beyond = torch.zeros(p.shape, dtype=torch.bool)

    def loaded(self, p: Tensor, state: dict[str, Any]) -> None:
        """Rounded once more, to p's type."""
        for name, value in (("p", p), *state.items()):
            if name in self.of and value is not None:
                least = torch.finfo(p.dtype).smallest_normal * unit(p)
                self.of[name] = self.of[name] + 2 * unit(p) * wide(value).abs() + least


def unit(p: Tensor) -> float:
    return torch.finfo(p.dtype).eps / 2


def wide(t: Tensor) -> Tensor:
    return (t.to_dense() if t.layout is not torch.strided else t).detach().double()


def advance(
    b: Bounds, kind: str, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any], near: float
) -> None:
    """After a step of p as it was before, with these states before.

    near: how far gradients are from torch's, relative."""
    of, u = (
        b.of,
        ROUNDINGS * max(unit(t) for t in (p, *(state[n] for n in STATES if state.get(n) is not None))),
    )
    least = torch.finfo(p.dtype).smallest_normal * torch.finfo(p.dtype).eps
    lr, decay, size = float(group["lr"]), float(group["weight_decay"]), wide(p).abs()
    x = wide(g).abs()
    bx = near * x
    decoupled = group.get("decoupled_weight_decay", False)
    if decay and not decoupled:
        x = x + decay * size
        bx = bx + decay * of["p"] + u * x
    zeros = torch.zeros_like(size)

    def held(name: str) -> Tensor:
        return wide(state[name]).abs() if state.get(name) is not None else zeros

    if kind == "sgd":
        momentum, first = group["momentum"], state.get("momentum_buffer") is None
        if momentum:
            rest = 1.0 if first else abs(1 - group["dampening"])
            m = momentum * held("momentum_buffer") + rest * x
            of["momentum_buffer"] = momentum * of["momentum_buffer"] + rest * bx + u * m + 4 * least
            more = of["momentum_buffer"]
            x, bx = (x + momentum * m, bx + momentum * more) if group["nesterov"] else (m, more)
        of["p"] = of["p"] + lr * bx + u * (size + lr * x) + 4 * least
        # torch's loop has the sum in the parameter's type, in which it may overflow.
        b.lost = b.lost | (x.isfinite() & (x > torch.finfo(p.dtype).max))
        return
    beta1, beta2 = (float(beta) for beta in group["betas"])
    t = float(state["step"]) + 1 if "step" in state else 1.0
    m = beta1 * held("exp_avg") + (1 - beta1) * x
    of["exp_avg"] = beta1 * of["exp_avg"] + (1 - beta1) * bx + u * (held("exp_avg") + x) + 4 * least
    w = beta2 * held("exp_avg_sq") + (1 - beta2) * x * x
    of["exp_avg_sq"] = beta2 * of["exp_avg_sq"] + (1 - beta2) * (2 * x * bx + bx * bx) + u * w + 4 * least
    if p.dtype is not torch.float64:
        b.is_beyond = x * x > torch.finfo(torch.float32).max
        b.beyond = b.beyond | b.is_beyond
        of["exp_avg_sq"] = of["exp_avg_sq"].masked_fill(b.beyond, math.inf)
    bw = of["exp_avg_sq"]
    if group["amsgrad"]:
        w = torch.maximum(held("max_exp_avg_sq"), w)
        bw = of["max_exp_avg_sq"] = torch.maximum(of["max_exp_avg_sq"], bw)
    root = math.sqrt(1 - beta2**t)
    least_w = torch.where(b.beyond, zeros, torch.where(w.isinf(), w, w - bw))
    low, high = (end.clamp(min=0).sqrt() / root + group["eps"] for end in (least_w, w + bw))
    rate = lr / (1 - beta1**t)
    way = rate * (of["exp_avg"] / low + m * (1 / low - 1 / high)) + u * (size + rate * m / low)
    if p.dtype is torch.float64 and isinstance(group["lr"], Tensor) and group["lr"].dtype is torch.float32:
        way = way + 2**-23 * (size + rate * m / low)  # torch has 1 - lr * weight_decay in the type of lr
    of["p"] = of["p"] * (abs(1 - lr * decay) if decoupled else 1) + way + 4 * least


def compare(what: str, ours: Tensor, theirs: Tensor, bound: Tensor) -> None:
    a, b = wide(ours), wide(theirs)
    same = (a == b) | (a.isnan() & b.isnan()) | bound.isposinf() | ((a - b).abs() <= bound)
    top = torch.finfo(ours.dtype).max  # one may be rounded to it and the other beyond
    same |= (a.isinf() & (b.abs() + bound >= top)) | (b.isinf() & (a.abs() + bound >= top))
    if what in STATES:  # that came to no number: torch's first moment is NaN where memopt's is infinite
        same |= ~a.isfinite() & ~b.isfinite()
    if not bool(same.all()):
        at = (~same).nonzero()[0].tolist()
        here = tuple(at)
        raise Difference(
            f"{what} {at}: {a[here].item()!r}, torch's {b[here].item()!r}, which is beyond {bound[here].item():.3g}"
        )


# ---- playing ---------------------------------------------------------------------------------------------------------
def seen(side: Side) -> list[tuple[Tensor, Tensor | None, dict[str, Any], dict[str, Any]]]:
    """The tensors of a step: parameter, gradient, states, group."""
    return [
        (
            p.detach().clone(),
            None if p.grad is None else p.grad.clone(),
            {
                k: v.clone() if isinstance(v, Tensor) else v
                for k, v in side.optimizer.state.get(p, {}).items()
            },
            {k: v for k, v in group.items() if k != "params"},
        )
        for group in side.optimizer.param_groups
        for p in group["params"]
    ]


def called(call: Any, side: Side, other: Side, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return repr(call(side, other, random.Random(seed)))
        except Exception as error:  # compared, whatever it is
            return type(error), str(error)


STEPS = (iteration, step, closure, scaled, clipped, clipped_by_scaler)


# Of torch's fused SGD where only some parameters of a group have a momentum buffer yet.
TORCHS_FAULT = re.compile("expected Tensor as element . in argument 2, but got NoneType")


class Pair:
    def __init__(self, seed: int) -> None:
        self.ours, self.theirs = Side(0, seed), Side(1, seed)
        self.bounds: dict[int, Bounds] = {}

    def bound(self, number: int) -> Bounds:
        return self.bounds.setdefault(number, Bounds(self.theirs.params[number]))

    def make(self, call: Any, seed: int) -> bool:
        """Return whether the sequence can go on."""
        before = seen(self.theirs)
        for side in (self.ours, self.theirs):
            side.held = side.optimizer.state_dict()
        said = [called(call, *sides, seed) for sides in ((self.ours, self.theirs), (self.theirs, self.ours))]
        if all(isinstance(one, tuple) for one in said) and said[0][0] is said[1][0]:
            return False  # torch's words depend on which of its steps it takes
        if isinstance(said[1], tuple) and TORCHS_FAULT.fullmatch(said[1][1]):
            return False
        if any(isinstance(one, tuple) and one[0] is RuntimeError for one in said) and any(
            map(is_mixed, before)
        ):
            return False
        if said[0] != said[1]:
            raise Difference(f"came {said[0]}, torch's {said[1]}")
        grads = [p.grad for p in self.theirs.params]
        if call in STEPS:
            for number, ((p, _, state, group), grad) in enumerate(zip(before, grads, strict=True)):
                if grad is not None:
                    near = 2e-6 if call is clipped_by_scaler else 0.0
                    advance(self.bound(number), self.theirs.kind, group, p, grad, state, near)
        elif call in (exchange, load_into_another, convert):
            for number, p in enumerate(self.theirs.params):
                self.bound(number).loaded(p, self.theirs.optimizer.state.get(p, {}))
        if call is clipped_by_scaler:  # the next step is to have the same gradients
            self.ours.optimizer.zero_grad()
            self.theirs.optimizer.zero_grad()
        if call not in (backward, zero_grad, change_options, freeze):
            self.check()
        return True

    def check(self) -> None:
        for number, (p, q) in enumerate(zip(self.ours.params, self.theirs.params, strict=True)):
            mine, stock = self.ours.optimizer.state.get(p, {}), self.theirs.optimizer.state.get(q, {})
            b = self.bound(number)
            of = b.of = {name: bound.masked_fill(b.lost, math.inf) for name, bound in b.of.items()}
            compare(f"parameter {number} ({q.dtype})", p, q, of["p"])
            for name in STATES:
                if mine.get(name) is None and stock.get(name) is None:
                    continue
                # What a step made that its scaler skipped is as none.
                held = [s[name] if s.get(name) is not None else torch.zeros_like(q) for s in (mine, stock)]
                compare(name, *held, of[name])
            steps = [float(s.get("step", 0)) for s in (mine, stock)]
            if steps[0] != steps[1]:
                raise Difference(f"step of parameter {number}: {steps[0]}, torch's {steps[1]}")
            if isinstance(self.ours.optimizer, OnePass) and is_plain(p) and b.is_beyond.any():
                if wide(mine["exp_avg_sq"])[b.is_beyond].isfinite().any():
                    raise Difference(f"parameter {number}: a square beyond fp32 is finite")
            b.is_beyond = torch.zeros_like(b.is_beyond)


def is_mixed(held: tuple[Tensor, Any, dict[str, Any], Any]) -> bool:
    """Return whether a parameter's states are of another type than it is: torch's steps differ in which of that they
    take."""
    p, _, state, _ = held
    return any(state[name].dtype is not p.dtype for name in STATES if state.get(name) is not None)


def all_finite(t: Tensor) -> bool:
    return bool(wide(t).isfinite().all())


def difference(seed: int, lengths: list[int] | None = None) -> str | None:
    """Plays the sequence of a seed: the first difference, in words, or None.

    lengths: how many calls it came to is put here."""
    draw = random.Random(seed ^ 0x0071)
    calls, weights = zip(*CALLS, strict=True)
    history: list[str] = []
    pair = Pair(seed)
    for call in draw.choices(calls, weights, k=CALLS_A_SEQUENCE):
        history.append(call.__name__)
        try:
            goes_on = pair.make(call, draw.getrandbits(30))
        except Difference as error:
            return (
                f"seed {seed} ({pair.theirs.kind} {pair.theirs.options}), after {' '.join(history)}: {error}"
            )
        if not goes_on:
            break
    if lengths is not None:
        lengths.append(len(history))
    return None
