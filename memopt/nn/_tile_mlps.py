"""memopt.nn.tile_mlps: a model's MLPs, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from memopt._checkpoint.stages.module_forwards import is_its_classes, own_forward, restore_forward

WIDER = 2  # times as wide as its input is a layer in an MLP at least
_LAYERS = range(2, 5)  # of an MLP, linear ones
_TRIED = 7  # rows on which it is seen what a module does with them


class TiledMLPs:
    """The handle that tile_mlps() returns.

    Attributes:
        model: The model.
        forwards: Of its modules in question, by name.
    """

    def __init__(self, model: nn.Module, forwards: dict[str, TiledForward]) -> None:
        self.model, self.forwards = model, forwards

    @property
    def ran(self) -> list[str]:
        """Names of the modules that have run in tiles by now."""
        return [name for name, one in self.forwards.items() if one.ran]

    def remove(self) -> nn.Module:
        """Restore the plain model. A second call does nothing.

        Returns:
            The model.
        """
        for one in self.forwards.values():
            if one.module.__dict__.get("forward") is one:
                restore_forward(one.module, one.own)
        return self.model

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.model).__name__}: {', '.join(self.forwards)}>"


def tile_mlps(model: nn.Module, *, rows: int | None = None) -> TiledMLPs:
    """Run a model's MLPs on some rows at a time, which saves what they hold of the others.

    An MLP takes each row (a token) by itself, so the wide results between its layers need not be there for all of a
    long sequence at once. They are made again, tile by tile, in the backward pass: a forward pass more of the MLPs, and
    no further one in a checkpointed block that ends with its MLP. Results and gradients are the same up to rounding;
    those of parameters are added up in fp32.

    An MLP is a module of two to four linear layers, of which one is at least twice as wide as the input, and of
    functions of single elements. At its first call that each row stands for itself is checked by what torch runs. A
    module runs as before where that does not hold, where it has buffers, draws random numbers (a dropout in training),
    has hooks on its parts, gets no more rows than a tile has or more than one argument, and under torch.compile. What
    else its forward changes, it changes for each tile, and again in the backward pass.

    Source: sequence tiling of ALST (Bekman et al. 2025, arXiv 2506.13996), of which the size of a tile is too.

    Args:
        model: The model, in place: parameters, names, hooks and state_dict() stay as they are.
        rows: Rows of a tile; by default as many as the MLP's input is wide.

    Returns:
        A handle: .remove() restores the plain model, .ran has the names of modules that have run in tiles.

    Raises:
        ValueError: rows is not positive, the model has no module that looks like an MLP, or runs in tiles already.

    Examples:
        >>> memopt.nn.tile_mlps(model)
    """
    if rows is not None and rows < 1:
        raise ValueError(f"tile_mlps: rows={rows}: expected a number of rows, 1 or more")
    if any(isinstance(one.__dict__.get("forward"), TiledForward) for one in model.modules()):
        raise ValueError(
            f"tile_mlps: {type(model).__name__} runs in tiles already: .remove() its handle first"
        )
    found = install(model, rows)
    if not found:
        raise ValueError(
            f"tile_mlps: {type(model).__name__} has no module of {_LAYERS[0]} to {_LAYERS[-1]} linear layers with a "
            f"result {WIDER} times as wide as its input: call the function in question on parts of its rows"
        )
    return TiledMLPs(model, found)


def install(model: nn.Module, rows: int | None = None) -> dict[str, TiledForward]:
    """Run those modules in tiles that look like MLPs, and return their forwards by the modules' names."""
    found = {name: TiledForward(one, own_forward(one), rows) for name, one in _mlps(model, "").items()}
    put(found.values())
    return found


def put(forwards: Iterable[TiledForward]) -> None:
    """Have the modules of these forwards run by them."""
    for forward in forwards:
        forward.module.__dict__["forward"] = forward


def _mlps(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the innermost modules that look like MLPs."""
    found: dict[str, nn.Module] = {}
    for child, one in module.named_children():
        found |= _mlps(one, f"{name}.{child}" if name else child)
    widths = [layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not found and len(widths) in _LAYERS and max(widths) >= WIDER * min(widths) and is_its_classes(module):
        found[name] = module
    return found


class TiledForward:
    """The forward of an MLP in tiles.

    Attributes:
        own: Its own.
        rows: Of a tile; None: as many as the input is wide.
        ran: Whether a call had several tiles.
        by_rows: That its parts' calls are no stages of a model.
    """

    by_rows = True

    def __init__(self, module: nn.Module, own: Callable[..., Any], rows: int | None) -> None:
        self.module, self.own, self.rows, self.ran = module, own, rows, False
        self._takes_rows: bool | None = None  # each by itself; None: no call has shown it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not self._suits(args[0]):
            return self.own(*args, **kwargs)
        self.ran = True
        parameters, kept = self.parameters(), Kept(args[0].requires_grad)
        rows = Keep.apply(kept, args[0], *parameters)  # type: ignore[no-untyped-call]
        return InTiles.apply(self, kept, rows, *parameters)  # type: ignore[no-untyped-call]

    def parameters(self) -> list[Tensor]:
        return [owner._parameters[name] for owner, name in self._slots()]  # type: ignore[misc]

    @contextmanager
    def using(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Have the module use these parameters in the place of its own."""
        before = self.parameters()
        try:
            for (owner, name), p in zip(self._slots(), parameters, strict=True):
                owner._parameters[name] = p  # type: ignore[assignment]
            yield
        finally:
            for (owner, name), p in zip(self._slots(), before, strict=True):
                owner._parameters[name] = p  # type: ignore[assignment]

    def _slots(self) -> list[tuple[nn.Module, str]]:
        return [
            (owner, name)
            for owner in self.module.modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]

    def tiles(self, x: Tensor, given: Tensor) -> Sequence[Tensor]:
        """Return the rows of a tensor in tiles, with as many dimensions as it has. given: the input, by whose width a
        tile has its rows."""
        flat = x.reshape(*[1] * (x.dim() - 2), -1, x.shape[-1])
        return torch.split(flat, self.rows or given.shape[-1], -2)  # type: ignore[no-any-return, no-untyped-call]

    def _suits(self, x: Any) -> bool:
        if type(x) is not Tensor or x.dim() < 2 or torch.compiler.is_compiling():
            return False
        if x.numel() <= (self.rows or x.shape[-1]) * x.shape[-1]:
            return False
        if not all(type(p) in (nn.Parameter, Tensor) for p in self.parameters()) or self._is_watched():
            return False
        if self._takes_rows is None:
            self._takes_rows = takes_single_rows(self.own, self.tiles(x, x)[0][..., :_TRIED, :])
        return self._takes_rows

    def _is_watched(self) -> bool:
        """Return whether there are buffers, or parts have hooks, or draw random numbers as they are now."""
        return any(True for _ in self.module.buffers()) or any(
            one._forward_hooks
            or one._forward_pre_hooks
            or one._backward_hooks
            or one._backward_pre_hooks
            or (one.training and getattr(one, "p", 0))
            for one in self.module.modules()
            if one is not self.module
        )


class Kept:
    """The input and the parameters that a call keeps for its backward pass.

    Attributes:
        goes_on: Whether the input needs a gradient.
        by: The context of Keep, which has them.
    """

    def __init__(self, goes_on: bool) -> None:
        self.goes_on = goes_on
        self.by: Any = None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.by.saved_tensors  # type: ignore[no-any-return]


class Keep(torch.autograd.Function):
    """Keeps what InTiles needs, before that runs. So a region that runs again ends here, without the MLP, where nothing
    but its result comes after it."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, x: Tensor, *parameters: Tensor) -> Tensor:
        kept.by = ctx
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, gradient, *[None] * (len(ctx.needs_input_grad) - 2)


class InTiles(torch.autograd.Function):
    """An MLP's rows, tile by tile; again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledForward, kept: Kept, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.mlp, ctx.kept, ctx.cast = mlp, kept, _cast(x.device.type)
        made: Tensor | None = None
        done = 0
        with torch.autocast(**ctx.cast):
            for tile in mlp.tiles(x, x):
                rows: Tensor = mlp.own(tile).flatten(0, -2)
                if made is None:
                    made = rows.new_empty(x.shape[:-1].numel(), rows.shape[-1])
                made[done : done + len(rows)] = rows
                done += len(rows)
        assert made is not None
        return made.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mlp, goes_on, trained = ctx.mlp, ctx.kept.goes_on, ctx.needs_input_grad[3:]
        x, *saved = ctx.kept.tensors()
        parameters = [p.detach().requires_grad_(needs) for p, needs in zip(saved, trained, strict=True)]
        del saved
        of_x = x.new_empty(x.shape)
        sums: list[Tensor | None] = [None] * sum(trained)
        for tile, part, place in zip(*(mlp.tiles(one, x) for one in (x, gradient, of_x)), strict=True):
            rows = tile.detach().requires_grad_(goes_on)
            with mlp.using(parameters), torch.enable_grad(), torch.autocast(**ctx.cast):
                result = mlp.own(rows)
            inputs = [*(p for p in parameters if p.requires_grad), *([rows] if goes_on else [])]
            made = torch.autograd.grad(result, inputs, part, allow_unused=True)
            sums = [_added(whole, one) for whole, one in zip(sums, made, strict=False)]
            if goes_on:
                place.copy_(made[-1])
            del result, rows, made, inputs
        each = iter(sums)
        of_parameters = [
            whole.to(p.dtype) if needs and (whole := next(each)) is not None else None
            for p, needs in zip(parameters, trained, strict=True)
        ]
        return None, None, of_x if goes_on else None, *of_parameters


def _cast(kind: str) -> dict[str, Any]:
    """Return autocast's state, without its cache: a weight that is cast without a graph would stay so in it."""
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,
    }


def _added(whole: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return a sum in fp32 at least."""
    if whole is None or part is None:
        half = part is not None and part.dtype in (torch.float16, torch.bfloat16)
        return part.float() if part is not None and half else whole if part is None else part
    return whole.add_(part)


# ---- what a module does with its rows --------------------------------------------------------------------------------


def takes_single_rows(forward: Callable[[Tensor], Any], rows: Tensor) -> bool:
    """Return whether a function takes each row by itself, by the operators that it runs on these rows.

    Args:
        forward: From a tensor of rows (all dimensions but the last) to another.
        rows: A few rows.
    """
    rows = rows.detach().clone()
    before = rows._version
    with torch.no_grad(), torch.autocast(**_cast(rows.device.type)), RowOperators(rows) as seen:
        try:
            result = forward(rows)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError):
            return False  # it takes no part of a batch
    return (
        seen.apart and id(result) in seen.of_rows and result.dim() == rows.dim() and rows._version == before
    )


_VIEWS = {"view", "expand", "_unsafe_view", "alias", "detach", "clone", "_to_copy", "squeeze", "unsqueeze"}
_WIDTH = {
    "slice": 1,
    "split": 2,
    "split_with_sizes": 2,
    "glu": 1,
}  # in the last dimension, which stands there
_NORMS = {"native_layer_norm", "_fused_rms_norm"}


class RowOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no stub for it
    """Follows what is made of rows, and whether each stays by itself.

    Attributes:
        of_rows: Tensors that have a row for each, by id.
        apart: Whether all that was seen keeps them apart, in their order.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.apart, self._count = True, rows.shape[:-1].numel()
        self.of_rows: dict[int, Tensor] = {id(rows): rows}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if any(id(one) in self.of_rows for one in given):
            made = results if isinstance(results, (tuple, list)) else [results]
            rows = [one for one in made if isinstance(one, Tensor) and self._has_all(one)]
            self.apart &= self._keeps_apart(func, args, given) and any(one is made[0] for one in rows)
            self.of_rows |= {id(one): one for one in rows}
        return results

    def _has_all(self, one: Tensor) -> bool:
        return one.dim() >= 2 and bool(one.shape[:-1].numel() == self._count)

    def _keeps_apart(self, func: Any, args: Sequence[Any], given: list[Tensor]) -> bool:
        name = func.overloadpacket.__name__
        others = [one for one in given if id(one) not in self.of_rows]
        if name in ("mm", "addmm", "bmm"):  # rows are the left factor
            left, right = args[-2:]
            others = [one for one in others if one is not right]
            apart = id(left) in self.of_rows and id(right) not in self.of_rows and _are_of_no_row(others)
            return apart and (right.dim() == 2 or len(right) == 1)
        if name in _WIDTH:
            at = _WIDTH[name]
            return len(args) > at and bool(args[at] in (-1, args[0].dim() - 1))
        if name in _NORMS:
            return len(args[1]) == 1 and _are_of_no_row(others)
        return name in _VIEWS or (torch.Tag.pointwise in func.tags and _are_of_no_row(others))


def _are_of_no_row(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are the same for each row."""
    return all(one.shape[:-1].numel() == 1 for one in tensors)
