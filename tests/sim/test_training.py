"""A training loop with kernels that compute nothing: every allocation is the real one, and comes out the same twice."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt.sim

SIM = {"memory": "4GiB", "blank": True}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(x)


class Transformer(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(1000, 128)
        self.blocks = nn.ModuleList(Block(128, 4) for _ in range(4))
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def train(checkpointed: bool) -> dict[str, int]:
    """Five steps over batches of changing length; what the allocator did, as differences."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = memopt.sim.stats()["launches"], memopt.sim.calls("cudaMalloc")
    torch.manual_seed(0)
    model = Transformer(checkpointed).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for step in range(5):
        tokens = torch.randint(0, 1000, (8, 64 + 32 * (step % 3))).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "launches": memopt.sim.stats()["launches"] - before[0],
        "mallocs": memopt.sim.calls("cudaMalloc") - before[1],
    }


def test_the_same_loop_allocates_the_same_twice():
    train(checkpointed=False)  # handles and workspaces that live on are made once
    first, second = train(checkpointed=False), train(checkpointed=False)
    assert first == second
    assert first["launches"] > 1000
    parameters = sum(p.numel() for p in Transformer(False).parameters()) * 4
    assert first["allocated"] > 3 * parameters  # weights, gradients, at least


def test_checkpointing_lowers_the_peak():
    train(checkpointed=True)
    assert train(checkpointed=True)["allocated"] < train(checkpointed=False)["allocated"]


def test_a_model_that_does_not_fit_fails_in_the_step_that_needs_the_memory():
    memopt.sim.set_memory("48MiB")
    try:
        train(checkpointed=False)
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
    else:
        raise AssertionError("a transformer of 1.3 M parameters trained in 48 MiB")
    finally:
        memopt.sim.set_memory("4GiB")
