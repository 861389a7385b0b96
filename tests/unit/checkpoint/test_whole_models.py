"""Models whose modules form no chain: their forward is cut across modules, and what lives across parts is held."""

from __future__ import annotations

import copy
import io
import os
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt._checkpoint.stages.model_chain import ModelChain
from memopt._checkpoint.stages.trace_forward import ForwardTrace
from memopt.chain import InfeasibleBudget

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 16
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


def double(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Skips(nn.Module):
    """A U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = double(3, 8)
        self.downs = nn.ModuleList(double(8 << n, 16 << n) for n in range(3))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(16 << n, 8 << n, 2, 2) for n in (2, 1, 0))
        self.convs = nn.ModuleList(double(16 << n, 8 << n) for n in (2, 1, 0))
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.inc(x), []
        for down in self.downs:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, conv in zip(self.ups, self.convs, strict=True):
            x = conv(torch.cat([skips.pop(), up(x)], 1))
        return self.out(x)


class Attended:
    """Not a tensor: one module's result for another."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Attended]:
        hidden = F.gelu(self.inner(x)) * 2
        hidden.mul_(0.5)
        return self.outer(hidden), Attended(hidden)


class Sums(nn.Module):
    """Residual sums in the code of the module that has the layers."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(Mixing() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, _ = layer(norm(x))
            x = x + F.dropout(out, 0.1, self.training)
        return x


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(WIDTH, WIDTH), Sums(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(x)))


class Features(nn.Module):
    """Layers that each take what all before them have made."""

    def __init__(self, depth: int = 10, more: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH + n * more, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, more))
            for n in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, -1)))
        return torch.cat(features, -1)


class Choosing(nn.Module):
    """A branch by a value, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu() if x.sum() > 0 else self.b(x).relu()


class Chosen(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.layers.layers[3].inner = nn.Sequential(Choosing(), nn.Linear(WIDTH, 4 * WIDTH))


class Twice(Wrapper):
    """Layers that are called twice each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.layers(self.first(x))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "skips": (Skips, (2, 3, 32, 32), 0.8),
    "sums": (Wrapper, (64, 8, WIDTH), 0.5),
    "features": (Features, (512, WIDTH), 0.5),
    "a choice": (Chosen, (64, 8, WIDTH), 0.5),
    "twice": (Twice, (64, 8, WIDTH), 0.4),
}


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def least_budget(model: nn.Module, x: torch.Tensor) -> int:
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, x, memory_budget=1, loss=loss)
    return error.value.least_budget


def live_peak(model: nn.Module, x: torch.Tensor) -> int:
    standing = [*model.parameters(), *model.buffers(), x]
    meter = Meter(torch.device("cpu"))
    meter.ignore(standing)
    with meter:
        loss(model(x)).backward()
    model.zero_grad()
    return bytes_of(standing) + meter.peak


def bits(model: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model(x))
    value.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [value.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
def test_the_plain_runs_bits_within_the_least_budget(kind: str) -> None:
    make, shape, share = MODELS[kind]
    torch.manual_seed(1)
    model, x = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    peak, budget = live_peak(copy.deepcopy(model), x), least_budget(model, x)
    assert budget <= share * peak
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        memopt.auto_checkpoint(model, x, memory_budget=budget, loss=loss)
        assert model.plan.runner is not None
        for seed in range(3):
            found, expected = bits(model, x, seed), bits(plain, x, seed)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
        copied = copy.deepcopy(model.state_dict())
        assert live_peak(model, x) <= budget
        model.load_state_dict(copied)
    other = x[: len(x) // 2].contiguous()
    assert all(map(torch.equal, bits(model, other, 4), bits(plain, other, 4)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["skips", "sums", "twice"])
def test_a_training_with_all_that_comes_between_has_the_plain_runs_bits(kind: str) -> None:
    """Batches of other sizes, gradients of two of them, evaluation, and another model between forward and backward."""
    make, shape, _ = MODELS[kind]
    torch.manual_seed(1)
    model, other, x = make(), make(), torch.randn(shape)
    plain, plain_other = copy.deepcopy(model), copy.deepcopy(other)
    for one in (model, other):
        memopt.auto_checkpoint(one, x, memory_budget=least_budget(one, x), loss=loss)

    def trained(first: nn.Module, second: nn.Module) -> list[torch.Tensor]:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (first, second)]
        values = []
        torch.manual_seed(2)
        for share in (1, 2, 1, 4):
            part = x[: max(1, len(x) // share)].contiguous()
            for sign in (1, -1):
                out, after = first(part * sign), second(part)
                first.eval()
                with torch.no_grad():
                    values.append(first(part))
                values += [loss(out).detach(), loss(after).detach()]
                loss(out).backward()  # in evaluation mode: a stage runs again in the mode that it ran in
                loss(after).backward()
                first.train()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*values, *first.state_dict().values(), *second.state_dict().values(), torch.get_rng_state()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a forward that takes another path in this batch
        found, expected = trained(model, other), trained(plain, plain_other)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Reading(Wrapper):
    """Reads the shape of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, *x.shape[-2:])).view(*x.shape[:-1], WIDTH)


def test_batches_of_other_shapes_are_cut_as_the_planned_one() -> None:
    torch.manual_seed(1)
    model, x = Reading(), torch.randn(64, 8, WIDTH)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    shares = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for rows, length in ((64, 8), (48, 8), (64, 5), (30, 6), (48, 8)):
            part = torch.randn(rows, length, WIDTH)
            standing = bytes_of([*model.parameters(), part])
            peaks = live_peak(model, part), live_peak(plain, part)  # with what it takes to see the new calls
            shares.append((peaks[0] - standing) / (peaks[1] - standing))
            assert all(map(torch.equal, bits(model, part, rows), bits(plain, part, rows)))
    assert max(shares) <= 0.5


def test_what_cannot_be_traced_is_one_step_and_the_rest_is_cut() -> None:
    model, x = Chosen(), torch.randn(4, 8, WIDTH)
    with torch.no_grad():  # else the graph keeps what the trace must not find
        trace = ForwardTrace(model, model.forward, (x,), {}, opens=True)
    assert trace.refusal is None
    assert [reason.partition(":")[0] for reason in trace.refusals] == ["Choosing"]
    assert sum(isinstance(step.target, Choosing) for step in trace.steps) == 1
    assert len(ModelChain(model, (x,), {}).names) > 8
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    plain = Chosen()
    plain.load_state_dict(model.state_dict())
    assert all(map(torch.equal, bits(model, -x, 0), bits(plain, -x, 0)))


def test_hooks_of_modules_in_it_run_as_in_the_plain_run() -> None:
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(2, 3, 32, 32)
    model.downs[1].register_forward_hook(lambda module, args, out: out * 2)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    assert all(map(torch.equal, bits(model, x, 0), bits(plain, x, 0)))
    for one in (model, plain):
        one.convs[1].register_forward_hook(lambda module, args, out: out * 3)
    with pytest.warns(UserWarning, match="Sequential has hooks"):
        found = bits(model, x, 0)
    assert all(map(torch.equal, found, bits(plain, x, 0)))


class Noting(nn.Module):
    """A block that leaves a loss of its own in a list that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noted: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x).relu()
        self.noted.append(x.detach().mean())
        return x + self.outer(x).relu()


def test_a_list_that_a_module_adds_to_is_no_part_of_a_trace() -> None:
    block = Noting()
    trace = ForwardTrace(block, block.forward, (torch.randn(2, WIDTH),), {})
    assert trace.refusal == "it changes the contents of noted of Noting"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Noting() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(256, WIDTH)
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    loss(model(x)).backward()
    assert [len(block.noted) for block in model if isinstance(block, Noting)] == [1] * 4


METRICS: list[torch.Tensor] = []


class Measured(Noting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x).relu()
        METRICS.append(x.detach().mean())
        return x + self.outer(x).relu()


def test_what_a_module_leaves_anywhere_is_left_in_each_step() -> None:
    block = Measured()
    trace = ForwardTrace(block, block.forward, (torch.randn(2, WIDTH),), {})
    assert trace.refusal == "it keeps a tensor that it made"
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Measured() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(256, WIDTH)
    memopt.auto_checkpoint(model, x, memory_budget="1GiB", loss=loss)
    METRICS.clear()
    loss(model(x)).backward()
    assert len(METRICS) == 4
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    METRICS.clear()
    loss(model(x)).backward()
    assert len(METRICS) >= 4  # that a run again leaves another one is a known limit


def test_a_buffer_that_the_models_own_code_changes_is_no_part_of_a_trace() -> None:
    class Counting(Wrapper):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x)

    model, x = Counting(), torch.randn(4, 8, WIDTH)
    trace = ForwardTrace(model, model.forward, (x,), {}, opens=True)
    assert trace.refusal == "it changes a parameter or buffer in place"
    model.calls.zero_()
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    loss(model(x)).backward()
    assert model.calls == 1


def test_storages_are_told_apart_though_they_lie_at_one_address() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = self.a(x).detach() * 2
            return x.mul_(2)

    block = Passing()
    trace = ForwardTrace(block, block.forward, (torch.randn(8, WIDTH),), {})
    assert trace.refusal is None
    ((at, numbers),) = trace.changes
    assert at == len(trace.steps) - 1
    assert len(numbers) == 2  # what is changed, and the result by another name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["skips", "sums"])
def test_a_copy_and_a_saved_model_are_in_parts_too(kind: str) -> None:
    make, shape, _ = MODELS[kind]
    torch.manual_seed(1)
    model, x = make(), torch.randn(shape)
    model.names = ["a", "b"]  # as a library's module may have them: equal in a copy, not the same
    memopt.auto_checkpoint(model, x, memory_budget=least_budget(model, x), loss=loss)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
    expected = bits(model, x, 0)
    budget = model.plan.memory_budget
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for one in copies:
            assert all(map(torch.equal, bits(one, x, 0), expected))
            assert live_peak(one, x) <= budget


class Net(nn.Module):
    """A random graph: each node takes one or two values, most often the last ones."""

    def __init__(self, chance: random.Random, nodes: int) -> None:
        super().__init__()
        self.graph: list[tuple[str, int, int]] = []
        self.parts = nn.ModuleList()
        for n in range(nodes):
            near = n if chance.random() < 0.6 else chance.randint(0, n)
            self.graph.append((chance.choice(KINDS), near, chance.randint(0, n)))
            self.parts.append(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
                if chance.random() < 0.5
                else nn.Linear(WIDTH, WIDTH)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.parts[0](x)]
        for (kind, a, b), part in zip(self.graph, self.parts, strict=True):
            one, other = values[min(a, len(values) - 1)], values[min(b, len(values) - 1)]
            if kind == "branch":
                values.append(one + part(other))
            elif kind == "in place":
                values.append(part(one).mul_(0.5).relu_())
            elif kind == "halves":
                left, right = part(one).chunk(2, -1)
                values.append(torch.cat([left.sigmoid() * right, other[..., : WIDTH // 2]], -1))
            elif kind == "noise":
                values.append(F.dropout(part(one), 0.1, self.training))
            else:
                values.append(F.gelu(part(one)))
        return torch.stack(values[-2:])


KINDS = ("branch", "in place", "halves", "noise", "plain", "plain")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(500 if SOAK else 8))
def test_random_graphs_have_the_plain_runs_bits_within_their_budgets(number: int) -> None:
    seed = number if number % 2 else int(os.environ["MEMOPT_SEED"]) + number
    torch.manual_seed(seed)
    chance = random.Random(seed)
    model, x = Net(chance, chance.randint(4, 14)), torch.randn(64, 4, WIDTH)
    plain = copy.deepcopy(model)
    peak, least = live_peak(copy.deepcopy(model), x), least_budget(model, x)
    for budget in (least, max(least, (least + peak) // 2)):
        memopt.auto_checkpoint(model, x, memory_budget=budget, loss=loss)
        for step in range(2):
            assert all(map(torch.equal, bits(model, x, step), bits(plain, x, step)))
        assert live_peak(model, x) <= budget


def test_what_skips_stages_is_told_with_a_bound_on_what_it_costs() -> None:
    x = torch.randn(2, 3, 32, 32)
    with pytest.raises(memopt.chain.InfeasibleBudget) as error:
        memopt.auto_checkpoint(Skips(), x, memory_budget=1)
    least, bounds = error.value.least_budget, []
    for room in (1.0, 4.0):
        plan = memopt.auto_checkpoint(Skips(), x, memory_budget=int(least * room)).plan
        skipping = sum(
            x.shape[0] * (8 << n) * (32 >> n) ** 2 * 4 for n in range(2)
        )  # the last within a stage
        assert plan.crossing_bytes >= skipping
        assert plan.chain.plain_seconds * 0.999 <= plan.least_seconds() <= plan.schedule.seconds
        bounds.append(plan.least_seconds() / plan.chain.plain_seconds)
        assert "skip stages and are kept throughout" in str(plan)
    assert bounds[-1] == pytest.approx(1) and bounds[0] > bounds[-1]
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    memopt.auto_checkpoint(chain, torch.randn(2, 8), memory_budget="1MiB")
    assert chain.plan.crossing_bytes == 0 and chain.plan.least_seconds() == chain.plan.schedule.seconds
    assert "skip stages" not in str(chain.plan)
