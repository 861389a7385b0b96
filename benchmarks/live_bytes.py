"""The bytes that a training step holds at once, by kind.

The figure every `memory_budget` is about: *live bytes*, the sum of the storages that exist at one moment,
each counted once, parameters, buffers, gradients, optimizer state, batch and activations together. It is a
property of the step, not of an allocator: no rounding, no cache, no fragmentation, and the same on a CPU, a
GPU, or fake tensors that hold no memory at all.

A `TorchDispatchMode` sees every tensor that an ATen operation returns, in forward, backward and optimizer
alike; a weak reference to its storage says when it dies. The result is a log of births and deaths, replayed
afterwards, when it is known which storages turned out to be gradients. What a kernel takes and gives back
within one operation (a cuDNN or MKL workspace) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = ("parameters", "buffers", "optimizer_state", "gradients", "batch", "activations")


@dataclass(frozen=True)
class StepMemory:
    """Live bytes at the moment of a training step when they are the most, by what they are.

    `parameters + buffers + optimizer_state + gradients + batch + activations == peak`. Activations are what
    is none of the others: saved tensors, temporaries, gradients of activations.
    """

    peak: int
    parameters: int
    buffers: int
    optimizer_state: int
    gradients: int
    batch: int
    activations: int

    @property
    def activation_share(self) -> float:
        """activations / peak, 0 to 1."""
        return self.activations / self.peak

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "activation_share": self.activation_share}


class LiveBytes(TorchDispatchMode):
    """Logs the birth and death of every storage that passes while the mode is on.

    `log` holds `(key, bytes)`: a storage `key` was seen with `bytes` more than before (a new one, or one that
    was resized), or died (its bytes, negative). Keys count upwards and are never used twice, unlike
    addresses. The sum of the log is the number of bytes live now; its largest prefix sum is the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._next_key = 0

    def see(self, tensor: torch.Tensor) -> int:
        """The key of a tensor's storage; logs it if it is new or has another size than before."""
        storage = tensor.untyped_storage()
        identity, size = storage._cdata, storage.nbytes()
        known = self._known.get(identity)
        if known is None:
            key, before = self._next_key, 0
            self._next_key += 1
            # torch keeps the Python object of a storage for as long as C++ uses the storage, so the reference
            # dies with it.
            reference = weakref.ref(storage, lambda _, identity=identity: self._died(identity))
        else:
            reference, key, before = known
        if size != before:
            self.log.append((key, size - before))
        self._known[identity] = (reference, key, size)
        return key

    def _died(self, identity: int) -> None:
        _, key, size = self._known.pop(identity)
        if size:
            self.log.append((key, -size))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


def peak_by_category(log: Iterable[tuple[int, int]], category: dict[int, str]) -> StepMemory:
    """Replays a log and splits its peak. `category` names the storages that are not activations, by key."""
    live = dict.fromkeys(CATEGORIES, 0)
    at_peak, peak, total = dict(live), 0, 0
    for key, change in log:
        live[category.get(key, "activations")] += change
        total += change
        if total > peak:
            peak, at_peak = total, dict(live)
    return StepMemory(peak=peak, **at_peak)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, torch.Tensor)]


def measure_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    batch: Iterable[torch.Tensor],
) -> StepMemory:
    """Live bytes at the peak of one plain training step: `loss()`, backward, `optimizer.step()`.

    Two steps are taken, and change the model: the first lets the optimizer make its state, the second is
    measured, from gradients that are None. `batch` is what `loss` reads, so that it is counted as what it is.
    """
    loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    live = LiveBytes()
    category: dict[int, str] = {}
    standing = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "optimizer_state": optimizer_tensors(optimizer),
        "batch": list(batch),
    }
    for name, tensors in standing.items():
        for tensor in tensors:
            category.setdefault(live.see(tensor), name)
    with live:
        loss().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                category.setdefault(live.see(parameter.grad), "gradients")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peak_by_category(live.log, category)
