"""torch's own ways to checkpoint a model that is a sequence of blocks, each as a forward pass in the place of the
model's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.utils.checkpoint as torchs
from torch import nn

from benchmarks.checkpoint_models import Blocks, Work

Forward = Callable[[torch.Tensor], torch.Tensor]

MATRIX_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
"""The usual choice of selective checkpointing: results that take long to compute for their size."""


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules that checkpoint_sequential divides into segments."""
    return list(model.blocks if isinstance(model, Blocks) else model.children())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Regions that one would checkpoint by hand: a transformer's blocks; each convolution with what follows it."""
    if isinstance(model, Blocks):
        return list(model.blocks)
    groups: list[list[nn.Module]] = []
    for module in model.children():
        if isinstance(module, nn.Conv2d) or not groups:
            groups.append([])
        groups[-1].append(module)
    return [nn.Sequential(*group) for group in groups]


def between(model: nn.Module, run: Forward) -> Forward:
    """The model's forward, in which `run` runs the blocks."""
    if isinstance(model, Blocks):
        return lambda x: model.after(run(model.before(x)))
    return run


def every(blocks: Sequence[nn.Module], count: int, **options: object) -> Forward:
    """One region for each `count` blocks."""
    regions = [nn.Sequential(*blocks[k : k + count]) for k in range(0, len(blocks), count)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for region in regions:
            x = torchs.checkpoint(region, x, use_reentrant=False, **options)
        return x

    return run


def ways(work: Work) -> dict[str, Forward]:
    """All there are, by name."""
    model = work.model
    modules, blocks = modules_of(model), blocks_of(model)
    found: dict[str, Forward] = {}
    for segments in range(2, len(modules) + 1):
        sequential = functools.partial(_sequential, nn.Sequential(*modules), segments)
        found[f"checkpoint_sequential, {segments} segments"] = between(model, sequential)
    for count in (1, 2, 3, 4, 6):
        name = "each block" if count == 1 else f"every {count} blocks"
        found[f"checkpoint, {name}"] = between(model, every(blocks, count))
    contexts = functools.partial(torchs.create_selective_checkpoint_contexts, MATRIX_OPERATIONS)
    found["selective, each block"] = between(model, every(blocks, 1, context_fn=contexts))
    return found


def _sequential(modules: nn.Sequential, segments: int, x: torch.Tensor) -> torch.Tensor:
    return torchs.checkpoint_sequential(modules, segments, x, use_reentrant=False)


class Instead(nn.Module):
    """A model whose forward is another; parameters and modules are the model's own."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.way = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(x)


def work_by(work: Work, forward: Forward) -> Work:
    return Work(Instead(work.model, forward), work.sample, work.loss)
