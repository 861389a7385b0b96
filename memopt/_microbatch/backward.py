"""memopt.backward: a forward and a backward pass that survive out-of-memory errors."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from memopt._memory.oom.exceptions import is_out_of_memory
from memopt._microbatch import ALONE, Agreement, exactness
from memopt._microbatch.attempt import BufferHistory, EntryGradients, Failure, InitialScale, run_attempt
from memopt._microbatch.size_cache import KnownSizes, StepMemory, available_bytes, memory_before, memory_since
from memopt._microbatch.split_batch import Cutting, Lists, Reduction, SplitBatch, Weights
from memopt._runtime import arguments
from memopt._runtime.log import logger, stacklevel
from memopt._runtime.state_snapshot import ModuleTensors, RandomState, version

Model: TypeAlias = nn.Module | Iterable[nn.Module]

# What comes of a tensor that has not the number of samples that fn expects. Other classes are a program's own words.
_WRONG_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


def backward(
    fn: Callable[..., Tensor],
    *batch: Any,
    model: Model,
    scaler: torch.amp.GradScaler | None = None,
    reduction: Reduction = "mean",
    exact: bool | None = None,
    unbatched: Collection[int | str] = (),
    batch_dim: int | Mapping[int | str, int] = 0,
    lists: Lists | None = None,
    agreement: Agreement | None = None,
    micro_batch_size: int | None = None,
    **named: Any,
) -> Tensor:
    """Run fn(*batch, **named).backward(), in micro-batches where the batch runs out of memory.

    The losses of micro-batches are weighted so that the gradients are the whole batch's. Sizes are remembered by the
    shape of the input, as long as the model lives: the next such batch is split at once, and runs whole again when
    there is more room. Random states (torch's, Python's, NumPy's global one), buffers and gradients are restored to
    their state at entry between attempts, and also before this function raises. If there were gradients at entry, the
    step's gradients are kept apart until it has succeeded, which takes their size once more, at the end of the backward
    pass. If even one sample does not fit beside them, gradients on a CUDA device are moved to the host for that time.

    Out-of-memory errors that an earlier kernel reports asynchronously cannot be detected. An out-of-memory error in the
    optimizer's step is not handled here. During a CUDA graph's capture this is a plain backward.

    Args:
        fn: Returns the loss as a 0-dimensional tensor, or a loss for each sample, (n, …), which is reduced here. It may
            compute derivatives itself (torch.autograd.grad with create_graph=True), but must not call memopt.backward.
            It is run again after an out-of-memory error. In a model's first step, and occasionally in a step that is
            split, it is also run on parts of the batch, as a trial. Its other effects (counters, logging) are repeated
            then.
        *batch: n samples, in dimension 0 of every tensor, in any nesting of tuples, dicts and dataclasses;
            micro-batches are views. Numbers, strings, None and functions are passed whole.
        model: The module, or several, with the gradients, buffers and modes concerned. Gradients at entry are added to.
        scaler: torch's or memopt's GradScaler; backward() is then called on scaler.scale(loss).
        reduction: The loss's reduction over its samples: "mean", "sum", or a function that returns a micro-batch's
            weight, given its arguments: lambda x, y: (y != -100).sum() for a mean over tokens.
        exact: True refuses random numbers as well, because micro-batches draw other dropout masks and other noise than
            the whole batch, so their gradients are equal in distribution only. By default the first step that is split
            warns of that. Noise that is drawn outside fn and passed with the batch is split with it. False refuses
            nothing, checks nothing, and does not warn.
        unbatched: Arguments that are passed whole to each micro-batch, by position, keyword, key or field.
        batch_dim: The dimension of the samples, if not 0; or a dict from such names to dimensions, for some arguments.
        lists: "samples" or "tensors": the meaning of a list that could be either.
        agreement: The agreement between the ranks of a model in several processes (memopt.types.Agreement).
        micro_batch_size: The most samples of a micro-batch, also where more fit.
        **named: Further parts of the batch.

    Returns:
        The whole batch's loss, detached.

    Raises:
        ValueError: Before anything runs: micro_batch_size is below 1, the samples cannot be identified, micro-batches
            would have other gradients (batch norm in train mode, hooks on gradients), or parameters step in the
            backward pass (step_in_backward=True). After the first step: the loss is not such a reduction. Also: the
            loss is neither one number nor one for each sample; or a batch has to be split, and fn runs only on the
            whole of it (a graph's nodes, too few samples). A trial that fails is only logged, and the step goes on if
            it fits.
        TypeError: An argument cannot be split.
        RuntimeError: fn calls memopt.backward.
        torch.OutOfMemoryError: A single sample does not fit. The error has the class of the last one and names the
            least capacity that is sufficient. Other exceptions of fn are passed on.

    Examples:
        >>> def compute_loss(inputs, targets):
        ...     with torch.autocast("cuda", torch.float16):
        ...         return F.cross_entropy(model(inputs), targets)
        >>> for inputs, targets in loader:
        ...     loss = memopt.backward(compute_loss, inputs, targets, model=model, scaler=scaler)
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     optimizer.zero_grad()
    """
    if _running.inside:
        raise NestedBackward(
            "memopt.backward: fn calls memopt.backward itself, but memopt.backward may have to run fn again at any "
            "point: have fn return only the loss, and call memopt.backward once around it"
        )
    arguments.check_function(
        fn, "memopt.backward: fn", "the batch that returns its loss; the batch comes after it"
    )
    modules = (
        tuple(model) if isinstance(model, Iterable) and not isinstance(model, nn.Module | str) else (model,)
    )
    for module in modules:
        arguments.check_module(module, "memopt.backward: model", ", or several")
    if not modules:
        raise ValueError("memopt.backward: model= names no module whose gradients the step computes")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"memopt.backward: micro_batch_size={micro_batch_size}: expected at least 1 sample")
    split = SplitBatch(batch, named, Cutting(unbatched, batch_dim, lists))
    agreement = agreement or _agreement(modules)
    step = _Step(fn, split, modules, scaler, Weights(reduction, split), exact, agreement, micro_batch_size)
    _running.inside = True
    try:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return step.plain()
        return step.run()
    finally:
        _running.inside = False


class NestedBackward(RuntimeError):
    """memopt.backward was called by the fn of another call."""


class _Running(threading.local):
    inside = False  # this thread is in memopt.backward


_running = _Running()


class _History:
    """The knowledge of a model from earlier steps."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.sizes = KnownSizes()
        self.buffers = BufferHistory()
        self.suspects = exactness.suspects(modules)
        self.seen: set[Hashable] = set()  # what has gone through once
        self.cut: dict[Hashable, int] = {}  # steps in micro-batches, of each
        self.not_on_parts: dict[
            Hashable, str
        ] = {}  # what does not run on a part of its batch, and the error for it
        self.told_of_randomness: set[Hashable] = set()
        self.told_of_micro_batches: set[Hashable] = set()


_histories: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


def _history(modules: Sequence[nn.Module]) -> _History:
    found = _histories.get(modules[0])
    if found is None:
        found = _histories[modules[0]] = _History(modules)
    return found


def _agreement(modules: Sequence[nn.Module]) -> Agreement:
    """Return the agreement.

    That of models in several processes is imported only if there are any: torch.distributed is large."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    from memopt._microbatch.rank_protocol import of_model

    return of_model(modules)


class _Step:
    """One call of backward()."""

    def __init__(
        self,
        fn: Callable[..., Tensor],
        split: SplitBatch,
        modules: Sequence[nn.Module],
        scaler: Any,
        weights: Weights,
        exact: bool | None,
        agreement: Agreement,
        most: int | None,
    ) -> None:
        self.most = most  # samples of a micro-batch
        self.fn, self.split, self.modules, self.scaler, self.weights = fn, split, modules, scaler, weights
        self.history = _history(modules)
        self.exact, self.agreement = exact, agreement
        self.what = (
            _what(fn),
            tuple(module.training for module in modules),
            _what(weights.reduction),
            split.cutting.key(),
        )
        parameters, self.buffers = ModuleTensors.of(modules)
        self.parameters = _leaves(parameters, split)
        self.devices = tuple({tensor.device for tensor in (*self.parameters, *split.tensors())})
        exactness.refuse_steps(self.parameters)
        if exact is not False:
            self._refuse()
        self.done = 0  # samples whose gradients are accumulated
        self.total: Tensor | None = None  # their weighted losses
        self.room: int | None = None  # bytes at entry, as soon as somebody asks
        self.in_forward = True  # where the micro-batch is
        self.was_emptied = False  # the allocator's cache, in this step
        self.done_again_in = 0  # samples, after it ran out of memory
        self.is_cut = False
        self.tried_again = False  # one sample
        self.failure: Failure | None = None  # of one sample, where there are other ranks

    def _refuse(self) -> None:
        exactness.refuse_mixing(self.history.suspects)
        if not self._was_seen():
            exactness.refuse_hooks(self.modules)
            if self.exact:
                exactness.refuse_random_modules(self.modules)
        for tensor in self.split.tensors():
            if tensor.grad_fn is not None:
                raise ValueError(
                    "memopt.backward: a tensor of the batch has a graph of its own, whose backward pass can run only "
                    "once: compute it within fn, or pass it detached"
                )

    def plain(self) -> Tensor:
        loss = self._loss(0, self.split.samples)
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Tensor:
        self.scale = InitialScale(self.scaler)
        self.versions = [version(tensor) for tensor in self.split.tensors()]
        if run_attempt(self._enter, self.devices) is not None:
            self._enter()  # now that nothing is cached and no garbage is left
        self.gradients = EntryGradients(self.parameters)
        try:
            self._run()
            self.agreement.reduce(self.parameters)
            self._check()
            self._tell()
        except BaseException:
            self.gradients.restore()
            self.random.restore()
            self.saved.restore(is_required=False)
            raise
        self.gradients.add()
        if self.total is None:  # no micro-batch counted for anything: the mean of nothing
            return torch.full((), float("nan"), device=self.devices[0])
        return self.total

    def _enter(self) -> None:
        self.random = RandomState(self.devices)
        self.saved = self.history.buffers.values(self.buffers)

    def _run(self) -> None:
        samples = self.split.samples
        size, before = self._chosen(), None
        while True:
            left = samples - self.done
            count = self._agreed(left, size)
            size = -(-left // count) if left else 1
            if self.done == 0:
                before = None if count == 1 else memory_before(self.devices)
            self.is_cut = self.done > 0 or count > 1
            if self.is_cut and (reason := self._no_parts()):
                raise exactness.NotOnParts(reason)
            failed = self._micro_batches(count)
            if self.agreement.succeeded(failed is None, failed[0].text if failed else ""):
                self._learn(size, before)
                return
            if failed is None:  # another rank's did not
                self._begin_again()
                size = max(1, size // 2)
            else:
                size = self._smaller(*failed)
                if self.agreement is not ALONE:
                    self._begin_again()

    def _agreed(self, left: int, size: int) -> int:
        """Return the number of micro-batches that the ranks agree on.

        size 0: not even one sample fits this rank; the others learn it from a number that no rank can have, and raise
        as this one does.
        """
        wanted = 1 if not left else -(-left // size) if size else 2 * self.split.samples
        try:
            return self.agreement.micro_batches(wanted, self.split.samples)
        except Exception as error:
            if self.failure is None:
                raise
            raise self._final(self.failure) from error

    def _chosen(self) -> int:
        """Return the number of samples that a micro-batch has at first."""
        fitting = self._fitting()
        return fitting if self.most is None else min(self.most, fitting)

    def _fitting(self) -> int:
        """Return the number of samples that are known or hoped to fit."""
        samples, sizes = self.split.samples, self.history.sizes
        if sizes.is_unlimited(self.what) or samples < 2 or self._no_parts():
            return max(samples, 1)
        self.room = available_bytes(self.devices)
        return sizes.choose(self.what, self.split.shapes, samples, self.room)

    def _micro_batches(self, count: int) -> tuple[Failure, int] | None:
        """Run what is left of the batch as `count` micro-batches.

        Returns the failure and the size of the one that ran out of memory.
        """
        begin, left = self.done, self.split.samples - self.done
        ends = [begin + left * (k + 1) // count for k in range(count)]
        for index, (start, stop) in enumerate(zip([begin, *ends], ends, strict=False)):
            with self.agreement.micro_batch(index, count):
                failure = self._micro_batch(start, stop)
            if failure is not None:
                return failure, stop - start
            self.done = stop
        return None

    def _micro_batch(self, start: int, stop: int) -> Failure | None:
        """Run one micro-batch.

        After a failure the state is that at its beginning if nothing was accumulated, else that at entry.
        """
        first = start == 0
        marks = None if first else self.gradients.marks()
        random, saved = self.random, self.saved

        def call() -> None:
            nonlocal random, saved
            self.in_forward = True
            if not first:
                random, saved = RandomState(self.devices), self.history.buffers.values(self.buffers)
            self._forward_and_backward(start, stop)

        failure = run_attempt(call, self.devices)
        if failure is None:
            return None
        self.was_emptied = True
        if self.versions != [version(tensor) for tensor in self.split.tensors()]:
            raise ValueError(
                "memopt.backward: fn changed a tensor of its batch in place and then ran out of memory, so it cannot "
                "run again: change a copy instead"
            )
        self.scale.restore()
        if first or not (self.in_forward or (marks is not None and self.gradients.untouched(marks))):
            self._begin_again()
        elif random is not self.random:  # else it had not even begun
            random.restore()
            saved.restore()
        return failure

    def _begin_again(self) -> None:
        self.gradients.clear()
        self.random.restore()
        self.saved.restore()
        self.done, self.total = 0, None

    def _forward_and_backward(self, start: int, stop: int) -> None:
        if self.weights.is_nothing(start, stop):
            return
        loss = self._loss(start, stop)
        if self.exact is not False:
            self._refuse_loss(loss)
        scaled = self._scaled(loss)
        self.in_forward = False
        scaled.backward()  # type: ignore[no-untyped-call]
        self.total = loss.detach() if self.total is None else self.total + loss.detach()

    def _loss(self, start: int, stop: int) -> Tensor:
        """Return the loss of those samples, as their part of the whole batch's loss."""
        args, named = self.split.micro_batch(start, stop)
        try:
            loss = self.fn(*args, **named)
        except _WRONG_SHAPES as error:
            is_whole = stop - start == self.split.samples
            if is_whole or is_out_of_memory(error) or isinstance(error, NestedBackward):
                raise
            found = exactness.not_on_parts(start, stop, self.split.samples, error)
            self.history.not_on_parts[self.what] = str(found)
            raise found from error
        loss = self.weights.reduced(loss, start, stop)
        if not loss.requires_grad:
            raise ValueError(
                "memopt.backward: fn returned a loss without a graph (detached, or computed under torch.no_grad()), "
                "so no parameter gets a gradient from it: return the loss itself"
            )
        return loss

    def _no_parts(self) -> str | None:
        """Return the reason why fn does not run on a part of its batch; None if no reason is known.

        One rank's reason does not count for the others.
        """
        is_asked = self.exact is not False and self.agreement is ALONE
        return self.history.not_on_parts.get(self.what) if is_asked else None

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _was_seen(self) -> bool:
        return self.what in self.history.seen

    # ---- what is learned ---------------------------------------------------------------------------------------------

    def _smaller(self, failure: Failure, size: int) -> int:
        """Return the size to try next. Raises if there is none."""
        if self.room is None:
            self.room = available_bytes(self.devices)
        self.history.sizes.record(self.what, self.split.shapes).has_failed(size, self.room, failure.asked)
        if size > 1:
            logger.info("%d samples ran out of memory: micro-batches of %d", size, size // 2)
            return size // 2
        if not self.tried_again:  # what was garbage or cached is gone, and a failure need not last
            self.tried_again = True
            return 1
        if self.gradients.to_host():
            logger.info("one sample ran out of memory: the gradients at entry are moved to the host")
            self._begin_again()
            return 1
        self._begin_again()
        if self.agreement is not ALONE:
            self.failure = failure
            return 0
        raise self._final(failure)

    def _final(self, failure: Failure) -> BaseException:
        begin = "CUDA out of memory. " if failure.kind is torch.OutOfMemoryError else ""
        return failure.error(
            f"{begin}memopt.backward: even one sample (of {self.split.samples}) does not fit: it needs "
        )

    def _learn(self, size: int, before: StepMemory | None) -> None:
        self.history.buffers.learn(self.saved)
        if self.room is None:
            return
        taken = None if before is None else memory_since(self.devices, before)
        record = self.history.sizes.record(self.what, self.split.shapes)
        record.has_fitted(size, self.room, taken, self.was_emptied)
        if self.was_emptied and size < self.split.samples:
            self.done_again_in = size

    def _tell(self) -> None:
        """Warn, once for such a batch, of a step that was done again; with all gradients there, as a warning may be an
        error."""
        if (
            self.done_again_in
            and self.exact is not False
            and self.what not in self.history.told_of_micro_batches
        ):
            self.history.told_of_micro_batches.add(self.what)
            warnings.warn(
                f"memopt.backward: a batch of {self.split.samples} samples ran out of memory; its step was done again "
                f"in micro-batches of {self.done_again_in}, as later ones will be while no more memory is free",
                RuntimeWarning,
                stacklevel=stacklevel(),
            )

    # ---- what is checked ---------------------------------------------------------------------------------------------

    def _refuse_loss(self, loss: Tensor) -> None:
        """Check the loss between forward and backward."""
        is_news = self.is_cut and self.done == 0 and self.what not in self.history.told_of_randomness
        if (self.exact or is_news) and self.random.was_drawn_from():
            if self.exact:
                exactness.refuse_randomness()
            self.history.told_of_randomness.add(self.what)
            exactness.warn_of_randomness(self.modules)
        is_due = exactness.is_due(self.history.cut.get(self.what, 0)) if self.is_cut else not self._was_seen()
        if self.weights.by_samples and is_due:
            exactness.refuse_graph(loss)

    def _check(self) -> None:
        """Check the loss by values: in the first step, and ever more rarely in steps with micro-batches."""
        is_new = not self._was_seen()
        self.history.seen.add(self.what)
        cut = self.history.cut.get(self.what, 0)
        if self.is_cut:
            self.history.cut[self.what] = cut + 1
        if self.exact is False or self.agreement is not ALONE or self.split.samples < 2:
            return
        if (
            exactness.is_due(cut)
            if self.is_cut
            else is_new and not exactness.is_compiled(self.modules, self.fn)
        ):
            try:
                run_attempt(self._check_values, self.devices)  # what does not fit is not checked
            except exactness.NotOnParts as error:
                self.history.not_on_parts[self.what] = str(error)
                if self.is_cut:
                    raise
                logger.warning("%s", error)

    def _check_values(self) -> None:
        """Compare values.

        An out-of-memory error here is not a failure, but takes time, so only a step that already had one tries the
        largest number of samples.
        """
        samples, record = self.split.samples, None
        if self.is_cut:
            record = self.history.sizes.record(self.what, self.split.shapes)
            if not self.was_emptied:
                samples = min(samples, record.checked or 0)
        if samples > 1:
            saved = self.history.buffers.values(self.buffers)
            surroundings = (self.modules, self.parameters, self.devices, saved)
            checked = exactness.check_loss(self.fn, self.split, self.weights, *surroundings, samples)
            if record is not None:
                record.checked = checked


def _what(fn: Any) -> Hashable:
    """Return the identity of fn. A function that is created anew for each step is identified by its code."""
    if isinstance(fn, str):
        return fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    return cast(Hashable, getattr(fn, "__code__", None) or type(fn))


def _leaves(parameters: Sequence[Tensor], split: SplitBatch) -> list[Tensor]:
    """Return all tensors into which the step accumulates gradients, each once."""
    found = [parameter for parameter in parameters if parameter.requires_grad]
    leaves = [tensor for tensor in split.tensors() if tensor.requires_grad and tensor.is_leaf]
    return list({id(tensor): tensor for tensor in (*found, *leaves)}.values()) if leaves else found
