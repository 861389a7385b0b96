"""An estimate's child as one rank of several: shards, buckets and split layers have the sizes they have there."""

import os

import pytest
from estimation_children import estimate

SIM = None
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
WEIGHTS = 4 * 2 * 512 * 2048 * 4  # bytes

MODEL = """
import torch
from torch import nn
torch.cuda.set_device(0)
model = nn.Sequential(*[
    nn.Sequential(nn.Linear(512, 2048, bias=False), nn.GELU(), nn.Linear(2048, 512, bias=False)) for _ in range(4)
]).cuda()
"""
TRAINING = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(SAMPLES, 512, device="cuda")).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
SAMPLES = 64 * (1 + dist.get_rank())
mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
dist.barrier()
"""
REPLICATED = """
import os
import torch.distributed as dist
dist.init_process_group()
assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (3, 8, "0")
model = nn.parallel.DistributedDataParallel(model)
SAMPLES = 64
"""


def has_the_parts_of(found: dict, bytes_: int) -> None:
    assert found["error"] is None and found["steps"] == 2
    assert found["by_category"]["parameters"] == bytes_
    # Two states a parameter, and at the peak what a step makes meanwhile.
    assert 2 * bytes_ <= found["by_category"]["optimizer"] < 3.1 * bytes_


def test_a_script_of_its_own_ranks_is_run_as_one_of_them(tmp_path):
    last = estimate(tmp_path, MODEL + SHARDED + TRAINING, ranks=4, rank=3, record=True)
    has_the_parts_of(last, WEIGHTS // 4)
    if SOAK:
        first = estimate(tmp_path, MODEL + SHARDED + TRAINING, ranks=4, rank=0, record=True)
        has_the_parts_of(first, WEIGHTS // 4)
        assert last["peak_allocated"] > first["peak_allocated"]


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_a_replica_has_the_whole_model_and_its_buckets(tmp_path):
    found = estimate(tmp_path, MODEL + REPLICATED + TRAINING, ranks=8, rank=3, record=True)
    has_the_parts_of(found, WEIGHTS)
    assert found["peak_allocated"] > 5 * WEIGHTS  # parameters, gradients, two states, buckets


@pytest.mark.parametrize("spread", ["ddp", "fsdp", "tp"] if SOAK else ["tp"])
def test_a_script_for_one_device_is_spread(tmp_path, spread):
    source = MODEL + "SAMPLES = 64" + TRAINING
    found = estimate(tmp_path, source, ranks=4, rank=0, spread=spread, record=True)
    has_the_parts_of(found, WEIGHTS if spread == "ddp" else WEIGHTS // 4)


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_parameters_of_no_module_cannot_be_spread(tmp_path):
    found = estimate(
        tmp_path,
        "import torch\ntorch.optim.SGD([torch.ones(3, device='cuda', requires_grad=True)])",
        ranks=2,
        spread="fsdp",
    )
    assert "of no module that could be spread over ranks" in found["error"]
