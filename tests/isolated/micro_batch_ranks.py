"""One rank of a few, by gloo: what memopt.backward does where ranks run out of memory.

test_micro_batches_distributed.py starts it once a rank: micro_batch_ranks.py RANK RANKS FILE CASE... It says "ok" after
each case."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt._microbatch import rank_protocol
from memopt._microbatch.rank_protocol import RankLost

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
SAMPLES, LIMIT = 12, 500.0  # seconds, of which a busy machine may take many


def model_of(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)], nn.Linear(16, 4)
    ).double()
    model.register_buffer("table", torch.ones(3))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard  # seconds to import

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def batch_of(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, 16, generator=made).double(), torch.randn(SAMPLES, 4, generator=made).double()


def whole(step: int = 0) -> list[torch.Tensor]:
    """The gradients of all ranks' batches in one process."""
    model = model_of()
    batches = [batch_of(rank, step) for rank in range(RANKS)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    nn.functional.mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(one, other, strict=True)
    )


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. planted")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            out_of_memory()
        return gradient, None


def loss_of(model: nn.Module, rank: int, most: int, where: str, sizes: list[int]):
    """mse, of which a rank can run no more than so many samples."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        fails = rank == RANK and len(x) > most
        if fails and where == "before":
            out_of_memory()
        if where == "late" and rank != RANK:
            time.sleep(0.05)
        out = model(x)
        if fails and where == "between":
            out_of_memory()
        return nn.functional.mse_loss(Failing.apply(out, fails and where == "backward"), y)

    return loss


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------


def data_parallel():
    """One rank alone runs out, at any place: all cut, all finish, and the gradients are the single process's."""
    expected = whole()
    for where in ("before", "between", "backward", "late"):
        for rank in {0, RANKS - 1}:
            model, sizes = model_of("ddp"), []
            rank_protocol.of_model(model, limit=LIMIT)
            x, y = batch_of(RANK)
            memopt.backward(loss_of(model, rank, 4, where, sizes), x, y, model=model)
            assert close([p.grad for p in model.parameters()], expected), (where, rank)
            fails = where != "late"
            assert (max(sizes[-3:]) <= 4) == fails, (where, sizes)
            # The second step knows: nothing fails any more, on no rank.
            sizes.clear()
            model.zero_grad()
            memopt.backward(loss_of(model, rank, 4, where, sizes), x, y, model=model)
            if fails and rank == RANK:
                assert max(sizes) <= 4 and sum(sizes) == SAMPLES, sizes
            assert close([p.grad for p in model.parameters()], expected)


def gradients_at_entry():
    model = model_of("ddp")
    expected = [a + b for a, b in zip(whole(0), whole(1), strict=True)]
    for step in range(2):
        memopt.backward(loss_of(model, 0, 5, "backward", []), *batch_of(RANK, step), model=model)
    assert close([p.grad for p in model.parameters()], expected)


def views_of_buckets():
    """Gradients that are views of DDP's own memory."""
    torch.manual_seed(0)
    model = DistributedDataParallel(model_of(), gradient_as_bucket_view=True)
    x, y = batch_of(RANK)
    nn.functional.mse_loss(model(x), y).backward()  # plain, so that there are buckets
    model.zero_grad()
    memopt.backward(loss_of(model, 1, 5, "backward", []), x, y, model=model)
    assert close([p.grad for p in model.parameters()], whole())
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()  # and a plain step goes on
    assert close([p.grad for p in model.parameters()], whole())


def unused_parameters():
    """A rank has no gradient where another has one."""
    model = DistributedDataParallel(model_of(), find_unused_parameters=True)
    inner = model.module

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (inner[0](x) if RANK else inner[1](inner[0](x))).square().mean()

    model.forward = lambda x: loss(x)
    memopt.backward(lambda x: model(x), batch_of(RANK)[0], model=model, exact=False)
    there = [p.grad is not None for p in model.parameters()]
    assert there[:4] == [True] * 4 and not any(there[4:]), there
    total = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    said = [torch.zeros(1, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(said, torch.tensor([total], dtype=torch.float64))
    assert all(torch.equal(said[0], one) for one in said)


def one_sample_does_not_fit():
    """Every rank says so, and gradients and later steps are whole."""
    model, sizes = model_of("ddp"), []
    x, y = batch_of(RANK)
    begun = time.monotonic()
    try:
        memopt.backward(loss_of(model, 1, 0, "backward", sizes), x, y, model=model)
    except torch.OutOfMemoryError as error:
        assert ("even one sample (of" if RANK == 1 else "fits on rank 1") in str(error), error
    else:
        raise AssertionError("it went through")
    assert time.monotonic() - begun < LIMIT
    assert all(p.grad is None for p in model.parameters())
    memopt.backward(loss_of(model, 1, 99, "backward", sizes), x, y, model=model)
    assert close([p.grad for p in model.parameters()], whole())


def an_error_of_ones_own():
    """Is raised there, and heard of elsewhere."""
    model = model_of("ddp")

    def loss(x: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            raise KeyError("planted")
        return model(x).square().mean()

    try:
        memopt.backward(loss, batch_of(RANK)[0], model=model)
    except KeyError:
        assert RANK == 1
    except RankLost as error:
        assert RANK != 1 and "rank 1 ended its step with an error, which it raised" in str(error)
    else:
        raise AssertionError("it went through")
    memopt.backward(loss_of(model, 1, 4, "backward", []), *batch_of(RANK), model=model)
    assert close([p.grad for p in model.parameters()], whole())


def a_model_that_nobody_needs_is_freed():
    model = model_of("ddp")
    memopt.backward(loss_of(model, 0, 4, "backward", []), *batch_of(RANK), model=model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def a_rank_that_never_comes():
    """Within the limit, which is short here, the others raise."""
    model = model_of("ddp")
    made = rank_protocol.of_model(model, limit=LIMIT)
    distributed_c10d._set_pg_timeout(timedelta(seconds=2), made.ranks._side)
    if RANK == 1:
        dist.monitored_barrier(timeout=timedelta(seconds=LIMIT))
        return
    try:
        memopt.backward(loss_of(model, 1, 99, "before", []), *batch_of(RANK), model=model)
    except RankLost as error:
        assert "did not answer" in str(error)
    else:
        raise AssertionError("it went through")
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT))


def refused():
    model = model_of("ddp")
    model.register_comm_hook(None, lambda state, bucket: None)
    try:
        memopt.backward(lambda x: model(x).mean(), batch_of(RANK)[0], model=model)
    except ValueError as error:
        assert "communication hook" in str(error)
    else:
        raise AssertionError("it went through")


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def full(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters()]


def sharded():
    """Nobody runs out: whole, and in as many micro-batches as the tightest rank wants."""
    expected = whole()
    x, y = batch_of(RANK)
    model, sizes = model_of("fsdp"), []
    memopt.backward(loss_of(model, 0, 99, "before", sizes), x, y, model=model)
    assert close(full(model), expected) and max(sizes) == SAMPLES
    model, sizes = model_of("fsdp"), []
    rank_protocol.of_model(model, limit=LIMIT, bytes_a_sample=1000)
    rank_protocol.available_bytes, before = (
        lambda devices: 5400 if RANK == 1 else 10**9,
        rank_protocol.available_bytes,
    )  # five samples, by a sixteenth less
    memopt.backward(loss_of(model, 0, 99, "before", sizes), x, y, model=model)
    rank_protocol.available_bytes = before
    assert close(full(model), expected) and sizes == [4, 4, 4], sizes


def sharded_runs_out():
    """A test that all ranks raise the same error when one runs out of memory within fn. The last case: its groups are
    of no use. STAYS: seconds that the rank stays after it has raised, so that the others' collectives end by their
    limit and not by its end."""
    where, stays = os.environ["WHERE"], float(os.environ["STAYS"])
    model = model_of("fsdp")
    made = rank_protocol.of_model(model, limit=LIMIT)
    x, y = batch_of(RANK)
    memopt.backward(loss_of(model, 1, 99, where, []), x, y, model=model)
    dist.barrier()
    if stays:
        made.ranks.limit = stays / 4
    begun = time.monotonic()
    try:
        memopt.backward(loss_of(model, 1, 3, where, []), x, y, model=model)
    except torch.OutOfMemoryError as error:
        print(f"said: {error}", flush=True)
    else:
        raise AssertionError("it went through")
    if stays and RANK == 1:
        time.sleep(stays)
    assert not stays or RANK == 1 or time.monotonic() - begun < stays


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=RANK,
        world_size=RANKS,
        timeout=timedelta(seconds=510),
    )
    for case in sys.argv[4:]:
        globals()[case]()
        print(f"{case} ok", flush=True)
        if case != "sharded_runs_out":
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a group that has failed may hold its destructor up
