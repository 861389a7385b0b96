"""Orders in which the lazy simulated device may run the work of a step's streams, by who is ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memopt import sim


def run_ahead(ahead: str, streams: Sequence[int], choose: random.Random) -> None:
    """Have the device run what is queued, as far as `ahead` says. streams: of copies in and out, and of steps."""
    if ahead == "computation":
        sim.progress(-1, 1)
    elif ahead == "copies in" and streams:
        sim.progress(-1, 1)
        sim.progress(-1, streams[0])
    elif ahead == "computation, the others slowly":
        for stream in streams:
            sim.progress(-1, 1)
            sim.progress(1, stream)
    elif ahead == "steps" and streams:
        sim.progress(-1, 1)
        sim.progress(-1, streams[2])
    elif ahead == "copies" and streams:
        sim.progress(-1, streams[0])
        sim.progress(-1, streams[1])
    elif ahead == "either":
        sim.progress(choose.randrange(4), choose.choice([1, *streams]))
