"""Stages: every rank has some of the blocks, and each batch runs through all ranks in microbatches.

torchrun --standalone --nproc-per-node 2 benchmarks/scripts/distributed/pipeline.py
"""

import torch
import torch.distributed as dist
from digits import BLOCKS, batches, classifier
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import memopt

dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
whole = classifier()
parts = [*whole.blocks[rank * BLOCKS // count : (rank + 1) * BLOCKS // count]]
for block in parts:
    block.forward = lambda x, f=block.forward: memopt.checkpoint(f, x, use_reentrant=False)
stage = nn.Sequential(
    *([whole.first] if rank == 0 else []), *parts, *([whole.last] if rank == count - 1 else [])
)
schedule = Schedule1F1B(PipelineStage(stage, rank, count, torch.device("cpu")), 4, loss_fn=F.cross_entropy)
optimizer = memopt.optim.AdamW(stage.parameters(), lr=2e-3)
losses: list[torch.Tensor] = []
for x, y in batches():
    optimizer.zero_grad()
    schedule.step(
        *([x] if rank == 0 else []),
        **({"target": y, "losses": losses} if rank == count - 1 else {}),
    )
    memopt.amp.clip_grad_norm_(stage.parameters(), 1.0, process_group=dist.group.WORLD)  # of all stages
    optimizer.step()
    if rank == count - 1:
        loss = torch.stack(losses).mean()
        losses.clear()
if rank == count - 1:
    print(f"pipeline: loss {loss:.3f} in the last of the steps", flush=True)
dist.destroy_process_group()
