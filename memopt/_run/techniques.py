"""Techniques applied to a script from outside: an estimate tests its advice so, `memopt run --fit` applies a plan."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from memopt._run.plan import (
    BF16,
    CHECKPOINT,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    FUSED,
    GRADIENTS,
    HAVE_FUSED,
    KEEPS,
    LEAST_BUDGET,
    LOSS_HEAD,
    OFFLOAD_GRADIENTS,
    OFFLOAD_LAYERS,
    OUTPUT,
    PLANNED,
    PLANNING,
    SAVED_ELSEWHERE,
    TILES,
    of_optimizers,
    options_of,
    plain,
)
from memopt.nn._deferred_logits import DeferredLogits
from memopt.nn._tile_mlps import TiledForward
from memopt.nn._tile_mlps import install as install_tiles

_OF_MOMENTS = {EIGHT_BITS, FOUR_BITS, FACTORED}  # Adam's


class Techniques:
    """Techniques installed for the rest of the process, before the script begins.

    Args:
        wanted: Names of techniques, as a request has them.
        mark: Is told PLANNING where a plan for a model is about to be made, and PLANNED once it is.
        keeps: Of KEEPS, what the script does.
        host_memory: Bytes of the host's memory for what stages offload; None for no limit.

    Attributes:
        applied: Parts of the script that each technique was applied to, such as {"fused": ["AdamW"]}; a technique that
            was applied to nothing has no entry.
        refused: Why a technique was not applied to one of the script's models, by the technique.
    """

    def __init__(
        self,
        wanted: list[str],
        mark: Callable[[str], None] = lambda kind: None,
        keeps: Collection[str] = KEEPS,
        host_memory: int | None = None,
    ) -> None:
        self._mark, self._keeps, self._host_memory = mark, keeps, host_memory
        self.applied: dict[str, list[str]] = {}
        self.refused: dict[str, str] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth = 0
        behind = {name: rest for name, _, rest in (one.partition(":") for one in wanted)}
        names = {*behind}
        options = of_optimizers(wanted)
        if options:
            self._memopts_optimizers(options)
        if FUSED in names:
            self._fused()
        if names & {OFFLOAD_LAYERS, CHECKPOINT}:
            self._watch_optimizers(offloads=OFFLOAD_LAYERS in names)
        if LOSS_HEAD in names:
            _install_loss_head(lambda: self.applied.setdefault(LOSS_HEAD, ["cross_entropy"]))
        if names & {CHECKPOINT, *SAVED_ELSEWHERE, TILES, BF16}:
            self._around_calls(behind)

    def _met(self, technique: str, what: object) -> None:
        met, name = self.applied.setdefault(technique, []), type(what).__name__
        if name not in met:
            met.append(name)

    # ---- optimizers -----------------------------------------------------------------------------------------------

    def _memopts_optimizers(self, techniques: Collection[str]) -> None:
        """Put memopt's optimizers in the place of torch's, with these options, and what reads gradients with them."""
        import memopt.amp
        import memopt.optim

        for name in ("Adam", "AdamW", *(["SGD"] if {*techniques} - _OF_MOMENTS else [])):
            kind = self._with_options(getattr(memopt.optim, name), techniques)
            setattr(torch.optim, name, kind)
            setattr(importlib.import_module(f"torch.optim.{name.lower()}"), name, kind)
        if OFFLOAD_GRADIENTS in techniques:
            for module in (nn.utils, nn.utils.clip_grad):
                module.clip_grad_norm_ = memopt.amp.clip_grad_norm_
            for module in (torch.amp, torch.amp.grad_scaler):
                module.GradScaler = memopt.amp.GradScaler  # type: ignore[misc]

    def _with_options(self, ours: Any, techniques: Collection[str]) -> type:
        met = self._met

        class WithOptions(ours):  # type: ignore[misc]
            def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
                coded = "SGD" not in ours.__name__ and not kwargs.get("amsgrad")
                used = [name for name in techniques if coded or name not in _OF_MOMENTS]
                super().__init__(params, *args, **options_of(used), **kwargs)
                for name in used:
                    met(plain(name), self)

        WithOptions.__name__ = WithOptions.__qualname__ = ours.__name__
        return WithOptions

    def _fused(self) -> None:
        for name in HAVE_FUSED:
            kind = getattr(torch.optim, name)
            kind.__init__ = self._given_fused(kind.__init__)

    def _given_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            chosen = (kwargs.get(name) for name in ("fused", "foreach", "differentiable"))
            if any(one is not None and one is not False for one in chosen):
                original(optimizer, params, *args, **kwargs)
                return
            original(optimizer, params, *args, **kwargs | {"fused": True})
            self._met(FUSED, optimizer)

        return init

    def _watch_optimizers(self, offloads: bool) -> None:
        """Note each optimizer that is made; before it, offload the layers whose parameters it is given."""
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
            if offloads:
                params = list(params)
                self._offload_layers(params)
            original(optimizer, params, *args, **kwargs)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]

    # ---- models ---------------------------------------------------------------------------------------------------

    def _offload_layers(self, groups: list[Any]) -> None:
        """Offload layers before the optimizer is made, because its states are to be where the parameters are then."""
        import memopt

        given = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
        stepped = {id(p) for p in given if isinstance(p, torch.Tensor)}
        for model in _models():
            if model not in self._offloaded and any(id(p) in stepped for p in model.parameters()):
                memopt.offload_layers(model)
                self._offloaded.add(model)
                self._met(OFFLOAD_LAYERS, model)

    def _around_calls(self, names: dict[str, str]) -> None:
        """Wrap each outermost call of a module with gradients, which is a model's forward pass. names: of techniques,
        with what follows them.

        A part of such a model that is called by itself runs again in a backward pass. Under bf16 results leave the
        call as fp32, as accelerate has them: the loss is computed outside of it.
        """
        from memopt._offload.activations import OffloadedCalls

        original = nn.Module.__call__
        elsewhere = next((name for name in SAVED_ELSEWHERE if name in names), "")
        keep = int(names.get(elsewhere) or 0) or None
        offloaded = OffloadedCalls(keep, SAVED_ELSEWHERE.get(elsewhere, "cpu"))
        models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        tiled: weakref.WeakSet[TiledForward] = weakref.WeakSet()
        parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outermost = not self._depth and torch.is_grad_enabled() and module not in parts
            if not outermost or not _is_trained(module):
                return original(module, *args, **kwargs)
            self._depth += 1
            with contextlib.ExitStack() as around:
                around.callback(self._leave)
                lowered = BF16 in names and not torch.is_autocast_enabled("cuda")
                if lowered:
                    self._met(BF16, module)
                    around.enter_context(torch.autocast("cuda", torch.bfloat16))
                if module not in models:
                    models.add(module)
                    parts.update(part for part in module.modules() if part is not module)
                    if TILES in names:
                        tiled.update(install_tiles(module).values())
                    if CHECKPOINT in names:
                        self._checkpoint(module, args, kwargs, int(names[CHECKPOINT]))
                if elsewhere:
                    self._met(elsewhere, module)
                    around.enter_context(offloaded.of(module))
                results = original(module, *args, **kwargs)
            if TILES not in self.applied and any(one.ran for one in tiled):
                self._met(TILES, module)
            return pytree.tree_map(_as_fp32, results) if lowered else results

        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]

    def _leave(self) -> None:
        self._depth -= 1

    def _checkpoint(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], budget: int
    ) -> None:
        from memopt._checkpoint.auto import plan_model, planned_device
        from memopt._checkpoint.shape_plans import PlanRequest
        from memopt._checkpoint.stages.model_chain import NoStages

        if args and kwargs:
            raise ValueError(
                "auto_checkpoint takes positional arguments or keyword arguments as its sample, not both"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # each rank for itself: the trial steps reduce nothing
        mine = {id(p) for p in model.parameters()}
        stepped = (
            one
            for one in self._optimizers
            if any(id(p) in mine for g in one.param_groups for p in g["params"])
        )
        sample = kwargs or args
        if planned_device(model, sample).type != "cuda":
            return
        optimizer = next(stepped, None)
        request = PlanRequest(
            budget,
            to="cpu",
            optimizer=0 if optimizer is None else weakref.ref(optimizer),
            accumulate=GRADIENTS in self._keeps,
            keeps_output=OUTPUT in self._keeps,
            or_least=True,  # with other techniques that may be enough
            host_memory=self._host_memory,
        )
        self._mark(PLANNING)
        try:
            plan_model(model, sample, request)
        except NoStages as error:
            self.refused[CHECKPOINT] = str(error)
            return
        finally:
            self._mark(PLANNED)
        if (takes := model.plan.peak_bytes) > budget:
            self.applied[LEAST_BUDGET] = [str(takes)]
        self._met(CHECKPOINT, model)


def _models() -> list[nn.Module]:
    """Return modules that are in no other module."""
    modules = [
        one for one in gc.get_objects() if issubclass(type(one), nn.Module)
    ]  # no `__class__` of others
    below = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in below]


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def trained_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the parameters that an optimizer has."""
    return sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])


# ---- the loss head ---------------------------------------------------------------------------------------------------


_CLASSES = 4  # times as many as the rows are wide, which a layer has at most: more are a head's
_LARGE = 1 << 20  # elements of its result


def _install_loss_head(met: Callable[[], object]) -> None:
    """Run a vocabulary's head and its cross_entropy as one from now on; `met` is called for each loss found."""
    linear = functional.linear

    @functools.wraps(linear)
    def head(rows: Any, weight: Any, bias: Any = None) -> Any:
        if type(rows) is not torch.Tensor or weight.dim() != 2 or rows.dim() < 2:
            return linear(rows, weight, bias)
        classes, width = weight.shape
        if classes <= _CLASSES * width or rows.numel() // width * classes < _LARGE:
            return linear(rows, weight, bias)
        kind = rows.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        made: Any = _FunctionalHead(weight, bias, linear, met)
        return DeferredLogits(made, rows, autocast, (), autocast or rows.dtype)

    functional.linear = head


class _FunctionalHead:
    """A call of torch.nn.functional.linear as a LossHead, for DeferredLogits."""

    defers = True
    chunk_bytes = 64 << 20

    def __init__(self, weight: Any, bias: Any, linear: Callable[..., Any], met: Callable[[], object]) -> None:
        self.weight, self.bias, self.out_features = weight, bias, weight.shape[0]
        self._linear, self._met = linear, met

    def __call__(self, rows: Any, loss: Callable[..., Any] | None = None) -> Any:
        if loss is None:
            return self._linear(rows, self.weight, self.bias)
        self._met()
        return loss(rows, self.weight, self.bias)
