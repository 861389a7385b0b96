"""The runner of schedules: any schedule gives the plain run's gradients, bit for bit, and holds what it says."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

import memopt
from memopt._checkpoint.runner import ChainRunner
from memopt._checkpoint.stages.costs import Meter
from memopt._checkpoint.stages.measure import expand, passing

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = int(os.environ["MEMOPT_SEED"])
SOAK = os.environ.get("MEMOPT_SOAK") == "1"

Ops = list[tuple[str, int]]


def backward_of(choose: random.Random, s: int, t: int) -> Ops:
    """Any way to the backward of stages t … s, from a_s, which stays."""
    if s == t:
        return [("fall", s), ("bwd", s)]
    ways = ["all", "keep"] + ["again"] * (t - s > 1)
    way = choose.choice(ways)
    if way == "all":
        return [("fall", s), *backward_of(choose, s + 1, t), ("bwd", s)]
    j = choose.randint(s + 1, t)
    to_j = [("fck", s), *(("fnone", k) for k in range(s + 1, j))]
    if way == "keep":
        return [*to_j, *backward_of(choose, j, t), *backward_of(choose, s, j - 1)]
    # Stage j's saved set stays while its input goes, to be made again; a stage's input may also be dropped by itself.
    j = choose.randint(s + 1, t - 1)
    to_j = [("fck", s), *(("fnone", k) for k in range(s + 1, j))]
    waiting = [("fall", j), ("drop_input", j)]
    if choose.random() < 0.3:
        waiting = [("fck", j), ("drop_input", j)]
        return [
            *to_j,
            *waiting,
            *backward_of(choose, j + 1, t),
            *to_j,
            ("fall", j),
            ("bwd", j),
            *backward_of(choose, s, j - 1),
        ]
    return [
        *to_j,
        *waiting,
        *backward_of(choose, j + 1, t),
        *to_j,
        ("bwd", j),
        *backward_of(choose, s, j - 1),
    ]


def keep_all(count: int) -> Ops:
    return [("fall", k) for k in range(count)] + [("bwd", k) for k in reversed(range(count))]


def least(count: int) -> Ops:
    """Only a_0 is kept: each stage's backward starts over."""
    ops: Ops = [("fck", 0), *(("fnone", k) for k in range(1, count))]
    for k in reversed(range(count)):
        ops += [("fck", 0), *(("fnone", j) for j in range(1, k))] if k else []
        ops += [("fall", k), ("bwd", k)]
    return ops


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Detour(nn.Module):
    """Saves its own input twice, a view of it, and what it makes in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * x.flip(-1)
        return y.sigmoid_() + x[:, :1] * x


def stages(choose: random.Random, count: int, width: int = 6) -> list[nn.Module]:
    kinds = [
        lambda: nn.Linear(width, width),
        lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)),
        lambda: nn.Dropout(0.3),
        lambda: nn.Tanh(),
        lambda: Residual(width),
        lambda: Detour(),
        lambda: nn.Identity(),
    ]
    return [nn.Linear(width, width)] + [choose.choice(kinds)() for _ in range(count - 1)]


def batch(rows: int = 5, width: int = 6, *, seed: int = 0, requires_grad: bool = True) -> torch.Tensor:
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(requires_grad)


def plain(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
    return x


def same(a: list[nn.Module], b: list[nn.Module]) -> None:
    for one, other in zip(
        nn.ModuleList(a).named_parameters(), nn.ModuleList(b).named_parameters(), strict=True
    ):
        assert (one[1].grad is None) == (other[1].grad is None), one[0]
        assert one[1].grad is None or torch.equal(one[1].grad, other[1].grad), one[0]
    for one, other in zip(nn.ModuleList(a).named_buffers(), nn.ModuleList(b).named_buffers(), strict=True):
        assert torch.equal(one[1], other[1]), one[0]


@pytest.mark.parametrize("loss_outside", [False, True])
def test_every_schedule_gives_the_plain_runs_bits(loss_outside: bool) -> None:
    choose = random.Random(SEED)
    dropped = 0
    for n in range(2000 if SOAK else 60):
        count = choose.randint(1, 7)
        modules = stages(choose, count)
        copies = copy.deepcopy(modules)
        ops = backward_of(choose, 0, count - 1 + loss_outside)
        dropped += any(op == "drop_input" for op, _ in ops)
        runner = ChainRunner(copies, ops)
        x, y = batch(seed=n), batch(seed=n)
        for _ in range(2):
            torch.manual_seed(n)
            out = plain(modules, x)
            out.square().sum().backward()
            state = torch.get_rng_state()
            torch.manual_seed(n)
            out_again = runner(y)
            out_again.square().sum().backward()
            assert torch.equal(torch.get_rng_state(), state), ops
            assert torch.equal(out, out_again), ops
            assert torch.equal(x.grad, y.grad), ops
            same(modules, copies)
    assert dropped > 10


def test_all_ways_through_the_graph_give_the_plain_runs_gradients() -> None:
    choose = random.Random(SEED + 1)
    for n in range(500 if SOAK else 25):
        count = choose.randint(2, 6)
        modules = stages(choose, count)
        copies = copy.deepcopy(modules)
        runner = ChainRunner(copies, backward_of(choose, 0, count))
        x, y = batch(seed=n), batch(seed=n)
        torch.manual_seed(n)
        out = plain(modules, x)
        torch.manual_seed(n)
        again = runner(y)
        # twice through the graph, then a part of it, then inputs only
        for _ in range(2):
            out.sum().backward(retain_graph=True)
            again.sum().backward(retain_graph=True)
        same(modules, copies)
        ends = [next(iter(nn.ModuleList(m).parameters())) for m in (modules, copies)]
        one = torch.autograd.grad(out.square().sum(), ends[0], retain_graph=True)
        other = torch.autograd.grad(again.square().sum(), ends[1], retain_graph=True)
        assert torch.equal(one[0], other[0])
        assert torch.equal(*(torch.autograd.grad(o.sum(), i)[0] for o, i in ((out, x), (again, y))))


def test_passes_may_overlap() -> None:
    """Two forward passes, then their backward passes, in either order."""
    for order in ((0, 1), (1, 0)):
        modules = stages(random.Random(3), 5)
        copies = copy.deepcopy(modules)
        runner = ChainRunner(copies, least(5))
        torch.manual_seed(0)
        outs = [plain(modules, batch(seed=k)) for k in (1, 2)]
        torch.manual_seed(0)
        again = [runner(batch(seed=k)) for k in (1, 2)]
        for k in order:
            outs[k].sum().backward()
            again[k].sum().backward()
        same(modules, copies)


class Pair(nn.Module):
    """Tuple in, tuple out; uses a mask beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(
        self, pair: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None = None, scale: float = 1
    ):
        a, b = pair
        hidden = self.linear(a) * scale
        return hidden if mask is None else hidden * mask, b + a


@pytest.mark.parametrize(
    "ops", [keep_all(5), least(5), [*least(4)[:4], ("fall", 4), ("bwd", 4), *least(4)[4:]]]
)
def test_tuples_masks_and_what_is_computed_between(ops: Ops) -> None:
    modules = [Pair() for _ in range(4)]
    copies = copy.deepcopy(modules)
    runner = ChainRunner(copies, ops)
    results = []
    for own, call in ((modules, lambda k, *a, **kw: modules[k](*a, **kw)), (copies, runner.run)):
        x, mask = batch(), torch.rand(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        pair = (x, x * 2)
        pair = call(0, pair, mask=mask)
        pair = call(1, pair, scale=0.5)
        between = (pair[0].tanh(), pair[1])  # cuts the chain in one of its two tensors
        pair = call(2, between, mask=mask)
        pair = call(3, pair)
        (pair[0].square().sum() + pair[1].sum()).backward()
        results.append((pair[0].detach(), x.grad, mask.grad, [p.grad for m in own for p in m.parameters()]))
    (a, xa, ma, pa), (b, xb, mb, pb) = results
    assert torch.equal(a, b)
    assert torch.equal(xa, xb)
    assert torch.equal(ma, mb)
    assert all(map(torch.equal, pa, pb))


def test_a_stage_that_is_left_out_or_comes_again_changes_no_result() -> None:
    """LayerDrop, and a module that the model calls twice."""
    for order in ((0, 2, 3), (0, 1, 1, 2, 3), (2, 0, 1), (3,), (0, 1, 2, 3, 0, 1)):
        modules = stages(random.Random(5), 4)
        copies = copy.deepcopy(modules)
        runner = ChainRunner(copies, least(4))
        x, y = batch(), batch()
        torch.manual_seed(0)
        out = x
        for k in order:
            out = modules[k](out)
        torch.manual_seed(0)
        again = y
        for k in order:
            again = runner.run(k, again)
        out.sum().backward()
        again.sum().backward()
        assert torch.equal(out, again)
        assert torch.equal(x.grad, y.grad)
        same(modules, copies)


def test_autocast_is_as_it_was() -> None:
    modules = [Residual(6) for _ in range(4)]
    copies = copy.deepcopy(modules)
    runner = ChainRunner(copies, least(4))
    with torch.autocast("cpu", torch.bfloat16):
        out = plain(modules, batch())
        again = runner(batch())
    out.float().sum().backward()
    again.float().sum().backward()
    assert torch.equal(out, again)
    same(modules, copies)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Penalised(nn.Module):
    """Takes a gradient within its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad


@pytest.mark.parametrize("kind", [Recurrent, Penalised])
def test_a_stage_runs_again_in_grad_mode(kind: type[nn.Module]) -> None:
    """oneDNN's LSTM makes other bits without it, and a gradient penalty none at all."""
    torch.manual_seed(0)
    modules = [kind(64) for _ in range(4)]
    copies = copy.deepcopy(modules)
    x = torch.randn(32, 10, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    plain(modules, x).square().sum().backward()
    ChainRunner(copies, least(4))(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    same(modules, copies)


def test_without_a_graph_a_stage_is_just_called() -> None:
    class Told(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch._C._autograd._saved_tensors_hooks_is_enabled()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            return x

    runner = ChainRunner([Told(), Told()], keep_all(2))
    x = batch()
    with torch.no_grad():
        assert runner(x) is x
    with torch.inference_mode():
        assert runner(x) is x
    assert getattr(runner.here, "run", None) is None


class Fails(nn.Module):
    """Raises at its n-th call."""

    def __init__(self, module: nn.Module, at: int) -> None:
        super().__init__()
        self.module, self.left = module, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left == 0:
            self.left = -1
            raise ArithmeticError("planned")
        self.left -= 1
        return self.module(x)


def next_step_is_sound(runner: ChainRunner, modules: list[nn.Module]) -> None:
    copies = copy.deepcopy(modules)
    for module in (*modules, *copies):
        module.zero_grad()
    runner(batch()).sum().backward()
    plain(copies, batch()).sum().backward()
    same(modules, copies)


def test_an_exception_at_any_call_of_a_stage_leaves_nothing_behind() -> None:
    ops = least(4)
    happened = 0
    for stage in range(4):
        for at in range(6):
            modules: list[nn.Module] = [Residual(6) for _ in range(4)]
            modules[stage] = Fails(modules[stage], at)
            runner = ChainRunner(modules, ops)
            alive = []
            state = torch.get_rng_state()
            try:
                x = batch(requires_grad=False)
                for k in range(4):
                    x = runner.run(k, x)
                    alive.append(weakref.ref(x.untyped_storage()))
                x.sum().backward()
            except ArithmeticError:
                happened += 1
            del x
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.is_grad_enabled()
            assert [ref for ref in alive if ref() is not None] == []
            # and the next step is sound
            modules[stage].left = -1
            next_step_is_sound(runner, modules)
    assert happened > 10


def test_a_pass_without_a_graph_lives_with_its_output_and_no_longer() -> None:
    runner = ChainRunner([nn.Tanh() for _ in range(3)], least(3))
    for stop in range(1, 4):
        sample = torch.randn(4, 4)
        seen, x = weakref.ref(sample.untyped_storage()), sample
        for k in range(stop):
            x = runner.run(k, x)
        del sample
        assert (seen() is None) == (stop == 3)  # then there is no stage left that could want it
        del x
        assert seen() is None
    broken = ChainRunner([nn.Tanh(), Fails(nn.Tanh(), 0)], least(2))
    sample = torch.randn(4, 4)
    seen = weakref.ref(sample.untyped_storage())
    with pytest.raises(ArithmeticError):
        broken(sample)
    del sample
    gc.collect()
    assert seen() is None


def test_what_changed_since_is_said_with_the_stage() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 1:
                return x.exp().exp()
            return x + 1 if self.fewer else x.double().exp().exp().float()

    for fewer, text in ((True, "A different number of tensors"), (False, "different metadata")):
        fickle = Fickle()
        fickle.fewer = fewer
        runner = ChainRunner([nn.Linear(6, 6), fickle, nn.Linear(6, 6)], least(3))
        with pytest.raises(CheckpointError, match=text) as error:
            runner(batch()).sum().backward()
        assert "Stage 1 of the chain, Fickle()" in str(error.value)

    runner = ChainRunner([nn.Linear(6, 6), nn.Tanh()], least(2))
    x = batch(requires_grad=False)
    out = runner(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*change a copy"):
        out.sum().backward()


def test_an_input_changed_in_place_between_two_stages_is_not_taken_for_the_stages_output() -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        modules = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
        runner = ChainRunner(modules, least(3))
        x = batch()
        call = runner.run if checkpointed else lambda k, v, m=modules: m[k](v)
        hidden = call(0, x)
        hidden.relu_()
        call(2, call(1, hidden)).sum().backward()
        results.append([x.grad, *(p.grad for m in modules for p in m.parameters())])
    assert all(map(torch.equal, *results))


def test_stages_that_change_their_input_run_again_with_the_one_that_made_it() -> None:
    choose = random.Random(SEED + 2)
    changes = [
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Hardswish(inplace=True),
        lambda: nn.Dropout(0.4, inplace=True),
    ]
    for n in range(500 if SOAK else 25):
        modules: list[nn.Module] = []
        groups: list[range] = []
        for _ in range(choose.randint(1, 5)):
            begin = len(modules)
            modules.append(choose.choice([nn.Linear(6, 6), nn.BatchNorm1d(6)]))
            if choose.random() < 0.7:
                modules.append(choose.choice(changes)())
            groups.append(range(begin, len(modules)))
        modules = [nn.Linear(6, 6), *modules]
        groups = [range(1), *(range(g.start + 1, g.stop + 1) for g in groups)]
        copies = copy.deepcopy(modules)
        ops = expand(backward_of(choose, 0, len(groups)), groups)
        changing = {k for k, module in enumerate(modules) if getattr(module, "inplace", False)}
        runner = ChainRunner(copies, ops, passing(groups), changing)
        x, y = batch(seed=n), batch(seed=n)
        torch.manual_seed(n)
        out = plain(modules, x).square().sum()
        torch.manual_seed(n)
        again = runner(y).square().sum()
        for _ in range(2):
            out.backward(retain_graph=True)
            again.backward(retain_graph=True)
        assert torch.equal(x.grad, y.grad), (n, ops)
        same(modules, copies)


def test_double_backward() -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        runner = ChainRunner(modules, least(3))
        x = batch()
        out = runner(x) if checkpointed else plain(modules, x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append([x.grad, *(p.grad for m in modules for p in m.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_pass_is_copied_with_its_model_and_pickled() -> None:
    modules = [nn.Linear(6, 6), nn.Tanh()]
    runner = ChainRunner([m.forward for m in modules], least(2))
    runner(batch())
    other = copy.deepcopy(runner)
    assert other.functions[0].__self__ is not modules[0]
    assert pickle.loads(pickle.dumps(runner)).ops == runner.ops


@pytest.mark.parametrize(
    "ops",
    [
        [],
        [("fall", 0), ("bwd", 0)],
        [("fall", 1), ("fall", 0), ("bwd", 1), ("bwd", 0)],
        [("fall", 0), ("fall", 1), ("bwd", 0), ("bwd", 1)],
        [("fall", 0), ("fall", 1), ("bwd", 1)],
        [("fly", 0), ("fall", 1), ("bwd", 1), ("bwd", 0)],
    ],
)
def test_what_is_no_schedule_of_these_stages_is_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="operation 0 is 'fly'|does not fit 2 stages"):
        ChainRunner([nn.Tanh(), nn.Tanh()], ops)


def test_no_step_leaves_anything() -> None:
    modules = stages(random.Random(7), 6)
    runner = ChainRunner(modules, backward_of(random.Random(11), 0, 6))
    gc.collect()
    gc.disable()
    try:
        counts = []
        for step in range(1000 if SOAK else 20):
            runner(batch()).sum().backward()
            if step in (3, 19, 999):
                counts.append(sum(type(o) is torch.Tensor for o in gc.get_objects()))
    finally:
        gc.enable()
    assert len(counts) > 1
    assert len(set(counts)) == 1


def test_live_bytes_are_those_of_the_schedule() -> None:
    """Stages that save nothing but their output of a known size: the peak can be told by hand."""
    width, rows = 64, 256
    unit = rows * width * 4
    modules = [nn.Tanh() for _ in range(8)]
    peaks = {}
    for name, ops in (("all", keep_all(9)), ("least", least(9))):
        runner = ChainRunner(modules, ops)
        x = batch(rows, width)
        meter = Meter()
        meter.ignore([x])
        with meter:
            out = runner(x)
            out.backward(torch.ones_like(out))
        peaks[name] = meter.peak / unit
    # The caller holds the last output and its gradient; two gradients more live at once, and eight outputs or, besides
    # the last, two that are made again.
    assert peaks == {"all": 11, "least": 6}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_in_a_stage_counts_a_batch_once(reentrant: bool) -> None:
    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]

    modules, copies = build(), build()

    def region(stage: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: memopt.checkpoint(stage, x, use_reentrant=reentrant)

    runner = ChainRunner([region(stage) for stage in copies], least(4))
    for n in range(3):
        x, y = batch(seed=n), batch(seed=n)
        plain(modules, x).sum().backward()
        runner(y).sum().backward()
        assert torch.equal(x.grad, y.grad)
    same(modules, copies)
