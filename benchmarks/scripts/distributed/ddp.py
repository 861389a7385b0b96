"""Replicas: every rank has the model, and a part of the batch.

torchrun --standalone --nproc-per-node 2 benchmarks/scripts/distributed/ddp.py
torchrun --standalone --nproc-per-node 2 -m memopt run benchmarks/scripts/distributed/ddp.py
"""

import torch.distributed as dist
from digits import batches, classifier, loss_of, tell
from torch.nn.parallel import DistributedDataParallel

import memopt

dist.init_process_group("gloo")
model = classifier()
for block in model.blocks:  # recomputed in the backward pass
    block.forward = lambda x, f=block.forward: memopt.checkpoint(f, x, use_reentrant=False)
parallel = DistributedDataParallel(model)
optimizer = memopt.optim.AdamW(parallel.parameters(), lr=2e-3)
scaler = memopt.amp.GradScaler("cpu", init_scale=256.0, process_group="world")
for x, y in batches(dist.get_rank(), dist.get_world_size()):
    optimizer.zero_grad()
    # Where a rank runs out of memory, all cut their batches together.
    memopt.backward(lambda x, y: loss_of(parallel, x, y), x, y, model=parallel, scaler=scaler)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
tell(parallel, "DDP")
dist.destroy_process_group()
