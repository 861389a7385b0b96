"""torchvision's image classifiers by name, with random images."""

import argparse

import torch
import torchvision
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="vit_b_16")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--image", type=int, default=224)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
options = {"image_size": args.image} if args.model.startswith("vit") else {}
model = torchvision.models.get_model(args.model, **options).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(args.steps):
    images = torch.randn(args.batch_size, 3, args.image, args.image).cuda()
    targets = torch.randint(0, 1000, (args.batch_size,)).cuda()
    loss = F.cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
