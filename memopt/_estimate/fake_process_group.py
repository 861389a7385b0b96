"""One rank of a job of several, without the others.

Collectives go to torch's fake process group, which moves nothing, so that shards, buckets and gathered parameters have
the sizes that they have among `count` ranks. The rank is alone on its node: LOCAL_RANK is 0, and its card the only one.
The result of a collective keeps its previous values; where memory depends on them (an uneven all-to-all, say), it is
that of a rank whose peers are like it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def environment(rank: int, count: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set."""
    place = {
        "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": count, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": count,
    }  # fmt: skip
    missing = {name: value for name, value in _ADDRESS.items() if name not in os.environ}
    return {name: str(value) for name, value in place.items()} | missing | {"TORCHELASTIC_RUN_ID": "estimate"}


def install(rank: int, count: int) -> None:
    """Make init_process_group() and new_group() create fake groups from now on, whatever backend they name."""
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, group = distributed_c10d.init_process_group, distributed_c10d.new_group

    def init_process_group(*_: Any, **named: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=count, group_name=named.get("group_name", ""))

    def new_group(ranks: Any = None, *_: Any, **named: Any) -> Any:
        kept = {name: named[name] for name in ("group_desc", "use_local_synchronization") if name in named}
        return group(ranks, backend="fake", **kept)

    _reduce_in_place(DistributedDataParallel)
    for module in (dist, distributed_c10d, device_mesh):
        for name, made in (("init_process_group", init_process_group), ("new_group", new_group)):
            if hasattr(module, name):
                setattr(module, name, made)


def install_in_started(applies: Callable[[], bool]) -> None:
    """The same, once a process that `applies` is to calls init_process_group(), as the rank that it says there."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named).arguments
        count = given.get("world_size", -1)
        rank = given.get("rank", -1)
        count = int(os.environ.get("WORLD_SIZE", "1")) if count < 0 else count
        rank = int(os.environ.get("RANK", "0")) if rank < 0 else rank
        if count < 2 or not applies():
            original(*args, **named)
            return
        dist.init_process_group = distributed_c10d.init_process_group = original
        install(rank, count)
        dist.init_process_group(group_name=given.get("group_name", ""))

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def _reduce_in_place(parallel: Any) -> None:
    """Leave DDP's buckets as they are: DDP asks for a reduction's result, which a fake reduction does not have.

    A communication hook of the script's own, which compresses gradients, is not called, so its temporaries do not
    count.
    """
    import torch

    make, register = parallel.__init__, parallel.register_comm_hook

    def reduced(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__.clear()  # torch checks them, and these are texts

    def init(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        register(self, None, reduced)

    parallel.__init__ = init
    parallel.register_comm_hook = lambda self, state, hook: None
