"""A small convolutional student learns from a frozen teacher: softened outputs, hints of the features, a warm-up."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--image", type=int, default=96)
parser.add_argument("--teacher", type=int, default=192)
parser.add_argument("--student", type=int, default=64)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()
TEMPERATURE, CLASSES = 4.0, 100


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers, inputs = [], 3
        for level in range(3):
            for block in range(depth):
                outputs = width * 2**level
                stride = 2 if block == 0 else 1
                layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
        self.features, self.head = nn.Sequential(*layers), nn.Linear(inputs, CLASSES)

    def forward(self, x):
        features = self.features(x)
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1)), features


torch.manual_seed(0)
teacher = Network(args.teacher, 3).cuda().eval().requires_grad_(False)
student = Network(args.student, 2).cuda()
hint = nn.Conv2d(4 * args.student, 4 * args.teacher, 1).cuda()
trained = [*student.parameters(), *hint.parameters()]
optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9, nesterov=True)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.steps)
for _ in range(args.steps):
    images = torch.randn(args.batch_size, 3, args.image, args.image).to("cuda")
    labels = torch.randint(CLASSES, (args.batch_size,)).to("cuda")
    with torch.no_grad():
        wanted, wanted_features = teacher(images)
    output, features = student(images)
    soft = F.kl_div(
        F.log_softmax(output / TEMPERATURE, 1), F.softmax(wanted / TEMPERATURE, 1), reduction="batchmean"
    )
    loss = (
        F.cross_entropy(output, labels) + TEMPERATURE**2 * soft + F.mse_loss(hint(features), wanted_features)
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm_up.step()
    print(f"loss {loss.item():.6f}")
