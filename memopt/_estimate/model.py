"""memopt.estimate(): the memory that a model's training needs, from Python and notebooks."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt._estimate import cards, interpreters, protection
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.child_process import ScriptChildren
from memopt._estimate.prediction import FAKE, Estimate
from memopt._estimate.progress import Progress
from memopt._estimate.protection import Protection
from memopt._estimate.request import BatchOption, Request
from memopt._estimate.survey import NoEffect, ScriptFailed, Survey, largest
from memopt._run.plan import BACKENDS
from memopt._runtime import arguments
from memopt._runtime.log import logger

_MODULE = "memopt._estimate.serialization"


def estimate(
    fn_or_model: Any,
    sample: Any = None,
    *,
    optimizer: Any = None,
    loss: Callable[[Any], Any] | None = None,
    amp: str | None = None,
    train: bool = True,
    card: str | int | Card | None = None,
    steps: int = 3,
    backend: str = "native",
    python: str | None = None,
    method: str | None = None,
    quick: bool = False,
    seconds: float = 600,
    unprotected: bool = False,
) -> Estimate:
    """Predict the device memory that training needs, without a device.

    The training runs in a child process on a simulated device, where PyTorch's own allocator decides, if this Python,
    or the one given by python=, has PyTorch's CUDA build; parameters are sent there as shapes. Otherwise, and where the
    model cannot be sent, it runs on fake tensors in a fork, which is less exact; .method tells which one it was. The
    model, the optimizer and the sample are not changed. Your files are protected too, as the command protects them from
    scripts: the kernel keeps the writes of the function or module away from them, and the processes that it leaves
    running are ended.

    Args:
        fn_or_model: A module, whose forward gets the sample (a tuple's items in order, a dict's by name); or a function
            of the sample that returns a loss. Without a sample, a function that returns (module, sample), (module,
            sample, optimizer) or a loss, or that trains by itself; or the name of such a function, "module:function".
        sample: A batch like those of the training.
        optimizer: An optimizer, or a callable that makes one from parameters, such as torch.optim.AdamW.
        loss: A function of the module's output; by default its .loss, else the sum of the output.
        amp: "bf16" or "fp16", for autocast.
        train: Whether to run the backward pass and the optimizer; otherwise the forward alone, without gradients.
        card: "24GiB", "a100-40", …: the card for the verdict.
        steps: Number of training steps in each run.
        backend: The allocator: "native", "expandable" (PyTorch's with expandable segments), or "pool" (memopt's).
        python: Path of a Python that has PyTorch's CUDA build.
        method: "simulated device" or "fake tensors", to require one of them.
        quick: Whether to make one run only, without ranges and comparisons.
        seconds: Time limit of a run.
        unprotected: Whether to continue where the kernel cannot protect your files. memopt then redirects Python's own
            writes, but not those of other programs and of C code.

    Returns:
        An Estimate: print it; .peak is (low, high) in bytes, .fits("24GiB") a bool, .max_batch_size("24GiB") a number.

    Raises:
        ValueError: An argument is not valid.
        TypeError: The function or model cannot be run.
        RuntimeError: The run fails or takes longer than seconds; or, before anything runs, the kernel cannot protect
            your files and unprotected is False.

    Examples:
        >>> print(memopt.estimate(model, batch, optimizer=torch.optim.AdamW, card="24GiB"))
    """
    from memopt._runtime.torch_version import require

    require("memopt.estimate()")
    import torch

    from memopt._estimate import fake_tensors
    from memopt._estimate.training import AMP, TrainingTask

    if amp is not None and amp not in AMP:
        raise ValueError(f"amp={amp!r} is not one of {', '.join(map(repr, AMP))}")
    if method not in (None, "simulated device", FAKE):
        raise ValueError(f'method={method!r} is neither "simulated device" nor "{FAKE}"')
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a number of steps, 1 or more")
    _check(fn_or_model, sample)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        arguments.check_function(optimizer, "estimate: optimizer", "parameters, such as torch.optim.AdamW")
    if loss is not None:
        arguments.check_function(loss, "estimate: loss", "the model's output that returns one number")
    on = None if card is None else card if isinstance(card, Card) else cards.card(card)
    training = TrainingTask(fn_or_model, sample, optimizer, loss, amp, steps, train)
    asked = Request(
        [_MODULE, ""],
        "",
        cards.NO_LIMIT,
        module=True,
        seconds=seconds,
        steps=steps if train else 0,
        backend=backend,
    )
    if method != FAKE:
        from memopt._estimate import serialization

        try:
            found = interpreters.find(python)
            asked = asked.protected(_protection(found, unprotected))
            return _simulated(training, asked, on, found, quick)
        except (interpreters.NoInterpreter, serialization.NotSerializable) as error:
            if method is not None or (python is not None and isinstance(error, interpreters.NoInterpreter)):
                raise
            logger.info("estimate: on fake tensors, for: %s", error)
            reason = str(error)
    else:
        reason = ""
    protected = _protection(sys.executable, unprotected)
    return _faked(training, on, reason, lambda one: fake_tensors.run(one, seconds, protected))


def _protection(python: str, unprotected: bool) -> Protection:
    try:
        return protection.find(python, [os.getcwd()])
    except protection.Unprotected as error:
        if not unprotected:
            raise RuntimeError(f"{error}: unprotected=True {protection.GOES_ON}") from None
        logger.warning("estimate: %s: unprotected=True %s", error, protection.GOES_ON)
        return Protection("redirect")


def _check(fn_or_model: Any, sample: Any) -> None:
    import torch

    if isinstance(fn_or_model, str):
        module, _, function = fn_or_model.partition(":")
        if not module or not function:
            raise ValueError(f'{fn_or_model!r} is not the name of a function: write "module:function"')
    elif not callable(fn_or_model):
        raise TypeError(f"estimate() takes a module or a function, not {type(fn_or_model).__name__}")
    elif isinstance(fn_or_model, torch.nn.Module) and sample is None:
        raise TypeError("a module needs a sample: pass sample=, its forward's arguments")


# ---- on the simulated device ---------------------------------------------------------------------


def _simulated(training: Any, asked: Request, card: Card | None, python: str, quick: bool) -> Estimate:
    sent = _sent(training)  # first: what cannot cross needs no child
    asked = asked.like(card or Card("", cards.NO_LIMIT))
    size = batch_of(training.sample)

    def run(request: Request) -> Answer:
        """Run a request in a child whose script reads the model from a file; a batch size changes the sample."""
        content = sent
        if request.batch_size is not None and size is not None:
            content = _sent(replace(training, sample=resized(training.sample, size, request.batch_size)))
        with tempfile.TemporaryDirectory(prefix="memopt-model-") as folder:
            path = Path(folder) / "model.pickle"
            path.write_bytes(content)
            with ScriptChildren(python) as children:
                return children.run(replace(request, argv=[_MODULE, str(path)], batch_size=None))

    survey = Survey(
        title=_title(training.subject),
        request=asked,
        run=run,
        shown=run,
        card=card,
        batch=None if size is None else BatchOption("", size=size),
    )
    with Progress() as progress:
        survey.say = progress.say
        try:
            found = survey.estimate(ranges=not quick, compare=not quick, fixes=not quick)
        except ScriptFailed as failure:
            raise RuntimeError(f"{survey.title} does not run on the simulated device: {failure}") from failure
    found.again = survey.runs_on
    if size is not None:
        found.largest = lambda there: survey.largest_batch(found, there)
    return found


def _sent(training: Any) -> bytes:
    from memopt._estimate import serialization

    return pickle.dumps((serialization.import_paths(), serialization.dumps(training)))


# ---- on fake tensors -----------------------------------------------------------------------------


def _faked(training: Any, card: Card | None, reason: str, run: Callable[[Any], Answer]) -> Estimate:

    from memopt._estimate import fake_tensors

    answer = run(training)
    found = fake_tensors.estimate_of(answer, _title(training.subject), card, reason)
    size = batch_of(training.sample)
    if size is not None:
        found.largest = lambda there: _largest(training, size, answer, there, run)
    return found


def _largest(training: Any, size: int, first: Answer, card: Card, run: Callable[[Any], Answer]) -> int:

    from memopt._estimate import fake_tensors

    room, seen = card.usable_bytes - card.context_bytes, fake_tensors.held_at_most(first, card)
    start = max(1, size * room // (2 * seen))

    def measure(count: int) -> int | None:
        changed = replace(training, sample=resized(training.sample, size, count))
        held = fake_tensors.held_at_most(run(changed), card)
        return held if held <= room else None

    try:
        return largest(measure, room, start, 1 << 40, known={size: seen})[0]
    except NoEffect:
        raise ValueError(
            "the memory needed does not change with the sample's first dimension: is that the batch dimension?"
        ) from None


# ---- the sample ----------------------------------------------------------------------------------


def batch_of(sample: Any) -> int | None:
    """Return the first dimension of the sample's first tensor, None if there is none."""
    import torch
    from torch.utils import _pytree as pytree

    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0] or None
    return None


def resized(sample: Any, size: int, count: int) -> Any:
    """Return the sample with `count` instead of `size` elements in the batch dimension, repeated from the start."""
    import torch
    from torch.utils import _pytree as pytree

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        if leaf.is_floating_point() or leaf.is_complex():  # its values do not cross
            return torch.empty((count, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        return leaf[torch.arange(count) % size]

    return pytree.tree_map(change, sample)


def _title(subject: Any) -> str:
    if isinstance(subject, str):
        return subject
    name = getattr(subject, "__qualname__", None)
    return str(name) if name else type(subject).__name__
