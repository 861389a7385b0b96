"""Tensors made on one stream and read on others, freed at once, on a device that runs late and in any order: what a
reader sees is right only if an allocator keeps a block back until every stream that used it is done."""

from __future__ import annotations

import random

import torch

import memopt.sim


def race(seed: int, stream_count: int, operations: int = 200) -> int:
    """The number of readers that saw something else than what was written. Leaves the device eager."""
    torch.set_num_threads(1)  # small copies on a busy host: many threads only wait for each other
    choose = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(stream_count)]
    live: list[tuple[torch.Tensor, torch.cuda.Stream, torch.cuda.Event, int]] = []
    seen: list[tuple[torch.Tensor, int]] = []
    memopt.sim.lazy(True)
    for value in range(1, operations + 1):
        home = choose.choice(streams)
        count = choose.choice([1000, 30_000, 150_000, 350_000])
        source = torch.full((count,), value, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(home):
            x = torch.empty(count, dtype=torch.int32, device="cuda")
            x.copy_(source, non_blocking=True)
            live.append((x, home, home.record_event(), value))
        del x
        while len(live) > choose.randrange(8):
            x, home, written, wrote = live.pop(choose.randrange(len(live)))
            for reader in choose.sample(streams, choose.randrange(1, stream_count + 1)):
                if reader == home:
                    continue
                out = torch.empty(x.numel(), dtype=torch.int32).pin_memory()
                reader.wait_event(written)
                with torch.cuda.stream(reader):
                    out.copy_(x, non_blocking=True)
                x.record_stream(reader)
                seen.append((out, wrote))
            del x  # its readers may not have begun
        if choose.random() < 0.5:  # one stream gets ahead of the others
            memopt.sim.progress(choose.randrange(1, 8), choose.choice(streams).cuda_stream)
    live.clear()
    torch.cuda.synchronize()
    memopt.sim.lazy(False)
    return sum(not bool((out == wrote).all()) for out, wrote in seen)
