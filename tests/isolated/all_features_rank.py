"""One rank of a training with all of memopt's features, on the CPU under DDP by gloo: all_features_rank.py RANK RANKS
FILE. Each rank has its part of the batch; prints the rank's losses as JSON. memopt.enable() is all that names memopt
before the training; that it runs under `memopt run` too changes nothing."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt._demo.tasks import Batch, Task

TASK = Task("gpt", "tiny", 8, 1e-3, (("length", 64), ("dim", 32), ("layers", 3), ("heads", 2)))
STEPS = 4
BUDGET = 2_400_000  # bytes a rank, whose plain step takes 3 million


def part(rank: int, ranks: int) -> list[Batch]:
    return [(x[rank::ranks], y[rank::ranks]) for x, y in TASK.batches(STEPS)]


def main(rank: int, ranks: int, file: str) -> list[float]:
    memopt.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    module = TASK.build_model()
    optimizer = memopt.optim.AdamW(module.parameters(), lr=TASK.learning_rate)
    scaler = memopt.amp.GradScaler("cpu")
    x, y = part(rank, ranks)[0]
    memopt.auto_checkpoint(
        module, x, memory_budget=BUDGET, optimizer=optimizer, loss=lambda logits: TASK.loss_of(logits, y)
    )
    assert not module.plan.keeps_all
    model = DistributedDataParallel(module)
    losses = []
    for batch in memopt.data.Prefetcher(part(rank, ranks), "cpu"):
        loss = memopt.backward(lambda x, y: TASK.loss(model, (x, y)), *batch, model=model, scaler=scaler)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()  # gloo's threads free the last step's gradients, which they cannot in an interpreter that ends
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])), flush=True)
