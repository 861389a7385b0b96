"""A plan of memopt.fit() in force, and how to undo it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from memopt._checkpoint.auto import auto_checkpoint, installed, run_by_plan, undo_checkpoint
from memopt._checkpoint.shape_plans import PlanRequest
from memopt._fit.optimizers import load_states, replaced
from memopt._microbatch.backward import backward
from memopt._offload.layers import offload_layers
from memopt._run.plan import (
    CHECKPOINT,
    CODED_ACTIVATIONS,
    FUSED,
    LOSS_HEAD,
    OFFLOAD_LAYERS,
    TILES,
    of_optimizers,
    options_of,
)
from memopt.nn._fuse_loss_head import fuse_loss_head
from memopt.nn._tile_mlps import put

if TYPE_CHECKING:
    from memopt._fit.result import Fit


class AppliedFit:
    """The handle that Fit.apply() returns, which is a context manager too.

    Attributes:
        fit: The plan.
        model: The model.
        optimizer: The optimizer to step with: the one that was given, or memopt's with its param groups and states. A
            learning-rate scheduler of the one that was given goes on setting its rates.
    """

    def __init__(self, fit: Fit) -> None:
        self.fit, self.model = fit, fit.step.model
        self.optimizer: torch.optim.Optimizer = fit.step.optimizer
        self._undo = ExitStack()
        _check_unchanged(fit)
        try:
            self._apply()
        except BaseException:
            self._undo.close()
            raise

    def _apply(self) -> None:
        names, step, model = self.fit.names or frozenset(), self.fit.step, self.model
        if LOSS_HEAD in names:
            self._undo.callback(fuse_loss_head(model).remove)
        if TILES in names:
            put(step.tiles.forwards.values())
            self._undo.callback(step.tiles.remove)
        if OFFLOAD_LAYERS in names:
            self._undo.callback(_move_states, step.optimizer)
            self._undo.callback(offload_layers(model).remove)
            _move_states(step.optimizer)
        if FUSED in names or of_optimizers(names):
            self.optimizer, undo = replaced(step.optimizer, options_of(names))
            self._undo.callback(self._take_back, undo)
        if names & {CHECKPOINT, CODED_ACTIVATIONS}:
            with step.cast(names):
                self._checkpoint()
            self._undo.callback(undo_checkpoint, model)

    def _checkpoint(self) -> None:
        """Have the model run by the schedule that trial steps tested; where there were none, by one made now."""
        fit = self.fit
        call = fit.step.call(fit.micro_batch_size)
        if fit.planned is None:  # its layers' parameters have left since
            auto_checkpoint(
                self.model,
                call.kwargs or call.args,
                memory_budget=fit.chain_budget,
                optimizer=self.optimizer,
                loss=call.loss,
                accumulate=fit.accumulates,
                to=fit.to,
                keeps_output=False,
                host_memory=fit.chain_host_memory,
            )
            return
        request = PlanRequest(
            loss=call.loss,
            budget=fit.memory_budget,
            to=fit.to,
            optimizer=weakref.ref(self.optimizer),
            accumulate=fit.accumulates,
            keeps_output=False,
            besides=fit.memory_budget - fit.chain_budget,
            host_memory=fit.chain_host_memory,
        )
        run_by_plan(self.model, request, fit.planned)

    def _take_back(self, undo: Callable[[], None]) -> None:
        undo()
        self.optimizer = self.fit.step.optimizer

    def backward(self, *batch: Any, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """Run the loss's forward and backward pass, in micro-batches where the plan has them.

        Args:
            *batch: The parts of a batch as the sample has them: handle.backward(inputs, targets).
            scaler: A GradScaler, which scales the loss.

        Returns:
            The batch's loss, detached; where the effective batch has several batches, its part of that one's.

        Raises:
            ValueError: As memopt.backward, for micro-batches.
        """
        if self.fit.micro_batch_size is None:
            loss = self._compute(*batch)
            (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        return backward(
            self._compute,
            *batch,
            model=self.model,
            scaler=scaler,
            reduction=self.fit.step.reduction,
            micro_batch_size=self.fit.micro_batch_size,
        )

    def _compute(self, *batch: Any) -> Tensor:
        with self.fit.step.cast(self.fit.names or ()):
            return self.fit.step.compute(*batch)

    def remove(self) -> nn.Module:
        """Undo the plan: the model is plain, and the states are the given optimizer's again. Once is enough.

        Returns:
            The model.

        Raises:
            RuntimeError: As OffloadedLayers.remove(), while a backward pass is pending.
        """
        self._undo.close()
        return self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' + '.join(sorted(self.fit.names or ())) or 'as it is'}>"


def _check_unchanged(fit: Fit) -> None:
    """Raise ValueError for a model that runs by a plan already, or has other modules than when it was planned for."""
    model = fit.step.model
    if installed(model):
        raise ValueError(
            "memopt.fit: the model runs by a plan already: .remove() the handle of the earlier apply(), or call "
            "memopt.undo_checkpoint(model)"
        )
    there = {*model.modules()}
    if fit.planned is not None and not there.issuperset(fit.planned.forwards):
        raise ValueError(
            "memopt.fit: modules of the model were replaced after it was planned for: call memopt.fit() again"
        )


def _move_states(optimizer: torch.optim.Optimizer) -> None:
    """Have the states where the parameters are."""
    load_states(optimizer, optimizer.state_dict())
