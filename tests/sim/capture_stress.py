"""Four threads beside each other: one captures graphs, one hands blocks to the capturing stream and frees them, one
gives the cache back, one asks for more than there is. A capture stays open until each of the others has done its share,
so that none of them may wait for its end. `python capture_stress.py memopt|native SEED ROUNDS` prints what came of it.
With torch's native allocator, which a block that is recorded on a capturing stream brings down, blocks are recorded on
another."""

from __future__ import annotations

import collections
import json
import random
import sys
import threading
import time
from collections.abc import Callable

import memopt.sim

MIB = 1 << 20
SHARE = 4  # turns of each other thread while a capture is open


class Stress:
    def __init__(self, seed: int, rounds: int, native: bool):
        self.seed, self.rounds = seed, rounds
        self.capturing_stream = torch.cuda.Stream()
        self.recorded_stream = torch.cuda.Stream() if native else self.capturing_stream
        self.changed = threading.Condition()
        self.turns: collections.Counter[str] = collections.Counter()
        self.aims: dict[str, int] = {}
        self.longest: dict[str, float] = {}
        self.errors: collections.Counter[str] = collections.Counter()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.over = False

    def timed(self, what: str, call: Callable[[], object]) -> object:
        """Return the call's result, None if it raises; its time and its error are recorded."""
        begun, result = time.perf_counter(), None
        try:
            result = call()
        except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are
            self.errors[f"{what}: {type(error).__name__}"] += 1
        self.longest[what] = max(self.longest.get(what, 0.0), time.perf_counter() - begun)
        return result

    def block(self, what: str, mib: int) -> torch.Tensor | None:
        return self.timed(what, lambda: torch.empty(mib * MIB, dtype=torch.uint8, device="cuda"))

    def turn(self, name: str) -> None:
        with self.changed:
            self.turns[name] += 1
            self.changed.notify_all()

    def capture(self) -> None:
        try:
            for _ in range(self.rounds):
                self.timed("capture", self.capture_once)
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()

    def capture_once(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.capturing_stream, capture_error_mode="thread_local"):
            x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            with self.changed:
                self.aims = {name: self.turns[name] + SHARE for name in ("record", "empty", "ask")}
                self.changed.notify_all()
                self.changed.wait_for(lambda: all(self.turns[name] >= aim for name, aim in self.aims.items()))
            y = self.block("request in a capture", 1)
            if y is not None:
                y.copy_(x)
        graph.replay()
        self.graphs.append(graph)

    def record(self, choose: random.Random) -> None:
        x = self.block("request", choose.randrange(1, 9))
        if x is not None:
            self.timed("record_stream", lambda: x.record_stream(self.recorded_stream))

    def empty(self, choose: random.Random) -> None:
        blocks = [self.block("request", choose.randrange(1, 5)) for _ in range(3)]
        blocks.clear()
        self.timed("empty_cache", torch.cuda.empty_cache)

    def ask(self, choose: random.Random) -> None:
        self.block("request that is refused", 1000)
        self.block("request", choose.randrange(1, 5))

    def repeat(self, name: str) -> None:
        choose = random.Random(f"{self.seed} {name}")
        with torch.cuda.stream(torch.cuda.Stream()):
            while True:
                with self.changed:  # no more than its share: what is recorded stays until the capture's end
                    self.changed.wait_for(lambda: self.over or self.turns[name] < self.aims.get(name, 0))
                    if self.over:
                        return
                getattr(self, name)(choose)
                self.turn(name)

    def run(self) -> None:
        torch.cuda.synchronize()
        others = [threading.Thread(target=self.repeat, args=(name,)) for name in ("record", "empty", "ask")]
        for thread in others:
            thread.start()
        self.capture()
        for thread in others:
            thread.join()


if __name__ == "__main__":
    memopt.sim.activate(memory="512MiB")
    import torch

    import memopt

    which, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if which == "memopt":
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    stress = Stress(seed, rounds, which == "native")
    stress.run()
    stats = memopt.cuda.memory_stats() if which == "memopt" else {}
    print(
        json.dumps(
            {
                "longest": stress.longest,
                "errors": stress.errors,
                "turns": stress.turns,
                "graphs": len(stress.graphs),
                "host_waits": stats.get("host_waits"),
            }
        )
    )
