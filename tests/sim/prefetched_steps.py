"""Steps that read prefetched batches, on a device that does its work as late as it may or, on one stream, as early: how
many of them saw another batch than theirs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from memopt import _C, sim
from memopt.data import Prefetcher

CUDA = torch.device("cuda", 0)
COUNT = 1 << 18  # numbers of a batch: not of the allocator's small ones
STEPS = 8


def numbers(step: int) -> torch.Tensor:
    """None twice, so what is left in memory is not what is looked for."""
    return torch.full((COUNT,), step + 1, dtype=torch.int64)


def small(step: int) -> torch.Tensor:
    return torch.full((1, 1, 512, COUNT // 512), step + 1, dtype=torch.uint8)


def pinned(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    return lambda step: make(step).pin_memory()


def in_pinned_memory_that_serves_again(step: int) -> torch.Tensor:
    """As a loader's pin_memory does: freed, torch's pinned memory is the next tensor's at once, unless it is known to
    be read."""
    return torch.empty(COUNT, dtype=torch.int64, pin_memory=True).copy_(numbers(step))


class Stream:
    """Computation: copies, since they are what the simulated device does at its own time."""

    def __init__(self, ahead: Callable[[], object], use: torch.cuda.Stream | None = None) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ahead, self.use = ahead, use or torch.cuda.current_stream()

    def step(self, batch: torch.Tensor, want: torch.Tensor) -> None:
        """Reads the batch, and writes over memory of its size afterwards: what the batch had, if it is free."""
        seen = torch.empty_like(want, device="cpu").fill_(0).pin_memory()
        self.pairs.append((seen, want))
        self.ahead()
        with torch.cuda.stream(self.use):
            seen.copy_(batch, non_blocking=True)

    def wrong(self) -> int:
        torch.cuda.synchronize()
        return sum(not torch.equal(seen, want) for seen, want in self.pairs)


def ahead_by(which: str, choose: random.Random) -> Callable[[], object]:
    copies = _C.copy_counts(0)["stream_in"]
    return {
        "computation": lambda: sim.progress(-1, 1),
        "copies": lambda: sim.progress(-1, copies),
        "neither": lambda: None,
        "either": lambda: sim.progress(choose.randrange(4), choose.choice([1, copies])),
    }[which]


def wrong_after(
    which: str, make: Callable[[int], torch.Tensor], seed: int = 0, depth: int = 2, *, other: bool = False
) -> int:
    """The number of steps that saw another batch than theirs. other: they run on a stream of their own, but for each
    third."""
    choose = random.Random(seed)
    widen = True if make(0).dtype == torch.uint8 else None
    want = [make(step).to(torch.float32 if widen else torch.int64) for step in range(STEPS)]
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    sim.lazy(True)
    computation = Stream(ahead_by(which, choose), aside if other else None)

    def loader() -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            yield make(step)

    it = iter(Prefetcher(loader(), CUDA, depth, widen=widen))
    for step in range(STEPS):
        with torch.cuda.stream(aside if other and step % 3 else torch.cuda.current_stream()):
            batch = next(it)
            computation.use = torch.cuda.current_stream()
            computation.step(batch, want[step])
        place = batch.data_ptr()
        del batch  # its memory is the next one's, whoever reads it still
        assert place
    found = computation.wrong()
    sim.lazy(False)
    return found


MADE = {
    "pageable": numbers,
    "pinned": in_pinned_memory_that_serves_again,
    "widened": small,
    "widened, pinned": pinned(small),
}
