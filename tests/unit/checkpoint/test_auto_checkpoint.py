"""auto_checkpoint: whatever the model, the plain run's bits within the budget."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from benchmarks import tasks
from memopt._checkpoint.shape_plans import StageForward
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt.chain import InfeasibleBudget
from tests.helpers.residual import FeedForward

pytestmark = pytest.mark.usefixtures("one_thread")
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
Loss = Callable[[torch.Tensor], torch.Tensor]


class Vision(nn.Module):
    """Patches, a ModuleList of residual blocks, a mean, a head."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(tasks.Block(width, 2, 0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Layer(nn.Module):
    """As a library has them: arguments by name, a tuple back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = FeedForward(width)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        out = self.branch(hidden_states)
        return (hidden_states + (out if attention_mask is None else out * attention_mask),)


class Language(nn.Module):
    """Gives a dictionary with the loss in it."""

    def __init__(self, width: int = 32, depth: int = 5) -> None:
        super().__init__()
        self.token = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden, mask = self.token(input_ids), (input_ids > 3)[..., None].float()
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)[0]
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def convolutions() -> nn.Sequential:
    """Widths and resolutions differ; normalised and not, in place and not."""
    layers: list[nn.Module] = []
    width = 3
    for n, out in enumerate((16, 16, 32, 32, 48, 48)):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=n > 2)]
        layers += [nn.MaxPool2d(2)] if n % 2 else []
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 16, 10))


def enlarged() -> nn.Sequential:
    """Begins with stages that have no graph: the sample needs no gradient. Their output is the largest."""
    layers: list[nn.Module] = [nn.Upsample(scale_factor=4), nn.AvgPool2d(3, 1, 1)]
    for _ in range(5):
        layers += [nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


def perceptron() -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in range(5):
        layers += [nn.Linear(64, 64 * (1 + n % 2)), nn.ReLU(), nn.Linear(64 * (1 + n % 2), 64)]
    return nn.Sequential(*layers)


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def own_loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["loss"]


def make(kind: str) -> tuple[nn.Module, object, Callable]:
    torch.manual_seed(1)
    if kind == "gpt":
        task = tasks.get("gpt", "small")
        x, y = (t[:1].clone() for t in next(iter(task.batches(1))))
        return task.build_model("cpu"), x, lambda out: F.cross_entropy(out.flatten(0, 1), y.view(-1))
    if kind == "cnn":
        task = tasks.get("cnn", "small")
        x, y = (t[:6].clone() for t in next(iter(task.batches(1))))
        return task.build_model("cpu"), x, lambda out: F.cross_entropy(out, y)
    if kind == "vision":
        return Vision(), torch.randn(8, 3, 32, 32), squares
    if kind == "language":
        ids = torch.randint(0, 50, (16, 32))
        return Language(), {"input_ids": ids, "labels": ids}, own_loss
    if kind == "convolutions":
        return convolutions(), torch.randn(8, 3, 32, 32), squares
    if kind == "enlarged":
        return enlarged(), torch.randn(8, 3, 16, 16), squares
    return perceptron(), torch.randn(512, 64), squares


KINDS = ("cnn", "vision", "language", "convolutions", "perceptron", "enlarged", *(["gpt"] if SOAK else []))


def step(model: nn.Module, sample: object, loss: Callable) -> torch.Tensor:
    value = loss(model(**sample) if isinstance(sample, dict) else model(sample))
    value.backward()
    return value.detach()


def live_peak(model: nn.Module, sample: object, loss: Callable) -> int:
    """Live bytes at the most in a step, what kernels take among them: everything that memory_budget counts."""
    model.zero_grad()
    standing = [*model.parameters(), *model.buffers()]
    standing += list(sample.values()) if isinstance(sample, dict) else [sample]
    meter = Meter(torch.device("cpu"))
    meter.ignore(standing)
    with meter:
        step(model, sample, loss)
    return bytes_of(standing) + meter.peak


def least_budget(model: nn.Module, sample: object, loss: Callable) -> int:
    with pytest.raises(InfeasibleBudget, match="takes at least") as error:
        memopt.auto_checkpoint(model, sample, memory_budget=1, loss=loss)
    assert "plan" not in model.__dict__
    return error.value.least_budget


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_runs_bits_within_every_budget(kind: str) -> None:
    model, sample, loss = make(kind)
    plain = copy.deepcopy(model)
    peak = live_peak(plain, sample, loss)
    least = least_budget(model, sample, loss)
    assert least < peak
    worked = 0
    for n in range(5):
        budget = least + (peak - least) * n // 5
        same = memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss)
        assert same is model
        assert list(model.state_dict()) == list(plain.state_dict())
        worked += model.plan.runner is not None
        assert live_peak(model, sample, loss) <= model.plan.peak_bytes <= budget
        for module in (model, plain):
            module.load_state_dict(copy.deepcopy(plain.state_dict()))
            module.zero_grad()
        torch.manual_seed(n)
        expected = step(plain, sample, loss)
        state = torch.get_rng_state()
        torch.manual_seed(n)
        assert torch.equal(step(model, sample, loss), expected)
        assert torch.equal(torch.get_rng_state(), state)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        for (name, p), q in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(p, q), name
    assert worked >= 3


def test_planning_leaves_the_model_as_it_was() -> None:
    model, sample, loss = make("convolutions")
    before = copy.deepcopy(model.state_dict())
    step(model, sample, loss)
    model.load_state_dict(before)
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    state = torch.get_rng_state()
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, grads, values))
    # and where all fits, nothing stands in anything's place but the model's, for larger batches
    assert model.plan.runner is None
    assert [module for module in model.modules() if "forward" in module.__dict__] == [model]


def checkpointed(kind: str = "vision") -> tuple[nn.Module, object, Callable]:
    model, sample, loss = make(kind)
    memopt.auto_checkpoint(
        model, sample, memory_budget=int(least_budget(model, sample, loss) * 1.02), loss=loss
    )
    assert model.plan.runner is not None
    return model, sample, loss


def test_undo_gives_the_model_back() -> None:
    model, sample, loss = checkpointed()
    assert memopt.undo_checkpoint(model) is model
    assert "plan" not in model.__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())
    memopt.undo_checkpoint(model)
    step(model, sample, loss)


def test_a_forward_of_the_instances_own_is_called_and_comes_back() -> None:
    model, sample, loss = make("vision")
    block = model.blocks[1]
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return type(block).forward(block, x)

    block.forward = forward
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample, loss), loss=loss)
    calls.clear()
    step(model, sample, loss)
    assert len(calls) > 1
    memopt.undo_checkpoint(model)
    assert block.forward is forward


def test_hooks_run_once_a_step() -> None:
    model, sample, loss = checkpointed()
    calls = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    step(model, sample, loss)
    assert calls == ["forward", "backward"]


def test_without_a_graph_and_in_eval_it_is_the_plain_model() -> None:
    model, sample, _ = checkpointed()
    plain = memopt.undo_checkpoint(copy.deepcopy(model)).eval()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(sample), plain(sample))
    out = model(sample)
    out.sum().backward()
    plain(sample).sum().backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_copy_is_checkpointed_by_itself() -> None:
    model, sample, loss = checkpointed()
    other = copy.deepcopy(model)
    stage = next(m for m in other.modules() if isinstance(m.__dict__.get("forward"), StageForward))
    forward = stage.__dict__["forward"]
    assert forward.member.module is stage
    assert forward.member.forward.__self__ is stage
    assert forward.runner is not model.plan.runner
    torch.manual_seed(0)
    step(model, sample, loss)
    torch.manual_seed(0)
    step(other, sample, loss)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_batch_of_another_shape_is_right_too() -> None:
    model, sample, loss = checkpointed()
    plain = memopt.undo_checkpoint(copy.deepcopy(model))
    small = sample[:3]
    for module in (model, plain):
        torch.manual_seed(0)
        step(module, small, loss)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("how", ["of a graph", "a leaf"])
def test_trial_steps_leave_the_callers_graph_alone(how: str) -> None:
    """A GAN's critic is given what the generator made, and plans anew for a larger batch of it."""
    before, rows = nn.Linear(16, 16), torch.randn(64, 16)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(6)]
    critic = nn.Sequential(*blocks)

    def gradients() -> list[torch.Tensor | None]:
        before.zero_grad()
        x = before(rows) if how == "of a graph" else rows.clone().requires_grad_()
        critic(x).sum().backward()
        return [x.grad] if how == "a leaf" else [before.weight.grad, before.bias.grad]

    wanted = gradients()
    memopt.auto_checkpoint(critic, rows[:16], memory_budget=1 << 20, optimizer=0, accumulate=True)
    for _ in range(2):
        for mine, plain in zip(gradients(), wanted, strict=True):
            assert mine is not None and plain is not None and torch.equal(mine, plain)


@pytest.mark.parametrize("budget", [1, 0.0, 2.0, "much", -5])
def test_what_fails_leaves_the_plan_that_was_there(budget: object) -> None:
    model, sample, loss = make("vision")
    least = least_budget(model, sample, loss)
    memopt.auto_checkpoint(model, sample, memory_budget=least, loss=loss)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert any(isinstance(forward, StageForward) for forward in before.values())
    plan, calls = model.plan, []
    handles = [module.register_forward_hook(lambda *_: calls.append(1)) for module in model.children()]
    with pytest.raises((ValueError, InfeasibleBudget)):
        memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss)
    assert bool(calls) == (budget == 1)  # what is no budget is refused before anything runs
    for handle in handles:
        handle.remove()
    assert model.plan is plan
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert live_peak(model, sample, loss) <= least
    memopt.undo_checkpoint(model)
    assert "plan" not in model.__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_stage_that_is_not_the_same_each_time_is_refused_by_name() -> None:
    before: list[torch.Tensor] = []  # not the module's own, which would be put back

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before.append(self.linear(x))
            return torch.cat(before).tanh().sum(0, keepdim=True) + x

    model = nn.Sequential(nn.Linear(8, 8), Caches(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"behaves differently.*cache or a counter"):
        memopt.auto_checkpoint(model, torch.ones(1, 8), memory_budget="1GiB")


def test_a_models_own_change_of_a_stages_output_is_its_own() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(F.relu(self.b(F.relu(self.a(x), inplace=True)), inplace=True))

    torch.manual_seed(0)
    model, sample = Changes(), torch.randn(512, 64)
    plain = copy.deepcopy(model)
    memopt.auto_checkpoint(model, sample, memory_budget=least_budget(model, sample, squares), loss=squares)
    step(model, sample, squares)
    step(plain, sample, squares)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_least_feasible_budget_is_the_same_each_time() -> None:
    """Though the seconds that are measured are not."""
    model, sample, loss = make("convolutions")
    found = {least_budget(model, sample, loss) for _ in range(3)}
    assert len(found) == 1


def test_budgets_and_what_is_refused() -> None:
    model, sample, loss = make("perceptron")
    for budget in (2**40, "1TiB", 1.0):
        memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss)
        assert model.plan.keeps_all
    assert memopt.auto_checkpoint(model, sample, memory_budget=0.5, loss=loss).plan.memory_budget > 2**28
    for wrong, text in ((1.5, "fraction"), (0.0, "fraction"), ("much", "much"), (-1, "-1")):
        with pytest.raises(ValueError, match=text):
            memopt.auto_checkpoint(model, sample, memory_budget=wrong, loss=loss)
    with pytest.raises(ValueError, match="no chain of stages"):
        memopt.auto_checkpoint(nn.Linear(2, 2), torch.ones(1, 2), memory_budget="1GiB")
    with pytest.raises(ValueError, match="needs a gradient"):
        memopt.auto_checkpoint(nn.Sequential(nn.Tanh()), torch.ones(1, 2), memory_budget="1GiB")


def test_the_plan_explains_itself() -> None:
    model, _, _ = checkpointed("convolutions")
    text = str(model.plan)
    lines = text.splitlines()
    assert lines[0].startswith(f"{len(model.plan.stages)} stages within ")
    assert len(lines) == 3 + len(model.plan.stages) + 1
    assert (
        "1, 2" in model.plan.stages or "0, 1" in model.plan.stages
    )  # what passes between them is not needed again
    assert model.plan.peak_bytes < model.plan.plain_bytes
    assert model.plan.seconds > 0
    assert model.plan.plain_seconds > 0
