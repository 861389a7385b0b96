"""Outputs of a model's modules, captured while the model runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class FeatureCapture:
    """The outputs of some modules in the latest call of their model.

    A module that runs again after that call, in a checkpointed region's second run for one, is not listened to. Modules
    are held by the hooks alone, and their outputs only until they are taken.
    """

    def __init__(self, model: nn.Module, names: list[str], who: str) -> None:
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                raise ValueError(f"features: the {who} has no module {name!r}")
        self.model, self.names, self.who = model, names, who
        self._found: dict[str, torch.Tensor] = {}
        self._running = False
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        # Around all else that is hooked to the model.
        self._handles.append(self.model.register_forward_pre_hook(self._begin, prepend=True))
        for name in self.names:
            self._handles.append(self.model.get_submodule(name).register_forward_hook(_Listener(self, name)))
        self._handles.append(self.model.register_forward_hook(self._end, always_call=True))

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the outputs by name, each once."""
        missing = [name for name in self.names if name not in self._found]
        if missing:
            raise ValueError(
                f"features: the {self.who}'s {', '.join(map(repr, missing))} has not run since the last loss: call the "
                f"{self.who} before each"
            )
        found, self._found = self._found, {}
        return found

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._found.clear()
        self._running = True

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running = False

    def give(self, name: str, output: Any) -> None:
        if not self._running:
            return
        found = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(found, torch.Tensor):
            raise TypeError(
                f"features: the {self.who}'s {name!r} returns a {type(output).__name__}, and no tensor"
            )
        self._found[name] = found


class _Listener:
    def __init__(self, capture: FeatureCapture, name: str) -> None:
        self._capture, self._name = capture, name

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._capture.give(self._name, output)
