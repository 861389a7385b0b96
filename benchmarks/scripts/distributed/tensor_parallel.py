"""Split layers: every rank computes a part of each block, on the whole batch.

torchrun --standalone --nproc-per-node 2 benchmarks/scripts/distributed/tensor_parallel.py
"""

import tempfile

import torch.distributed as dist
from digits import batches, classifier, loss_of, tell
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memopt

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = classifier()
for block in model.blocks:
    parallelize_module(block, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
optimizer = memopt.optim.AdamW(model.parameters(), lr=2e-3)
for x, y in batches():
    optimizer.zero_grad()
    with memopt.offload_activations(min_size="64KiB", to=tempfile.gettempdir()):
        loss = loss_of(model, x, y)
    loss.backward()
    memopt.amp.clip_grad_norm_(model.parameters(), 1.0)  # DTensors beside plain tensors
    optimizer.step()
tell(model, "tensor parallel")
dist.destroy_process_group()
