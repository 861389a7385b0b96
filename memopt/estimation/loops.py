"""A training script's loops, each of which ends once it has shown what it takes, so that the script comes to its end.

A loop in whose iterations an optimizer steps ends after a few steps; one around it, as over epochs, after a few
iterations. In its last iteration all is due that the script does every so many of them, as an evaluation or
saving. A loader that gives batches and sees no backward pass evaluates, and skips to its last batch. A loop that
takes no steps is left as it is. loop_source.py has the script's own loops ask here before each iteration, and
loader_passes.py has DataLoaders do so."""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt.estimation.watch import Stopped

_EPOCHS = 10  # iterations of a loop around the one with the steps
_LONG = 20.0  # seconds, after which two of them suffice
_FOR_OTHERS = 5  # times as many steps, while another optimizer has hardly stepped, as a GAN's generator
_PASSES = 20  # over a loader, of which nothing can be ended that they are in
_UNASKED = 40  # steps in a row that no loop has asked about


class Loop:
    """One execution of one. `own`: steps of each optimizer that no loop within took; `epochs`: iterations with steps
    that loops within took; `turn`: how often a loop at this place has come to steps; `fed`: batches come from a
    DataLoader that ends itself; `periodic`: the loop that does things every so many iterations, this one or the one
    that it feeds, "" for none; `last`: so does the present one."""

    def __init__(self, place: object, where: str, seen: int, periodic: str = "") -> None:
        self.place, self.where, self.seen, self.periodic = place, where, seen, periodic
        self.last, self.length = False, 0
        self.own: Counter[int] = Counter()
        self.epochs = self.turn = 0
        self.within = self.fed = False
        self.since = time.monotonic()


class Loops:
    """`steps`: after how many of an optimizer its loop ends; None: nothing ends before its time. `stop`: the
    script ends with that step, and no loop. `done`: the most that
    an optimizer has taken; `backwards`: backward passes, which count as steps where there is no optimizer."""

    def __init__(self, steps: int | None, stop: bool = False) -> None:
        self.steps, self._stop = (None if stop else steps), (steps if stop else None)
        self.done = self.taken = self.backwards = 0
        self.short: dict[str, str] = {}  # what was ended, by where it is: how
        self.last: dict[
            str, int
        ] = {}  # periodic loops in their last iteration: of how many, 0 where that is not known
        self.early: dict[
            str, Any
        ] = {}  # lines that came before their turn: what it is every so many iterations
        self._stack: list[Loop] = []
        self._turns: Counter[object] = Counter()
        self._repeats: set[object] = (
            set()
        )  # places where an optimizer has stepped twice: not loops over optimizers
        self._unasked = 0
        self._of_each: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._watch_optimizers()
        self._watch_backward()

    # ---- steps --------------------------------------------------------------------------------------------------

    def _watch_optimizers(self) -> None:
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            self._of_each[optimizer] = 0
            original(optimizer, *args, **kwargs)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._stepped)

    def _watch_backward(self) -> None:
        engine: Any = torch.autograd
        original = engine._engine_run_backward

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.backwards += 1
            if not self._of_each:
                self._took(0, self.backwards)
            return result

        engine._engine_run_backward = run

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._of_each[optimizer] = self._of_each.get(optimizer, 0) + 1
        self.done = max(self.done, steps)
        if self._stop is not None and self.done >= self._stop:
            raise Stopped("steps")
        self._took(id(optimizer), steps)

    def _took(self, who: int, steps: int) -> None:
        self.taken += 1
        self._unasked += 1
        if self._stack:
            *around, loop = self._stack
            self._count(loop, who)
            if loop.place in self._repeats:
                for one in around:
                    one.within = True
            if self.steps is not None and loop.turn > _PASSES and not any(not one.fed for one in around):
                raise Stopped("steps")
        if self.steps is not None and self._unasked > _FOR_OTHERS * self.steps + _UNASKED:
            raise Stopped("steps")

    def due(self, where: str, line: str, every: Any) -> bool:
        """Whether what comes every so many iterations of a loop has to come out of its turn, because this one is the
        last; not in a loop that has fewer of them."""
        if where not in self.last or (isinstance(every, int) and 0 < self.last[where] < every):
            return False
        self.early[line] = every
        return True

    def _count(self, loop: Loop, who: int) -> None:
        loop.own[who] += 1
        if loop.own[who] > 1:
            self._repeats.add(loop.place)
        if not loop.turn:
            self._turns[loop.place] += 1
            loop.turn = self._turns[loop.place]

    # ---- loops --------------------------------------------------------------------------------------------------

    def enter(self, place: object, where: str, periodic: bool = False) -> Loop:
        loop = Loop(place, where, self.taken, where if periodic else "")
        self._stack.append(loop)
        return loop

    def leave(self, loop: Loop) -> None:
        if loop in self._stack:
            place = self._stack.index(loop)
            del self._stack[place]
            if place and loop.place not in self._repeats:  # over parts of a batch, or optimizers
                for who in loop.own:
                    self._count(self._stack[place - 1], who)
        if loop.last:
            self.last.pop(loop.periodic, None)

    def ends(self, loop: Loop) -> bool:
        """True where it is to end before its next iteration, of which it has not asked since `seen`."""
        loop.seen, self._unasked = self.taken, 0
        if loop.within:
            loop.within = False
            loop.epochs += 1
        if self.steps is None:
            return False
        steps = self._enough(loop)
        long = loop.epochs >= 2 and time.monotonic() - loop.since > _LONG
        most = _EPOCHS - (1 if loop.periodic else 0)
        if not loop.last and not steps and (loop.fed or not (long or loop.epochs >= most)):
            return False
        if loop.periodic and not loop.last:
            loop.last = True
            self.last[loop.periodic] = loop.length
            return False
        self.short[loop.where] = "steps" if steps else f"{loop.epochs} iterations"
        return True

    def _enough(self, loop: Loop) -> bool:
        own, wanted = max(loop.own.values(), default=0), max(2, self.steps or 0)
        if loop.turn > 1:
            return own >= (1 if loop.turn > 2 and loop.place in self._repeats else 2)
        waits = any(steps < 2 for steps in self._of_each.values())
        return own >= (_FOR_OTHERS * wanted if waits else wanted)


class For:
    """The object that a script's `for` iterates over, in the place of `iterable`."""

    def __init__(self, loops: Loops, iterable: Iterable[Any], where: str, periodic: bool) -> None:
        self._iterator = iter(iterable)
        self._loops = loops
        self.loop = loops.enter(where, where, periodic)
        self.loop.length = len(iterable) if isinstance(iterable, range) else 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.loop.seen != self._loops.taken and self._loops.ends(self.loop):
            raise StopIteration
        return next(self._iterator)

    def __del__(self) -> None:
        if hasattr(self, "loop"):  # else it was not iterable
            self._loops.leave(self.loop)


class While:
    """What a script's `while` asks besides."""

    def __init__(self, loops: Loops, where: str, periodic: bool) -> None:
        self._loops = loops
        self._loop = loops.enter(where, where, periodic)

    def goes_on(self) -> bool:
        return self._loop.seen == self._loops.taken or not self._loops.ends(self._loop)

    def ended(self) -> None:
        self._loops.leave(self._loop)

    __del__: Callable[[While], None] = ended
