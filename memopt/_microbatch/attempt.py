"""An attempt at a step: a call that may run out of memory, and the state to give back if it does.

Of a call that failed nothing is left: the exception is gone and so is what its frames held. Gradients, buffers and a
scaler's first scale are put back to what they were at entry."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt._memory.oom import exceptions
from memopt._memory.oom.exceptions import bytes_asked, out_of_memory_in
from memopt._microbatch.size_cache import least_memory
from memopt._runtime.log import logger
from memopt._runtime.state_snapshot import Buffer, BufferValues, version

KEPT_BUFFERS = 64 << 20  # bytes of buffers that are copied before it is known which of them a step changes
_UNCOUNTED = ("running_mean", "running_var")  # batch_norm() writes to them without counting a version


class Failure(NamedTuple):
    """An out-of-memory error's text and numbers, when the exception is gone.

    kind: the exception's class; asked: bytes of the request, where it is said; least: the bytes that would have let it
    pass, and of what.
    """

    kind: type[BaseException]
    text: str
    asked: int | None
    least: str

    def error(self, begin: str) -> BaseException:
        """Return an exception of the same class, so that handlers of that class catch it."""
        kind = self.kind if self.kind in (torch.OutOfMemoryError, MemoryError) else RuntimeError
        return kind(f"{begin}{self.least}. The last failure was: {self.text}")


def run_attempt(call: Callable[[], object], devices: Iterable[torch.device]) -> Failure | None:
    """Call it. An out-of-memory error is returned as a Failure, after everything it held is free.

    The exception, whose traceback holds each frame of the call, and those their tensors, is gone by then, cycles are
    collected, and the allocator has given back what it had cached in the sizes of the call. Any other exception is
    raised.
    """
    try:
        call()
        return None
    except Exception as error:
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        failure = Failure(
            type(cause),
            str(cause) or type(cause).__name__,
            bytes_asked(cause),
            least_memory(cause, devices),
        )
        exceptions.empty_frames(error)
        del cause
    # Only here is the exception gone: within the handler the interpreter itself holds it.
    torch.clear_autocast_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    logger.log(logging.INFO, "out of memory in a step: %s", failure.text.partition("\n")[0])
    return failure


# ---- state at entry --------------------------------------------------------------------------------------------------


class BufferHistory:
    """The buffers that the steps of a model change: all small ones are copied until a step has shown it."""

    def __init__(self) -> None:
        # By module (its id: one that is gone leaves at worst a copy too many) and name.
        self._changing: dict[tuple[int, str], bool] = {}

    def values(self, buffers: Sequence[Buffer]) -> BufferValues:
        """Return the state of these buffers, with copies of those that a step may change."""
        left = KEPT_BUFFERS

        def is_copied(one: Buffer) -> bool:
            nonlocal left
            module, key, buffer = one
            if key in _UNCOUNTED and module.training:
                return True
            changing = self._changing.get((id(module), key))
            if changing is None:
                left -= buffer.nbytes
            return left >= 0 if changing is None else changing

        return BufferValues(buffers, is_copied)

    def learn(self, values: BufferValues) -> None:
        """Compare the buffers, after a step that went through, with what they were before it."""
        for one in values.saved:
            name = id(one.module), one.key
            self._changing[name] = self._changing.get(name, False) or one.has_changed()


class EntryGradients:
    """The gradients of parameters at entry, put aside while attempts accumulate into None.

    Where all are None nothing is put aside. Else the attempt's gradients are apart from those until add(), which takes
    as many bytes as the gradients at entry that the step adds to (`nbytes`); it is at the end of a backward pass,
    when its activations are gone. to_host() moves them away meanwhile.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._entry = [parameter.grad for parameter in parameters]
        self._host: list[Tensor | None] | None = None
        self.nbytes = sum(grad.nbytes for grad in self._entry if grad is not None)
        if self.nbytes:
            self.clear()

    def clear(self) -> None:
        """Drop what an attempt has accumulated."""
        for parameter in self._parameters:
            parameter.grad = None

    def marks(self) -> list[tuple[Tensor | None, int]]:
        """Marks by which untouched() tells that nothing has been accumulated since."""
        grads = (parameter.grad for parameter in self._parameters)
        return [(grad, -1 if grad is None else version(grad)) for grad in grads]

    def untouched(self, marks: list[tuple[Tensor | None, int]]) -> bool:
        pairs = zip(self.marks(), marks, strict=True)
        return all(now is before and count == was for (now, count), (before, was) in pairs)

    def to_host(self) -> bool:
        """Move gradients to the host. Returns True if there was one on a device.

        Its storage is freed, the tensors stay who they are. Views of a storage that others see are left where they are.
        """
        if self._host is not None or not self.nbytes:
            return False
        host = self._host = [None] * len(self._entry)
        for k, grad in enumerate(self._entry):
            if (
                grad is None
                or grad.device.type != "cuda"
                or type(grad) is not Tensor
                or grad.layout != torch.strided
            ):
                continue
            if _has_its_memory_alone(grad):
                host[k] = grad.detach().cpu()
                grad.untyped_storage().resize_(0)
        return any(one is not None for one in host)

    def _back(self) -> None:
        for k, kept in enumerate(self._host or ()):
            grad = self._entry[k]
            if kept is not None and grad is not None:
                grad.untyped_storage().resize_(grad.numel() * grad.element_size())
                with torch.no_grad():
                    grad.copy_(kept)
                assert self._host is not None
                self._host[k] = None
        self._host = None

    def restore(self) -> None:
        """Drop what an attempt has left, and put the gradients at entry in their place."""
        self.clear()
        self._back()
        for parameter, grad in zip(self._parameters, self._entry, strict=True):
            parameter.grad = grad

    def add(self) -> None:
        """Add the attempt's gradients to those at entry, in the tensors at entry."""
        if not self.nbytes:
            return
        new = [parameter.grad for parameter in self._parameters]
        if self._host is not None:
            self._add_from_host(new)
            return
        olds, news = [], []
        for parameter, old, grad in zip(self._parameters, self._entry, new, strict=True):
            if old is None:
                continue
            parameter.grad = old
            if grad is not None:
                olds.append(old)
                news.append(grad)
        with torch.no_grad():
            if olds:
                torch._foreach_add_(olds, news)

    def _add_from_host(self, new: list[Tensor | None]) -> None:
        """Add them one after another; each new gradient is freed before the next is copied from the host."""
        assert self._host is not None
        with torch.no_grad():
            for k, parameter in enumerate(self._parameters):
                old, kept = self._entry[k], self._host[k]
                grad, new[k] = new[k], None
                if old is None:
                    continue
                parameter.grad = None
                if kept is not None:
                    if grad is not None:
                        kept += grad.cpu()
                        grad = None
                    old.untyped_storage().resize_(old.numel() * old.element_size())
                    old.copy_(kept)
                    self._host[k] = None
                elif grad is not None:
                    old += grad
                parameter.grad = old
        self._host = None


def _has_its_memory_alone(tensor: Tensor) -> bool:
    """Return whether no other tensor views its memory."""
    storage = tensor.untyped_storage()
    fresh = torch.empty(1).untyped_storage()
    return (
        storage.nbytes() == tensor.nbytes and _users(storage) == _users(fresh) + 1
    )  # fresh has no tensor any more


def _users(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


class InitialScale:
    """A gradient scaler's initial scale.

    Its first scale() creates it in two allocations, and torch's scaler cannot continue if only one succeeded."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._absent = scaler is not None and getattr(scaler, "_scale", True) is None

    def restore(self) -> None:
        if self._absent:
            self._scaler._scale = self._scaler._growth_tracker = None
