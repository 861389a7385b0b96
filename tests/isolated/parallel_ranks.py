"""One rank of a few, by gloo: training with memopt's optimizers, scaler, clipping, checkpoints, offload and backward,
in models that are replicated, sharded, split within layers and split between them, against one process that has the
whole batch and nothing of memopt. Started by test_parallel_training.py, once a rank: parallel_ranks.py RANK RANKS FILE
short|long CASE... Says "ok" after each case."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import cycle
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.chain import InfeasibleBudget
from tests.helpers.residual import Residual

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
SHORT = sys.argv[4] == "short"
WIDTH, BLOCKS, SAMPLES, STEPS = 8, 4, 64, 3
GLOO = timedelta(seconds=500)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(WIDTH) for _ in range(BLOCKS)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole_batch(step: int) -> torch.Tensor:
    return torch.cat([batch(rank, step) for rank in range(RANKS)])


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


# ---- one process, the whole batch, torch alone ----------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, memopt.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, memopt.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}
SCALER = {"init_scale": 64.0, "growth_interval": 2}
MAX_NORM = 0.05  # so that every step clips


@functools.cache
def alone(kind: str, bad_step: int) -> tuple[list[torch.Tensor], float]:
    """The parameters after a few steps, and the scale. In bad_step a gradient overflows."""
    model = blocks()
    theirs, _, options = OPTIMIZERS[kind]
    optimizer, scaler = theirs(model.parameters(), **options), torch.amp.GradScaler("cpu", **SCALER)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(squares(model(whole_batch(step)))).backward()
        if step == bad_step:
            model[0].branch.norm.weight.grad[0] = torch.inf
        scaler.unscale_(optimizer)
        assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > MAX_NORM
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()], scaler.get_scale()


# ---- ways to run a model --------------------------------------------------------------------------------------------


def unchanged(model: nn.Module) -> nn.Module:
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    for block in model:
        block.forward = lambda x, f=block.forward: memopt.checkpoint(f, x, use_reentrant=False)
    return model


def reentrant(model: nn.Module) -> nn.Module:
    for block in model:
        block.forward = lambda x, f=block.forward: memopt.checkpoint(
            f, x.requires_grad_() if x.is_leaf else x, use_reentrant=True
        )
    return model


def sequential(model: nn.Module) -> nn.Module:
    layers = list(model)
    model.forward = lambda x: memopt.checkpoint_sequential(
        layers, min(2, len(layers)), x, use_reentrant=False
    )
    return model


def automatic(model: nn.Module, batches: int = 1) -> nn.Module:
    """Within the least budget there is, for so many batches at once. What collectives' threads hold differs from run to
    run, now and then by more than the room that an error leaves for it: then it names another."""
    sample, budget = torch.cat([batch(RANK, 0)] * batches), 1
    for _ in range(4):
        try:
            memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=squares)
            break
        except InfeasibleBudget as error:
            budget = error.least_budget
    assert vars(model)["plan"].runner is not None or len(model) == 1
    return model


class Offloaded:
    def __enter__(self) -> None:
        self.inside = memopt.offload_activations(min_size=0, to=tempfile.gettempdir(), in_flight=1)
        self.inside.__enter__()

    def __exit__(self, *raised: object) -> None:
        self.inside.__exit__(*raised)
        assert self.inside.last.bytes_out > 0


class Way(NamedTuple):
    change: Callable[[nn.Module], nn.Module] = unchanged
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    backward: bool = False  # by memopt.backward


WAYS = {
    "plain": Way(),
    "checkpoint": Way(checkpointed),
    "reentrant": Way(reentrant),
    "sequential": Way(sequential),
    "auto": Way(automatic),
    "offload": Way(around=Offloaded),
    "backward": Way(backward=True),
}
CLIPS = ("step", "unscale_and_clip_", "clip_grad_norm_")


def combinations(ways: list[str]) -> Iterator[tuple[str, str, str, int]]:
    """Way, optimizer, clipping, the step that overflows (-1: none): all, or in the short form each once."""
    if SHORT:
        yield from zip(ways, cycle(OPTIMIZERS), cycle(CLIPS), cycle((1, -1)), strict=False)
        return
    for way in ways:
        for kind in OPTIMIZERS:
            for clip in CLIPS if way in ("plain", "backward") else CLIPS[:1]:
                yield way, kind, clip, 1
                yield way, kind, clip, -1


# ---- several ranks --------------------------------------------------------------------------------------------------


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def agree(model: nn.Module, expected: list[torch.Tensor], scale: tuple[float, float], what: object) -> None:
    for (name, p), wanted in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            full(p.detach()),
            wanted,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda said, name=name: f"{what}, {name}: {said}",
        )
    assert scale[0] == scale[1], (what, scale)


def overflow(model: nn.Module) -> None:
    """One element of one rank's gradient."""
    gradient = next(model.parameters()).grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if RANK == 0:
        local.view(-1)[0] = torch.inf


def train(
    model: nn.Module, way: Way, kind: str, clip: str, bad_step: int, batch_of: Callable[[int], torch.Tensor]
) -> float:
    """As alone(); gives the scale."""
    _, ours, options = OPTIMIZERS[kind]
    optimizer = ours(model.parameters(), **options)
    scaler = memopt.amp.GradScaler("cpu", **SCALER, process_group="world")
    for step in range(STEPS):
        optimizer.zero_grad()
        if way.backward:
            memopt.backward(lambda x: squares(model(x)), batch_of(step), model=model, scaler=scaler)
        else:
            with way.around():
                loss = squares(model(batch_of(step)))
            scaler.scale(loss).backward()
        if step == bad_step:
            overflow(model)
        if clip == "step":
            scaler.step(optimizer, max_norm=MAX_NORM)
        elif clip == "unscale_and_clip_":
            scaler.unscale_and_clip_(optimizer, MAX_NORM)
            scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            memopt.amp.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
        assert bool(scaler.step_skipped(optimizer)) == (step == bad_step)
        scaler.update()
    return scaler.get_scale()


def compare(
    make: Callable[[nn.Module], nn.Module], *, split_first: bool, same_batch: bool = False, ways: str = ""
) -> None:
    """split_first: auto_checkpoint is called on what make() has made."""

    def batch_of(step: int) -> torch.Tensor:
        return whole_batch(step) if same_batch else batch(RANK, step)

    for name, kind, clip, bad_step in combinations(ways.split() or list(WAYS)):
        way = WAYS[name]
        first, then = (make, way.change) if name == "auto" and split_first else (way.change, make)
        model = then(first(blocks()))
        scale = train(model, way, kind, clip, bad_step, batch_of)
        expected, wanted = alone(kind, bad_step)
        agree(model, expected, (scale, wanted), (name, kind, clip, bad_step))


def ddp() -> None:
    compare(DistributedDataParallel, split_first=False)


def mesh() -> dist.device_mesh.DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", (RANKS,))


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard  # seconds to import

    def sharded(model: nn.Module) -> nn.Module:
        for block in model:
            fully_shard(block, mesh=mesh())
        return fully_shard(model, mesh=mesh())

    compare(sharded, split_first=True)


def split(model: nn.Module) -> nn.Module:
    """Plain norms beside split layers: gradients are DTensors and tensors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {}
    for n in range(BLOCKS):
        plan |= {f"{n}.branch.inner": ColwiseParallel(), f"{n}.branch.outer": RowwiseParallel()}
    return parallelize_module(model, mesh(), plan)


def tensor_parallel() -> None:
    compare(split, split_first=True, same_batch=True)


def two_dimensions() -> None:
    """Split over pairs of ranks, then sharded over those that have the same part."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = dist.device_mesh.init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("data", "model"))

    def spread(model: nn.Module) -> nn.Module:
        for block in model:
            plan = {"branch.inner": ColwiseParallel(), "branch.outer": RowwiseParallel()}
            fully_shard(parallelize_module(block, both["model"], plan), mesh=both["data"])
        return fully_shard(model, mesh=both["data"])

    for name, kind, clip, bad_step in combinations(list(WAYS)):
        way = WAYS[name]
        model = (
            way.change(spread(blocks())) if name in ("auto", "sequential") else spread(way.change(blocks()))
        )
        # Ranks of a pair have the same quarter of the batch, twice as large as that of one rank.
        mine = both.get_local_rank("data")

        def batch_of(step: int, mine: int = mine) -> torch.Tensor:
            return whole_batch(step).chunk(RANKS // 2)[mine]

        scale = train(model, way, kind, clip, bad_step, batch_of)
        expected, wanted = alone(kind, bad_step)
        agree(model, expected, (scale, wanted), (name, kind, clip, bad_step))


def pipeline() -> None:
    """A stage a rank, four microbatches; gradients are clipped by the norm of all stages'. torch's schedules take
    gradients by autograd.grad, which reentrant checkpoints refuse, and memopt.backward has no pass of its own there."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    ways = [name for name in WAYS if name not in ("reentrant", "backward")]
    for n, (name, kind, _, bad_step) in enumerate(combinations(ways)):
        way = WAYS[name]
        expected, wanted = alone(kind, bad_step)
        layers = list(blocks())
        part = way.change(nn.Sequential(*layers[BLOCKS * RANK // RANKS : BLOCKS * (RANK + 1) // RANKS]))
        _, ours, options = OPTIMIZERS[kind]
        optimizer = ours(part.parameters(), **options)
        scaler = memopt.amp.GradScaler("cpu", **SCALER, process_group="world")
        scaler.scale(torch.ones(()))  # only the last stage has a loss
        schedule = (Schedule1F1B, ScheduleGPipe)[n % 2](
            PipelineStage(part, RANK, RANKS, torch.device("cpu")),
            4,
            loss_fn=lambda out, _, scaler=scaler: scaler.scale(squares(out)),
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            with way.around():
                schedule.step(
                    *([whole_batch(step)] if RANK == 0 else []),
                    **({"target": whole_batch(step)} if RANK == RANKS - 1 else {}),
                )
            if step == bad_step:
                overflow(part)
            scaler.unscale_(optimizer)
            memopt.amp.clip_grad_norm_(part.parameters(), MAX_NORM, process_group=dist.group.WORLD)
            scaler.step(optimizer)
            scaler.update()
        a_stage = len(expected) // RANKS
        mine = expected[RANK * a_stage : (RANK + 1) * a_stage]
        agree(part, mine, (scaler.get_scale(), wanted), (name, kind, bad_step))


# ---- what is not one of the ways ------------------------------------------------------------------------------------


def frozen_stages() -> None:
    """Stages ahead of their own turn find their parameters sharded: they are gathered. Ranks' plans are one."""
    from torch.distributed.fsdp import fully_shard

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
        for p in model[:5].parameters():
            p.requires_grad_(False)
        return model

    plain = made()
    squares(plain(whole_batch(0))).backward()
    model = made()
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    automatic(model, batches=16)  # of one, activations take so little that nothing is gained by a second run
    for _ in range(2):
        model.zero_grad()
        squares(model(batch(RANK, 0))).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad)
    said = [None] * RANKS
    dist.all_gather_object(said, (vars(model)["plan"].operations, vars(model)["plan"].chain))
    assert all(one == said[0] for one in said)


def spread_too_late() -> None:
    """A plan that is one rank's alone is refused where stages have collectives."""
    model = split(automatic(blocks()))
    try:
        model(batch(RANK, 0))
    except RuntimeError as error:
        assert "call auto_checkpoint() after fully_shard() and parallelize_module()" in str(error), error
    else:
        raise AssertionError("it went through")


def other_norms() -> None:
    """clip_grad_norm_ over stages and kinds of tensors, for other norms; and its errors."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for norm_type in (1.0, 2.0, 3.5, float("inf")):
        for p in parameters:
            p.grad = torch.full_like(p, 2.0 + RANK)
        gathered = torch.cat([torch.full((7,), 2.0 + rank) for rank in range(RANKS)])
        norm = memopt.amp.clip_grad_norm_(parameters, 1.0, norm_type, process_group=dist.group.WORLD)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(gathered, norm_type))
        torch.testing.assert_close(
            parameters[0].grad, torch.full((3,), (2.0 + RANK) / float(norm)), rtol=1e-4, atol=1e-6
        )
    if RANK == 0:
        parameters[0].grad[0] = torch.nan
    try:
        memopt.amp.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, process_group=dist.group.WORLD)
    except RuntimeError as error:
        assert "non-finite" in str(error)
    else:
        raise AssertionError("it went through")
    # A rank without any gradient takes part.
    for p in parameters:
        p.grad = None if RANK == 0 else torch.ones_like(p)
    norm = memopt.amp.clip_grad_norm_(parameters, 1e9, process_group=dist.group.WORLD)
    torch.testing.assert_close(norm, torch.tensor(7.0 * (RANKS - 1)).sqrt())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS, timeout=GLOO
    )
    for case in sys.argv[5:]:
        globals()[case]()
        print(f"{case} ok", flush=True)
    dist.destroy_process_group()
