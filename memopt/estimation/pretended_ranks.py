"""One rank of a job of several, whose others do not exist: collectives go to torch's fake process group, which moves
nothing, so that shards, buckets and gathered parameters have the sizes that they have among `count` ranks.

The rank is alone on its node: LOCAL_RANK is 0, and its card the only one. What a collective would have brought keeps
whatever value it had; where memory hangs on it (an uneven all-to-all, say) it is that of a rank whose peers are like
it."""

from __future__ import annotations

import os
from typing import Any

_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def environment(rank: int, count: int) -> dict[str, str]:
    """What torchrun would set."""
    place = {
        "RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": count, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": count,
    }  # fmt: skip
    missing = {name: value for name, value in _ADDRESS.items() if name not in os.environ}
    return {name: str(value) for name, value in place.items()} | missing | {"TORCHELASTIC_RUN_ID": "estimate"}


def install(rank: int, count: int) -> None:
    """From here on init_process_group() and new_group(), whatever backend they name, make groups that pretend."""
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


def _reduce_in_place(parallel: Any) -> None:
    """DDP asks what a reduction gives, which a fake one does not have: its buckets stay what they are. A hook of the
    script's own, which compresses what is sent, is not called: what it would hold for a while is not counted."""
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
