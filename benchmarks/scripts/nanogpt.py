"""A small GPT on random tokens: mixed precision, accumulated gradients, a fused optimizer, validation now and then."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--block-size", type=int, default=1024)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocabulary", type=int, default=50304)
parser.add_argument("--iterations", type=int, default=4)
args = parser.parse_args()

device, heads, accumulate, dropout = "cuda", args.width // 64, 2, 0.1
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
data = torch.randint(args.vocabulary, (200_000,))


def get_batch():
    starts = torch.randint(len(data) - args.block_size - 1, (args.batch_size,))
    x = torch.stack([data[i : i + args.block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, heads, width // heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if self.training else 0, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(args.width, bias=False), Attention()
        self.norm2 = nn.LayerNorm(args.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(args.width, 4 * args.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * args.width, args.width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.block_size, args.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width, bias=False)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx, targets):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
autocast = torch.autocast(device, torch.bfloat16)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        with autocast:
            losses[k] = model(*get_batch()).item()
    model.train()
    return losses.mean().item()


best, (x, y) = float("inf"), get_batch()
for iteration in range(args.iterations):
    lr = 6e-4 * 0.5 * (1 + math.cos(math.pi * iteration / args.iterations))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iteration % 2 == 0:
        loss = estimate_loss()
        print(f"iteration {iteration}: validation loss {loss:.4f}")
        if loss < best:
            best = loss
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _ in range(accumulate):
        with autocast:
            loss = model(x, y) / accumulate
        x, y = get_batch()
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise SystemExit("the gradients are not finite")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"iteration {iteration}: loss {loss.item() * accumulate:.4f}")
