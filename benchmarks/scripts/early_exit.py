"""A network in which rows leave as soon as it is sure of them: how deep the rest goes, the model decides."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=8192)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--stages", type=int, default=8)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
CLASSES, SURE = 4, 0.35


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norm, self.exit = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x):
        x = x + self.body(self.norm(x))
        return x, self.exit(x)


torch.manual_seed(0)
stem = nn.Linear(32, args.width).cuda()
stages = nn.ModuleList(Stage(args.width) for _ in range(args.stages)).cuda()
optimizer = torch.optim.AdamW([*stem.parameters(), *stages.parameters()], 1e-3)
for step in range(args.steps):
    x, labels = torch.randn(args.rows, 32).cuda(), torch.randint(CLASSES, (args.rows,)).cuda()
    x, loss, depth = stem(x), torch.zeros((), device="cuda"), 0
    for stage in stages:
        x, output = stage(x)
        loss = loss + F.cross_entropy(output, labels, reduction="sum") / args.rows
        depth += 1
        unsure = output.softmax(1).amax(1) < SURE
        if not unsure.any():
            break
        x, labels = x[unsure], labels[unsure]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {depth} stages, loss {loss.item():.4f}")
