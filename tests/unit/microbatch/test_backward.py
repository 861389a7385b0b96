"""memopt.backward on the CPU: an out-of-memory error at any operation of a step, and the gradients of the plain run."""

from __future__ import annotations

import functools
import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt._microbatch import backward as step

SOAK = os.environ.get("MEMOPT_SOAK") == "1"

pytestmark = pytest.mark.usefixtures("one_thread")


class Failing(TorchDispatchMode):
    """The operation at a position, counted from 0, runs out of memory, once: of those that take memory."""

    def __init__(self, position: int = -1, error: Callable[[], Exception] = MemoryError) -> None:
        super().__init__()
        self.position, self.count, self.error, self.raised = position, 0, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.is_mutable:
            self.count += 1
            if self.count - 1 == self.position:
                self.raised += 1
                raise self.error()
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 6, generator=generator), torch.randint(4, (samples,), generator=generator)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Of the norm."""
    apart = sum((a.double() - b.double()).square().sum() for a, b in zip(one, other, strict=True))
    return float((apart / sum(b.double().square().sum() for b in other)).sqrt())


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Of models."""
    step._histories.clear()


@pytest.mark.parametrize("at_entry", [False, True])
def test_any_operation_may_run_out_of_memory(at_entry: bool) -> None:
    x, y = batch()
    plain = Net()
    for _ in range(1 + at_entry):
        expected_loss = F.cross_entropy(plain(x), y)
        expected_loss.backward()
    position = 0
    while True:
        model = Net()
        fn = lambda a, b: F.cross_entropy(model(a), b)  # noqa: B023, E731
        if at_entry:
            fn(x, y).backward()
        old = [p.grad for p in model.parameters()]
        model.calls.zero_()
        with Failing(position) as failing:
            state = torch.get_rng_state()
            loss = memopt.backward(fn, x, y, model=model)
        assert torch.equal(state, torch.get_rng_state())
        assert difference(grads(model), grads(plain)) < 1e-6
        assert abs(float(loss) - expected_loss.item()) < 1e-6 and not loss.requires_grad
        if at_entry:
            assert all(p.grad is grad for p, grad in zip(model.parameters(), old, strict=True))
        if not failing.raised:
            break
        position += 1 if SOAK else 4
    assert position > 40


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(words: str, fn: Callable[..., torch.Tensor], *args: object, **named: object) -> None:
    """And nothing has changed."""
    model = named["model"]
    random, before = torch.get_rng_state(), [p.grad for p in model.parameters()]
    values = [None if grad is None else grad.clone() for grad in before]
    buffers = [b.clone() for b in model.buffers()]
    with pytest.raises(ValueError, match=words):
        memopt.backward(fn, *args, **named)
    for p, grad, value in zip(model.parameters(), before, values, strict=True):
        assert p.grad is grad and (value is None or torch.equal(grad, value))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (nn.BatchNorm1d(6), "BatchNorm1d 'norm' normalises by the batch's own statistics"),
        (nn.SyncBatchNorm(6), "SyncBatchNorm 'norm'"),
        (nn.BatchNorm1d(6, track_running_stats=False).eval(), "BatchNorm1d 'norm'"),
        (nn.InstanceNorm1d(6, track_running_stats=True), "averages its running statistics over the batch"),
    ],
    ids=lambda n: type(n).__name__,
)
def test_norms_that_mix_samples_are_refused_before_anything_runs(norm: nn.Module, words: str) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = norm, nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("nothing is to run")

    model = Mixing()
    refused(words, lambda x, y: F.cross_entropy(model(x), y), *batch(), model=model)


def test_batch_norm_is_let_through_in_eval_mode_or_by_request() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))
    x, y = batch()
    memopt.backward(lambda a, b: F.cross_entropy(model(a), b), x, y, model=model, exact=False)
    assert int(model[0].num_batches_tracked) == 1
    with Failing(5):
        memopt.backward(lambda a, b: F.cross_entropy(model(a), b), x, y, model=model, exact=False)
    assert (
        int(model[0].num_batches_tracked) == 3
    )  # that of the failure is taken back, each micro-batch counts
    model.eval()
    memopt.backward(lambda a, b: F.cross_entropy(model(a), b), x, y, model=model)


@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda out, y: F.cross_entropy(out, y, ignore_index=1),
            r"a mean over \d of \d targets \(ignore_index=1\)",
        ),
        (
            lambda out, y: F.cross_entropy(out, y.where(y < 3, -100)),
            r"a mean over \d of \d targets \(ignore_index=-100\)",
        ),
        (lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2, 3, 4])), "class weights"),
        (lambda out, y: F.cross_entropy(out, y, reduction="sum"), "not a 'mean' over samples"),
        (lambda out, y: out.logsumexp(0).mean(), "not a 'mean' over samples"),
        (lambda out, y: (out * (y < 1)[:, None]).sum() / (y < 1).sum(), "not a 'mean' over samples"),
    ],
    ids=["ignored", "ignored by default", "weighted", "sum", "mixed", "masked"],
)
def test_losses_that_are_no_mean_over_samples_are_refused(loss: Callable, words: str, samples: int) -> None:
    model = Net()
    model.layers[0](batch(4)[0]).sum().backward()  # there are gradients at entry
    labels = torch.tensor([0, 0, 1, 2, 3, 1, 2, 1])[:samples]
    refused(words, lambda x, y: loss(model(x), y), batch(samples)[0], labels, model=model)


def test_the_same_losses_are_exact_when_told_what_they_are() -> None:
    x, y = batch()
    told = [
        ("sum", lambda m, a, b: F.cross_entropy(m(a), b, reduction="sum")),
        (lambda a, b: (b != 1).sum(), lambda m, a, b: F.cross_entropy(m(a), b, ignore_index=1)),
        ("mean", lambda m, a, b: F.cross_entropy(m(a), b, reduction="none")),
        (
            lambda a, b: (b != 1).sum(),
            lambda m, a, b: F.cross_entropy(m(a), b, ignore_index=1, reduction="none"),
        ),
    ]
    for reduction, fn in told:
        plain = Net()
        whole = fn(plain, x, y)
        whole = whole if whole.dim() == 0 else whole.sum() / (8 if reduction == "mean" else (y != 1).sum())
        whole.backward()
        for position in (0, 12, 30):
            model = Net()
            with Failing(position) as failing:
                loss = memopt.backward(functools.partial(fn, model), x, y, model=model, reduction=reduction)
            assert failing.raised
            assert difference(grads(model), grads(plain)) < 1e-6
            assert abs(loss.item() - whole.item()) < 1e-5


def test_a_micro_batch_in_which_nothing_counts_is_left_out() -> None:
    x, _ = batch()
    y = torch.tensor([-100] * 4 + [0, 1, -100, 2])
    fn = lambda m, a, b: F.cross_entropy(m(a), b)  # noqa: E731
    plain, model = Net(), Net()
    fn(plain, x, y).backward()
    with Failing(0):
        memopt.backward(
            functools.partial(fn, model), x, y, model=model, reduction=lambda a, b: (b != -100).sum()
        )
    assert difference(grads(model), grads(plain)) < 1e-6


def test_exact_refuses_what_is_random() -> None:
    model = Net(dropout=0.5)
    refused(
        "Dropout 'layers.3' draws another mask",
        lambda x, y: F.cross_entropy(model(x), y),
        *batch(),
        model=model,
        exact=True,
    )
    plain = Net()
    refused(
        "fn draws random numbers",
        lambda x, y: F.cross_entropy(F.dropout(plain(x)), y),
        *batch(),
        model=plain,
        exact=True,
    )
    memopt.backward(lambda x, y: F.cross_entropy(model(x), y), *batch(), model=model)
    model.eval()
    memopt.backward(lambda x, y: F.cross_entropy(model(x), y), *batch(), model=model, exact=True)


def test_a_loss_behind_dropout_is_checked_in_eval_mode() -> None:
    model = Net(dropout=0.5)
    refused("not a 'mean'", lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), *batch(), model=model)
    assert model.layers[3].training


def test_hooks_graphs_and_changed_arguments_are_refused() -> None:
    x, y = batch()
    hooked = Net()
    handle = hooked.layers[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    refused(
        "parameter layers.0.weight has a hook", lambda a, b: F.cross_entropy(hooked(a), b), x, y, model=hooked
    )
    handle.remove()
    model = Net()
    made = x.clone().requires_grad_() * 2
    refused("has a graph of its own", lambda a, b: F.cross_entropy(model(a), b), made, y, model=model)
    changed = x.clone()
    with Failing(8):
        refused(
            "changed a tensor of its batch in place",
            lambda a, b: F.cross_entropy(model(a.mul_(2)), b),
            changed,
            y,
            model=model,
        )
    with pytest.raises(ValueError, match="names no module"):
        memopt.backward(lambda a: a.sum(), x, model=[])
    with pytest.raises(TypeError, match="fn returned a tuple"):
        memopt.backward(lambda a, b: (F.cross_entropy(model(a), b), 1), x, y, model=model)


def test_another_error_is_passed_on_and_gradients_are_those_at_entry() -> None:
    model = Net()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    before = grads(model)

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        memopt.backward(
            lambda a, b: F.cross_entropy(model.layers[4](Breaks.apply(model.layers[:4](a))), b),
            x,
            y,
            model=model,
        )
    assert all(map(torch.equal, grads(model), before))


# ---- what it is as elsewhere -----------------------------------------------------------------------------------------


def test_without_a_failure_it_is_the_plain_run_bit_for_bit() -> None:
    x, y = batch()
    plain, model = Net(dropout=0.3), Net(dropout=0.3)
    torch.manual_seed(3)
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loss = memopt.backward(lambda a, b: F.cross_entropy(model(a), b), x, y, model=model)
    assert torch.equal(loss, expected.detach()) and torch.equal(after, torch.get_rng_state())
    assert all(map(torch.equal, grads(model), grads(plain)))
    assert float(model.calls) == 1


def test_running_statistics_that_count_no_version_move_only_in_attempts_that_count() -> None:
    x, _ = batch()
    plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    for module, parts in zip(plain, ([x], x.split(4)), strict=True):
        for part in parts:
            module(part)
    for position in range(100):
        model = nn.BatchNorm1d(6)
        for warm_up in range(2):  # the second step knows which buffers the first one changed
            with Failing(position if warm_up else -1) as failing:
                model.reset_running_stats()
                memopt.backward(lambda a: model(a).square().mean(), x, model=model, exact=False)  # noqa: B023
        if not failing.raised:
            break
        expected = plain[int(model.num_batches_tracked) - 1]
        assert all(map(torch.equal, model.buffers(), expected.buffers())), position
    assert position > 5


def test_random_states_of_all_kinds_are_those_at_entry_for_the_second_attempt() -> None:
    model, drawn = Net(), []

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
        return F.cross_entropy(model(x), y)

    with Failing(20) as failing, pytest.warns(RuntimeWarning, match="fn draws random numbers"):
        memopt.backward(fn, *batch(), model=model)
    assert failing.raised and drawn[0] == drawn[1] != drawn[2]


def test_nested_and_keyword_batches_and_a_scaler() -> None:
    x, y = batch()
    plain = Net()
    (F.cross_entropy(plain(x), y) * 1024).backward()
    for position in (0, 25):
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        with Failing(position):
            loss = memopt.backward(
                lambda data, *, labels, factor: factor * F.cross_entropy(model(data["x"]), labels),  # noqa: B023
                {"x": x},
                labels=y,
                factor=1.0,
                model=model,
                scaler=scaler,
            )
        assert difference(grads(model), grads(plain)) < 1e-6
        assert loss.item() < 10 and float(scaler._scale) == 1024


def test_a_batch_that_requires_gradients_has_them() -> None:
    model = Net()
    x, y = batch()
    wanted = x.clone().requires_grad_()
    F.cross_entropy(model(wanted), y).backward()
    for position in (0, 25):
        leaf = x.clone().requires_grad_()
        with Failing(position):
            memopt.backward(lambda a, b: F.cross_entropy(model(a), b), leaf, y, model=model)
        assert difference([leaf.grad], [wanted.grad]) < 1e-6


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    models = [nn.BatchNorm1d(6)]  # which the refusals look at
    memopt.backward(lambda a: models[0](a).square().mean(), batch()[0], model=models[0], exact=False)
    gone = weakref.ref(models[0])
    models.clear()
    gc.collect()
    assert gone() is None and not step._histories


def test_the_host_may_run_out_for_good() -> None:
    """Under a limit of address space: torch's allocator raises by itself.

    glibc is told its threshold, so that it keeps nothing of what was freed: what it kept would hold a sample.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "isolated" / "host_memory_limit.py")],
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cut", "least"]
