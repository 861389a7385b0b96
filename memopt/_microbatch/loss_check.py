"""A check that a loss is the reduction that it is said to be, by its values on a batch and on parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt._microbatch import exactness, retry
from memopt._microbatch.loss_weights import Weights
from memopt._microbatch.split_batch import SplitBatch
from memopt._runtime.log import logger
from memopt._runtime.state_snapshot import BufferValues, GradientTensors, Modes, RandomState


def is_due(steps: int) -> bool:
    """True at the first, second, fourth, eighth … step, by how many came before."""
    return (steps + 1) & steps == 0


def is_compiled(modules: Sequence[nn.Module], fn: Any) -> bool:
    """Then another batch size is compiled for anew, and for good in another way."""
    found = [fn, *(module for root in modules for module in root.modules())]
    return any(
        hasattr(one, "_torchdynamo_orig_callable")
        or hasattr(one, "_orig_mod")
        or getattr(one, "_compiled_call_impl", None) is not None
        for one in found
    )


def check(
    fn: Callable[..., Tensor],
    split: SplitBatch,
    weights: Weights,
    modules: Sequence[nn.Module],
    parameters: Sequence[Tensor],
    devices: Sequence[torch.device],
    saved: BufferValues,
    most: int,
) -> int:
    """Run fn on the first samples of a batch, and on unequal parts of those, and compare the losses.

    It runs without gradients, which takes least memory, and with them where it raises an exception without: a loss
    may itself take derivatives (a gradient penalty, a differential equation). Where it draws random numbers, it runs
    in eval mode, in which dropout draws none. Gradients, random states, buffers and modes are put back.

    Args:
        fn: The function of memopt.backward.
        split: Its arguments.
        weights: The weights of their samples.
        modules: The modules whose modes are put back.
        parameters: Those whose gradients are to stay as they are.
        devices: The devices whose random states count.
        saved: Copies of the buffers that fn may change.
        most: The number of samples, if so many fit.

    Returns:
        The number of samples that were compared, 0 if none could be.

    Raises:
        ValueError: The losses of the parts do not add up.
        NotOnParts: fn raises an exception on a part.
    """
    values = _PartLosses(fn, split, weights, devices)
    random = values.random
    modes, gradients = Modes(*modules), GradientTensors(parameters)
    gradients.clear()  # fn might add to them
    try:
        samples = values.of_most(most)
        if samples and random.was_drawn_from():
            modes.set_eval()
            random.restore()
            samples = values.of_most(samples, in_eval_mode=True)
            if random.was_drawn_from():
                samples = 0
        if not samples:
            logger.info(
                "memopt.backward could not check the loss: it is random, or nothing fits beside the gradients"
            )
            return 0
        whole, *parts = values.values
        if not exactness.add_up(whole, parts):
            if values.of_most(samples) == samples and not exactness.add_up(whole, values.values[:1]):
                logger.info("memopt.backward could not check the loss: it is another one each time")
                return 0
            exactness.refuse_values(whole, parts, weights.reduction)
        return samples
    finally:
        modes.restore()
        gradients.restore()
        random.restore()
        saved.restore()
        torch.clear_autocast_cache()  # a weight that was cast without gradients would stay without


class _PartLosses:
    """Losses of the first samples of a batch, and of parts of those, weighted so that they should add up."""

    def __init__(
        self,
        fn: Callable[..., Tensor],
        split: SplitBatch,
        weights: Weights,
        devices: Sequence[torch.device],
    ) -> None:
        self.fn, self.split, self.weights, self.devices = fn, split, weights, devices
        self.random = RandomState(devices)
        self.with_gradients = False
        self.bounds = (0, 0)  # of the samples that fn was run on last
        self.values: list[Tensor] = []  # of all, and of each part

    def of_most(self, samples: int, in_eval_mode: bool = False) -> int:
        """Compute them of as many samples as fit.

        Returns 0 where there is no memory for two, or fn is none for eval mode.
        """
        while samples > 1:
            try:
                if retry.run(lambda: self._compute(samples), self.devices) is None:  # noqa: B023
                    return samples
            except Exception as error:
                if not self.with_gradients:
                    self.with_gradients = True
                    self.random.restore()
                    continue
                if in_eval_mode:
                    logger.info("memopt.backward could not check the loss: in eval mode fn raises %r", error)
                    return 0
                raise exactness.not_on_parts(*self.bounds, self.split.samples, error) from error
            samples //= 2
        return 0

    def _compute(self, samples: int) -> None:
        ends = sorted(
            {max(1, samples // 4), samples - samples // 3, samples}
        )  # unequal, so that weights matter
        with torch.set_grad_enabled(self.with_gradients):
            bounds = [(0, samples), *zip([0, *ends], ends, strict=False)]
            self.values = [self._weighted(*pair, samples) for pair in bounds]

    def _weighted(self, start: int, stop: int, samples: int) -> Tensor:
        self.bounds = (start, stop)
        weight = 1.0 if self.weights.reduction == "sum" else self.weights.count(start, stop)
        if not weight:
            return torch.zeros(())
        args, named = self.split.micro_batch(start, stop)
        loss = self.fn(*args, **named).detach()
        if loss.dim():  # for each sample: their sum is what adds up
            return loss.sum()
        return loss * (1.0 if self.weights.reduction == "sum" else weight / self.weights.count(0, samples))
