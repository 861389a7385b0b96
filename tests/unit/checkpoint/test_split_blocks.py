"""Blocks that are more than one stage: the plain run's bits within every budget, and right results when they are called
in another way than they were planned for."""

from __future__ import annotations

import copy
import os
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import memopt
from memopt._checkpoint.stages.costs import Meter, bytes_of, tensors_in
from memopt._checkpoint.stages.model_chain import ModelChain
from memopt._checkpoint.stages.trace_forward import ForwardTrace
from memopt.chain import Chain, InfeasibleBudget, Stage, solve
from tests.helpers import split_models
from tests.helpers.split_models import FORMS, WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def step(model: nn.Module, sample: dict[str, Any]) -> torch.Tensor:
    value = squares(model(**sample))
    value.backward()
    return value.detach()


def live_peak(model: nn.Module, sample: dict[str, Any]) -> int:
    model.zero_grad()
    standing = [*model.parameters(), *model.buffers(), *tensors_in(sample)]
    meter = Meter()
    meter.ignore(standing)
    with meter:
        step(model, sample)
    return bytes_of(standing) + meter.peak


def same_step(model: nn.Module, plain: nn.Module, sample: dict[str, Any], seed: int = 0) -> None:
    values = []
    for module in (model, plain):
        module.zero_grad()
        torch.manual_seed(seed)
        values.append((step(module, sample), torch.get_rng_state()))
    (value, state), (expected, expected_state) = values
    assert torch.equal(value, expected)
    assert torch.equal(state, expected_state)
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == q[0]
        assert torch.equal(p.grad, q[1].grad), name


def least_budget(model: nn.Module, sample: dict[str, Any]) -> int:
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, sample, memory_budget=1, loss=squares)
    return error.value.least_budget


def tight(form: str, depth: int = 2) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A model on the least budget, the plain one, a sample."""
    torch.manual_seed(1)
    model, sample = split_models.make(form, depth)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample), loss=squares)
    assert model.plan.runner is not None
    return model, plain, sample


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("form", FORMS)
def test_each_block_is_attention_and_mlp(form: str) -> None:
    model, sample = split_models.make(form, 2)
    chain = ModelChain(model, (), sample)
    found = [name for name in chain.names if name.startswith("blocks.")]
    assert len(found) == 4, found
    attention, mlp = found[2:]
    assert "att" in attention
    assert "mlp" not in attention
    assert "linear1" not in attention
    assert any(word in mlp for word in ("mlp", "linear1 + dropout + linear2", "intermediate + output"))
    assert "att" not in mlp.replace("post_attention_layernorm", "")
    assert chain.lingering[1:5] == [None, 1, None, 3]


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch's, of its own layer's masks
@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
def test_the_plain_runs_bits_within_every_budget(form: str) -> None:
    torch.manual_seed(1)
    model, sample = split_models.make(form, 2, rows=8, length=24)
    plain = copy.deepcopy(model)
    peak, least = live_peak(plain, sample), least_budget(model, sample)
    assert least < peak
    parts = 0
    budgets = [least + (peak - least) * n // 4 for n in range(12 if SOAK else 4) if n < 4 or n % 2]
    for n, budget in enumerate(budgets):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message="Support for mismatched")
            memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=squares)
            assert live_peak(model, sample) <= model.plan.peak_bytes <= budget
            same_step(model, plain, sample, n)
        parts += model.plan.runner is not None and any("(" in name for name in model.plan.stages)
    assert parts >= 2
    assert list(model.state_dict()) == list(plain.state_dict())


def test_finer_stages_are_faster_between_the_budgets() -> None:
    """Attention and MLP as stages, or both as one that costs their sum: what fits the one, fits the other, in less
    time."""
    parts = []
    for _ in range(6):
        parts += [Stage(7 << 20, 1 << 20, 0.7, 1.4), Stage(10 << 20, 1 << 20, 1.1, 2.2)]
    whole = [Stage(17 << 20, 1 << 20, 1.8, 3.6) for _ in range(6)]
    loss = Stage(2 << 20, 1 << 20, 0.1, 0.1)
    fine, coarse = Chain((*parts, loss), 1 << 20), Chain((*whole, loss), 1 << 20)
    won = 0
    for budget in range(40, 101, 5):
        a, b = solve(fine, budget << 20).seconds, solve(coarse, budget << 20).seconds
        assert a <= b + 1e-9
        won += a < b - 1e-9
    assert won >= 6


def test_hooks_of_the_block_and_in_it_run_as_in_the_plain_run() -> None:
    model, plain, sample = tight("prenorm")
    seen: dict[int, list[str]] = {id(model): [], id(plain): []}
    for module in (model, plain):
        calls = seen[id(module)]
        block = module.blocks[1]
        block.register_forward_hook(lambda *_, calls=calls: calls.append("block"))
        block.register_full_backward_hook(lambda *_, calls=calls: calls.append("block backward"))
        block.mlp.register_full_backward_hook(lambda *_, calls=calls: calls.append("mlp backward"))
        block.ln2.register_forward_pre_hook(lambda *_, calls=calls: calls.append("ln2"))
    same_step(model, plain, sample)
    counts = {what: seen[id(model)].count(what) for what in seen[id(plain)]}
    assert counts["block"] == counts["block backward"] == counts["mlp backward"] == 1
    assert counts["ln2"] >= 1
    # and a hook that changes what a module in the block returns, does
    for module in (model, plain):
        module.blocks[1].attn.register_forward_hook(lambda m, args, out: out * 2)
    same_step(model, plain, sample)


def test_without_a_graph_the_blocks_own_forward_runs() -> None:
    model, plain, sample = tight("prenorm")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval(), plain.eval()
        assert torch.equal(model(**sample), plain(**sample))


OTHERWISE: dict[str, Callable[[nn.Module], Any]] = {
    "another rate": lambda model: setattr(model.blocks[1], "p", 0.5),
    "another type": lambda model: [
        part.double() for part in (model.token, model.blocks, model.norm, model.head)
    ],
}


def parts_run(model: nn.Module, step: Callable[[], None]) -> set[int]:
    """Return the numbers of the stages whose function did anything but pass a result on in this step."""
    runner, found = model.plan.runner, set[int]()
    functions = runner.functions

    def noting(k: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if args[:1] != (None,) or len(args) > 2:
                found.add(k)
            return functions[k](*args, **kwargs)

        return run

    runner.functions = tuple(map(noting, range(runner.count)))
    step()
    runner.functions = functions
    return found


@pytest.mark.parametrize("what", OTHERWISE)
def test_a_block_that_makes_the_same_calls_otherwise_is_in_parts_too(what: str) -> None:
    model, plain, sample = tight("prenorm")
    for module in (model, plain):
        OTHERWISE[what](module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if what == "another type":  # its parameters are larger
            warnings.filterwarnings("ignore", ".*No plan takes that much less")
        for n in range(2):
            assert (
                len(parts_run(model, lambda n=n: same_step(model, plain, sample, n)))
                == model.plan.runner.count
            )


def test_a_block_that_makes_other_calls_runs_whole() -> None:
    model, plain, sample = tight("prenorm")
    for module in (model, plain):
        module.blocks[1].mlp = copy.deepcopy(module.blocks[0].mlp)
    words = r"blocks\.1, a PreNorm, runs as one stage instead of 2, because mlp of PreNorm has changed"
    with pytest.warns(UserWarning, match=words):
        same_step(model, plain, sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", ".*No plan takes that much less"
        )  # the first step may have been above
        same_step(model, plain, sample, 1)  # said once


def test_other_arguments_with_the_same_calls_run_in_parts() -> None:
    model, plain, sample = tight("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_step(model, plain, sample | {"output_attentions": True})
        same_step(model, plain, sample)  # and as planned again


def test_a_batch_of_another_shape_is_in_parts_too() -> None:
    for form in ("prenorm", "bert"):
        model, plain, sample = tight(form)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same_step(model, plain, {"tokens": sample["tokens"][:2, :4]})


def test_under_autocast() -> None:
    torch.manual_seed(1)
    model, sample = split_models.make("prenorm", 2)
    plain = copy.deepcopy(model)
    least = least_budget(model, sample)
    with torch.autocast("cpu", torch.bfloat16):
        least = max(least, least_budget(model, sample))  # which one is larger depends on the CPU
        memopt.auto_checkpoint(model, sample, memory_budget=least, loss=squares)
        same_step(model, plain, sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_step(model, plain, sample)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's, of pickles of its own TreeSpec
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_parts_of_its_own(way: Callable[[nn.Module], nn.Module]) -> None:
    model, plain, sample = tight("torch prenorm")
    other = way(model)
    member = other.blocks[0].__dict__["forward"].member
    assert member.module is other.blocks[0]
    assert all(
        step_.target in set(other.modules())
        for step_ in member.block.trace.steps
        if isinstance(step_.target, nn.Module)
    )
    for parameter in other.parameters():
        parameter.data.add_(0.01)
    for parameter in plain.parameters():
        parameter.data.add_(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_step(other, plain, sample)


def test_a_parameter_that_is_replaced_is_used() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.tanh(self.a(x)) * self.scale
            return x + torch.tanh(self.b(x)) * self.scale

    model = split_models.Stack([Scaled(), Scaled()])
    plain = copy.deepcopy(model)
    sample = {"tokens": torch.randint(0, 11, (4, 3))}
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample), loss=squares)
    assert sum("blocks" in name for stage in model.plan.stages for name in stage.split(", ")) == 4
    for module in (model, plain):
        module.blocks[0].scale = nn.Parameter(torch.full((WIDTH,), 2.0))
    same_step(model, plain, sample)


class Odd(nn.Module):
    """A block that does what a test says between its two branches."""

    def __init__(self, does: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.does = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), does
        self.last = torch.zeros(3)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.a(x))
        y = self.does(self, x)
        x = y if isinstance(y, torch.Tensor) else x
        return x + torch.tanh(self.b(x))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def counts(block: Odd, x: torch.Tensor) -> None:
    block.count += 1


def keeps(block: Odd, x: torch.Tensor) -> None:
    block.seen = x.detach()


def without_gradients(block: Odd, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x + 1


ODD: dict[str, tuple[str, Callable[[Any, torch.Tensor], Any]]] = {
    "looks at a value": ("item returns something that is not a tensor", lambda _, x: x.sum().item()),
    "branches on a value": ("__bool__", lambda _, x: x * 2 if x.sum() > 0 else x),
    "counts its calls": ("changes count", counts),
    "keeps a tensor": ("new attributes", keeps),
    "draws from Python": ("random numbers", lambda _, x: x * random.random()),
    "a tensor from nowhere": ("unknown origin", lambda block, x: x + block.last.sum()),
    "its own function": ("grad mode", lambda _, x: Double.apply(x)),
    "another grad mode": ("grad mode", without_gradients),
    "past autograd": ("uses data", lambda _, x: x.data * 1),
    "a sparse tensor": ("not plain and strided", lambda _, x: x + x.detach().to_sparse().to_dense()),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_recorded_is_said_and_stays_whole(what: str) -> None:
    words, does = ODD[what]
    torch.manual_seed(0)
    block = Odd(does)
    recording = ForwardTrace(block, block.forward, (torch.randn(2, WIDTH, requires_grad=True),), {})
    assert recording.refusal is not None
    assert words in recording.refusal
    if what == "keeps a tensor":
        del block.seen
    model = split_models.Stack([Odd(does), Odd(does)])
    plain = copy.deepcopy(model)
    sample = {"tokens": torch.randint(0, 11, (4, 3))}
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample), loss=squares)
    assert [name for name in model.plan.stages if "blocks" in name] == ["blocks.0", "blocks.1"]
    random.seed(3)
    torch.manual_seed(3)
    expected = squares(plain(**sample))
    random.seed(3)
    torch.manual_seed(3)
    assert torch.equal(squares(model(**sample)), expected)


def test_what_is_changed_in_place_stays_in_one_part() -> None:
    def in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).mul_(2).view_as(x)

    block = Odd(in_place)
    model = split_models.Stack([block, copy.deepcopy(block)])
    sample = {"tokens": torch.randint(0, 11, (4, 3))}
    chain = ModelChain(model, (), sample)
    for member in chain.members:
        if member.block is not None:
            steps = member.block.trace.steps[: member.block.programs[0].end]
            first = [getattr(step_.target, "__name__", "") for step_ in steps]
            assert "mul_" in first
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample), loss=squares)
    same_step(model, plain, sample)


def test_shapes_that_the_block_asks_for_are_expected() -> None:
    block = Odd(lambda _, x: x.reshape(x.shape[0], -1).view_as(x))
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    with torch.no_grad():  # the trace must find no tensor that something keeps, such as a graph
        recording = ForwardTrace(block, block.forward, (x,), {})
    assert recording.refusal is None
    leaves, spec = tree_flatten(((x,), {}))
    assert recording.expected.difference(leaves, spec) is None
    assert "argument 0" in str(recording.expected.difference([x[:1]], spec))


def test_a_skip_over_the_whole_block_cannot_be_cut() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(F.relu(self.a(x)))

    model = split_models.Stack([Parallel(), Parallel()])
    names = ModelChain(model, (), {"tokens": torch.randint(0, 11, (2, 3))}).names
    assert names == ["token", "blocks.0", "blocks.1", "norm", "head"]
