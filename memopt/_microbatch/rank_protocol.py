"""The agreement of ranks that train one model together on a step in micro-batches.

DistributedDataParallel: no rank reduces before all have gone through. Micro-batches run under no_sync, so an
out-of-memory error on one rank finds no other in a collective; all hear of it in succeeded(), cut in smaller ones
together, and reduce once at the end, in place. What that costs is DDP's overlap of reduction with the backward pass, in
every step.

FSDP2 (fully_shard): the forward pass itself is full of collectives, and a rank that runs out of memory in it leaves the
others waiting there. So the size is agreed on before, from the rank that has least room, and an out-of-memory error
inside is the end: of all ranks, with the same error, within `limit`.

What the ranks tell each other goes beside their model's collectives (Ranks, Verdicts), always within a time limit."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from memopt import _C
from memopt._microbatch import ALONE, Agreement
from memopt._microbatch.size_cache import HEADROOM, available_bytes
from memopt._runtime.log import logger

FAILED = 1 << 40  # among numbers that are exchanged: this rank ended with an error of its own
LIMIT = 600.0  # seconds
_made: weakref.WeakKeyDictionary[nn.Module, Agreement] = weakref.WeakKeyDictionary()


def of_model(
    model: nn.Module | Sequence[nn.Module], *, limit: float = LIMIT, bytes_a_sample: int | None = None
) -> Agreement:
    """The agreement for a model, made once for each: that of DDP, of FSDP2, or of a process alone.

    limit: seconds that a rank waits for the others before it raises RankLost; for FSDP2, within a step, of each of
    the model's collectives too, so more than the slowest rank's step takes. bytes_a_sample: for FSDP2, what a sample
    takes at the peak of a step on this rank (memopt.estimate, or .peak of two sizes in memopt.find_batch_size, tell);
    the size is chosen from that and the room there is. Without it a batch is run whole.

    All ranks call it at the same point. ValueError for a model of two kinds, of FSDP1, with a communication hook, or
    sharded over a part of the ranks of another group.
    """
    modules = (model,) if isinstance(model, nn.Module) else tuple(model)
    found = _made.get(modules[0])
    if found is None or limit != LIMIT or bytes_a_sample is not None:
        found = _made[modules[0]] = _new(modules, limit, bytes_a_sample)
    return found


def _new(modules: Sequence[nn.Module], limit: float, bytes_a_sample: int | None) -> Agreement:
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    within = [module for root in modules for module in root.modules()]
    parallel = [module for module in within if isinstance(module, DistributedDataParallel)]
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # large, and loaded where there is such a model
    sharded = [module for module in within if fsdp and isinstance(module, fsdp.FSDPModule)]
    if fsdp and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in within):
        raise ValueError(
            "memopt.backward: FullyShardedDataParallel's ranks cannot agree on micro-batches: use fully_shard"
        )
    if parallel and sharded:
        raise ValueError(
            "memopt.backward: a model that uses both DDP and FSDP2 cannot agree on micro-batches"
        )
    if parallel:
        return DataParallel(parallel, limit)
    return FullyShard(modules, limit, bytes_a_sample) if sharded else ALONE


class _OnRanks:
    """The common part of both agreements: before an attempt."""

    ranks: Ranks

    def micro_batches(self, wanted: int, most: int) -> int:
        said = self.ranks.exchange(wanted, int(wanted > max(most, 1)))
        ended = [rank for rank, (_, too_many) in zip(self.ranks.numbers, said, strict=True) if too_many]
        if ended:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. memopt.backward: not even one sample fits on rank {ended[0]}, whose error says "
                "what it needs"
            )
        return max(count for count, _ in said)


class DataParallel(_OnRanks):
    """The agreement of DistributedDataParallel."""

    def __init__(self, modules: Sequence[DistributedDataParallel], limit: float) -> None:
        if any(module.process_group is not modules[0].process_group for module in modules):
            raise ValueError("memopt.backward: the model's DDP modules have different process groups")
        if any(module._comm_hooks for module in modules):
            raise ValueError(
                "memopt.backward: the model has a communication hook, which a reduction after all micro-batches would "
                "not call"
            )
        # Weak: `_made` keeps this as long as the model lives.
        self._references = [weakref.ref(module) for module in modules]
        self.ranks = Ranks(modules[0].process_group, limit)

    @property
    def _modules(self) -> list[DistributedDataParallel]:
        return [module for reference in self._references if (module := reference()) is not None]

    def micro_batches(self, wanted: int, most: int) -> int:
        count = super().micro_batches(wanted, most)
        for module in self._modules:
            # What DDP does in a forward pass, where an out-of-memory error could come between.
            if torch.is_grad_enabled():
                module.reducer._rebuild_buckets()
            if module.broadcast_buffers and module.modules_buffers:
                module._sync_buffers()
        return count

    @contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(module.no_sync())
                module.require_forward_param_sync = False  # the buffers are equal already
            try:
                yield
            except Exception:
                self.ranks.fails(1)
                raise

    def succeeded(self, ok: bool, why: str = "") -> bool:
        return all(one for (one,) in self.ranks.exchange(int(ok)))

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take means over ranks, as DDP does: each gradient is divided, then summed.

        In place, so that no rank runs out of memory here; but a rank that has no gradient where another has one makes
        zeros, and all hear whether it could.
        """
        modules = self._modules
        chosen = [parameter for module in modules for parameter in _reduced(module)]
        there = [int(parameter.grad is not None) for parameter in chosen]
        said = self.ranks.exchange(*there) if there else []
        wanted = [any(column) for column in zip(*said, strict=True)]
        if any(
            want and not all(column) for want, column in zip(wanted, zip(*said, strict=True), strict=True)
        ):
            self._make_zeros([p for p, want in zip(chosen, wanted, strict=True) if want and p.grad is None])
        gradients = [p.grad for p, want in zip(chosen, wanted, strict=True) if want]
        group, count = modules[0].process_group, len(self.ranks.numbers)
        with torch.no_grad():
            torch._foreach_div_(gradients, count)
            for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
                work.wait()

    def _make_zeros(self, parameters: list[torch.Tensor]) -> None:
        failed = None
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        except torch.OutOfMemoryError as error:
            failed = error
        if not all(one for (one,) in self.ranks.exchange(int(failed is None))):
            raise failed or torch.OutOfMemoryError(
                "CUDA out of memory. memopt.backward: another rank has no memory for its gradients"
            )


def _reduced(module: DistributedDataParallel) -> list[nn.Parameter]:
    return [
        parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    ]


class FullyShard(_OnRanks):
    """The agreement of FSDP2.

    The gradients of micro-batches are reduced and scattered one after the other, and add up in the shards.
    """

    def __init__(self, modules: Sequence[nn.Module], limit: float, bytes_a_sample: int | None) -> None:
        meshes = {
            parameter.device_mesh: None
            for root in modules
            for parameter in root.parameters()
            if hasattr(parameter, "device_mesh")
        }
        self._groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        everybody = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
        # What tensor parallelism does not split is sharded over those that have the same part of the rest.
        ranks = max(everybody, key=len)
        if not all(set(ranks) >= set(some) for some in everybody):
            raise ValueError(
                f"memopt.backward: the model is sharded over different sets of ranks, {sorted(everybody)}, none of "
                "which contains all the others: shard it over one mesh"
            )
        world = dist.group.WORLD
        assert world is not None
        alike = [group for group in self._groups if tuple(dist.get_process_group_ranks(group)) == ranks]
        if not alike and len(ranks) != dist.get_world_size():
            raise ValueError(
                "memopt.backward: the model is sharded over some of the ranks only, in several dimensions"
            )
        self.ranks = Ranks(alike[0] if alike else world, limit)
        self._verdicts = Verdicts(self.ranks)
        self._bytes_a_sample = bytes_a_sample
        self._devices = {p.device for root in modules for p in root.parameters()}

    def micro_batches(self, wanted: int, most: int) -> int:
        """Return the count of the rank with the least room.

        All ranks need equally many forward passes, so a rank with fewer samples than that is an error (ValueError) on
        every rank.
        """
        if self._bytes_a_sample:
            fitting = int(available_bytes(self._devices) * (1 - HEADROOM)) // self._bytes_a_sample
            wanted = max(wanted, -(-most // fitting) if fitting else 2 * most)
        count = super().micro_batches(wanted, most)
        least = min(samples for (samples,) in self.ranks.exchange(most))
        if count > least:
            raise ValueError(
                f"memopt.backward: {count} micro-batches are needed, but one rank has only {least} samples: under "
                "FSDP2 every rank runs every micro-batch, so give all ranks batches of equal size"
            )
        self._verdicts.begin()
        return count

    @contextmanager
    def micro_batch(self, index: int, count: int) -> Iterator[None]:
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), daemon=True, name="memopt-ranks")
        watch.start()
        try:
            with limited(self._groups, self.ranks.limit):
                yield
        except Exception as error:
            raise self._verdict_on(error) from error
        finally:
            over.set()
            watch.join()

    def succeeded(self, ok: bool, why: str = "") -> bool:
        said = self._verdicts.ok() if ok else self._verdicts.fail(self._sentence(why))
        if said:
            raise _error(said)
        return True

    def reduce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: the gradients are reduced already."""

    def _watch(self, over: threading.Event) -> None:
        """End the groups when another rank has failed, since this rank may be waiting for it in a collective."""
        while not over.wait(0.2):
            if self._verdicts.said():
                end(self._groups)
                return

    def _verdict_on(self, error: Exception) -> Exception:
        """The error that every rank raises.

        An error of a collective is the end of another rank, which has said why before anybody waited for long. Where
        none has, this rank's own error came first.
        """
        said = self._verdicts.wait(min(5.0, self.ranks.limit)) if isinstance(error, RuntimeError) else ""
        if said:
            return _error(said)
        self._verdicts.fail(f"rank {self.ranks.own} failed: {type(error).__name__}: {error}")
        return error

    def _sentence(self, why: str) -> str:
        return (
            f"CUDA out of memory. memopt.backward: rank {self.ranks.own} ran out of memory within a step under FSDP2, "
            "where the other ranks wait for it, so all ranks end here. Give every rank smaller batches, or pass "
            "bytes_a_sample to memopt._microbatch.rank_protocol.of_model(), with which the ranks agree beforehand. "
            f"The error was: {why}"
        )


def _error(said: str) -> Exception:
    return torch.OutOfMemoryError(said) if said.startswith("CUDA out of memory") else RankLost(said)


# ---- messages between ranks ------------------------------------------------------------------------------------------


class RankLost(_C.Error):
    """Another rank did not answer within the limit, has ended, or has failed for a reason other than memory."""


class Ranks:
    """The ranks of a process group, by a group of their own over gloo.

    So neither the device nor what the model's collectives wait for is in the way. All of them must make theirs at the
    same point. limit: seconds that any one waits.
    """

    def __init__(self, group: dist.ProcessGroup, limit: float) -> None:
        self.numbers = dist.get_process_group_ranks(group)
        self.limit = limit
        self._side = dist.new_group(
            self.numbers,
            backend="gloo",
            timeout=timedelta(seconds=limit),
            use_local_synchronization=True,  # the other ranks of the world are not called
        )
        self.own = dist.get_rank()
        self._last: dist.Work | None = None

    def exchange(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of every rank, in the order of `self.numbers`. Raises RankLost if one does not answer."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(mine) for _ in self.numbers]
        try:
            # Kept until the next: gloo's thread would free the work's tensors, and needs Python's lock for that, which
            # ends the process by std::terminate() where the interpreter is about to end.
            self._last = dist.all_gather(found, mine, group=self._side, async_op=True)
            self._last.wait()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.own} waited up to {self.limit:g} s for the others of {self.numbers} to agree on a step, "
                f"but one did not answer: it has ended, hangs, or calls memopt.backward less often ({_first(error)})"
            ) from error
        said = [one.tolist() for one in found]
        failed = [rank for rank, one in zip(self.numbers, said, strict=True) if one[0] == FAILED]
        if failed and numbers[0] != FAILED:
            raise RankLost(f"rank {failed[0]} ended its step with an error, which it raised itself")
        return said

    def fails(self, width: int) -> None:
        """Report a failure in the place of the next exchange, of so many numbers; errors there do not matter."""
        try:
            self.exchange(*(FAILED,) * width)
        except RankLost as error:
            logger.info("an error could not be sent to the other ranks: %s", error)


class Verdicts:
    """The end of an attempt for all ranks, by the store that they met at.

    The first one that fails decides, even while the others wait in a collective: a thread of theirs can read it, so
    nothing here waits with a lock held.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        store = distributed_c10d._get_default_store()
        # A connection of its own: another thread may wait on the first.
        self._store: Any = dist.PrefixStore(f"memopt/{'-'.join(map(str, ranks.numbers))}", store.clone())
        self._attempt = 0
        self._lock = threading.Lock()
        self._said: str | None = None

    def begin(self) -> None:
        self._attempt += 1
        self._said = None
        if self._attempt > 2 and self._ranks.own == self._ranks.numbers[0]:
            for name in ("ok", "verdict"):  # of an attempt that all have left
                self._store.delete_key(f"{self._attempt - 2}/{name}")

    def said(self) -> str:
        """Return the verdict, "" as long as no rank has failed."""
        with self._lock:
            if not self._said and self._store.check([self._key("verdict")]):
                self._said = self._store.get(self._key("verdict")).decode()
                if self._said:
                    self._store.add(self._key("heard"), 1)
            return self._said or ""

    def fail(self, why: str) -> str:
        """Give the verdict, and return it, or that of a rank that was faster.

        The rank that gives it waits until all have heard it, for the store may end with this process: at most the
        limit.
        """
        with self._lock:
            first = not self._said
            if first:
                self._said = self._store.compare_set(self._key("verdict"), "", why).decode() or why
                first = self._said == why
                self._store.add(self._key("heard"), 1)
        until = time.monotonic() + self._ranks.limit
        while first and time.monotonic() < until:
            if self._store.add(self._key("heard"), 0) >= len(self._ranks.numbers):
                break
            time.sleep(0.05)
        return self._said or why

    def ok(self) -> str:
        """Wait for all ranks; return "" if every rank succeeded.

        Raises RankLost if a rank does not report within the limit."""
        if self._store.add(self._key("ok"), 1) == len(self._ranks.numbers):
            self._store.set(self._key("verdict"), "")
        try:
            self._store.wait([self._key("verdict")], timedelta(seconds=self._ranks.limit))
        except RuntimeError as error:
            raise RankLost(
                f"rank {self._ranks.own} received no result of the step from the other ranks for "
                f"{self._ranks.limit:g} s ({_first(error)})"
            ) from error
        return self.said()

    def wait(self, seconds: float) -> str:
        """Wait up to so many seconds for a failure; return "" if there is none, or if the store has ended with its
        process."""
        until = time.monotonic() + seconds
        try:
            while not (said := self.said()) and time.monotonic() < until:
                time.sleep(0.05)
            return said
        except RuntimeError as error:
            logger.info("the ranks' store does not answer: %s", error)
            return self._said or ""

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"


@contextmanager
def limited(groups: list[dist.ProcessGroup], seconds: float) -> Iterator[None]:
    """Limit the time that any collective of these groups waits, within the context."""
    before = [_limit(group) for group in groups]
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    try:
        yield
    finally:
        for group, limit in zip(groups, before, strict=True):
            distributed_c10d._set_pg_timeout(limit, group)


def _limit(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    default: timedelta = distributed_c10d.default_pg_timeout
    return default


def end(groups: list[dist.ProcessGroup]) -> None:
    """End these groups.

    NCCL's collectives, which another rank's exception does not end, then return an error; gloo's have their own limit.
    """
    for group in groups:
        try:
            group.abort()
        except RuntimeError as error:
            logger.warning("a process group could not be destroyed: %s", error)


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
