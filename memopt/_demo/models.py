"""The demo's two models, in plain operations: a character GPT and a residual CNN."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


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
    """A pre-norm transformer block: two residual halves, attention and MLP."""

    def __init__(self, dim: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
            tokens: Whole numbers (B, T) int64.
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
    """Return a CNN from images (B, 1, 8, 8) to logits (B, 10): a flat chain, so that its stages are seen at once.

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
