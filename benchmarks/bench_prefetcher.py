"""Batches on their way to a device: memopt.data.Prefetcher beside what one writes without it.

    DataLoader     torch's, pin_memory=True, and batch.to(device, non_blocking=True)
    by hand        the same, and the next batch sent on a stream of its own, with record_stream: many training
                   scripts' own prefetcher
    memopt         memopt.data.Prefetcher; "pinned" where the DataLoader pins

On the simulated device copies are made by the host, in the call that queues them, and kernels do nothing, on any
side: so what is timed is the host's work and the bytes that travel; that they overlap a step is shown by
tests/sim/test_prefetcher_order.py. A GPU's times need --cuda.

Loaders and prefetchers are made once and iterated anew in each call, as a program does each epoch: so on every side
pinned memory is there from the call before.

- images: batches of 64 x 3 x 224 x 224. The first two are made float32 on the host (float, div, sub, div, as ToTensor
  and Normalize do it), the others are widened on the device.
- as they come: float32 images that are only copied; a dict of three rows of tokens.
- a thread: a step during which the host waits for the device, beside a loader whose work leaves the GIL, holds it, or
  is done by a worker. "in a thread": the loader in a background thread, two batches ahead, under the same Prefetcher.
- on the CPU: widening by memopt's loop and by torch's operations.
- pinned bytes of an epoch."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
DATALOADER, BY_HAND, MEMOPT, MEMOPT_PINNED = "DataLoader", "by hand", "memopt", "memopt, pinned"
NONE, IN_A_THREAD = "none", "in a thread"


def on_the_host(x: Any) -> Any:
    """Four passes, as transforms do them."""
    import torch

    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return x.float().div_(255).sub_(mean).div_(std)


class Batches:
    """A dataset whose items are batches: so the loader itself costs little."""

    def __init__(self, made: list[Any], prepare: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.made, self.prepare = made, prepare

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> Any:
        return self.prepare(self.made[index])


def loader(made: list[Any], prepare: Callable[[Any], Any] = lambda batch: batch, *, pin: bool) -> Any:
    import torch

    return torch.utils.data.DataLoader(Batches(made, prepare), batch_size=None, pin_memory=pin)  # type: ignore[arg-type]


def moved(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
    return batch.to(device, non_blocking=True)


class ByHand:
    """The next batch is on its way while one is in use."""

    def __init__(self, batches: Iterable[Any], device: str) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[Any]:
        import torch

        side, source, coming = torch.cuda.Stream(), iter(self.batches), None
        while True:
            found = next(source, None)
            following = None
            if found is not None:
                with torch.cuda.stream(side):
                    following = moved(found, self.device)
            if coming is not None:
                yield coming
            if following is None:
                return
            torch.cuda.current_stream().wait_stream(side)
            for tensor in following.values() if isinstance(following, dict) else [following]:
                tensor.record_stream(torch.cuda.current_stream())
            coming = following


def all_of(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def all_moved(batches: Iterable[Any], device: str) -> None:
    for batch in batches:
        moved(batch, device)


# ---- a thread -------------------------------------------------------------------------------------------------------


class InAThread:
    """A loader's batches, two ahead, by a background thread."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(2)

        def load() -> None:
            for batch in self.batches:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=load, daemon=True).start()
        while (batch := ready.get()) is not None:
            yield batch


def unpacks(packed: Any) -> Any:
    """Leaves the GIL."""
    import torch

    return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)


def counts(packed: Any) -> Any:
    """Holds it."""
    import torch

    total = 0
    for n in range(150_000):
        total += n * n
    return torch.tensor([total])


def stepping(batches: Iterable[Any], waits: float) -> None:
    """Steps of Python's own work, as launches are, and of the host's wait for the device."""
    for _ in batches:
        total = 0
        for n in range(30_000):
            total += n
        time.sleep(waits)


def compare_threads(report: harness.Report, quick: bool) -> None:
    import torch

    from memopt.data import Prefetcher

    packed = [zlib.compress(os.urandom(1 << 20) + bytes(3 << 20), 1) for _ in range(4)]
    count = 4 if quick else 12

    def made(prepare: Callable[[Any], Any], workers: int) -> Any:
        batches = Batches([packed[n % 4] for n in range(count)], prepare)
        return torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)  # type: ignore[arg-type]

    for case, prepare, workers in (
        ("a thread: a loader that leaves the GIL", unpacks, 0),
        ("a thread: a loader that holds the GIL", counts, 0),
        ("a thread: a loader with a worker", unpacks, 1),
    ):
        source = made(prepare, workers)
        none, in_a_thread = Prefetcher(source, "cuda"), Prefetcher(InAThread(source), "cuda")
        report.compare(
            f"{case}, steps of 10 ms",
            {
                NONE: lambda b=none: stepping(b, 0.01),
                IN_A_THREAD: lambda b=in_a_thread: stepping(b, 0.01),
            },
            calls=1,
        )


# ---- the rest -------------------------------------------------------------------------------------------------------


def compare_epochs(
    report: harness.Report, case: str, theirs: Any, ours: list[Any], widened: dict[str, Any]
) -> None:
    """theirs: a loader of what torch's side copies. ours: two of what memopt's does, the second pins."""
    from memopt.data import Prefetcher

    by_hand = ByHand(theirs, "cuda")
    memopt, memopt_pinned = (Prefetcher(one, "cuda", **widened) for one in ours)
    report.compare(
        case,
        {
            DATALOADER: lambda: all_moved(theirs, "cuda"),
            BY_HAND: lambda: all_of(by_hand),
            MEMOPT: lambda: all_of(memopt),
            MEMOPT_PINNED: lambda: all_of(memopt_pinned),
        },
        calls=1,
    )


def compare_images(report: harness.Report, quick: bool) -> None:
    import torch

    from memopt.data import Prefetcher

    count, size = (3, 112) if quick else (8, 224)
    made = [torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8) for _ in range(count)]
    shape = f"64 x 3 x {size} x {size}"
    widened = {"widen": True, "scale": True, "mean": MEAN, "std": STD}
    compare_epochs(
        report,
        f"images, {count} of {shape}",
        loader(made, on_the_host, pin=True),
        [loader(made, pin=False), loader(made, pin=True)],
        widened,
    )
    wide = [on_the_host(x) for x in made]
    tokens = [{k: torch.randint(50_000, (8, 1024)) for k in ("ids", "mask", "labels")} for _ in range(50)]
    for case, batches in (
        (f"as they come: {count} of float32 {shape}", wide),
        ("as they come: 50 of tokens", tokens),
    ):
        pinning = loader(batches, pin=True)
        compare_epochs(report, case, pinning, [loader(batches, pin=False), pinning], {})
    channels_last = [x.to(memory_format=torch.channels_last) for x in made]
    for case, batches in (("NCHW", made), ("channels_last", channels_last)):
        report.compare(
            f"on the CPU: {case}, {count} of {shape}",
            {
                "torch": lambda b=batches: [on_the_host(x) for x in b],
                MEMOPT: lambda b=batches: all_of(Prefetcher(b, "cpu", **widened)),  # type: ignore[arg-type]
            },
            calls=1,
        )


def record_bytes(report: harness.Report, quick: bool) -> None:
    """In a fresh process each would begin with none; here what is pinned is given back between them."""
    import gc

    import torch

    from memopt.data import Prefetcher

    size = 112 if quick else 224
    made = [torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8) for _ in range(8)]
    for case, prepare, more in (
        ("images", on_the_host, {"widen": True, "scale": True, "mean": MEAN, "std": STD}),
        ("bytes as they come", lambda x: x, {}),
    ):
        gc.collect()
        torch._C._host_emptyCache()
        before = pinned_now()
        all_of(ByHand(loader(made, prepare, pin=True), "cuda"))
        torch.cuda.synchronize()
        theirs = pinned_now() - before
        torch._C._host_emptyCache()
        batches = Prefetcher(loader(made, pin=False), "cuda", **more)  # type: ignore[arg-type]
        all_of(batches)
        torch.cuda.synchronize()
        report.record(
            f"pinned bytes, {case}: 64 x 3 x {size} x {size}",
            {BY_HAND: theirs, MEMOPT: batches.pinned_bytes},
            unit="bytes",
            peer=BY_HAND,
        )


def pinned_now() -> int:
    """By torch's allocator of pinned memory."""
    import torch

    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    if not options.cuda:
        import memopt.sim

        memopt.sim.activate(memory="8GiB")
        memopt.sim.emulate("memopt_widen", lambda *_: None, [64])
    report = harness.Report("bench_prefetcher", options, claim="batches on their way to a device")
    compare_images(report, options.quick)
    compare_threads(report, options.quick)
    record_bytes(report, options.quick)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
