"""Gradients and outputs that a script keeps, and the begin of its training: a plan changes neither."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from memopt._run.plan import GRADIENTS, KEEPS, OUTPUT


class Kept:
    """Watches a script's passes: whether a forward or a backward pass finds gradients of the step before, and whether
    a backward pass finds the output that a model has returned, from which the loss was computed.

    The output's memory tells whether the script has let it go: a view of it, or a graph, keeps it as well. Of a model
    that returns several tensors, half of the bytes decide: a graph may need a part of what the script has dropped, as
    an encoder's states beside a decoder's logits.

    Args:
        begins: Is called once, before a module or a backward pass runs or an optimizer is made: techniques change
            nothing before that.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins: Callable[[], None] | None = begins
        self._seen: dict[str, bool] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._outputs: list[tuple[StorageWeakRef, int]] = []
        self._depth = 0  # of calls, and of backward passes, which call modules too
        engine: Any = torch.autograd
        engine._engine_run_backward = self._around(engine._engine_run_backward, self._pass_begins)
        call = self._around(nn.Module.__call__, self._call_begins, self._returned)
        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]
        made = self._around(torch.optim.Optimizer.__init__, self._begin)
        torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign, assignment]

    def stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note a step of an optimizer: what a backward pass finds is told from then on."""
        if optimizer is not None:
            self._optimizers.add(optimizer)

    def names(self) -> list[str]:
        """Return what is kept, or was not seen."""
        return [name for name in KEEPS if self._seen.get(name, True)]

    def _around(
        self,
        original: Callable[..., Any],
        first: Callable[[], None] = lambda: None,
        then: Callable[[Any], None] = lambda results: None,
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return original(*args, **kwargs)
            first()
            self._depth += 1
            try:
                results = original(*args, **kwargs)
            finally:
                self._depth -= 1
            then(results)
            return results

        return run

    def _returned(self, results: Any) -> None:
        if torch.is_grad_enabled():
            tensors = (one for one in pytree.tree_leaves(results) if isinstance(one, Tensor))
            self._outputs += [
                (StorageWeakRef(one.untyped_storage()), one.nbytes)
                for one in tensors
                if one.requires_grad and one.dim()
            ]

    def _begin(self) -> None:
        if self._begins is not None:
            self._begins()
            self._begins = None

    def _call_begins(self) -> None:
        self._begin()
        self._find_gradients()

    def _pass_begins(self) -> None:
        self._begin()
        if self._outputs:
            alive = sum(nbytes for one, nbytes in self._outputs if not one.expired())
            self._see(OUTPUT, 2 * alive >= sum(nbytes for _, nbytes in self._outputs))
            self._outputs.clear()
        self._find_gradients()

    def _find_gradients(self) -> None:
        if self._optimizers and torch.is_grad_enabled():
            groups = (group for one in self._optimizers for group in one.param_groups)
            self._see(GRADIENTS, any(p.grad is not None for group in groups for p in group["params"]))

    def _see(self, name: str, kept: bool) -> None:
        self._seen[name] = kept or self._seen.get(name, False)
