"""A mixture of experts: which rows each of them sees, the gate decides."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=16384)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class Mixture(nn.Module):
    def __init__(self, width, experts, chosen=2):
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.chosen, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + result


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, args.width),
    Mixture(args.width, args.experts),
    Mixture(args.width, args.experts),
    nn.Linear(args.width, 10),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(args.steps):
    x, labels = torch.randn(args.rows, 64).cuda(), torch.randint(10, (args.rows,)).cuda()
    loss = F.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
