"""memopt.nn.fuse_loss_head: linear_cross_entropy under a model that computes logits and their cross entropy."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt._runtime import arguments
from memopt.nn._deferred_logits import LossHead


class FusedLossHead:
    """The handle that fuse_loss_head() returns.

    Attributes:
        model: The model.
        head: Its last linear layer.
    """

    def __init__(self, model: nn.Module, head: LossHead, hooks: list[RemovableHandle]) -> None:
        self.model, self.head, self._hooks = model, head, hooks

    def remove(self) -> nn.Module:
        """Restore the plain model. A second call does nothing.

        Returns:
            The model.
        """
        uninstall(self.head, self._hooks)
        self._hooks = []
        return self.model

    def __repr__(self) -> str:
        state = str(self.head) if self._hooks else "removed"
        return f"<{type(self).__name__} of {type(self.model).__name__}: {state}>"


def fuse_loss_head(model: nn.Module, *, chunk_bytes: int | str = "64MiB") -> FusedLossHead:
    """Compute a Hugging Face model's training loss by linear_cross_entropy, without its logits.

    In training mode, and where the call has labels, the last layer's product is deferred until the model calls
    torch.nn.functional.cross_entropy with it. Casts, slices, reshapes, multiplication by numbers and tanh in between
    are recorded (a shift of labels, Gemma 2's cap). Anything else computes the logits as the plain model does, which
    the log tells at level INFO, and so does the first use of the output's `.logits`. The model is the plain one in eval
    mode, without labels, and under torch.compile. The parameters and the state_dict() are the same; weights may be
    tied, under autocast, or under memopt.offload_layers(). `memopt.patch(loss_head=True)` does this for every model of
    transformers.

    Args:
        model: A module with `get_output_embeddings()`, and `labels` in its forward: a PreTrainedModel for causal,
            masked or sequence-to-sequence language modelling.
        chunk_bytes: The most bytes of logits at a time, as linear_cross_entropy has it.

    Returns:
        A handle: .remove() restores the plain model.

    Raises:
        TypeError: The model has no such method or argument, or its last layer is no plain torch.nn.Linear (as with
            adapters or quantized weights, or where its forward is replaced). Nothing has changed then, as with the
            next.
        ValueError: The model is fused already, or chunk_bytes is no size.

    Examples:
        >>> handle = memopt.nn.fuse_loss_head(model)
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    size = arguments.size(chunk_bytes, "chunk_bytes")
    if size < 1:
        raise ValueError(f"chunk_bytes {chunk_bytes!r}: expected at least 1 byte")
    return FusedLossHead(model, *install(model, size))


def install(model: nn.Module, chunk_bytes: int) -> tuple[LossHead, list[RemovableHandle]]:
    """Fuse the head as fuse_loss_head() does, and return what uninstall() takes."""
    head, place = _head_of(model)
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.chunk_bytes, head.defers = chunk_bytes, False
    return head, [
        model.register_forward_pre_hook(partial(_begin, place), with_kwargs=True),
        model.register_forward_hook(_end, always_call=True),
    ]


def uninstall(head: LossHead, hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    if hooks:
        head.__class__ = nn.Linear  # type: ignore[assignment]
        del head.defers, head.chunk_bytes


def _head_of(model: nn.Module) -> tuple[nn.Linear, int]:
    """Return the last layer, and the place of `labels` among the arguments."""
    name = type(model).__name__
    find = getattr(model, "get_output_embeddings", None)
    names = list(inspect.signature(type(model).forward).parameters)
    if find is None or "labels" not in names:
        raise TypeError(
            f"fuse_loss_head: {name} has no get_output_embeddings(), or no `labels` in its forward: call "
            "memopt.nn.linear_cross_entropy() in its forward instead"
        )
    head = find()
    if isinstance(head, LossHead):
        raise ValueError(f"fuse_loss_head: {name} is fused already: .remove() its handle first")
    if type(head) is not nn.Linear or "forward" in vars(head):
        replaced = type(head) is nn.Linear and " whose forward is replaced"
        raise TypeError(
            f"fuse_loss_head: the last layer of {name} is {type(head).__name__}{replaced or ''}: expected a plain "
            "torch.nn.Linear"
        )
    return head, names.index("labels") - 1


def _begin(place: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    labels = kwargs["labels"] if "labels" in kwargs else args[place] if place < len(args) else None
    model.get_output_embeddings().defers = (
        model.training and labels is not None and not torch.compiler.is_compiling()
    )


def _end(model: Any, args: Any, output: Any) -> None:
    model.get_output_embeddings().defers = False
