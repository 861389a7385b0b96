"""Everything that training steps change, as it was: afterwards it is so again, bit for bit, in the same memory.

Values are kept on the host, each storage once, so that what is tried has as much of the device as the real run will.
Costs as many bytes of host memory as parameters, buffers, gradients and optimizer states have."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from memopt.owners.census import memory_of
from memopt.random_state import RandomState


class KeptState:
    """models, optimizers, scalers: any number of each. stateful: what else changes, objects with state_dict() and
    load_state_dict() (schedulers), or with get_state() and set_state() (generators).

    ValueError for a lazy module that has not run yet: what it will make of itself cannot be undone."""

    def __init__(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any],
        stateful: Iterable[Any] = (),
    ) -> None:
        self._values: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        known: set[int] = set()
        for model in models:
            for name, module in model.named_modules():
                uninitialized = getattr(module, "has_uninitialized_params", None)
                if uninitialized is not None and uninitialized():
                    raise ValueError(
                        f"{name or 'the model'} is a lazy module without a shape: run a step first"
                    )
                self._modes.append((module, module.training))
                self._note(module._parameters)
                self._note(module._buffers)
            for parameter in model.parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self._gradients.append((parameter, _on_host(parameter.grad)))
        for optimizer in optimizers:
            self._note(optimizer.state)
            self._note(optimizer.param_groups)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        self._note(parameter)
                        self._gradients.append((parameter, _on_host(parameter.grad)))
        for scaler in scalers:
            self._note(vars(scaler))
        self._stateful = [(one, _state_of(one)) for one in stateful]
        self._random = RandomState()

    def put_values_back(self) -> None:
        """Between tries: values and random states. What a step has made beside them (optimizer states, gradients)
        stays, as it does between a run's steps."""
        for storage, values in self._values.values():
            if storage.nbytes() != values.nbytes():
                storage.resize_(values.nbytes())
            storage.copy_(values)
        self._random.restore()

    def put_back(self) -> None:
        for container, content in self._containers.values():
            _refill(container, content)
        self.put_values_back()
        for parameter, gradient in self._gradients:
            _give(parameter, gradient)
        for module, training in self._modes:
            module.training = training
        for one, state in self._stateful:
            (one.load_state_dict if hasattr(one, "load_state_dict") else one.set_state)(state)

    def _note(self, thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            for device, address, _, part in memory_of(thing):
                if (device, address) not in self._values:
                    storage = part.untyped_storage()
                    # A copy even where it is on the host: cpu() gives the same storage there.
                    values = storage.clone() if storage.device.type == "cpu" else storage.cpu()
                    self._values[device, address] = storage, values
        elif isinstance(thing, dict | list):
            if id(thing) not in self._containers:
                self._containers[id(thing)] = thing, copy.copy(thing)
                for value in thing.values() if isinstance(thing, dict) else thing:
                    self._note(value)
        elif isinstance(thing, tuple | set | frozenset):
            for value in thing:
                self._note(value)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif len(container) != len(content) or any(container.get(key) is not content[key] for key in content):
        container.clear()
        container.update(content)


def _state_of(one: Any) -> Any:
    if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
        return copy.deepcopy(one.state_dict())
    if hasattr(one, "get_state") and hasattr(one, "set_state"):
        return one.get_state()
    raise TypeError(
        f"stateful: {type(one).__name__} has neither state_dict() and load_state_dict() nor get_state() and set_state()"
    )


def _on_host(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient's values. One that is more than plain memory (sparse, a DTensor) stays where it is."""
    if gradient is None:
        return None
    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    kept = gradient.detach()
    return kept.to("cpu", copy=True) if plain else kept.clone()


def _give(parameter: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Into the gradient's memory, if that is still there, so that who has a view of it sees it too."""
    gradient = parameter.grad
    if kept is None:
        parameter.grad = None
    elif (
        gradient is not None
        and gradient.layout is kept.layout
        and (gradient.shape, gradient.dtype, gradient.stride()) == (kept.shape, kept.dtype, kept.stride())
        and not gradient.requires_grad
    ):
        gradient.copy_(kept)
    else:
        parameter.grad = kept.to(parameter.device, copy=True)
