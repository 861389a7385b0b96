"""One rank of two, by gloo: a model with memopt.auto_checkpoint in torch's DistributedDataParallel. Started by
test_auto_checkpoint_uses.py, once a rank: checkpoint_ranks.py RANK FILE. Says "ok" when gradients are, bit for bit,
those of the plain model in it."""

from __future__ import annotations

import copy
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.chain import InfeasibleBudget
from tests.helpers.residual import Residual


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=timedelta(seconds=500)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(32) for _ in range(6)))
    plain = copy.deepcopy(model)
    sample = torch.randn(256, 32, generator=torch.Generator().manual_seed(rank))
    try:
        memopt.auto_checkpoint(model, sample, memory_budget=1, loss=squares)
    except InfeasibleBudget as error:
        memopt.auto_checkpoint(model, sample, memory_budget=error.least_budget, loss=squares)
    assert vars(model)["plan"].runner is not None
    parallel = [DistributedDataParallel(m, bucket_cap_mb=0.02) for m in (plain, model)]
    for step in range(5):
        # In the last two a batch that is twice as large, first for one rank: it is planned there, within DDP's forward.
        batch = sample + step
        batch = torch.cat([batch, batch]) if step > 3 or (step == 3 and rank == 0) else batch
        for module in parallel:
            module.zero_grad()
            with module.no_sync() if step == 1 else torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that twice as much takes more than the least budget
                squares(module(batch)).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (rank, step, name)
    assert len(model.forward.plans) == 2
    mean = plain[0].branch.inner.weight.grad.clone()
    dist.broadcast(mean, 0)
    assert torch.equal(mean, model[0].branch.inner.weight.grad)  # both ranks have the same: it was reduced
    print("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
