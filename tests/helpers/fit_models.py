"""Trainings for memopt.fit(): small models of different kinds, and the peak of their real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt._checkpoint.stages.costs import CpuBytes, bytes_of, tensors_in, workspace_bytes
from memopt._demo.tasks import GPT, make_cnn
from memopt._run.plan import OFFLOAD_LAYERS
from memopt.optim import _disk_states, _turns

STEPS = 3


class Embedded(nn.Module):
    """Most of it is an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(1))


class Headed(nn.Module):
    """A language model as transformers has them, with a head that is larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3)
        )
        self.lm_head = nn.Linear(32, 2048, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.lm_head(x)
        return {"loss": F.cross_entropy(logits.reshape(-1, 2048), labels.reshape(-1)), "logits": logits}


class Wide(nn.Module):
    """A layer of a model for long sequences: most of it are the wide results of its MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 16 * width), nn.GELU(), nn.Linear(16 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def tokens_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), targets.flatten())


@dataclass
class Training:
    """A model, its optimizer, a batch and its loss, on one device."""

    kind: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sample: Any
    loss: Callable[..., Tensor] | None

    def fit(self, memory_budget: int, **options: Any) -> Any:
        return memopt.fit(
            self.model, self.optimizer, self.sample, loss=self.loss, memory_budget=memory_budget, **options
        )

    @property
    def batch(self) -> tuple[Any, ...]:
        return self.sample if isinstance(self.sample, tuple) else (self.sample,)

    def compute(self, *batch: Any) -> Tensor:
        if self.loss is None:
            return self.model(**batch[0])["loss"]
        return self.loss(self.model(batch[0]), *batch[1:])

    def plain_step(self) -> Tensor:
        loss = self.compute(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def standing(self) -> list[Tensor]:
        states = tensors_in(list(self.optimizer.state.values()))
        return [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.sample), *states]


KINDS = ("gpt", "cnn", "embedded", "optimizer", "headed", "long")


def training(kind: str, device: str = "cpu", optimizer: Any = torch.optim.AdamW) -> Training:
    torch.manual_seed(5)
    loss: Callable[..., Tensor] | None = F.cross_entropy
    model: nn.Module
    if kind == "gpt":
        model, loss = GPT(100, 48, 48, 3, 4), tokens_loss
        sample: Any = tuple(torch.randint(0, 100, (16, 48)) for _ in range(2))
    elif kind == "cnn":
        model = make_cnn(1, 16, 1, 0.0)
        sample = torch.randn(128, 1, 8, 8), torch.randint(0, 10, (128,))
    elif kind == "embedded":
        model = Embedded()
        sample = torch.randint(0, 4096, (32, 32)), torch.randint(0, 10, (32,))
    elif kind == "optimizer":
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 10))
        sample = torch.randn(16, 256), torch.randint(0, 10, (16,))
    elif kind == "long":  # of one sample
        model, loss = nn.Sequential(*(Wide(32) for _ in range(3)), nn.Linear(32, 10)), tokens_loss
        sample = torch.randn(1, 2048, 32), torch.randint(0, 10, (1, 2048))
    else:
        model, loss = Headed(), None
        ids = torch.randint(0, 2048, (16, 32))
        sample = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    model.to(device)
    if isinstance(sample, dict):
        sample = {name: part.to(device) for name, part in sample.items()}
    else:
        sample = tuple(part.to(device) for part in sample)
    return Training(kind, model, optimizer(model.parameters(), lr=1e-3), sample, loss)


def small_areas(monkeypatch: Any) -> None:
    """Have states of models as small as these pass through little memory on their way to a disk, in several turns."""
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 1 << 17)
    monkeypatch.setattr(_disk_states, "CHUNK", 1 << 16)
    monkeypatch.setattr(_disk_states, "AREA", 1 << 18)


def peak_on_cpu(standing: list[Tensor], steps: Callable[[], object]) -> int:
    """Return the most bytes of tensors while steps run; standing: what is there before."""
    there = bytes_of(standing)
    watch = CpuBytes()
    watch.start()
    try:
        before, _ = watch.restart()
        steps()
        _, peak = watch.now_and_peak()
    finally:
        watch.stop()
    return there + peak - before


def peak_on_cuda(standing: list[Tensor], steps: Callable[[], object]) -> int:
    """Return torch.cuda.max_memory_allocated() over steps, of what is theirs; standing: what is there before."""
    torch.cuda.synchronize()
    workspace_bytes(torch.device("cuda"))
    on_device = [tensor for tensor in standing if tensor.is_cuda]
    others = torch.cuda.memory_allocated() - bytes_of(on_device)
    torch.cuda.reset_peak_memory_stats()
    steps()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def plain(one: Training, steps: int = STEPS) -> list[Tensor]:
    return [one.plain_step() for _ in range(steps)]


def applied(handle: Any, one: Training, steps: int = STEPS) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        losses.append(handle.backward(*one.batch))
        handle.optimizer.step()
        handle.optimizer.zero_grad()
    return losses


def check(kind: str, share: float, device: str, **options: Any) -> Any:
    """Plan for a share of the plain steps' peak, and hold the plan to what it says: the budget, the results by its
    tier, and the plain model after it. Returns the fit, and the measured peak where it fits."""
    peak_of = peak_on_cuda if device == "cuda" else peak_on_cpu
    plain_one = training(kind, device)
    expected: list[Tensor] = []
    budget = int(share * peak_of(plain_one.standing(), lambda: expected.extend(plain(plain_one))))
    expected += plain(plain_one, 2)
    one = training(kind, device)
    fit = one.fit(budget, **options)
    if not fit.fits:
        assert all(not row.fits for row in fit.rows)
        assert fit.least_budget > budget
        return fit, None
    losses: list[Tensor] = []
    with fit.apply() as handle:
        measured = peak_of(one.standing(), lambda: losses.extend(applied(handle, one)))
        if fit.planned is not None:  # which no step has replaced
            assert one.model.plan is fit.planned.plan
    losses += plain(one, 2)  # by the optimizer that was given, of a plain model
    assert measured <= budget, fit
    assert fit.peak_bytes <= budget
    tested = OFFLOAD_LAYERS not in fit.names
    assert fit.rows[0].evidence == ("tested by steps" if tested else "worked out")
    # Blocks of 512 bytes, norms and scalars on the device are some per cent of models as small as these.
    near, worked_out = (0.01, 0.05) if device == "cpu" else (0.03, 0.08)
    assert abs(fit.peak_bytes - measured) <= near * measured, (fit, measured)
    assert abs(fit.rows[0].predicted_bytes - measured) <= worked_out * measured, (fit, measured)
    if fit.tier in ("free", "bit-equal"):
        assert all(map(torch.equal, losses, expected))
        assert all(map(torch.equal, one.model.parameters(), plain_one.model.parameters()))
        for mine, other in zip(one.model.parameters(), plain_one.model.parameters(), strict=True):
            state, wanted = one.optimizer.state[mine], plain_one.optimizer.state[other]
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    else:
        near = 1e-4 if fit.tier == "equal to rounding" else 5e-2
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=near, atol=near)
    for mine, other in zip(one.model.parameters(), plain_one.model.parameters(), strict=True):
        state, wanted = one.optimizer.state[mine], plain_one.optimizer.state[other]
        assert {n: (v.shape, v.dtype, v.device) for n, v in state.items()} == {
            n: (v.shape, v.dtype, v.device) for n, v in wanted.items()
        }
        assert mine.device == other.device and mine.grad is None
    assert [set(g) for g in one.optimizer.param_groups] == [set(g) for g in plain_one.optimizer.param_groups]
    assert not any("forward" in vars(module) for module in one.model.modules())
    return fit, measured
