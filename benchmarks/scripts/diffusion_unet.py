"""Denoising diffusion with a U-Net: random time steps, a moving average of the weights."""

import argparse
import copy
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--image", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
TIMES = 1000


class Residual(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Linear(time, outputs)
        self.second = nn.Sequential(
            nn.GroupNorm(8, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        h = self.first(x) + self.time(time)[:, :, None, None]
        return self.second(h) + self.skip(x)


class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, width), nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x):
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return x + mixed.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time)])
        self.shrink = nn.ModuleList(
            [nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)]
        )
        self.middle = Residual(2 * width, 2 * width, time)
        self.attention = SelfAttention(2 * width)
        self.up = nn.ModuleList([Residual(4 * width, width, time), Residual(2 * width, width, time)])
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, times):
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = times[:, None] * rates[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.enter(x), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            kept.append(x)
            x = shrink(x)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.leave(x)


torch.manual_seed(0)
model = UNet(args.width).cuda()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), 2e-4)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device="cuda"), 0)
for _step in range(args.steps):
    images = torch.randn(args.batch_size, 3, args.image, args.image).cuda()
    times = torch.randint(0, TIMES, (args.batch_size,), device="cuda")
    noise = torch.randn_like(images)
    share = kept[times][:, None, None, None]
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    loss = nn.functional.mse_loss(model(noisy, times), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.001)
    print(f"loss {loss.item():.6f}")
