"""Each change is made to what was recorded, and the requests are put to the allocator again, on a device of as many
bytes: torch's own on the simulated device, in a child process, memopt's on a device of numbers. Only what then
completes is told of. The device of this process is not touched, and all of it ends after some seconds."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memopt import _C
from memopt.log import logger
from memopt.oom.fixes import Fix, Holder, Situation, Stepping
from memopt.oom.known_run import NEVER, Blocks, KnownRun, Plan, known_run
from memopt.profiling.recording import GRADIENTS, OPTIMIZER, Recording

SECONDS = 30.0  # in all
_LEAST = 0.01  # of the device: what is smaller is not worth a line
_GROWTH = 0.002  # of the device in an iteration: more is a leak, which runs out sooner or later
_TOGETHER = 2  # combinations that are told of
_SMALLEST = 512  # bytes of an allocator's block
_EXPANDABLE = "expandable_segments:True"
_POOL = "pool"

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from memopt.oom.replay_child import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Change:
    """`apply`: to the run's blocks; `plan`: of a first optimizer step; `allocator`: other settings, or "pool"."""

    text: str
    changes: str = ""
    apply: Callable[[KnownRun, Blocks], Blocks] | None = None
    plan: Plan | None = None
    allocator: str = ""


@dataclass(frozen=True)
class Tried:
    """`why`: what kept it from being tried, "" where nothing did."""

    fixes: list[Fix]
    why: str = ""


def tried(recorded: Callable[[], Recording], now: Situation) -> Tried:
    """`recorded` gives a recording that ends with the request that failed, or goes beyond it. It and all that is done
    with it get so many seconds: it may wait for a device, which may wait for another rank's."""
    found = Tried([], f"it was not done after {SECONDS:.0f} s")
    until = time.monotonic() + 0.9 * SECONDS  # so that there is time to end with what has been found

    def work() -> None:
        nonlocal found
        try:
            found = _tried(recorded(), now, until)
        except Exception as error:
            logger.info("what would fit could not be tried", exc_info=True)
            found = Tried([], f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="memopt-oom-trials", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found


def _tried(recording: Recording, now: Situation, until: float) -> Tried:
    run = known_run(recording)
    if run is None:
        return Tried([], "the recording does not have the request that failed")
    plan = None
    if not run.lag and now.phase == "optimizer step" and len(now.optimizers) == 1 and not len(run.steps):
        plan = now.optimizers[0].plan
    if plan is None and now.first:
        return Tried([], "an optimizer had not taken its first step")
    if plan is None and not run.lag:
        return Tried([], "the rest of the step had not been seen before")
    with _replays(now, until) as replay:
        trial = _Trial(run, now, plan, replay, until)
        if trial.completes("", run.blocks):
            return Tried(
                [], "the recorded requests fit when they are made again: something else took memory, too"
            )
        fixes = trial.fixes()
    late = time.monotonic() > until and not fixes
    return Tried(fixes, f"it was not done after {SECONDS:.0f} s" if late else "")


class _Trial:
    def __init__(
        self, run: KnownRun, now: Situation, plan: Plan | None, replay: Replay, until: float
    ) -> None:
        self.run, self.now, self.plan, self.replay, self.until = run, now, plan, replay, until

    def fixes(self) -> list[Fix]:
        alone = list(_changes(self.run, self.now, self.plan is not None))
        found = [fix for change in alone if (fix := self.fix((change,)))]
        for count in (2, 3):
            for together in itertools.combinations(alone, count) if not found else ():
                if _go_together(together) and (fix := self.fix(together)):
                    found.append(fix)
                    if len(found) == _TOGETHER:
                        break
        return sorted(found, key=lambda fix: bool(fix.changes))

    def fix(self, changes: tuple[Change, ...]) -> Fix | None:
        """Where the run completes with them, and an iteration after it."""
        if time.monotonic() > self.until:
            return None
        blocks = self.run.blocks
        for change in changes:
            if change.apply is not None:
                blocks = change.apply(self.run, blocks)
        if self.plan is not None:
            plan = next((change.plan for change in changes if change.plan is not None), self.plan)
            rest = self.run.first_iteration_again(plan)
        else:
            rest = self.run.completed(blocks)
        if rest is None or self._grows(rest):
            return None
        allocator = next((change.allocator for change in changes if change.allocator), "")
        peak = self.completes(allocator, rest)
        if not peak:
            return None
        said = ", ".join(dict.fromkeys(change.changes for change in changes if change.changes))
        return Fix(" + ".join(change.text for change in changes), peak, said)

    def _grows(self, rest: Blocks) -> bool:
        if self.plan is not None:
            return False
        length = self.run.failed - int(self.run.blocks.born[len(self.run.blocks) - 1 - self.run.lag])
        more = rest.live_bytes_at(self.run.failed + length) - rest.live_bytes_at(self.run.failed)
        return more > _GROWTH * self.now.capacity

    def completes(self, allocator: str, blocks: Blocks) -> int:
        """The peak, 0 where it runs out."""
        return self.replay(allocator or (_POOL if self.now.pool else ""), blocks.operations())


Replay = Callable[[str, torch.Tensor], int]


# ---- the changes -----------------------------------------------------------------------------------------------------


def _changes(run: KnownRun, now: Situation, first_step: bool) -> Iterator[Change]:
    if not now.pool:
        if "expandable_segments:True" not in _settings():
            yield Change("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", allocator=_EXPANDABLE)
        yield Change('memopt.enable(backend="pool")', allocator=_POOL)
    if not first_step:
        yield from _let_go(run, now)
        gradients = _gradients_of_earlier_steps(run)
        if _worth(run, now, gradients):
            yield Change(
                "optimizer.zero_grad() right after optimizer.step()", apply=_freed_at_the_step(gradients)
            )
    passing = _passing(run)
    if (
        now.optimizers
        and all(one.loops_fused for one in now.optimizers)
        and (first_step or bool(passing.any()))
    ):
        yield Change(
            f"torch.optim.{_kinds(now.optimizers)}(…, fused=True)",
            "the same up to rounding",
            _fused(passing, now.optimizers),
            now.optimizers[0].fused_plan,
        )
    adam = [one for one in now.optimizers if one.eight_bit_plan is not None]
    if adam and (first_step or now.moments):
        # What another optimizer's step takes is not told from theirs.
        gone = passing if len(adam) == len(now.optimizers) else torch.zeros_like(passing)
        yield Change(
            f"memopt.optim.{_kinds(adam)}(…, state_bits=8)",
            "other results: states of 8 bits",
            _in_eight_bits(now, gone, adam),
            adam[0].eight_bit_plan,
        )


def _kinds(optimizers: list[Stepping]) -> str:
    return " and ".join(dict.fromkeys(one.kind for one in optimizers))


def _settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _go_together(changes: tuple[Change, ...]) -> bool:
    """Not two allocators, and not two that write the optimizer anew."""
    return (
        sum(bool(change.allocator) for change in changes) < 2
        and sum(change.text.endswith(("fused=True)", "state_bits=8)")) for change in changes) < 2
    )


def _worth(run: KnownRun, now: Situation, which: torch.Tensor) -> bool:
    alive = which & (run.blocks.died == NEVER)
    return int(run.blocks.size[alive].sum()) >= _LEAST * now.capacity


def _let_go(run: KnownRun, now: Situation) -> Iterator[Change]:
    """What a variable holds of earlier iterations. Without it a block lives until the same block of the next one is
    made: until then some name may be bound to it."""
    blocks = run.blocks
    kept = (blocks.died == NEVER) & (blocks.category > OPTIMIZER) & ~run.workspaces
    kept &= torch.arange(len(blocks)) < len(blocks) - run.lag
    # Of the same thing there is another one in the next iteration, which stays as well.
    numbers = kept.nonzero().flatten()
    next_one = numbers + run.lag
    numbers = numbers[(blocks.size[next_one] == blocks.size[numbers]) & (blocks.died[next_one] == NEVER)]
    # The last of them may have another name, too: the loop's own. So each of an iteration's has that of the most.
    names: dict[int, Counter[Holder]] = {}
    for block in numbers.tolist():
        holder = now.holders.get(int(run.address[block]))
        if holder is not None:
            names.setdefault(block % run.lag, Counter())[holder] += 1
    named: dict[Holder, list[int]] = {}
    for block in numbers.tolist():
        if block % run.lag in names:
            named.setdefault(names[block % run.lag].most_common(1)[0][0], []).append(block)
    for (name, where, in_graph), held in named.items():
        which = torch.zeros(len(blocks), dtype=torch.bool)
        which[held] = True
        if not _worth(run, now, which):
            continue
        at = f" ({where})" if where else ""
        if not in_graph:
            text = f"{name} kept on the host, or not at all{at}"
        elif now.evaluating:
            text = f"torch.no_grad() around the evaluation, or {name} without its graph: .item() or .detach(){at}"
        else:
            text = f"{name} without its graph, where no backward() goes through it: .item() or .detach(){at}"
        yield Change(text, apply=_gone_an_iteration_later(which))


def _gone_an_iteration_later(which: torch.Tensor) -> Callable[[KnownRun, Blocks], Blocks]:
    def apply(run: KnownRun, blocks: Blocks) -> Blocks:
        died, numbers = blocks.died.clone(), which.nonzero().flatten()
        died[numbers] = blocks.born[numbers + run.lag] + 1
        return replace(blocks, died=died)

    return apply


def _gradients_of_earlier_steps(run: KnownRun) -> torch.Tensor:
    """That die in a later step than the one that made them, or are of the step before: until then nothing but
    zero_grad() lets go of them. What is older stays for ever, and is not made again."""
    blocks = run.blocks
    made = torch.searchsorted(run.steps, blocks.born)
    gone = torch.searchsorted(run.steps, blocks.died)
    before = (blocks.died < NEVER) | (made == len(run.steps) - 1)
    return (blocks.category == GRADIENTS) & (gone > made) & (made < len(run.steps)) & before


def _freed_at_the_step(which: torch.Tensor) -> Callable[[KnownRun, Blocks], Blocks]:
    def apply(run: KnownRun, blocks: Blocks) -> Blocks:
        step = run.steps[torch.searchsorted(run.steps, blocks.born[which])] + 1
        died = blocks.died.clone()
        died[which] = torch.minimum(died[which], step)
        return replace(blocks, died=died)

    return apply


def _passing(run: KnownRun) -> torch.Tensor:
    """What optimizers' steps take for as long as they run."""
    return (run.blocks.category == OPTIMIZER) & (run.blocks.died < NEVER)


def _fused(passing: torch.Tensor, optimizers: list[Stepping]) -> Callable[[KnownRun, Blocks], Blocks]:
    """Nothing passes, and the count of steps of each parameter is a tensor on the device."""

    def apply(run: KnownRun, blocks: Blocks) -> Blocks:
        size = blocks.size.clone()
        states = ((blocks.category == OPTIMIZER) & (blocks.died == NEVER)).nonzero().flatten()
        size[states[:1]] += sum(one.parameters for one in optimizers) * _SMALLEST
        return replace(blocks, size=size, there=blocks.there & ~passing)

    return apply


def _in_eight_bits(
    now: Situation, passing: torch.Tensor, optimizers: list[Stepping]
) -> Callable[[KnownRun, Blocks], Blocks]:
    def apply(run: KnownRun, blocks: Blocks) -> Blocks:
        size = blocks.size.clone()
        for block in (blocks.died == NEVER).nonzero().flatten().tolist():
            parts = now.moments.get(int(run.address[block]))
            if parts is not None:
                size[block] = sum(-(-part // _SMALLEST) * _SMALLEST for part in parts)
        return _fused(passing, optimizers)(run, replace(blocks, size=size))

    return apply


# ---- the allocators --------------------------------------------------------------------------------------------------


@contextmanager
def _replays(now: Situation, until: float) -> Iterator[Replay]:
    """What puts operations to an allocator: its peak, 0 where it runs out, or where the child is ended at `until`."""
    with tempfile.TemporaryDirectory(prefix="memopt-oom-") as folder:
        child: _Child | None = None

        def replay(allocator: str, operations: torch.Tensor) -> int:
            nonlocal child
            if allocator == _POOL:
                return _by_pool(operations, now.capacity)
            if child is None:
                child = _Child(folder, now.capacity, until)
            return child.peak(allocator, operations)

        try:
            yield replay
        finally:
            if child is not None:
                child.end()


class _Child:
    """torch's allocator on a simulated device."""

    def __init__(self, folder: str, capacity: int, until: float) -> None:
        self.folder = Path(folder)
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), str(capacity)],
            env=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.timer = threading.Timer(max(0.0, until - time.monotonic()), self.process.kill)
        self.timer.daemon = True
        self.timer.start()

    def peak(self, settings: str, operations: torch.Tensor) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        file = self.folder / "operations"
        file.write_bytes(array("q", operations.flatten().tolist()).tobytes())
        try:
            self.process.stdin.write(json.dumps([str(file), settings]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._nothing()
        line = self.process.stdout.readline()
        if not line:
            return self._nothing()
        told = json.loads(line)
        return 0 if told["failed"] is not None else int(told["peak"])

    def _nothing(self) -> int:
        _, complaint = self.process.communicate()
        if self.process.returncode != -9:
            raise RuntimeError(complaint.strip().splitlines()[-1] if complaint.strip() else "it said nothing")
        logger.info("trying what would fit took too long")
        return 0

    def end(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.communicate()


def _by_pool(operations: torch.Tensor, capacity: int) -> int:
    lines = [
        f"a {block} {size} {stream}" if size else f"f {block} {stream}"
        for block, size, stream in operations.tolist()
    ]
    run: Any = _C.replay(
        "\n".join(lines).encode() + b"\n", capacity, 20, 0, False, True, False, False, 0, False
    )
    return int(run["live_peak"]) if run["completed"] else 0
