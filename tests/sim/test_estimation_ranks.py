"""An estimate's child as one rank of several: shards, buckets and split layers have the sizes they have there."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from estimation_children import estimate

SIM = None
ROOT = Path(__file__).resolve().parents[2]
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
for layer in model.modules():
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()  # each rank its part
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


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def has_the_parts_of(found: dict, bytes_: int) -> None:
    assert found["error"] is None and found["steps"] == 2
    assert found["by_category"]["parameters"] == bytes_
    # Two states a parameter, and at the peak what a step makes meanwhile.
    assert 2 * bytes_ <= found["by_category"]["optimizer"] < 3.1 * bytes_


@pytest.mark.sampled("several processes")
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
    # Parameters, gradients, two states; buckets, and what a step makes meanwhile.
    assert found["peak_allocated"] > 5.9 * WEIGHTS, found["peak_allocated"] / WEIGHTS


@pytest.mark.sampled("several processes")
def test_a_replica_is_recomputed_within_its_parallel_module(tmp_path):
    """Its bits are other tests'; a plan for the wrapper itself would reduce in trial steps."""
    source = (
        MODEL + REPLICATED.replace("(3, 8, ", "(1, 2, ").replace("SAMPLES = 64", "SAMPLES = 2048") + TRAINING
    )
    plain = estimate(tmp_path, source, ranks=2, rank=1)
    found = estimate(tmp_path, source, ranks=2, rank=1, techniques=[f"checkpoint:{1 << 20}"])
    assert found["error"] is None and found["steps"] == plain["steps"] == 2
    assert found["techniques"]["checkpoint"] == ["Sequential"]
    assert found["peak_allocated"] < 0.8 * plain["peak_allocated"]


@pytest.mark.sampled("several processes")
def test_shards_are_recomputed_by_a_plan_that_takes_the_other_ranks_to_be_alike(tmp_path):
    source = MODEL + SHARDED.replace("SAMPLES = 64 *", "SAMPLES = 2048 *") + TRAINING
    plain = estimate(tmp_path, source, ranks=2, rank=0)
    found = estimate(tmp_path, source, ranks=2, rank=0, techniques=[f"checkpoint:{1 << 20}"])
    assert found["error"] is None and found["steps"] == plain["steps"] == 2
    assert found["techniques"]["checkpoint"] == ["FSDPSequential"]
    assert found["peak_allocated"] < 0.8 * plain["peak_allocated"]


@pytest.mark.sampled("several processes")
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
    assert "to no module that can be parallelized over ranks" in found["error"]


GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')\nSAMPLES = 64\n"
SPREAD = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model)\n",
    "fsdp": "from torch.distributed.fsdp import fully_shard\n"
    "mesh = dist.device_mesh.init_device_mesh('cuda', (dist.get_world_size(),))\n"
    "for block in model:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)\n",
}
RANK = """
import memopt
memopt.sim.activate(memory="2GiB")
{source}
torch.cuda.synchronize()
print(torch.cuda.max_memory_allocated())
dist.destroy_process_group()
"""


@pytest.mark.skipif(not SOAK, reason="the long form")
@pytest.mark.parametrize("spread", SPREAD)
def test_two_real_ranks_take_what_the_estimate_of_one_says(tmp_path, spread):
    source = MODEL + GLOO + SPREAD[spread] + TRAINING
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(source=source))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | meeting | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        peaks = [int(rank.communicate(timeout=600)[0].split()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = estimate(tmp_path, source, ranks=2, rank=0)
    # gloo scatters and gathers by way of a copy of all ranks' parts; NCCL, which is estimated, does not.
    copies = 0 if spread == "ddp" else WEIGHTS // 4
    assert found["peak_allocated"] * 0.999 <= peaks[0] <= found["peak_allocated"] * 1.001 + copies
