"""One rank of a few, by gloo: what memopt.amp.GradScaler does where ranks find different things. Started by
test_amp_distributed.py, once a rank: amp_ranks.py RANK RANKS FILE CASE... Says "ok" after each case."""

from __future__ import annotations

import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from memopt import optim
from memopt.amp import GradScaler, clip_grad_norm_

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


def scaler_of(cls=GradScaler, **options):
    scaler = cls("cpu", init_scale=8.0, **options)
    scaler.scale(torch.ones(()))
    return scaler


def parameters(bad: bool, none: bool = False) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for p in made:
        p.grad = None if none else torch.full_like(p, 16.0)
    if bad:
        made[1].grad[4] = math.inf
    return made


def skipped_by_all(scaler, made, make, take, *, expected: bool) -> None:
    optimizer = make(made)
    take(scaler, optimizer)
    assert bool(scaler.step_skipped(optimizer)) == expected, (RANK, make, take)
    assert all((p == 0).all() == (expected or p.grad is None) for p in made)
    scaler.update()
    assert scaler.get_scale() == (4.0 if expected else 8.0)


def step(scaler, optimizer):
    scaler.step(optimizer)


def unscale_step(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscale_clip_step(scaler, optimizer):
    scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer)


def clipped_step(scaler, optimizer):
    scaler.step(optimizer, max_norm=1.0)


TAKES = [step, unscale_step, unscale_clip_step, clipped_step]
MAKES = [
    lambda p: torch.optim.SGD(p, 1.0),
    lambda p: torch.optim.SGD(p, 1.0, fused=True),
    lambda p: optim.SGD(p, 1.0),
]


def agreement() -> None:
    """One rank's inf is everybody's."""
    for bad_rank in (0, RANKS - 1, None):
        for make in MAKES:
            for take in TAKES:
                made = parameters(bad_rank == RANK)
                scaler = scaler_of(process_group="world")
                skipped_by_all(scaler, made, make, take, expected=bad_rank is not None)


def without_gradients() -> None:
    """Of ranks some may have none: they take part all the same."""
    for bad in (False, True):
        for make in MAKES[:2]:
            for take in TAKES[:2]:
                made = parameters(bad and RANK == 0, none=RANK == RANKS - 1)
                skipped_by_all(scaler_of(process_group="world"), made, make, take, expected=bad)


def groups() -> None:
    """Only those of the group."""
    group = dist.new_group([0, 1])
    if RANK < 2:
        made = parameters(RANK == 1)
        skipped_by_all(scaler_of(process_group=group), made, MAKES[0], step, expected=True)
    else:
        skipped_by_all(scaler_of(), parameters(False), MAKES[0], step, expected=False)


def alone() -> None:
    """The control: without a group each rank goes its way."""
    skipped_by_all(scaler_of(), parameters(RANK == 0), MAKES[0], step, expected=RANK == 0)


def sharded() -> None:
    """As torch's ShardedGradScaler, over a few iterations."""
    worlds = []
    for cls, options in (
        (ShardedGradScaler, {}),
        (GradScaler, {"process_group": "world", "allow_fp16": True}),
    ):
        scaler = scaler_of(cls, growth_interval=2, **options)
        made = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))]
        optimizer = torch.optim.SGD(made, 0.1)
        seen = []
        for iteration in range(7):
            for i, p in enumerate(made):
                p.grad = torch.full_like(p, 1.0 + i + RANK)
            if iteration % 3 == 1 and iteration % RANKS == RANK:
                made[iteration % 2].grad[1] = math.nan
            scaler.step(optimizer)
            scaler.update()
            seen.append(([p.tolist() for p in made], scaler.state_dict()))
        worlds.append(seen)
    assert worlds[0] == worlds[1], worlds


def fsdp() -> None:
    """DTensors: as torch's own scaler, without a group; and beside plain gradients, which torch's refuses."""
    worlds = []
    for cls in (torch.amp.GradScaler, GradScaler):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
        for layer in net:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
        fully_shard(net)
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), scaler_of(cls)
        seen = []
        for iteration in range(5):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(3, 8) * (1 + RANK)).square().mean()).backward()
            if iteration == 2 and RANK == 0:
                net[0].weight.grad.to_local().view(-1)[0] = math.inf
            clip = torch.nn.utils.clip_grad_norm_ if cls is torch.amp.GradScaler else clip_grad_norm_
            if iteration == 3:
                scaler.unscale_(optimizer)
                seen.append(clip(net.parameters(), 0.5).full_tensor().tolist())
            elif iteration == 4 and cls is GradScaler:
                seen.append(scaler.unscale_and_clip_(optimizer, 0.5).full_tensor().tolist())
            elif iteration == 4:
                scaler.unscale_(optimizer)
                seen.append(clip(net.parameters(), 0.5).full_tensor().tolist())
            scaler.step(optimizer)
            scaler.update()
            seen.append(([p.to_local().tolist() for p in net.parameters()], scaler.state_dict()))
        worlds.append(seen)
    assert worlds[0] == worlds[1], worlds

    # `net`, `optimizer` and `scaler` are memopt's of the loop.
    plain = torch.nn.Parameter(torch.zeros(3))
    both = torch.optim.SGD([plain, *net.parameters()], 0.1)
    scaler.scale(net(torch.ones(3, 8)).square().mean()).backward()
    plain.grad = torch.full((3,), math.inf if RANK == 0 else 1.0)
    scaler.step(both)
    assert scaler.step_skipped(both) and (plain == 0).all()


CASES = {case.__name__: case for case in (agreement, without_gradients, groups, alone, sharded, fsdp)}

torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS, timeout=timedelta(seconds=500)
)
for name in sys.argv[4:]:
    CASES[name]()
    print(name, "ok", flush=True)
dist.destroy_process_group()
