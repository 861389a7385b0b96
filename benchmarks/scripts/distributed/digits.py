"""The training task of the scripts in this folder: a residual classifier on scikit-learn's digits, which ship with
it."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, WIDTH, BLOCKS = 30, 256, 128, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def classifier() -> Classifier:
    """The same on every rank."""
    torch.manual_seed(0)
    return Classifier()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def batches(rank: int = 0, count: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each batch."""
    x, y = data()
    chosen = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        part = torch.randint(len(x), (BATCH,), generator=chosen).chunk(count)[rank]
        yield x[part], y[part]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def tell(model: nn.Module, name: str) -> None:
    """Every rank runs the model, rank 0 says how good it is; and each what it keeps."""
    x, y = data()
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean()
    kept = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    all_kept = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(all_kept, torch.tensor([kept]))
    if dist.get_rank() == 0:
        each = ", ".join(f"{int(one) / 1024:.0f} KiB" for one in all_kept)
        print(f"{name}: accuracy {accuracy:.3f}, parameters on the ranks {each}", flush=True)
