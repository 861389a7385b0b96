"""A training step as memopt.fit() is given it: a model, an optimizer, a batch and a loss. Parts of its batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memopt._checkpoint.auto import installed, refuse_compiled, sample_arguments
from memopt._checkpoint.shape_plans import left_as_it_is
from memopt._checkpoint.stages import ranks
from memopt._microbatch import exactness
from memopt._microbatch.split_batch import Cutting, Reduction, SplitBatch, Weights
from memopt._offload.layers import offloaded
from memopt._run.plan import BF16
from memopt._runtime import arguments
from memopt._runtime.state_snapshot import BufferValues, ModuleTensors, RandomState
from memopt.nn._tile_mlps import TiledMLPs, tile_mlps

CHECKED = 8  # samples on which the loss of a batch is compared with those of its parts


class ModelCall(NamedTuple):
    """A call of the model on a part of the sample, and the loss of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


class TrainingStep:
    """Model, optimizer, batch and loss, checked.

    batches: how many batches like the sample an optimizer's step takes. samples: of the batch; None where they cannot
    be told. Raises ValueError or TypeError, which name the argument and the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sample: Any,
        loss: Callable[..., Tensor] | None,
        reduction: Reduction,
        effective_batch: int | None,
    ) -> None:
        self.model, self.optimizer, self.sample, self.loss = model, optimizer, sample, loss
        self.reduction = reduction
        self.loss_of_output = ".loss"  # how it is written, where the model computes it
        _check_model(model)
        _check_optimizer(model, optimizer)
        if loss is not None:
            arguments.check_function(loss, "memopt.fit: loss", "the model's output and the targets")
        self.device = _device(model)
        self.batch = self._parts(sample)
        self.not_split = ""  # why the batch cannot be cut
        self.split: SplitBatch | None = None
        try:
            self.split = SplitBatch(self.batch, {}, Cutting())
            self.split.micro_batch(0, 1)
        except (ValueError, TypeError) as error:
            self.split, self.not_split = None, str(error)
        self.samples = None if self.split is None else self.split.samples
        self.batches = self._batches(effective_batch)
        self._try_forward()

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def compute(self, *batch: Any) -> Tensor:
        """Return the loss of a batch, as its part of the effective batch's.

        Args:
            *batch: Its parts, as the sample has them.
        """
        inputs, rest = self._divided(batch)
        args, kwargs = sample_arguments(inputs)
        return self._loss_of(self.model(*args, **kwargs), rest)

    def cast(self, names: Collection[str]) -> AbstractContextManager[object]:
        """Return what is around the model and the loss with these levers."""
        return torch.autocast(self.device.type, torch.bfloat16) if BF16 in names else nullcontext()

    def call(self, samples: int | None = None) -> ModelCall:
        """Return the model's call on the first samples of the batch; None: on all."""
        batch = self.batch if samples is None else self.first(samples)
        inputs, rest = self._divided(batch)
        return ModelCall(*sample_arguments(inputs), lambda out: self._loss_of(out, rest))

    def first(self, samples: int) -> tuple[Any, ...]:
        assert self.split is not None
        return self.split.micro_batch(0, samples)[0]

    def _parts(self, sample: Any) -> tuple[Any, ...]:
        if isinstance(sample, (tuple, list)) and not hasattr(sample, "_fields"):
            if not sample:
                raise ValueError("memopt.fit: sample is empty: give a batch like those of the training")
            return tuple(sample)
        return (sample,)

    def _divided(self, batch: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the model's inputs, and what the loss takes beside its output."""
        if self.loss is not None:
            return batch[0], batch[1:]
        return (batch[0] if len(batch) == 1 else batch), ()

    def _loss_of(self, out: Any, rest: tuple[Any, ...]) -> Tensor:
        if self.loss is not None:
            value = self.loss(out, *rest)
        else:
            value = getattr(out, "loss", None)
            if value is None and isinstance(out, Mapping):
                value, self.loss_of_output = out.get("loss"), '["loss"]'
        if not isinstance(value, Tensor):
            whose = "loss= returned no tensor" if self.loss is not None else "the model's output has no .loss"
            raise ValueError(
                f"memopt.fit: {whose}: give loss=, a function of the model's output and of what follows the inputs in "
                "the sample, that returns the loss, as in memopt.fit(model, optimizer, (inputs, targets), "
                "loss=F.cross_entropy)"
            )
        return value / self.batches if self.batches > 1 and self.reduction == "mean" else value

    def _batches(self, effective: int | None) -> int:
        if effective is None:
            return 1
        if self.samples is None:
            raise ValueError(
                f"memopt.fit: effective_batch={effective}, but the samples of sample cannot be told: {self.not_split}"
            )
        if effective < self.samples or effective % self.samples:
            raise ValueError(
                f"memopt.fit: effective_batch={effective} is no multiple of the {self.samples} samples of sample: give "
                "a sample of the effective batch's size, or of a part that divides it; micro-batches are planned here"
            )
        if effective > self.samples and callable(self.reduction):
            raise ValueError(
                "memopt.fit: with a function as reduction=, what a batch counts for in the effective one is not known: "
                "give the effective batch as sample"
            )
        return effective // self.samples

    def _try_forward(self) -> None:
        """Run the loss once without gradients. Raises ValueError where the sample does not fit the model."""
        try:
            with left_as_it_is(self.model), torch.no_grad():
                value = self.compute(*self.batch)
        except torch.OutOfMemoryError:
            return  # that is what is planned for
        except ValueError as error:
            if str(error).startswith("memopt.fit"):
                raise
            raise self._does_not_fit(error) from error
        except (TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            raise self._does_not_fit(error) from error
        if value.dim():
            raise ValueError(
                f"memopt.fit: the loss has the shape {tuple(value.shape)}: reduce it to one number, by .mean() say"
            )

    def _does_not_fit(self, error: Exception) -> ValueError:
        how = (
            "the model's arguments"
            if self.loss is None
            else "(inputs, what the loss takes beside the output …)"
        )
        return ValueError(
            f"memopt.fit: {type(self.model).__name__} and its loss do not run on sample, which is read as {how}: "
            f"{type(error).__name__}: {error}"
        )

    # ---- MLPs in tiles -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def tiles(self) -> TiledMLPs:
        """The model's MLPs as they run in tiles, once they are put in. Raises ValueError where none does."""
        handle = tile_mlps(self.model)
        try:
            with left_as_it_is(self.model), torch.no_grad():
                self.compute(*self.batch)
        except torch.OutOfMemoryError:
            pass  # that is what is planned for; what has run is known
        finally:
            handle.remove()
        if not handle.ran:
            raise ValueError(
                "no MLP of the model runs in tiles: they get no more rows than they are wide, or do more than "
                "functions of single rows"
            )
        return handle

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def no_micro_batches(self) -> str:
        """The reason why micro-batches would not have the whole batch's gradients; "" if they have."""
        if self.split is None:
            return self.not_split
        if self.split.samples < 2:
            return "the batch has one sample"
        try:
            exactness.refuse_mixing(exactness.suspects([self.model]))
            exactness.refuse_hooks([self.model])
            self._compare_parts(self.split)
        except ValueError as error:
            return str(error).removeprefix("memopt.backward: ")
        return ""

    def _compare_parts(self, split: SplitBatch) -> None:
        parameters, buffers = ModuleTensors.of([self.model])
        with left_as_it_is(self.model):
            saved = BufferValues(buffers, lambda _: True)
            most = min(split.samples, CHECKED)
            weights = Weights(self.reduction, split)
            exactness.check_loss(
                self.compute, split, weights, [self.model], parameters, (self.device,), saved, most
            )

    @functools.cached_property
    def draws(self) -> bool:
        """True if a step draws random numbers, of which micro-batches would draw others."""
        with left_as_it_is(self.model), torch.no_grad():
            random = RandomState([self.device])
            self.compute(*(self.batch if self.split is None else self.first(1)))
            return random.was_drawn_from()


def _check_model(model: nn.Module) -> None:
    arguments.check_module(model, "memopt.fit: model")
    refuse_compiled(model)
    if installed(model):
        raise ValueError(
            "memopt.fit: the model runs by auto_checkpoint's plan: call memopt.undo_checkpoint(model) first"
        )
    if offloaded(model) is not None:
        raise ValueError("memopt.fit: the model is offloaded by offload_layers(): .remove() its handle first")
    many = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks.is_distributed(model) or (many and torch.distributed.get_world_size() > 1):
        raise ValueError(
            "memopt.fit plans for a model in one process, and this one is in several: plan for a plain one, and call "
            "memopt.auto_checkpoint() on each rank"
        )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, (tuple, list)):
        raise TypeError(
            f"memopt.fit: optimizer is a {type(optimizer).__name__} of {len(optimizer)}: give one optimizer, whose "
            "param groups have options of their own where these differ"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"memopt.fit: optimizer is {arguments.shown(optimizer)}: give the torch.optim.Optimizer that steps the "
            "model"
        )
    mine = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            if id(p) not in mine:
                raise ValueError(
                    f"memopt.fit: parameter {index} of the optimizer's param group {number}, of shape "
                    f"{tuple(p.shape)}, is not one of {type(model).__name__}'s: give the model that this optimizer "
                    "trains, or make the optimizer anew from model.parameters()"
                )


def _device(model: nn.Module) -> torch.device:
    devices = list(dict.fromkeys(p.device for p in model.parameters()))
    if len(devices) != 1 or devices[0].type not in ("cpu", "cuda"):
        names = ", ".join(map(str, devices)) or "no device: it has none"
        raise ValueError(
            f"memopt.fit: the model's parameters are on {names}: move the model to one CUDA device or to the CPU"
        )
    return devices[0]
