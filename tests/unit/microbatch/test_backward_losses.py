"""memopt.backward on losses that are more than a mean of a forward pass: derivatives inside, samples that need each
other, noise, and what is not a loss at all."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from tests.unit.microbatch.test_backward import Failing, Net, batch, difference, grads, nothing_known, refused  # noqa: F401

CUT = "memopt.backward: a batch of 8 samples ran out of memory; its step was done again in micro-batches of 4, as"
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:memopt.backward. a batch of:RuntimeWarning"),
]


def network(inputs: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return layers.double()


def of_those_that_have(model: nn.Module) -> list[torch.Tensor]:
    """Gradients: a last bias has none in a derivative."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def derivative(of: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def gradient_penalty(
    critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """WGAN-GP's critic."""
    between = (share * real + (1 - share) * fake).requires_grad_()
    norms = derivative(critic(between), between).norm(dim=1)
    return (critic(fake) - critic(real)).mean() + 10 * (norms - 1).square().mean()


def poisson(net: nn.Module, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A PINN's residual of second order, by a batch that is made to require gradients in place."""
    x.requires_grad_()
    u = net(x)
    return (derivative(derivative(u, x), x) + source).square().mean()


def korteweg_de_vries(net: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A third derivative."""
    x = x.detach().requires_grad_()
    u = net(x)
    first = derivative(u, x)
    return (derivative(derivative(first, x), x) + 6 * u * first).square().mean()


def forces(net: nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """By torch.func, of each sample."""
    slopes = torch.func.vmap(torch.func.grad(lambda position: net(position).squeeze()))(x)
    return (slopes + wanted).square().mean()


@pytest.mark.parametrize(
    ("loss", "shapes"),
    [
        (gradient_penalty, [(23, 6), (23, 6), (23, 1)]),
        (poisson, [(23, 1), (23, 1)]),
        (korteweg_de_vries, [(23, 1), (23, 1)]),
        (forces, [(23, 6), (23, 6)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("position", [-1, 3, 40])
def test_a_loss_may_take_derivatives_itself(loss: Callable, shapes: list, position: int) -> None:
    made = torch.Generator().manual_seed(1)
    values = [torch.rand(shape, generator=made, dtype=torch.float64) for shape in shapes]
    plain, model = network(shapes[0][1]), network(shapes[0][1])
    expected = loss(plain, *(value.clone() for value in values))
    expected.backward()
    with Failing(position) as failing:
        found = memopt.backward(lambda *piece: loss(model, *piece), *values, model=model, exact=True)
    assert failing.raised == (position >= 0)
    assert difference(of_those_that_have(model), of_those_that_have(plain)) < 1e-12
    assert torch.allclose(found, expected.detach(), rtol=1e-12)


def test_a_wrong_reduction_of_derivatives_is_found() -> None:
    model = network()
    x = batch()[0].double()
    refused(
        "not a 'mean' over samples",
        lambda a: derivative(model(a := a.detach().requires_grad_()), a).square().sum(),
        x,
        model=model,
    )


def test_a_trial_leaves_no_gradients_of_its_own() -> None:
    """Of a loss with a backward pass of its own inside, which is called in the trial too."""
    plain, model = network(), network()
    x = batch()[0].double()

    def loss(net: nn.Module, piece: torch.Tensor) -> torch.Tensor:
        (net(piece).square().mean() * 0.5).backward()
        return net(piece).square().mean()

    loss(plain, x).backward()
    memopt.backward(lambda a: loss(model, a), x, model=model)
    assert all(map(torch.equal, grads(model), grads(plain)))


# ---- what runs on the whole batch only -------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 3, 5]])


def of_graph(net: Net, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each node's messages come from its neighbours."""
    nodes = net(x)
    return F.cross_entropy(torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]]), y)


def of_many(net: Net, x: torch.Tensor, _: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if len(x) < 5:
        raise ValueError("five at least")
    return F.cross_entropy(net(x), y)


WHOLE_ONLY = [(of_graph, r"IndexError: index \d is out of bounds"), (of_many, "ValueError: five at least")]


@pytest.mark.parametrize(("loss", "words"), WHOLE_ONLY, ids=["graph", "small"])
def test_a_step_that_fits_goes_on_where_fn_does_not_run_on_parts(
    loss: Callable, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "memopt")
    x, y = batch()
    plain, model = Net(), Net()
    plain_loss = loss(plain, x, EDGES, y)
    plain_loss.backward()
    state = torch.get_rng_state()
    found = memopt.backward(lambda a, e, b: loss(model, a, e, b), x, EDGES, y, model=model, unbatched=(1,))
    assert torch.equal(found, plain_loss.detach()) and all(map(torch.equal, grads(model), grads(plain)))
    assert float(model.calls) == 1 and torch.equal(state, torch.get_rng_state())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("fits_first", [False, True])
@pytest.mark.parametrize(("loss", "words"), WHOLE_ONLY, ids=["graph", "small"])
def test_a_step_that_has_to_be_cut_names_the_reason_and_the_remedy(
    loss: Callable, words: str, fits_first: bool
) -> None:
    x, y = batch()
    model = Net()
    sizes, fitting = [], 8

    def fn(a: torch.Tensor, e: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes.append(len(a))
        found = loss(model, a, e, b)
        if len(a) > fitting:
            raise MemoryError
        return found

    named = {"model": model, "unbatched": (1,)}
    if fits_first:
        memopt.backward(fn, x, EDGES, y, **named)
    fitting = 4
    for again in range(2):
        sizes.clear()
        refused(f"{words}(.|\n)*unbatched=(.|\n)*memopt.auto_checkpoint", fn, x, EDGES, y, **named)
        assert sizes == ([8] if fits_first or again else [8, 4])  # what is known is not tried
    fitting = 8
    memopt.backward(fn, x, EDGES, y, **named)


def test_an_argument_that_is_named_later_is_another_way_to_cut() -> None:
    x, y = batch()
    plain, model = Net(), Net()
    F.cross_entropy(plain(x), y).backward()
    sizes, fitting = [], 8

    def fn(a: torch.Tensor, table: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes.append(len(a))
        assert len(table) == 8
        if len(a) > fitting:
            raise MemoryError
        return F.cross_entropy(model(a), b)

    memopt.backward(fn, x, torch.ones(8), y, model=model)
    model.zero_grad()
    fitting = 4
    memopt.backward(fn, x, torch.ones(8), y, model=model, unbatched=(1,))
    assert 4 in sizes and difference(grads(model), grads(plain)) < 1e-6


def test_an_exception_of_a_programs_own_is_passed_on_from_a_micro_batch_too() -> None:
    class Stop(Exception):
        pass

    model = Net()

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) < 8:
            raise Stop
        return F.cross_entropy(model(x), y)

    with Failing(4), pytest.raises(Stop):
        memopt.backward(fn, *batch(), model=model)


# ---- noise -----------------------------------------------------------------------------------------------------------


def noisy(kind: str, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    drawn = {
        "torch": lambda: torch.randn(()),
        "python": lambda: torch.tensor(random.random()),
        "numpy": lambda: torch.tensor(float(numpy.random.rand())),
        "module": lambda: torch.ones(()),
    }[kind]
    return lambda x, y: F.cross_entropy(model(x + drawn()), y)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "module"])
def test_the_first_step_that_is_cut_warns_once_of_noise_inside(kind: str) -> None:
    model = Net(dropout=0.5 if kind == "module" else 0.0)
    fn = noisy(kind, model)
    memopt.backward(fn, *batch(), model=model)  # and a step that fits does not
    words = r"Dropout 'layers.3'\) draws random" if kind == "module" else "and fn draws random"
    with Failing(8), pytest.warns(RuntimeWarning, match=f"{words}(.|\n)*draw the noise outside") as caught:
        memopt.backward(fn, *batch(), model=model)
    assert [warning.filename for warning in caught] == [__file__] * 2 and CUT in str(caught[-1].message)
    with Failing(8) as failing:
        memopt.backward(fn, *batch(), model=model)  # warnings are errors here
    assert failing.raised


def test_noise_that_is_passed_or_not_asked_about_is_none_to_warn_of() -> None:
    x, y = batch()
    noise = torch.randn_like(x)
    plain, model = Net(), Net()
    F.cross_entropy(plain(x + noise), y).backward()
    with Failing(8):
        memopt.backward(
            lambda a, z, b: F.cross_entropy(model(a + z), b), x, noise, y, model=model, exact=True
        )
    assert difference(grads(model), grads(plain)) < 1e-6
    for exact in (True, False):
        other = Net(dropout=0.5 * (not exact))
        with Failing(8), warnings.catch_warnings():
            memopt.backward(lambda a, b: F.cross_entropy(other(a), b), x, y, model=other, exact=exact)  # noqa: B023


@pytest.mark.filterwarnings("error:memopt.backward. a batch of:RuntimeWarning")
def test_the_first_step_that_is_cut_says_so_once_unless_nothing_is_asked() -> None:
    model = Net()
    fn = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    with Failing(8), pytest.warns(RuntimeWarning, match=CUT) as caught:
        memopt.backward(fn, *batch(), model=model)
    assert [warning.filename for warning in caught] == [__file__]
    with Failing(8) as failing:
        memopt.backward(fn, *batch(), model=model)
    assert failing.raised
    other = Net()
    with Failing(8) as failing:
        memopt.backward(lambda x, y: F.cross_entropy(other(x), y), *batch(), model=other, exact=False)
    assert failing.raised


def test_a_warning_that_is_an_error_leaves_everything_as_at_entry() -> None:
    model = Net(dropout=0.5)
    fn = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    memopt.backward(fn, *batch(), model=model)
    before, state, calls = grads(model), torch.get_rng_state(), model.calls.clone()
    with Failing(8), pytest.raises(RuntimeWarning):
        memopt.backward(fn, *batch(), model=model)
    assert all(map(torch.equal, grads(model), before)) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(model.calls, calls)


def test_a_loss_that_is_another_one_each_time_is_not_taken_for_a_wrong_reduction() -> None:
    """By a generator of the program's own, whose state memopt does not know."""
    model, made = Net(), torch.Generator().manual_seed(0)
    memopt.backward(
        lambda x, y: F.cross_entropy(model(x + torch.randn(x.shape, generator=made)), y),
        *batch(),
        model=model,
    )


# ---- what is no loss -------------------------------------------------------------------------------------------------


def test_what_is_no_scalar_is_refused_by_its_shape() -> None:
    x, y = batch()
    model = Net()
    model.layers[0](x).sum().backward()
    vector = lambda a, b: model(a).mean(0)  # noqa: E731
    for exact in (None, False):
        refused(r"shape \(4,\) for 8 samples: reduce it to a scalar", vector, x, y, model=model, exact=exact)
    refused(
        r"reduction= returned a tensor of shape \(8,\) for 8 samples: reduce it to a scalar",
        lambda a, b: F.cross_entropy(model(a), b, reduction="none"),
        x,
        y,
        model=model,
        reduction=lambda a, b: b != -100,
    )
    refused("a loss without a graph", lambda a, b: model(a).mean().detach(), x, y, model=model)


def test_a_call_within_fn_is_refused_by_name() -> None:
    x, y = batch()
    model = Net()

    def outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        memopt.backward(lambda c: model(c).mean(), a, model=model)
        return F.cross_entropy(model(a), b)

    for _ in range(2):  # and the first one has left the thread as it was
        with pytest.raises(RuntimeError, match=r"fn calls memopt\.backward itself"):
            memopt.backward(outer, x, y, model=model)
        assert all(p.grad is None for p in model.parameters()) and float(model.calls) == 0
    memopt.backward(lambda a, b: F.cross_entropy(model(a), b), x, y, model=model)
