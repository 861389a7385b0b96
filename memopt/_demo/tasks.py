"""Two tasks to train: a model, its data, its loss and its optimizer.

* `gpt`: a character GPT on the source of Python's own standard library, text that every machine has.
* `cnn`: a residual CNN on scikit-learn's digits (1797 images of 8 x 8), which ship inside the package.

Nothing is downloaded. Each comes in three sizes. Everything is seeded: on one machine two runs are bit-equal on the
CPU, and weights and batches are the same on every device, because both are made on the CPU and then moved."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memopt._demo.library_text import VOCABULARY, standard_library_text, windows
from memopt._demo.models import GPT, make_cnn

Batch = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def digits(split: str) -> Batch:
    """Return images (n, 1, 8, 8) as float32 in [0, 1] and labels (n,) as int64.

    Args:
        split: "train" or "val": every fifth image is held out.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits task reads scikit-learn's data: pip install scikit-learn"
        ) from error
    data = load_digits()
    images = torch.from_numpy(data.images).to(torch.float32).div(16).unsqueeze(1)
    labels = torch.from_numpy(data.target).to(torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    chosen = held_out if split == "val" else ~held_out
    return images[chosen], labels[chosen]


@dataclass(frozen=True)
class Task:
    """A model, its data, loss and optimizer. Make a variant by `dataclasses.replace(task, batch_size=64)`."""

    kind: str  # "gpt" or "cnn"
    size: str
    batch_size: int
    learning_rate: float
    shape: tuple[tuple[str, int], ...]  # the model's arguments: dim, layers, … or scale, width, blocks
    seed: int = 0
    dropout: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.size}"

    def build_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return a fresh model: equal weights each time and on every device. The caller's random state is kept.

        Args:
            device: The device that it is moved to.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            arguments = dict(self.shape)
            if self.kind == "gpt":
                model: nn.Module = GPT(len(VOCABULARY), **arguments, dropout=self.dropout)
            else:
                model = make_cnn(**arguments, dropout=self.dropout)
        # Fake parameters refuse to be moved, even to where they are.
        return model if torch.device(device).type == "cpu" else model.to(device)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return torch's fused AdamW: its fastest on every device, and it reads nothing back to the host.

        Args:
            model: The model whose parameters it updates.
        """
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, fused=True)

    def batches(
        self, steps: int, device: torch.device | str = "cpu", split: str = "train", seed: int | None = None
    ) -> Iterator[Batch]:
        """Yield batches (inputs, targets), the same ones for the same seed on every device.

        Text: windows at random places, inputs and targets (B, T) int64, targets one character on. Digits: epochs in
        shuffled order, the short rest of an epoch left out, inputs (B, 1, 8, 8) float32 and targets (B,) int64.

        Args:
            steps: Number of batches.
            device: The device that they are moved to.
            split: "train" or "val".
            seed: By default the task's.
        """
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        if self.kind == "gpt":
            characters, length = len(standard_library_text()[split]), dict(self.shape)["length"]
            for _ in range(steps):
                starts = torch.randint(characters - length, (self.batch_size, 1), generator=generator)
                window = windows(split, starts.flatten().tolist(), length + 1)
                yield window[:, :-1].contiguous().to(device), window[:, 1:].contiguous().to(device)
            return
        images, labels = digits(split)
        if len(labels) < self.batch_size:
            raise ValueError(
                f"{self.name}: a batch of {self.batch_size} from {len(labels)} images of split {split!r}"
            )
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < self.batch_size:
                order = torch.randperm(len(labels), generator=generator)
            chosen, order = order[: self.batch_size], order[self.batch_size :]
            yield images[chosen].to(device), labels[chosen].to(device)

    def data_bytes(self) -> int:
        """Of the training data, as tensors on the CPU that batches are taken from."""
        return 0 if self.kind == "gpt" else sum(tensor.nbytes for tensor in digits("train"))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy over all samples (and characters) of the batch, in nats, in float32.

        Args:
            model: The model.
            batch: Inputs and targets.
        """
        inputs, targets = batch
        return self.loss_of(model(inputs), targets)

    def loss_of(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a model's output.

        Args:
            logits: The output.
            targets: The batch's targets.
        """
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(self, model: nn.Module, steps: int = 4) -> dict[str, float]:
        """Return {"loss", "accuracy"} on held-out data, in eval mode; the model's mode is restored.

        Args:
            model: The model.
            steps: Number of batches, the same ones each time.
        """
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        loss, right, seen = 0.0, 0, 0
        data = replace(self, batch_size=min(self.batch_size, 256))
        for inputs, targets in data.batches(steps, device, "val", seed=1):
            logits = model(inputs).flatten(0, -2).float()
            loss += F.cross_entropy(logits, targets.flatten()).item() / steps
            right += int((logits.argmax(-1) == targets.flatten()).sum())
            seen += targets.numel()
        model.train(was_training)
        return {"loss": loss, "accuracy": right / seen}


class TaskData(torch.utils.data.IterableDataset[Batch]):
    """A task's batches, for a DataLoader with batch_size=None."""

    def __init__(self, task: Task, steps: int) -> None:
        self.task, self.steps = task, steps

    def __iter__(self) -> Iterator[Batch]:
        return self.task.batches(self.steps)


def _gpt(size: str, batch_size: int, learning_rate: float, **shape: int) -> Task:
    return Task("gpt", size, batch_size, learning_rate, tuple(shape.items()))


def _cnn(size: str, batch_size: int, learning_rate: float, **shape: int) -> Task:
    return Task("cnn", size, batch_size, learning_rate, tuple(shape.items()))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _gpt("small", 16, 1e-3, length=128, dim=128, layers=4, heads=4),
        _gpt("medium", 16, 6e-4, length=256, dim=256, layers=6, heads=8),
        _gpt("large", 8, 3e-4, length=512, dim=768, layers=12, heads=12),
        _cnn("small", 128, 2e-3, scale=1, width=32, blocks=1),
        _cnn("medium", 128, 1e-3, scale=2, width=64, blocks=2),
        _cnn("large", 128, 1e-3, scale=4, width=128, blocks=3),
    )
}
"""Small trains in seconds on two cores, medium in minutes; large is for a GPU, or for fake and simulated
ones."""


def get_task(kind: str, size: str = "small") -> Task:
    """Return a task.

    Args:
        kind: "gpt" or "cnn".
        size: "small", "medium" or "large".

    Raises:
        KeyError: There is no such task.
    """
    name = f"{kind}-{size}"
    if name not in TASKS:
        raise KeyError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def task_of(fields: dict[str, Any]) -> Task:
    """Return the task of a dict that dataclasses.asdict() made and JSON carried."""
    return Task(**{**fields, "shape": tuple((name, size) for name, size in fields["shape"])})
