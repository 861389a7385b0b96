"""Low-rank adapters on a frozen transformer in bfloat16, with checkpointed layers."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=32000)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class LoRA(nn.Module):
    def __init__(self, linear, rank=16):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        low = (x.float() @ self.down.t()) @ self.up.t()
        return self.linear(x) + low.to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            each(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(Layer(args.width) for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


torch.manual_seed(0)
with torch.device("cuda"):
    model = Model().to(torch.bfloat16)
model.requires_grad_(False)
for layer in model.layers:
    layer.query, layer.value = LoRA(layer.query).cuda(), LoRA(layer.value).cuda()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, 1e-4)
for _ in range(args.steps):
    tokens = torch.randint(args.vocabulary, (args.batch_size, args.length)).cuda()
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
print("trained", sum(parameter.numel() for parameter in trained), "parameters")
