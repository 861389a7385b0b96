"""State that modules change in their forward, under a schedule that runs them again: the plain run's, bit for bit."""

from __future__ import annotations

import copy
import os
import random
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import memopt
from memopt._checkpoint.stages.measure import default_loss
from memopt.chain import InfeasibleBudget
from tests.unit.checkpoint.test_auto_checkpoint import live_peak

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]
SEED = int(os.environ["MEMOPT_SEED"])
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
WIDTH, ROWS = 16, 64


class Layer(nn.Module):
    """Saves much more than its output. What it keeps besides is its kinds'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Counting(Layer):
    """In a buffer, in a number and in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.calls, self.seen = 0, deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.calls += 1
        self.seen.append(self.calls)
        return super().forward(x) * (1 - 0.02 * self.n.item() + 0.01 * self.calls + 0.001 * sum(self.seen))


class Averaging(Layer):
    """A running statistic, of which autograd saves what it is at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return super().forward(x) / self.average


class Hidden(Layer):
    """Changes `.data`, which no version counts, and a view of the buffer's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(2))
        self.register_buffer("part", self.average[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.data.lerp_(x.detach().square().mean().expand(2), 0.2)
        return super().forward(x) * self.part.clone()


class Codebook(Layer):
    """As vector quantisation is often written: a buffer and a parameter are others after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(4))
        self.codes = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with torch.no_grad():
            nearest = torch.cdist(out, self.codes).argmin(1)
            one_hot = nn.functional.one_hot(nearest, 4).float()
            self.size = self.size * 0.9 + 0.1 * one_hot.sum(0)
            self.codes = nn.Parameter(self.codes * 0.9 + 0.1 * (one_hot.T @ out) / self.size[:, None])
        return out + (self.codes[nearest] - out).detach() * 0.5


class Recurrent(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lstm(x[None])[0][0]


class Stateful(Layer):
    """Its hidden state goes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out = out if self.hidden is None else out + 0.5 * self.hidden
        self.hidden = out.detach()
        return out


class Balanced(Layer):
    """Leaves an auxiliary loss under a name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.auxiliary = out.softmax(1).square().mean()
        return out


class Chancy(Layer):
    """Draws from Python, and from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return super().forward(x * noise) * random.random()


class Mixed(nn.Module):
    """A stage of several modules: normalised by hooks and by parametrizations, batch norm, dropout."""

    def __init__(self, norm: object) -> None:
        super().__init__()
        self.first, self.second = norm(nn.Linear(WIDTH, 4 * WIDTH)), norm(nn.Linear(4 * WIDTH, WIDTH))
        self.norm, self.dropout = nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


NORMS = (
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
)
KINDS = (
    Counting, Averaging, Hidden, Codebook, Recurrent, Stateful, Balanced, Chancy,
    *(lambda norm=norm: Mixed(norm) for norm in NORMS),
    *(lambda norm=norm: norm(nn.Linear(WIDTH, WIDTH)) for norm in NORMS),
    nn.Tanh,
)  # fmt: skip


class Model(nn.Module):
    """Layers in a row, one of which runs twice."""

    def __init__(self, layers: list[nn.Module], twice: int) -> None:
        super().__init__()
        self.layers, self.twice = nn.ModuleList(layers), twice
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for n, layer in enumerate(self.layers):
            x = layer(x)
            if n == self.twice:
                x = layer(x)
        return x


def loss_of(model: nn.Module, out: torch.Tensor) -> torch.Tensor:
    auxiliary = [m.auxiliary for m in model.modules() if isinstance(m, Balanced)]
    return out.square().mean() + 0.1 * sum(auxiliary)


def state_of(model: nn.Module) -> list[object]:
    """All that it keeps, modules in their order."""
    own = []
    for module in model.modules():
        names = ("calls", "seen", "hidden", "auxiliary", "steps")
        own += [getattr(module, name) for name in names if hasattr(module, name)]
        own += [module.generator.get_state()] if isinstance(module, Chancy) else []
    own = [value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value) for value in own]
    return [*copy.deepcopy(model.state_dict()).values(), *own, torch.get_rng_state(), random.getstate()]


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def train(model: nn.Module, steps: int, accumulate: bool) -> list[object]:
    """Losses, gradients and state of each step."""
    torch.manual_seed(5)
    random.seed(5)
    found: list[object] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, model(torch.randn(ROWS, WIDTH)))
        if accumulate:  # both forward passes first
            loss = loss + loss_of(model, model(torch.randn(ROWS, WIDTH)))
        loss.backward()
        found += [loss.item(), *(p.grad if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
        found += state_of(model)
    return found


def least_budget(model: nn.Module, sample: torch.Tensor, loss: object) -> int:
    before = state_of(model)
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, sample, memory_budget=1, loss=loss)
    assert all(map(same, before, state_of(model)))
    return error.value.least_budget


def build(seed: str) -> Model:
    choose = random.Random(seed)
    torch.manual_seed(choose.randrange(1 << 30))
    layers = [nn.Linear(WIDTH, WIDTH), *(choose.choice(KINDS)() for _ in range(choose.randint(4, 8)))]
    # What an Averaging layer saved must stay until the backward pass, in the plain run too.
    twice = choose.choice([-1, *(n for n, layer in enumerate(layers) if not isinstance(layer, Averaging))])
    return Model(layers, twice)


def test_random_models_train_as_without_checkpoints() -> None:
    sample = torch.randn(ROWS, WIDTH)
    worked = 0
    for n in range(60 if SOAK else 5):
        seed = f"{SEED} {n}"
        plain = build(seed)
        accumulate = n % 3 == 2 and not any(isinstance(layer, Averaging) for layer in plain.layers)
        expected = train(plain, 3, accumulate)
        model = build(seed)
        least = least_budget(model, sample, lambda out, m=model: loss_of(m, out))
        for budget in (least, int(least * 1.2)):
            model = build(seed)
            memopt.auto_checkpoint(
                model, sample, memory_budget=budget, loss=lambda out, m=model: loss_of(m, out)
            )
            worked += model.plan.runner is not None
            found = train(model, 3, accumulate)
            wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)]
            assert not wrong, (seed, plain, plain.twice, accumulate, budget / least)
    assert worked >= 5


@pytest.mark.parametrize("kind", [Counting, Averaging, lambda: Mixed(parametrizations.spectral_norm)])
def test_twenty_steps_are_the_plain_runs(kind: object) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(kind() for _ in range(6)))

    model, sample = build(), torch.randn(ROWS, WIDTH)
    least = least_budget(model, sample, lambda out: out.square().mean())
    memopt.auto_checkpoint(model, sample, memory_budget=least, loss=lambda out: out.square().mean())
    assert model.plan.runner is not None
    assert all(map(same, train(model, 20, False), train(build(), 20, False)))


@pytest.mark.parametrize("norm", NORMS)
def test_the_budget_holds_what_norms_make(norm: object) -> None:
    """Weights of their directions and norms, whose gradients come behind the stages'."""

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(6) for layer in (norm(nn.Linear(256, 256)), nn.Tanh())))

    sample = torch.randn(64, 256)
    budget = least_budget(build(), sample, loss)
    model = build()
    memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss)
    for _ in range(2):
        assert live_peak(model, sample, loss) <= model.plan.peak_bytes <= budget


@pytest.mark.parametrize("hidden", [False, True])
def test_functions_in_a_row_keep_their_state_too(hidden: bool) -> None:
    """hidden: the functions do not show which modules they call."""
    torch.manual_seed(0)
    kinds = (Counting, Averaging, Chancy, lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), Layer)
    plain = nn.ModuleList(kind() for kind in (Layer, *kinds))
    model = copy.deepcopy(plain)
    functions = [(lambda x, m=module: m(x)) if hidden else module for module in model]
    with pytest.raises(InfeasibleBudget) as error:
        memopt.checkpoint_sequential(functions, None, torch.randn(ROWS, WIDTH), memory_budget=1)
    for step in range(3):
        outs = []
        for which in (plain, model):
            which.zero_grad()
            torch.manual_seed(step)
            random.seed(step)
            x = torch.randn(ROWS, WIDTH)
            if which is plain:
                for module in plain:
                    x = module(x)
            else:
                x = memopt.checkpoint_sequential(functions, None, x, memory_budget=error.value.least_budget)
            x.square().mean().backward()
            outs.append([x.detach(), *(p.grad for p in which.parameters()), *state_of(which)])
        assert all(map(same, *outs))


def test_state_that_was_not_seen_to_change_is_refused_by_name() -> None:
    """As by a part of a model that is trained, and was measured in eval()."""
    model = nn.Sequential(*(Layer() for _ in range(3)), Mixed(parametrizations.spectral_norm), Layer())
    sample = torch.randn(ROWS, WIDTH)
    memopt.auto_checkpoint(model.eval(), sample, memory_budget=least_budget(model, sample, default_loss))
    model[3].train()
    with pytest.raises(RuntimeError, match=r"_u of _SpectralNorm is changed by its forward.*again"):
        model(sample)
    model.train()(sample)  # is planned anew


class Penalised(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return super().forward(x) + torch.autograd.grad(super().forward(y).sum(), y)[0]


class Listing(Layer):
    losses: list[torch.Tensor] = []  # noqa: RUF012  # what is refused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.losses.append(out.square().mean())
        return out


class Moving(Layer):
    """Not even without checkpoints is there a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) / self.scale
        self.scale.mul_(0.9)
        return out


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Penalised, "2 computes gradients in its own forward"),
        (Listing, r"2 computes gradients .* or keeps a tensor .*\(in a list, say\)"),
        (Moving, r"2 changes in place a tensor that its own backward pass needs.*clone\(\)"),
    ],
)
def test_what_cannot_run_again_is_refused_by_name(kind: type[nn.Module], text: str) -> None:
    model = nn.Sequential(Layer(), Layer(), kind(), Layer())

    def loss(out: torch.Tensor) -> torch.Tensor:
        losses = list(Listing.losses)
        Listing.losses.clear()
        return out.square().mean() + sum(losses)

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=text):
        memopt.auto_checkpoint(model, torch.randn(ROWS, WIDTH), memory_budget="1GiB", loss=loss)
    Listing.losses.clear()
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert "plan" not in vars(model)
