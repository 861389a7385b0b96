"""memopt.estimate(): what a model's training needs, from Python and notebooks."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from memopt.estimation import cards, fake_estimate, interpreters
from memopt.estimation.answer import Answer
from memopt.estimation.batch_option import BatchOption
from memopt.estimation.cards import Card
from memopt.estimation.child_process import Children
from memopt.estimation.prediction import FAKE, Estimate
from memopt.estimation.progress import Progress
from memopt.estimation.request import BACKENDS, Request
from memopt.estimation.survey import ScriptFailed, Survey
from memopt.log import logger

_MODULE = "memopt.estimation.crossed_model"


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
) -> Estimate:
    """What training takes of a card, without one: memopt.estimate(model, batch, optimizer=torch.optim.AdamW).

    fn_or_model: a module, whose forward gets the sample (a tuple's items in order, a dict's by name); a function of the
    sample that returns a loss; without a sample, a function that returns (module, sample), (module, sample, optimizer)
    or a loss, or that trains by itself; such a function's name, "module:function", too. optimizer: one, or what makes
    one of parameters. loss: of the module's output; without it its .loss, else the sum of what it returns. amp: "bf16"
    or "fp16", for autocast. train=False: the forward alone, without gradients. card: "24GiB", "a100-40", …: says
    whether it fits there.

    It runs in a child process on a simulated device, with PyTorch's own allocator deciding, if this Python, or the one
    that python= names, has PyTorch's CUDA build; parameters go there as shapes. Else, or where the model cannot be sent
    there, it runs on fake tensors in a fork, which is the weaker way: .method says which it was, and method="simulated
    device" or "fake tensors" insists. quick: one run, without ranges and comparisons. The model, the optimizer and the
    sample stay as they are; what a function itself writes to files is not kept from them by the kernel, as the
    command's scripts are.

    steps: of training, in each run. backend: the allocator that decides, "native", PyTorch's with expandable segments,
    or "pool", memopt's. seconds: that a run may take before it is ended, with a RuntimeError.

    Returns an Estimate: print it; .peak is (low, high) in bytes, .fits("24GiB") a bool, .max_batch_size("24GiB") a
    number. Raises ValueError or TypeError for what cannot be run, RuntimeError where it fails."""
    from memopt.torch_version import require

    require("memopt.estimate()")
    from memopt.estimation.fake_run import run as run_fake
    from memopt.estimation.training import AMP, Training

    if amp is not None and amp not in AMP:
        raise ValueError(f"amp={amp!r} is none of {', '.join(map(repr, AMP))}")
    if method not in (None, "simulated device", FAKE):
        raise ValueError(f'method={method!r} is neither "simulated device" nor "{FAKE}"')
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(map(repr, BACKENDS))}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is no number of steps: write 1 or more")
    _check(fn_or_model, sample)
    on = None if card is None else card if isinstance(card, Card) else cards.card(card)
    training = Training(fn_or_model, sample, optimizer, loss, amp, steps, train)
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
        from memopt.estimation import crossing

        try:
            return _simulated(training, asked, on, interpreters.find(python), quick)
        except (interpreters.NoInterpreter, crossing.CannotCross) as error:
            if method is not None or (python is not None and isinstance(error, interpreters.NoInterpreter)):
                raise
            logger.info("estimate: on fake tensors, for: %s", error)
            reason = str(error)
    else:
        reason = ""
    return _faked(training, on, seconds, reason, run_fake)


def _check(fn_or_model: Any, sample: Any) -> None:
    import torch

    if isinstance(fn_or_model, str):
        module, _, function = fn_or_model.partition(":")
        if not module or not function:
            raise ValueError(f'{fn_or_model!r} is no name of a function: write "module:function"')
    elif not callable(fn_or_model):
        raise TypeError(f"a module or a function is estimated, not {type(fn_or_model).__name__}")
    elif isinstance(fn_or_model, torch.nn.Module) and sample is None:
        raise TypeError("a module is run on a sample: pass sample=, what its forward takes")


# ---- on the simulated device ---------------------------------------------------------------------


def _simulated(training: Any, asked: Request, card: Card | None, python: str, quick: bool) -> Estimate:
    sent = _sent(training)  # first: what cannot cross needs no child
    like = card or Card("", cards.NO_LIMIT)
    asked = replace(
        asked,
        context=like.context,
        compute_capability=like.compute_capability,
        multiprocessors=like.multiprocessors,
    )
    size = batch_of(training.sample)

    def run(request: Request) -> Answer:
        """In a child whose script reads the model from a file; a batch size is what changes the sample."""
        content = sent
        if request.batch_size is not None and size is not None:
            content = _sent(replace(training, sample=resized(training.sample, size, request.batch_size)))
        with tempfile.TemporaryDirectory(prefix="memopt-model-") as folder:
            path = Path(folder) / "model.pickle"
            path.write_bytes(content)
            with Children(python) as children:
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
            found = survey.estimate(ranges=not quick, compare=not quick, mend=not quick)
        except ScriptFailed as failure:
            raise RuntimeError(f"{survey.title} does not run on the simulated device: {failure}") from failure
    found.again = survey.runs_on
    if size is not None:
        found.largest = lambda there: survey.largest_batch(found, there)
    return found


def _sent(training: Any) -> bytes:
    from memopt.estimation import crossing

    return pickle.dumps((crossing.import_paths(), crossing.dumps(training)))


# ---- on fake tensors -----------------------------------------------------------------------------


def _faked(training: Any, card: Card | None, seconds: float, reason: str, run: Any) -> Estimate:
    answer = run(training, seconds)
    found = fake_estimate.made_of(answer, _title(training.subject), card, reason)
    size = batch_of(training.sample)
    if size is not None:
        found.largest = lambda there: _largest(training, size, answer, there, seconds, run)
    return found


def _largest(training: Any, size: int, first: Answer, card: Card, seconds: float, run: Any) -> int:
    from memopt.estimation import search

    room, seen = card.usable - card.context, fake_estimate.held_at_most(first, card)
    start = max(1, size * room // (2 * seen))

    def measure(count: int) -> int | None:
        changed = replace(training, sample=resized(training.sample, size, count))
        held = fake_estimate.held_at_most(run(changed, seconds), card)
        return held if held <= room else None

    try:
        return search.largest(measure, room, start, 1 << 40, known={size: seen})[0]
    except search.NoEffect:
        raise ValueError(
            "the sample's first dimension does not change what it needs: is it the batch's?"
        ) from None


# ---- the sample ----------------------------------------------------------------------------------


def batch_of(sample: Any) -> int | None:
    """The first dimension of the sample's first tensor, None where there is none."""
    import torch
    from torch.utils import _pytree as pytree

    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0] or None
    return None


def resized(sample: Any, size: int, count: int) -> Any:
    """The sample with `count` of what it has `size` of, the same ones again and again."""
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
