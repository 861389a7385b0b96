"""Trials of fixes: each change is made to the recorded requests, which are replayed on a device of as many bytes.

torch's own allocator replays them on the simulated device, in a child process; memopt's on a model device. Only changes
with which the run completes are reported. The device of this process is not touched, and all of it ends after some
seconds.
"""

from __future__ import annotations

import itertools
import os
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
from memopt._memory.oom.fixes import Fix, Holder, Situation, Stepping
from memopt._memory.oom.known_run import NEVER, BlockTable, FirstStepRequests, KnownRun, known_run
from memopt._memory.recording.recording import GRADIENTS, OPTIMIZER, Recording
from memopt._runtime.log import logger
from memopt._runtime.process import Child, Children

SECONDS = 30.0  # in all
_LEAST = 0.01  # of the device: what is smaller is not worth a line
_GROWTH = 0.002  # of the device in an iteration: more is a leak, which runs out sooner or later
_TOGETHER = 2  # combinations that are told of
_SMALLEST = 512  # bytes of an allocator's block
_EXPANDABLE = "expandable_segments:True"
_POOL = "pool"
ZERO_GRAD = "optimizer.zero_grad() right after optimizer.step()"


@dataclass(frozen=True)
class RunChange:
    """A change to a run. `apply`: to its blocks; `plan`: of a first optimizer step; `allocator`: other settings, or
    "pool"."""

    text: str
    changes: str = ""
    apply: Callable[[KnownRun, BlockTable], BlockTable] | None = None
    plan: FirstStepRequests | None = None
    allocator: str = ""


@dataclass(frozen=True)
class TriedFixes:
    """Fixes with which the run completes. `why`: the reason if they could not be tested, "" if they were."""

    fixes: list[Fix]
    why: str = ""


def tried(recorded: Callable[[], Recording], now: Situation) -> TriedFixes:
    """Test changes on a recording that ends with the request that failed, or continues beyond it.

    All of it, the recording included, gets so many seconds: it may wait for a device, which may wait for another
    rank's.
    """
    found = TriedFixes([], f"it was not finished after {SECONDS:.0f} s")
    until = time.monotonic() + 0.9 * SECONDS  # so that there is time to end with what has been found

    def work() -> None:
        nonlocal found
        try:
            found = _tried(recorded(), now, until)
        except Exception as error:
            logger.info("what would fit could not be tried", exc_info=True)
            found = TriedFixes([], f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="memopt-oom-trials", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found


def _tried(recording: Recording, now: Situation, until: float) -> TriedFixes:
    run = known_run(recording)
    if run is None:
        return TriedFixes([], "the recording does not have the request that failed")
    plan = None
    if not run.lag and now.phase == "optimizer step" and len(now.optimizers) == 1 and not len(run.steps):
        plan = now.optimizers[0].plan
    if plan is None and now.first:
        return TriedFixes([], "an optimizer had not taken its first step")
    if plan is None and not run.lag:
        return TriedFixes([], "the rest of the step had not been recorded before")
    with _replays(now, until) as replay:
        trial = _Trial(run, now, plan, replay, until)
        if trial.completes("", run.blocks):
            return TriedFixes(
                [], "the recorded requests fit when they are replayed, so something else took memory too"
            )
        fixes = trial.fixes()
    late = time.monotonic() > until and not fixes
    return TriedFixes(fixes, f"it was not finished after {SECONDS:.0f} s" if late else "")


class _Trial:
    def __init__(
        self, run: KnownRun, now: Situation, plan: FirstStepRequests | None, replay: Replay, until: float
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

    def fix(self, changes: tuple[RunChange, ...]) -> Fix | None:
        """Return the fix if the run completes with these changes, and the iteration after it too."""
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

    def _grows(self, rest: BlockTable) -> bool:
        if self.plan is not None:
            return False
        length = self.run.failed - int(self.run.blocks.born[len(self.run.blocks) - 1 - self.run.lag])
        more = rest.live_bytes_at(self.run.failed + length) - rest.live_bytes_at(self.run.failed)
        return more > _GROWTH * self.now.capacity

    def completes(self, allocator: str, blocks: BlockTable) -> int:
        """Return the peak, 0 if the run runs out of memory."""
        return self.replay(allocator or (_POOL if self.now.pool else ""), blocks.operations())


Replay = Callable[[str, torch.Tensor], int]


# ---- the changes -----------------------------------------------------------------------------------------------------


def _changes(run: KnownRun, now: Situation, first_step: bool) -> Iterator[RunChange]:
    if not now.pool:
        if "expandable_segments:True" not in _settings():
            yield RunChange("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", allocator=_EXPANDABLE)
        yield RunChange('memopt.enable(backend="pool")', allocator=_POOL)
    if not first_step:
        yield from _let_go(run, now)
        gradients = gradients_of_earlier_steps(run.blocks, run.steps)
        if _worth(run, now, gradients):
            yield RunChange(ZERO_GRAD, apply=_freed_at_the_step(gradients))
    passing = _passing(run)
    if (
        now.optimizers
        and all(one.loops_fused for one in now.optimizers)
        and (first_step or bool(passing.any()))
    ):
        yield RunChange(
            f"torch.optim.{_kinds(now.optimizers)}(…, fused=True)",
            "the same up to rounding",
            _fused(passing, now.optimizers),
            now.optimizers[0].fused_plan,
        )
    adam = [one for one in now.optimizers if one.eight_bit_plan is not None]
    if adam and (first_step or now.moments):
        # What another optimizer's step takes is not told from theirs.
        gone = passing if len(adam) == len(now.optimizers) else torch.zeros_like(passing)
        yield RunChange(
            f"memopt.optim.{_kinds(adam)}(…, state_bits=8)",
            "other results: states of 8 bits",
            _in_eight_bits(now, gone, adam),
            adam[0].eight_bit_plan,
        )


def _kinds(optimizers: list[Stepping]) -> str:
    return " and ".join(dict.fromkeys(one.kind for one in optimizers))


def _settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _go_together(changes: tuple[RunChange, ...]) -> bool:
    """Return whether changes can be combined: not two allocators, and not two replacements of the optimizer."""
    return (
        sum(bool(change.allocator) for change in changes) < 2
        and sum(change.text.endswith(("fused=True)", "state_bits=8)")) for change in changes) < 2
    )


def _worth(run: KnownRun, now: Situation, which: torch.Tensor) -> bool:
    alive = which & (run.blocks.died == NEVER)
    return int(run.blocks.size[alive].sum()) >= _LEAST * now.capacity


def _let_go(run: KnownRun, now: Situation) -> Iterator[RunChange]:
    """Yield changes that free what a variable holds of earlier iterations.

    A block then lives until the same block of the next iteration is made: until then some name may be bound to it.
    """
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
            text = f"{name} without its graph, if no backward() goes through it: .item() or .detach(){at}"
        yield RunChange(text, apply=_gone_an_iteration_later(which))


def _gone_an_iteration_later(which: torch.Tensor) -> Callable[[KnownRun, BlockTable], BlockTable]:
    def apply(run: KnownRun, blocks: BlockTable) -> BlockTable:
        died, numbers = blocks.died.clone(), which.nonzero().flatten()
        died[numbers] = blocks.born[numbers + run.lag] + 1
        return replace(blocks, died=died)

    return apply


def gradients_of_earlier_steps(blocks: BlockTable, steps: torch.Tensor) -> torch.Tensor:
    """Return a mask of gradients that outlive the step that made them. steps: the times at which steps ended.

    They die in a later step, or are of the step before: until then only zero_grad() would free them. Older ones stay
    for ever, and are not made again.
    """
    made = torch.searchsorted(steps, blocks.born)
    gone = torch.searchsorted(steps, blocks.died)
    before = (blocks.died < NEVER) | (made == len(steps) - 1)
    return (blocks.category == GRADIENTS) & (gone > made) & (made < len(steps)) & before


def _freed_at_the_step(which: torch.Tensor) -> Callable[[KnownRun, BlockTable], BlockTable]:
    def apply(run: KnownRun, blocks: BlockTable) -> BlockTable:
        step = run.steps[torch.searchsorted(run.steps, blocks.born[which])] + 1
        died = blocks.died.clone()
        died[which] = torch.minimum(died[which], step)
        return replace(blocks, died=died)

    return apply


def _passing(run: KnownRun) -> torch.Tensor:
    """Return a mask of the temporary blocks of optimizers' steps."""
    return (run.blocks.category == OPTIMIZER) & (run.blocks.died < NEVER)


def _fused(passing: torch.Tensor, optimizers: list[Stepping]) -> Callable[[KnownRun, BlockTable], BlockTable]:
    """Return the change to a fused optimizer: no temporaries, and each parameter's step count on the device."""

    def apply(run: KnownRun, blocks: BlockTable) -> BlockTable:
        size = blocks.size.clone()
        states = ((blocks.category == OPTIMIZER) & (blocks.died == NEVER)).nonzero().flatten()
        size[states[:1]] += sum(one.parameters for one in optimizers) * _SMALLEST
        return replace(blocks, size=size, there=blocks.there & ~passing)

    return apply


def _in_eight_bits(
    now: Situation, passing: torch.Tensor, optimizers: list[Stepping]
) -> Callable[[KnownRun, BlockTable], BlockTable]:
    def apply(run: KnownRun, blocks: BlockTable) -> BlockTable:
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
    """Yield a function that runs operations through an allocator and returns its peak, 0 if memory or time runs out."""
    with tempfile.TemporaryDirectory(prefix="memopt-oom-") as folder, Children() as children:
        child: Child | None = None

        def replay(allocator: str, operations: torch.Tensor) -> int:
            nonlocal child
            if allocator == _POOL:
                return _by_pool(operations, now.capacity)
            if child is None:
                child = _started(children, now.capacity)
            return _by_torch(child, Path(folder, "operations"), allocator, operations, until)

        yield replay


def _started(children: Children, capacity: int) -> Child:
    """torch's allocator on a simulated device."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return children.start(
        "memopt._memory.oom.replay_child",
        request=capacity,
        environment=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
    )


def _by_torch(child: Child, file: Path, settings: str, operations: torch.Tensor, until: float) -> int:
    if time.monotonic() < until:
        file.write_bytes(array("q", operations.flatten().tolist()).tobytes())
        child.send([str(file), settings])
        try:
            answer = child.hear(max(0.0, until - time.monotonic()))
        except TimeoutError:
            pass  # nor is it asked again
        else:
            if answer is None:
                raise RuntimeError(child.said(1) or "it ended without a message")
            return 0 if answer.what["failed"] is not None else int(answer.what["peak"])
    logger.info("testing what would fit took too long")
    return 0


def _by_pool(operations: torch.Tensor, capacity: int) -> int:
    lines = [
        f"a {block} {size} {stream}" if size else f"f {block} {stream}"
        for block, size, stream in operations.tolist()
    ]
    run: Any = _C.replay(
        "\n".join(lines).encode() + b"\n", capacity, 20, 0, False, True, False, False, 0, False
    )
    return int(run["live_peak"]) if run["completed"] else 0
