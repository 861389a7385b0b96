"""Two tasks to train: a model, its data, its loss and its optimizer.

* `gpt`: a character GPT on the source of Python's own standard library, text that every machine has.
* `cnn`: a residual CNN on scikit-learn's digits (1797 images of 8 x 8), which ship inside the package.

Nothing is downloaded. Each comes in three sizes. Everything is seeded: on one machine two runs are bit-equal on the
CPU, and weights and batches are the same on every device, because both are made on the CPU and then moved.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# ---- the text --------------------------------------------------------------------------------------------------------


VOCABULARY = b"\n\t" + bytes(range(32, 127)) + b"\0"
"""Token i is character VOCABULARY[i]; the last one stands for every byte that is not printable ASCII. Fixed,
not collected from the text, so that a model has the same shape under every Python."""

SITE_SPECIFIC = {"site", "sysconfig"}
"""Modules that distributions of Python rewrite; left out so that the same version gives the same text
elsewhere."""


def _is_validation(module: str) -> bool:
    """Whole modules are held out, one in ten by the checksum of the name: no function is in both splits."""
    return zlib.crc32(module.encode()) % 10 == 0


@functools.cache
def standard_library_text() -> dict[str, bytes]:
    """The source by split ("train", "val"): top-level modules of the standard library, by name, line ends
    \\n.

    Packages are left out (distributions move some of them elsewhere), and so are modules whose names start
    with an underscore (generated ones among them). About 4 MB under Python 3.11.
    """
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(path for path in library.glob("[a-z]*.py") if path.stem not in SITE_SPECIFIC)
    if len(modules) < 50:
        raise FileNotFoundError(
            f"{library} holds the source of only {len(modules)} modules of the standard library, on which the "
            "character GPT trains. Use a Python installed with its .py files, not a zipped one."
        )
    text: dict[str, list[bytes]] = {"train": [], "val": []}
    for path in modules:
        text["val" if _is_validation(path.stem) else "train"].append(
            path.read_bytes().replace(b"\r\n", b"\n")
        )
    return {split: b"".join(parts) for split, parts in text.items()}


@functools.cache
def token_bytes(split: str) -> bytes:
    """Return a split of the text, one byte a token."""
    table = bytes(VOCABULARY.find(bytes([byte])) % len(VOCABULARY) for byte in range(256))
    return standard_library_text()[split].translate(table)


def windows(split: str, starts: list[int], length: int) -> torch.Tensor:
    """Return windows (len(starts), length) int64: the tokens after each place.

    The text itself is not a tensor, so it does not count in a training's memory."""
    tokens = token_bytes(split)
    joined = bytearray(b"".join(tokens[start : start + length] for start in starts))
    return torch.frombuffer(joined, dtype=torch.uint8).view(len(starts), length).long()


# ---- the models ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention in plain operations.

    Not `scaled_dot_product_attention`: that picks another kernel on each device, and these tasks are there to
    compare devices, allocators and schedules, which needs the same operations and the same saved tensors
    everywhere.
    """

    def __init__(self, dim: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (dim // self.heads) ** -0.5
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        # In float32 by name: CUDA's autocast would do so, the CPU's would not, and results are compared
        # across devices.
        mixed = self.dropout(scores.float().softmax(-1)).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """A pre-norm transformer block: two residual halves, attention and MLP.

    Args:
        dim: Width, a multiple of heads.
        heads: Attention heads.
        causal: Whether a position sees the earlier ones only.
        dropout: Probability of dropout.
    """

    def __init__(self, dim: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream (B, T, dim) after the block.

        Args:
            x: The residual stream (B, T, dim) before it.
        """
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, vocabulary)."""

    def __init__(
        self, vocabulary: int, length: int, dim: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, True, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, vocabulary).

        Args:
            tokens: Token numbers (B, T) int64.
        """
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualConv(nn.Module):
    """Two 3 x 3 convolutions with batch norm around a shortcut; stride 2 halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_cnn(scale: int, width: int, blocks: int, dropout: float) -> nn.Sequential:
    """Return a CNN from images (B, 1, 8, 8) to logits (B, 10), as a flat chain of stages.

    Args:
        scale: Factor by which the image is enlarged first; it makes early stages heavy and late ones light.
        width: Channels of the first of three stages; the others have 2 and 4 times as many.
        blocks: Residual blocks of each stage.
        dropout: Probability of dropout.
    """
    layers: list[nn.Module] = [nn.Upsample(scale_factor=scale)] if scale > 1 else []
    layers += [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        outputs = width << stage
        for block in range(blocks):
            layers.append(ResidualConv(channels, outputs, 2 if stage and not block else 1))
            channels = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, 10)
    )


# ---- the tasks -------------------------------------------------------------------------------------------------------


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
            "the digits task needs scikit-learn's data: pip install scikit-learn"
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
        """Return torch's fused AdamW, which is its fastest on every device and does not synchronize with the host.

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
        """Return the bytes of the training data, as tensors on the CPU from which batches are taken."""
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
        raise KeyError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]


def task_of(fields: dict[str, Any]) -> Task:
    """Return the task of a dict that dataclasses.asdict() made and JSON carried."""
    return Task(**{**fields, "shape": tuple((name, size) for name, size in fields["shape"])})
