"""Message passing on a random graph: nodes are gathered and added up by index, a part of them is trained on."""

import argparse
import itertools

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=100_000)
parser.add_argument("--edges", type=int, default=1_000_000)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
CLASSES = 40


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, source, target, degree):
        messages = self.others(x)[source]
        gathered = torch.zeros(len(x), messages.shape[1], device=x.device).index_add_(0, target, messages)
        return self.own(x) + gathered / degree[:, None]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [64] + [args.width] * (args.layers - 1) + [CLASSES]
        self.layers = nn.ModuleList(Layer(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x, source, target, degree):
        for layer in self.layers[:-1]:
            x = nn.functional.dropout(layer(x, source, target, degree).relu(), 0.5, self.training)
        return self.layers[-1](x, source, target, degree)


torch.manual_seed(0)
features = torch.randn(args.nodes, 64)
source, target = torch.randint(args.nodes, (2, args.edges))
labels = torch.randint(CLASSES, (args.nodes,))
train = torch.rand(args.nodes) < 0.3

features, source, target = features.cuda(), source.cuda(), target.cuda()
labels, train = labels.cuda(), train.cuda()
degree = torch.bincount(target, minlength=args.nodes).clamp(min=1)
model = Network().cuda()
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
for epoch in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    output = model(features, source, target, degree)
    loss = nn.functional.cross_entropy(output[train], labels[train])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        predicted = model(features, source, target, degree).argmax(1)
        accuracy = (predicted[~train] == labels[~train]).float().mean()
    print(f"epoch {epoch}: loss {float(loss):.4f}  accuracy {float(accuracy):.3f}")
