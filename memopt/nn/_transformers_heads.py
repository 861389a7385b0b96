"""The part of memopt.patch(loss_head=True): a fused loss head in every model of transformers that trains."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from memopt import _C
from memopt._runtime.log import logger
from memopt.nn._deferred_logits import LossHead
from memopt.nn._fuse_loss_head import install, uninstall

_patched: list[type[nn.Module]] = []  # transformers' PreTrainedModel
_models: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()  # with their hooks


def patch() -> None:
    """Let models of transformers fuse their loss heads at their first call with labels in training mode."""
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        raise ImportError(
            "memopt.patch(loss_head=True): transformers' models are not imported: import your model's class before, "
            "or call memopt.nn.fuse_loss_head(model)"
        )
    if not _patched:
        module.PreTrainedModel.__call__ = _call
        _patched.append(module.PreTrainedModel)


def unpatch() -> None:
    """Restore transformers' class, and the models that were fused by patch()."""
    while _patched:
        model_class = _patched.pop()
        if vars(model_class).get("__call__") is _call:
            del model_class.__call__
    for model, hooks in list(_models.items()):
        head = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, LossHead):
            uninstall(head, hooks)
    _models.clear()


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if self.training and self not in _models and kwargs.get("labels") is not None:
        _models[self] = []
        try:
            _models[self] = install(self, _C.parse_size("64MiB"))[1]
        except (TypeError, ValueError) as error:
            logger.info("the loss head stays plain: %s", error)
    return nn.Module.__call__(self, *args, **kwargs)
