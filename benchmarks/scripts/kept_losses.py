"""A training loop that keeps each validation loss, and with it the activations of its forward pass."""

import torch
from torch import nn

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
model = nn.Sequential(*blocks).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
validation = torch.randn(256, 512, device="cuda")
losses = []
for _ in range(100):
    x = torch.randn(256, 512, device="cuda")
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append((model(validation) - validation).square().mean())
