"""The module whose forward pass a thread runs, noted in C at nn.Module._call_impl, which runs every forward pass.

torch's global hooks would report the same at some 8 µs a call instead of 0.2, and torch.compile would trace them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt import _C


class ModuleCalls:
    """The running module, from start() to stop(). `names`: of modules, by index; index 0 is "", for none.

    entered(module) and left(module, args, kwargs) are called for a module that is called while none runs.
    """

    def __init__(
        self,
        entered: Callable[[nn.Module], None],
        left: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    ) -> None:
        self.names: list[str] = [""]
        self._entered, self._left = entered, left
        self._indices: list[Any] = [0]
        self._texts: list[Any] = ["0"]
        self._known: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._taken: dict[str, int] = {}
        compiler: Any = torch._C._dynamo.eval_frame
        self._calls = _C.ModuleCalls(nn.Module._call_impl, self._enter, self._leave, compiler.set_eval_frame)

    def start(self) -> None:
        self._calls.start()

    def stop(self) -> None:
        self._calls.stop()

    def tell(self, told: Callable[[Any], None], as_text: bool = False) -> None:
        """Call `told` whenever another module runs, with its index, or with that as text."""
        self._calls.tell(told, self._texts if as_text else self._indices)

    def note(self, most: int) -> None:
        """Keep the last `most` times at which another module begins to run."""
        self._calls.note(most)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those times, in microseconds since 1970, and the index of the module that runs from each time on."""
        noted = self._calls.moments()
        pairs = torch.frombuffer(noted, dtype=torch.int64) if noted else torch.empty(0, dtype=torch.int64)
        times, indices = pairs.view(-1, 2).unbind(1)
        return times.contiguous(), indices.contiguous()

    # ---- called by ModuleCalls ----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, outermost: bool) -> int:
        if torch.compiler.is_compiling():
            return 0
        known = self._known.get(id(module))  # by id: a module may have an __eq__ of its own
        if known is None:
            known = self._name(module, outermost)
        if outermost:
            self._entered(module)
        return known[1]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._left(module, args, kwargs)

    def _name(self, module: nn.Module, outermost: bool) -> tuple[weakref.ref[nn.Module], int]:
        """Return the module's path from the outermost module that was called, which is named by its class."""
        base = type(module).__name__
        if outermost:
            self._taken[base] = nth = self._taken.get(base, 0) + 1
            base = base if nth == 1 else f"{base}#{nth}"
        for path, below in module.named_modules() if outermost else [("", module)]:
            if id(below) not in self._known:
                self._know(below, f"{base}.{path}" if path else base)
        return self._known[id(module)]

    def _know(self, module: nn.Module, name: str) -> None:
        identity, index, calls, known = id(module), len(self.names), self._calls, self._known

        def gone(_: Any) -> None:
            calls.forget(identity)
            known.pop(identity, None)

        self.names.append(name)
        self._indices.append(index)
        self._texts.append(str(index))
        known[identity] = weakref.ref(module, gone), index
        calls.know(module, index)
