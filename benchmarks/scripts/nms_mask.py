"""A detector's second stage: boxes above a threshold, fewer of them after suppression, go through a head."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--images", type=int, default=8)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


def suppress(boxes, scores, threshold=0.5):
    """A mask of the boxes that overlap no better one too much."""
    order = scores.argsort(descending=True)
    boxes = boxes[order]
    low, high = (
        torch.max(boxes[:, None, :2], boxes[None, :, :2]),
        torch.min(boxes[:, None, 2:], boxes[None, :, 2:]),
    )
    common = (high - low).clamp(min=0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlap = common / (area[:, None] + area[None] - common)
    worse = (overlap > threshold).triu(1).any(0)
    return order[~worse]


class Detector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()
        )
        self.proposals = nn.Conv2d(width, 5, 1)
        self.head = nn.Sequential(nn.Linear(width, 16 * width), nn.ReLU(), nn.Linear(16 * width, 10))

    def forward(self, images):
        features = self.backbone(images)
        found = []
        for each, feature in zip(self.proposals(features), features, strict=True):
            scores, sizes = each[0].flatten().sigmoid(), each[1:].flatten(1).t().abs()
            rows, columns = torch.meshgrid(
                *(torch.arange(n, device=each.device) for n in each.shape[1:]), indexing="ij"
            )
            corner = torch.stack([rows.flatten(), columns.flatten()], 1)
            boxes = torch.cat([corner - sizes[:, :2], corner + sizes[:, 2:]], 1)
            chosen = scores > 0.5
            boxes, scores, vectors = boxes[chosen], scores[chosen], feature.flatten(1).t()[chosen]
            kept = suppress(boxes.detach(), scores.detach())
            found.append(self.head(vectors[kept]) * scores[kept, None])
        return torch.cat(found)


torch.manual_seed(0)
model = Detector(args.width).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
for step in range(args.steps):
    output = model(torch.randn(args.images, 3, args.size, args.size).cuda())
    loss = output.pow(2).sum() / max(1, len(output))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {len(output)} boxes, loss {loss.item():.4f}")
