"""An ordinary training script of a Llama of three sizes, in bf16 or mixed precision, for bench_large_models.py.

Its levers are options, so that each configuration is one command line; a script of one's own has one of them."""

from __future__ import annotations

import argparse
import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
import memopt.amp
import memopt.nn
import memopt.optim


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    groups: int  # heads of keys and values
    inner: int
    words: int
    tied: bool = False


SIZES = {
    "1b": Size(16, 2048, 32, 8, 8192, 128256, tied=True),
    "7b": Size(32, 4096, 32, 32, 11008, 32000),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
}


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, head = size.width, size.width // size.heads
        self.size = size
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, size.groups * head, bias=False) for _ in range(2))
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        y = self.before_attention(x)
        q, k, v = (one(y).view(rows, length, -1, x.shape[-1] // self.size.heads).transpose(1, 2)
                   for one in (self.q, self.k, self.v))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.before_mlp(x))


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the hidden state before the head."""
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--state-bits", type=int, default=0, help="0: torch.optim.AdamW")
    parser.add_argument("--factored", action="store_true", help="second moments, with --state-bits")
    parser.add_argument("--offload-gradients", action="store_true")
    parser.add_argument("--offload-states", action="store_true")
    parser.add_argument("--step-in-backward", action="store_true", help="without clipping")
    parser.add_argument("--fused-head", action="store_true")
    parser.add_argument("--offload-activations", action="store_true", help="the blocks' inputs")
    parser.add_argument("--amp", action="store_true", help="fp32 parameters, and autocast to bf16")
    options = parser.parse_args()
    size = SIZES[options.model]
    torch.set_default_dtype(torch.float32 if options.amp else torch.bfloat16)
    with torch.device("cuda"):
        model = Llama(size)
    if options.state_bits:
        optimizer = memopt.optim.AdamW(
            model.parameters(),
            lr=1e-5,
            state_bits=options.state_bits,
            factored=options.factored,
            offload_gradients=options.offload_gradients,
            offload_states=options.offload_states,
            step_in_backward=options.step_in_backward,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        words = torch.randint(size.words, (1, options.length + 1)).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=options.amp):
            with memopt.offload_activations() if options.offload_activations else contextlib.nullcontext():
                x, targets = model(words[:, :-1]), words[:, 1:]
            if options.fused_head:
                loss = memopt.nn.linear_cross_entropy(x, model.head.weight, targets)
            else:
                loss = F.cross_entropy(model.head(x).float().flatten(0, 1), targets.flatten())
        loss.backward()
        if not options.step_in_backward:
            memopt.amp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
