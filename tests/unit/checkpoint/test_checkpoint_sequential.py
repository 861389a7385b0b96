"""checkpoint_sequential within a budget: the plain run's bits, live bytes within it, nothing left behind."""

from __future__ import annotations

import copy
import gc
import os
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import nn

import memopt
from memopt._checkpoint.drop_in import sequential
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt.chain import InfeasibleBudget

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = int(os.environ["MEMOPT_SEED"])
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
WIDTH = 24


def chain(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for n in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH * (1 + n % 2)), nn.BatchNorm1d(WIDTH * (1 + n % 2)), nn.Tanh()]
        layers += [nn.Dropout(0.3), nn.Linear(WIDTH * (1 + n % 2), WIDTH)]
    return nn.Sequential(*layers)


def batch(rows: int = 64, *, requires_grad: bool = True) -> torch.Tensor:
    made = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))
    return made.requires_grad_(requires_grad)


def within(functions: Any, budget: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda x: memopt.checkpoint_sequential(functions, None, x, memory_budget=budget, **kwargs)


def step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    value = run(x).square().mean()
    value.backward()
    return value.detach()


def live_peak(run: Callable[..., Any], functions: nn.Module, x: torch.Tensor) -> int:
    functions.zero_grad()
    x.grad = None
    standing = [*functions.parameters(), *functions.buffers(), x]
    meter = Meter()
    meter.ignore(standing)
    with meter:
        run(x).sum().backward()
    return bytes_of(standing) + meter.peak


def least_budget(functions: Any, x: Any) -> int:
    with pytest.raises(InfeasibleBudget, match=r"checkpoint_sequential's chain takes at least \d+") as error:
        memopt.checkpoint_sequential(functions, None, x, memory_budget=1)
    return error.value.least_budget


def same_step(
    run: Callable[..., Any], functions: nn.Module, plain: nn.Module, x: torch.Tensor, seed: int
) -> None:
    values = []
    for call, module in ((run, functions), (plain, plain)):
        module.zero_grad()
        x.grad = None
        torch.manual_seed(seed)
        values.append((step(call, x), torch.get_rng_state(), x.grad))
    for a, b in zip(*values, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    for (name, p), q in zip(functions.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(functions.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_plain_runs_bits_within_every_budget(requires_grad: bool) -> None:
    functions, x = chain(), batch(requires_grad=requires_grad)
    plain = copy.deepcopy(functions)
    peak, least = live_peak(copy.deepcopy(functions), functions, x), least_budget(functions, x)
    assert least < peak
    runs: list[int] = []
    functions[0].register_forward_hook(lambda *_: runs.append(0))
    for n in range(5):
        budget = least + (peak - least) * n // 5
        run = within(functions, budget)
        run(x)
        assert live_peak(run, functions, x) <= budget
        plain.load_state_dict(functions.state_dict())
        runs.clear()
        same_step(run, functions, plain, x, n)
        assert len(runs) >= 1 + (n == 0)


def test_functions_of_any_kind_in_a_row() -> None:
    """Methods, functions, closures over parameters and normalisation; what each works with is found."""
    torch.manual_seed(0)
    weight, norm = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH)
    linear = nn.Linear(WIDTH, WIDTH)
    functions = [
        torch.sin, lambda x: torch.tanh(x @ weight), linear.forward, torch.cos, lambda x: norm(x).exp(), torch.sin,
        lambda x: torch.dropout(x @ weight, 0.5, True),
    ]  # fmt: skip
    x = batch(200)
    parameters = [weight, *norm.parameters(), *linear.parameters(), x]

    def plain(value: torch.Tensor) -> torch.Tensor:
        for function in functions:
            value = function(value)
        return value

    def gradients(run: Callable[..., Any]) -> list[torch.Tensor]:
        norm.reset_running_stats()
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(1)
        step(run, x)
        return [*(p.grad for p in parameters), norm.running_mean.clone(), norm.num_batches_tracked.clone()]

    expected = gradients(plain)
    least = least_budget(functions, x)
    assert all(parameter.grad is not None for parameter in parameters)  # what was there before
    assert all(map(torch.equal, gradients(within(functions, least)), expected))


def test_functions_that_change_their_input_in_place() -> None:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(3):
        layers += [nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    functions, x = nn.Sequential(*layers), batch()
    plain = copy.deepcopy(functions)
    peak, least = live_peak(copy.deepcopy(functions), functions, x), least_budget(functions, x)
    for budget in (least, (least + peak) // 2):
        run = within(functions, budget)
        assert live_peak(run, functions, x) <= budget
        plain.load_state_dict(functions.state_dict())
        same_step(run, functions, plain, x, 1)
    for requires_grad in (False, True):
        given = batch(requires_grad=requires_grad)
        with pytest.raises(ValueError, match=r"functions\[0\], ReLU, changes its input in place"):
            within(list(functions)[2:], least)(given * 1)
        assert torch.equal(given, batch())


def test_a_module_that_is_there_twice_runs_twice() -> None:
    torch.manual_seed(3)
    tanh = nn.Tanh()
    functions = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), tanh, nn.Linear(WIDTH, WIDTH), tanh, nn.Linear(WIDTH, WIDTH)
    )
    plain, x = copy.deepcopy(functions), batch()
    same_step(within(functions, least_budget(functions, x)), functions, plain, x, 1)


def test_an_error_of_a_function_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        within([nn.Tanh(), nn.Linear(3, 3)], "1GiB")(batch())


def test_measured_once_for_the_same_functions_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = chain(2)
    made = []
    measure = sequential.ChainMeasurement
    monkeypatch.setattr(sequential, "ChainMeasurement", lambda *a: made.append(a) or measure(*a))
    for run in range(3):
        step(within(functions, "1GiB"), batch())
        functions.zero_grad()
        assert len(made) == 1, run
    step(within(list(functions), "1GiB"), batch())  # the same functions, in a list
    assert len(made) == 1
    step(within(functions, "1GiB"), batch())  # with gradients there to be added to
    assert len(made) == 2
    functions.zero_grad()
    step(within(functions, "1GiB"), batch(7))
    functions.zero_grad()
    step(within(functions, "2GiB"), batch())
    functions.zero_grad()
    functions[3].eval()
    step(within(functions, "1GiB"), batch())
    assert len(made) == 5
    methods = nn.Linear(WIDTH, WIDTH), nn.Tanh()
    for _ in range(2):
        step(within([m.forward for m in methods], "1GiB"), batch())
        methods[0].zero_grad()
    assert len(made) == 6


def test_nothing_is_left_of_functions_that_are_gone() -> None:
    gc.collect()
    before = len(sequential._chains)
    functions, x = chain(2), batch()
    least = least_budget(functions, x)
    step(within(functions, least), x)
    assert len(sequential._chains) == before + 1
    module, parameter = weakref.ref(functions[0]), weakref.ref(functions[0].weight)
    del functions
    gc.collect()
    assert module() is None
    assert parameter() is None
    assert len(sequential._chains) == before


def test_plans_of_one_chain_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "MOST_PLANS", 3)
    functions = chain(1)
    for rows in range(2, 9):
        within(functions, "1GiB")(batch(rows))
    assert len(sequential.plans_of(tuple(functions)).by_use) == 3


def test_without_gradients_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    functions, x = chain(1), batch(requires_grad=False)
    monkeypatch.setattr(sequential, "plan", lambda *_: pytest.fail("measured"))
    with torch.no_grad():
        torch.manual_seed(0)
        out = within(functions, 1)(x)  # far too little, and no concern of a run that keeps nothing
        torch.manual_seed(0)
        assert torch.equal(out, functions(x))
    monkeypatch.undo()
    functions.requires_grad_(False)
    assert not within(functions, "1GiB")(x).requires_grad
    assert within([], "1GiB")(x) is x


def test_budgets_and_what_is_refused() -> None:
    calls = []
    functions = [lambda x: calls.append(x) or x * 2]
    for wrong, text in ((1.5, "fraction"), (0.0, "fraction"), ("much", "much"), (-1, "-1")):
        with pytest.raises(ValueError, match=text):
            within(functions, wrong)(batch())
    with pytest.raises(ValueError, match="^Unexpected keyword arguments: other$"):
        within(functions, "1GiB", other=1)(batch())
    with pytest.raises(ValueError, match="segments is None: give the number of segments, or memory_budget"):
        memopt.checkpoint_sequential(functions, None, batch())
    assert not calls
    for budget in (2**40, "1TiB", 1.0):
        assert torch.equal(within(functions, budget, preserve_rng_state=True)(batch()), batch() * 2)


def test_the_gradients_that_are_there_stay() -> None:
    functions, x = chain(2), batch()
    plain = copy.deepcopy(functions)
    for module in (functions, plain):
        torch.manual_seed(0)
        step(module, x)
    x.grad = None
    grads = [p.grad for p in functions.parameters()]
    least = least_budget(functions, x)
    assert all(p.grad is g for p, g in zip(functions.parameters(), grads, strict=True))
    assert x.grad is None
    for run in (within(functions, least), plain):
        torch.manual_seed(1)
        step(run, x)
        x.grad = None
    for p, q in zip(functions.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def regions() -> Sequence[tuple[str, Callable[..., Any]]]:
    def selective(f: Callable[..., Any], x: Any) -> Any:
        keep = lambda: memopt.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731
        return memopt.checkpoint(f, x, use_reentrant=False, context_fn=keep)

    return [
        ("memopt", lambda f, x: memopt.checkpoint(f, x, use_reentrant=False, batch_norm_once=True)),
        ("memopt, reentrant", lambda f, x: memopt.checkpoint(f, x, use_reentrant=True, batch_norm_once=True)),
        ("torch", lambda f, x: torchs.checkpoint(f, x, use_reentrant=False)),
        ("torch, reentrant", lambda f, x: torchs.checkpoint(f, x, use_reentrant=True)),
        ("selective", selective),
    ]


@pytest.mark.parametrize(("name", "region"), regions(), ids=[name for name, _ in regions()])
def test_within_other_regions(name: str, region: Callable[..., Any]) -> None:
    """Measured within them too, at the first call."""
    torch.manual_seed(2)
    functions = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    )
    plain, x = copy.deepcopy(functions), batch()
    least = least_budget(copy.deepcopy(functions), x)
    run = within(functions, least)
    for seed in range(3):
        same_step(
            lambda value: region(lambda v: run(v * 2).sin(), value), functions, lambda_module(plain), x, seed
        )


def lambda_module(plain: nn.Module) -> nn.Module:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * 2).sin()

    return Around()


def test_an_exception_leaves_nothing_behind() -> None:
    functions, x = chain(2), batch()
    plain = copy.deepcopy(functions)
    least = least_budget(functions, x)
    fail = [True]

    def maybe(*_: Any) -> None:
        if fail[0]:
            raise KeyError("planted")

    functions[4].register_forward_hook(maybe)
    run = within(functions, least)
    for _ in range(2):
        with pytest.raises(KeyError, match="planted"):
            run(x)
    fail[0] = False
    plain.load_state_dict(functions.state_dict())
    same_step(run, functions, plain, x, 0)


def test_random_chains() -> None:
    choose = random.Random(SEED)
    for n in range(200 if SOAK else 6):
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(WIDTH, WIDTH), nn.Tanh, lambda: nn.Dropout(0.4), nn.GELU, nn.Identity,
            lambda: nn.BatchNorm1d(WIDTH), lambda: nn.LayerNorm(WIDTH), nn.Softplus,
        ]  # fmt: skip
        torch.manual_seed(n)
        functions = nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH)], *[choose.choice(kinds)() for _ in range(choose.randint(1, 8))]
        )
        plain, x = copy.deepcopy(functions), batch(choose.randint(2, 90), requires_grad=choose.random() < 0.5)
        budget = least_budget(functions, x)
        budget = int(budget * choose.choice((1.0, 1.1, 1.5)))
        run = within(functions, budget)
        same_step(run, functions, plain, x, n)
        assert live_peak(run, functions, x) <= budget, f"seed {SEED}, chain {n}: {functions}"
