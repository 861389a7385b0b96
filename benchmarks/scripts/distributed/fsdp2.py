"""Shards: every rank has a part of each parameter, its gradient and its optimizer's state, and a part of the batch.

torchrun --standalone --nproc-per-node 2 benchmarks/scripts/distributed/fsdp2.py
"""

import torch.distributed as dist
from digits import batches, classifier, loss_of, tell
from torch.distributed.fsdp import fully_shard

import memopt

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = classifier()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
x, y = next(batches(dist.get_rank(), dist.get_world_size()))
memopt.auto_checkpoint(
    model, x, memory_budget="64MiB", loss=lambda out: out.square().mean()
)  # one plan for all
optimizer = memopt.optim.AdamW(model.parameters(), lr=2e-3)
scaler = memopt.amp.GradScaler("cpu", init_scale=256.0)  # DTensors: found_inf is agreed on without a group
for x, y in batches(dist.get_rank(), dist.get_world_size()):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
tell(model, "FSDP2")
dist.destroy_process_group()
