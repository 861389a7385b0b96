"""A training script's loops, each shortened once it has shown its need, so that the script comes to its end.

A loop whose iterations contain optimizer steps ends after a few steps; a loop around it, as over epochs, after a few
iterations. If it runs over a range, its last iteration has the last number, and everything that the script does every
so many iterations, such as an evaluation or saving, is due in it. A loader that gives batches and sees no backward pass
evaluates, and skips to its last batch; a loop over a range, where no gradients are recorded, to its last number once
its iterations request the same memory. Another loop without steps is left as it is. loop_source.py makes the script's
own loops ask here before each iteration, and loader_passes.py the DataLoaders.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memopt._estimate.script import AllocatedMemory, Stopped, growth, memory, requested

_EPOCHS = 10  # iterations of a loop around the one with the steps
_LONG = 20.0  # seconds, after which two of them suffice
_FOR_OTHERS = 5  # times as many steps, while another optimizer has hardly stepped, as a GAN's generator
_PASSES = 20  # over a loader, of which nothing can be ended that they are in
_LITTLE = 10_000  # iterations: what they keep is not told where it is less than what is allocated
_ALIKE = 3  # iterations of an evaluation in a row, each of which requests as much memory as the one before
_LOOKED_AT = 20  # iterations, among which such ones are looked for
_UNASKED = 40  # steps in a row that no loop has asked about


class Loop:
    """One execution of a loop.

    `own`: steps of each optimizer that no inner loop took; `epochs`: iterations with steps of inner loops; `turn`:
    number of executions at this place with steps; `fed`: batches come from a DataLoader that ends itself; `periodic`:
    the loop that does things every so many iterations, this one or the one that it feeds, "" for none; `counts`: over a
    range; `last`: the present iteration is its last; `memory`: after each iteration with steps; `requested`: bytes that
    are there, and that ever were, before each of the first iterations.
    """

    def __init__(self, place: object, where: str, seen: int, periodic: str = "") -> None:
        self.place, self.where, self.seen, self.periodic = place, where, seen, periodic
        self.last, self.length = False, 0
        self.own: Counter[object] = Counter()
        self.epochs = self.turn = 0
        self.within = self.fed = self.counts = False
        self.since = time.monotonic()
        self.memory: list[AllocatedMemory] = []
        self.requested: list[tuple[int, int]] = []


class Loops:
    """The loops of a script.

    `steps`: number of an optimizer's steps after which its loop ends; None: nothing is shortened. `stop`: the script
    ends with that step, and no loop. `evaluations`: these are shortened too. `stepped`: is told who steps. `done`: most
    steps of an optimizer; `backwards`: backward passes, which count as steps if there is no optimizer.
    """

    def __init__(
        self,
        steps: int | None,
        stop: bool = False,
        evaluations: bool = True,
        stepped: Callable[[torch.optim.Optimizer | None], None] = lambda optimizer: None,
    ) -> None:
        self._told, self._evaluations = stepped, evaluations
        self.steps, self._stop = (None if stop else steps), (steps if stop else None)
        self.done = self.taken = self.backwards = 0
        self.short: dict[str, str] = {}  # what was ended, by where it is: how
        self.grows: dict[str, int] = {}  # bytes that each iteration kept of what was ended
        # Periodic loops in their last iteration: of how many, 0 where that is not known.
        self.last: dict[str, int] = {}
        # Lines that came before their turn: what it is every so many iterations.
        self.early: dict[str, Any] = {}
        self._stack: list[Loop] = []
        self._turns: Counter[object] = Counter()
        # Places where an optimizer has stepped twice: not loops over optimizers.
        self._repeats: set[object] = set()
        self._unasked = 0
        self._of_each: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._watch_optimizers()
        self._watch_backward()

    @property
    def trained(self) -> bool:
        return bool(self.done or self.backwards)

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
                self._told(None)
                self._took(0, self.backwards)
            return result

        engine._engine_run_backward = run

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._of_each[optimizer] = self._of_each.get(optimizer, 0) + 1
        self.done = max(self.done, steps)
        self._told(optimizer)
        if self._stop is not None and self.done >= self._stop:
            raise Stopped("steps")
        self._took(weakref.ref(optimizer), steps)  # the number of one that has gone is given again

    def _took(self, who: object, steps: int) -> None:
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
        """Return whether what a loop does every so many iterations is due out of turn, because this iteration is the
        last.

        It is not in a loop that has fewer iterations.
        """
        if where not in self.last or (isinstance(every, int) and 0 < self.last[where] < every):
            return False
        self.early[line] = every
        return True

    def _count(self, loop: Loop, who: object) -> None:
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
        if loop.last and loop.periodic:
            self.last.pop(loop.periodic, None)

    def ends(self, loop: Loop) -> bool:
        """Return whether the loop is to end before its next iteration; called once for each iteration."""
        loop.seen, self._unasked = self.taken, 0
        if loop.within:
            loop.within = False
            loop.epochs += 1
        if self.steps is None:
            return False
        loop.memory.append(memory())
        steps = self._enough(loop)
        long = loop.epochs >= 2 and time.monotonic() - loop.since > _LONG
        # Of loops within others, as over an epoch's steps, the first ones suffice, and those of the last iteration.
        counts = loop.counts and (loop.turn <= 2 or any(one.last for one in self._stack))
        most = _EPOCHS - (1 if loop.periodic or counts else 0)
        if not loop.last and not steps and (loop.fed or not (long or loop.epochs >= most)):
            return False
        if (loop.periodic or counts) and not loop.last:
            loop.last = True
            if loop.periodic:
                self.last[loop.periodic] = loop.length
            return False
        self.short[loop.where] = "steps" if steps else f"{loop.epochs} iterations"
        if (grows := growth(loop.memory)) * _LITTLE > loop.memory[-1].bytes:
            self.grows[loop.where] = grows
        return True

    def repeats(self, loop: Loop) -> bool:
        """Return whether a loop without steps evaluates, and what it requests of the card repeats itself; called before
        each of its iterations."""
        if self.steps is None or not self._evaluations or torch.is_grad_enabled():
            return False
        if len(loop.requested) == _LOOKED_AT:
            return False
        loop.requested.append(requested())
        pairs = itertools.pairwise(loop.requested[-_ALIKE - 1 :])
        found = [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]
        if len(found) < _ALIKE or len({*found}) > 1 or found[0][0] or not found[0][1]:
            return False
        self.short[loop.where] = "batches"
        return True

    def _enough(self, loop: Loop) -> bool:
        own, wanted = max(loop.own.values(), default=0), max(2, self.steps or 0)
        if loop.turn > 1:
            return own >= (1 if loop.turn > 2 and loop.place in self._repeats else 2)
        waits = any(steps < 2 for steps in self._of_each.values())
        return own >= (_FOR_OTHERS * wanted if waits else wanted)


class Numbers:
    """A range's, of which those before the last can be left out while they are gone through."""

    def __init__(self, numbers: range) -> None:
        self._numbers, self._iterator = numbers, iter(numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        self._iterator = iter(self._numbers)
        return self

    def __next__(self) -> int:
        return next(self._iterator)

    def skip_to_last(self) -> None:
        left = operator.length_hint(self._iterator)
        self._iterator = iter(self._numbers[-1:] if left else ())


class For:
    """The object that a script's `for` iterates over, in the place of `iterable`: a range's last number is that of the
    last iteration, for what a script does late, as at the end or with longer inputs; a progress bar's range, too."""

    def __init__(self, loops: Loops, iterable: Iterable[Any], where: str, periodic: bool) -> None:
        if isinstance(iterable, range):
            iterable = Numbers(iterable)
        bar = getattr(iterable, "__dict__", {})
        if isinstance(bar.get("iterable"), range):
            bar["iterable"] = Numbers(bar["iterable"])
        numbers = iterable if isinstance(iterable, Numbers) else bar.get("iterable")
        self._numbers = numbers if isinstance(numbers, Numbers) else None
        self._iterator = iter(iterable)
        self._loops = loops
        self.loop = loops.enter(where, where, periodic)
        if self._numbers is not None:
            self.loop.counts, self.loop.length = True, len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.loop.seen != self._loops.taken:
            if self._loops.ends(self.loop):
                raise StopIteration
            if self.loop.last and self._numbers is not None:
                self._skip_to_last(self._numbers)
        elif self._numbers is not None and self._loops.repeats(self.loop):
            self._skip_to_last(self._numbers)
        return next(self._iterator)

    def _skip_to_last(self, numbers: Numbers) -> None:
        numbers.skip_to_last()
        self._numbers = None

    def __del__(self) -> None:
        if hasattr(self, "loop"):  # else it was not iterable
            self._loops.leave(self.loop)


class While:
    """The question that a script's `while` asks besides its own."""

    def __init__(self, loops: Loops, where: str, periodic: bool) -> None:
        self._loops = loops
        self._loop = loops.enter(where, where, periodic)

    def goes_on(self) -> bool:
        return self._loop.seen == self._loops.taken or not self._loops.ends(self._loop)

    def ended(self) -> None:
        self._loops.leave(self._loop)

    __del__: Callable[[While], None] = ended
