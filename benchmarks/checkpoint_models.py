"""Models whose steps are checkpointed: what auto_checkpoint and its peers are compared on.

A step is what a training loop does with a batch, up to the optimizer: the model's output stays in a variable until the
backward pass is over. Sizes are such that a step takes 0.2 to 1.5 s on two CPU threads, and most of its memory is saved
for the backward pass; small ones, for tests, take milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import memopt
from benchmarks import tasks

Loss = Callable[[Any], torch.Tensor]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@dataclass
class Work:
    """A model, a batch and a loss."""

    model: nn.Module
    sample: Any
    loss: Loss

    def step(self, *, keep_gradients: bool = False) -> torch.Tensor:
        if not keep_gradients:
            self.model.zero_grad(set_to_none=True)
        if isinstance(self.sample, dict):
            out = self.model(**self.sample)
        else:
            out = self.model(*self.sample) if isinstance(self.sample, tuple) else self.model(self.sample)
        value = self.loss(out)
        value.backward()
        return value.detach()

    def standing_bytes(self) -> int:
        """Bytes of parameters, buffers and batch, each storage once."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.sample)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def live_peak(self) -> int:
        """Bytes that live at once in a step, at the most: as torch's CPU allocator gives them, what kernels take to
        work in among them, beside what was there before."""
        self.model.zero_grad(set_to_none=True)
        with memopt.profile("cpu", modules=False) as recorded:
            self.step()
        self.model.zero_grad(set_to_none=True)
        before = int(recorded.recording.live_bytes()[0])
        return self.standing_bytes() + recorded.peak_bytes - before


class Blocks(nn.Module):
    """Something before, blocks one after another, something after them; a subclass says how the blocks are run."""

    def __init__(self, before: nn.Module, blocks: list[nn.Module], after: nn.Module) -> None:
        super().__init__()
        self.before, self.blocks, self.after = before, nn.ModuleList(blocks), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.after(x)


class Tokens(nn.Module):
    def __init__(self, vocabulary: int, length: int, dim: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, dim), nn.Parameter(torch.zeros(length, dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class Patches(nn.Module):
    def __init__(self, size: int, patch: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, dim, patch, patch)
        self.position = nn.Parameter(torch.zeros((size // patch) ** 2, dim))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).flatten(2).transpose(1, 2) + self.position


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Encoder(nn.Module):
    """As a library has them: layers that take arguments by name and return a tuple, a mask for all of them, the loss in
    the dictionary that it returns."""

    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.token(input_ids)
        mask = (input_ids > 0)[:, None, None].to(hidden.dtype).log()
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)[0]
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class EncoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.inner, self.outer = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attention_mask).transpose(1, 2).flatten(2)
        hidden_states = self.norm1(hidden_states + self.out(mixed))
        return (self.norm2(hidden_states + self.outer(F.gelu(self.inner(hidden_states)))),)


def classes(labels: torch.Tensor) -> Loss:
    return lambda out: F.cross_entropy(out.flatten(0, -2), labels.flatten())


def conv_chain(small: bool) -> Work:
    """Convolutions, batch norms and activations one by one, as in VGG: from many pixels to many channels."""
    widths = (8, 8, 16, 16) if small else (24, 24, 48, 48, 96, 96, 192, 192)
    batch, size = (4, 16) if small else (16, 96)
    layers: list[nn.Module] = []
    width = 3
    for n, out in enumerate(widths):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if n % 2 else []
        width = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return Work(
        nn.Sequential(*layers),
        torch.randn(batch, 3, size, size),
        classes(torch.randint(10, (batch,))),
    )


def gpt(small: bool) -> Work:
    dim, layers, batch, length = (32, 3, 2, 16) if small else (256, 12, 6, 128)
    tokens = torch.randint(96, (batch, length + 1))
    model = Blocks(
        Tokens(96, length, dim),
        [tasks.Block(dim, 4) for _ in range(layers)],
        nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 96)),
    )
    return Work(model, tokens[:, :-1].contiguous(), classes(tokens[:, 1:]))


def vit(small: bool) -> Work:
    dim, layers, batch, size = (32, 3, 2, 32) if small else (192, 12, 12, 80)
    model = Blocks(
        Patches(size, 8, dim),
        [tasks.Block(dim, 3 if dim % 3 == 0 else 4, causal=False) for _ in range(layers)],
        nn.Sequential(nn.LayerNorm(dim), Mean(), nn.Linear(dim, 10)),
    )
    return Work(model, torch.randn(batch, 3, size, size), classes(torch.randint(10, (batch,))))


def residual_cnn(small: bool) -> Work:
    batch, scale, width, blocks = (8, 1, 8, 1) if small else (48, 3, 48, 3)
    return Work(
        tasks.make_cnn(scale, width, blocks, 0.1),
        torch.rand(batch, 1, 8, 8),
        classes(torch.randint(10, (batch,))),
    )


def perceptron(small: bool) -> Work:
    """Layers of different widths, with dropout: random numbers must come again."""
    batch, widths = (
        (512, (16, 64, 16, 64, 16)) if small else (2048, (512, 2048, 256, 1024, 256, 2048, 512, 1024))
    )
    layers: list[nn.Module] = []
    width = widths[-1]
    for out in widths:
        layers += [nn.Linear(width, out), nn.GELU(), nn.Dropout(0.1)]
        width = out
    return Work(nn.Sequential(*layers), torch.randn(batch, widths[-1]), lambda out: out.square().mean())


def encoder(small: bool) -> Work:
    dim, layers, batch, length = (32, 3, 2, 16) if small else (256, 10, 8, 96)
    tokens = torch.randint(1, 500, (batch, length))
    tokens[:, -length // 4 :] = 0
    return Work(
        Encoder(500, dim, layers, 4), {"input_ids": tokens, "labels": tokens.clone()}, lambda out: out["loss"]
    )


FAMILIES: dict[str, Callable[[bool], Work]] = {
    "conv chain": conv_chain,
    "GPT": gpt,
    "ViT": vit,
    "residual CNN": residual_cnn,
    "perceptron": perceptron,
    "encoder": encoder,
}


def make(family: str, *, small: bool = False) -> Work:
    """The same each time: weights, batch, loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return FAMILIES[family](small)
