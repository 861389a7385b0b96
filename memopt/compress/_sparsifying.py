"""memopt.compress.sparsify_(): tensors with many zeros in a layout that leaves them out, where that saves memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memopt import _C
from memopt._runtime.storages import memory_of, storage_bytes
from memopt.compress._model_changes import Layers, Outcome, carry_out, check_model, choose, shown, weight_of
from memopt.compress._saved_report import Evaluate, Report, bytes_of, signed, standing


class SparseWeight(nn.Parameter):
    """A parameter in a sparse layout. torch's own cannot be deep-copied; pickled or saved, it becomes one of those."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseWeight:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(), self.requires_grad)
        copied: SparseWeight = memo[id(self)]
        return copied


class SparseLinear(nn.Linear):
    """nn.Linear with a weight in the COO layout.

    torch has the product with such a matrix, but not with a bias added in the same call.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(input, self.weight)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, repr=False)
class SparseReport(Report):
    """A Report with the choices that were made.

    `choices`: for each tensor considered, its density, its break-even density, and whether it was converted. `tensor`:
    if a tensor was given, the sparse one, or the same tensor if it was not converted.
    """

    choices: tuple[SparseChoice, ...] = ()
    tensor: torch.Tensor | None = field(default=None, compare=False)

    def __str__(self) -> str:
        converted = [one for one in self.choices if one.converted]
        lines = [super().__str__(), *(f"  {one.name}: {one}" for one in converted[:4])]
        return "\n".join(lines)


def sparsify_(
    model_or_tensor: nn.Module | torch.Tensor,
    layout: str = "csr",
    *,
    layers: Layers = None,
    index_dtype: torch.dtype | None = None,
    evaluate: Evaluate = None,
) -> SparseReport:
    """Put the weights of a model's linear layers, or a tensor, into a sparse layout where that takes less memory.

    A tensor is converted only if the sparse layout takes less memory than its storage and nothing else in the model
    uses that storage. The report gives each tensor's density and break-even density, which depends on the types of
    elements and indices (sources: memopt/compress/_sparsifying.py). float32 breaks even at a density of 1/2 in csr with
    int32 indices, 1/3 with int64, and 1/5 in coo. Below that, memory is saved, but hardly ever time.

    A layer's sparse weight is a new parameter that takes no gradient; gradients still pass to the layer's input. It can
    be saved, pickled and deep-copied; load_state_dict() needs assign=True in a dense model. With "coo" a layer becomes
    a memopt.compress._sparsifying.SparseLinear, which is otherwise an nn.Linear. A tensor cannot change its layout in
    place: the sparse one is the report's `tensor`.

    Args:
        model_or_tensor: The model, or one tensor.
        layout: "csr": matrices; indices are int32 where they fit, unless index_dtype=torch.int64. "coo": any shape;
            indices are int64. "2:4": matrices in which two of every four neighbours are zero (as after
            prune_(method="2:4")), on CUDA devices of compute capability 8.0 and later.
        layers: Names or modules of the model, with all their submodules, or a function of name and module; by default
            all linear layers.
        index_dtype: torch.int32 or torch.int64, for "csr".
        evaluate: A function of the model that returns its accuracy; it is called before and after.

    Returns:
        A SparseReport.

    Raises:
        NotImplementedError: The device has no kernels for the layout. Nothing has changed then, as with all of these.
        TypeError: An argument has the wrong type.
        ValueError: The layout or a layer is unknown, or a tensor requires a gradient, is already sparse, quantised or
            on the meta device; the message names the tensor and the remedy.

    Examples:
        >>> memopt.compress.prune_(model, 0.9, "l1_unstructured")
        >>> print(memopt.compress.sparsify_(model))
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
    if index_dtype not in (None, torch.int32, torch.int64):
        raise ValueError(f"index_dtype={index_dtype!r}: expected torch.int32 or torch.int64")
    if index_dtype == torch.int32 and layout != "csr":
        raise ValueError(f"index_dtype: indices of {layout} are always int64")
    if isinstance(model_or_tensor, torch.Tensor):
        if layers is not None or evaluate is not None:
            raise ValueError("layers= and evaluate= apply to models, not to a tensor")
        return _sparsify_tensor(model_or_tensor, layout, index_dtype)
    return _sparsify_model(model_or_tensor, layout, layers, index_dtype, evaluate)


# ---- models


def _sparsify_model(
    model: nn.Module, layout: str, layers: Layers, index_dtype: torch.dtype | None, evaluate: Evaluate
) -> SparseReport:
    function = f"sparsify_ {layout}"
    check_model(model, function, replaces=True)
    chosen = choose(model, layers, _is_linear, "linear layer that can be sparse")
    weights = {name: weight_of(name, module, "weight", function) for name, module in chosen.items()}
    for name, weight in weights.items():
        _check_kernels(name, weight, layout, function)
    uses = Counter((device, address) for t in standing(model) for device, address, *_ in memory_of(t))
    choices: list[SparseChoice] = []

    def change(outcome: Outcome) -> None:
        made: dict[int, nn.Parameter] = {}
        for name, weight in weights.items():
            path = f"{name}.weight" if name else "weight"
            if id(weight) not in made:
                found = _find(path, weight, layout, index_dtype)
                why = found.why
                if found.sparse is not None:
                    if others := _other_places(model, weight, weights):
                        why = f"its memory is shared with {others[0]}, which keeps it"
                    elif any(uses[device, address] > 1 for device, address, *_ in memory_of(weight)):
                        why = "its storage also holds other tensors of the model"
                choices.append(replace(found.choice, converted=not why))
                if why or found.sparse is None:
                    outcome.skipped[path] = why
                    continue
                made[id(weight)] = SparseWeight(found.sparse, requires_grad=False)
            module = chosen[name]
            module._parameters["weight"] = made[id(weight)]
            if layout == "coo":
                module.__class__ = SparseLinear
            outcome.changed.append(path)
        if outcome.changed:
            outcome.notes.append("the sparse weights have no gradients")

    report = carry_out(model, function, change, evaluate, SparseReport, lambda: {"choices": tuple(choices)})
    assert isinstance(report, SparseReport)
    return report


def _is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer of a known class: subclasses may read the weight in other ways."""
    return type(module) in (nn.Linear, SparseLinear) or (
        type(module).__module__.startswith("torch.ao.nn.") and type(module).__name__ == "Linear"
    )


def _other_places(model: nn.Module, weight: nn.Parameter, weights: Mapping[str, nn.Parameter]) -> list[str]:
    """Return other places of this parameter in the model, besides the layers to be converted."""
    here = {f"{name}.weight" if name else "weight" for name, one in weights.items() if one is weight}
    return [
        name for name, p in model.named_parameters(remove_duplicate=False) if p is weight and name not in here
    ]


def _check_kernels(name: str, weight: torch.Tensor, layout: str, function: str) -> None:
    """Run the product with a few rows of the weight in the layout, as the layer will."""
    whose = f"{function}: {shown(name)}"
    if layout == "2:4" and (
        weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (8, 0)
    ):
        raise NotImplementedError(
            f"{whose} is on {weight.device}, which has no kernels for 2:4: they need a CUDA device of compute "
            "capability 8.0 or later"
        )
    rows = torch.ones_like(
        weight.detach()[: 64 if layout == "2:4" else 2]
    )  # of zeros alone nothing is computed
    if layout == "2:4":
        rows[:, 2::4] = rows[:, 3::4] = 0
    try:
        with torch.no_grad():
            some = convert(rows, layout, torch.int32)
            nn.functional.linear(torch.zeros(64, rows.shape[1], dtype=rows.dtype, device=rows.device), some)
    except Exception as error:
        raise NotImplementedError(
            f"{whose}: {weight.device} has no kernels for {layout} in {str(weight.dtype).removeprefix('torch.')} and "
            f"{tuple(weight.shape)}: {type(error).__name__}: {error}"
        ) from error


# ---- tensors


def _sparsify_tensor(tensor: torch.Tensor, layout: str, index_dtype: torch.dtype | None) -> SparseReport:
    function = f"sparsify_ {layout}"
    if why := _unusable(tensor, layout):
        raise ValueError(f"{function}: the tensor {why}")
    if layout == "2:4":
        _check_kernels("the tensor", tensor, layout, function)
    before = bytes_of([tensor], lambda: tensor)
    found = _find("the tensor", tensor, layout, index_dtype)
    choice, sparse = found.choice, tensor if found.sparse is None else found.sparse
    return SparseReport(
        technique=function,
        before=before,
        after=bytes_of([sparse], lambda: sparse),
        changed=(choice.name,) if choice.converted else (),
        skipped={} if choice.converted else {choice.name: found.why},
        choices=(choice,),
        tensor=sparse,
    )


def _unusable(tensor: torch.Tensor, layout: str) -> str | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__name__}: only plain tensors are converted"
    if tensor.layout is not torch.strided:
        return f"is sparse already ({tensor.layout})"
    if tensor.is_quantized:
        return "is quantised"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.requires_grad:
        return (
            "requires a gradient, which its sparse copy would not propagate: pass its .detach(), and call "
            "requires_grad_() on the result"
        )
    if tensor.dim() == 0 or (layout != "coo" and tensor.dim() != 2):
        return f"has {tensor.dim()} dimensions: {layout} takes {'at least one' if layout == 'coo' else 'two'}"
    return None


# ---- either


@dataclass(frozen=True)
class _Found:
    """One tensor: the choice, why it stays where it does, and the sparse one where it was converted."""

    choice: SparseChoice
    why: str
    sparse: torch.Tensor | None


def _find(name: str, tensor: torch.Tensor, layout: str, index_dtype: torch.dtype | None) -> _Found:
    """Decide whether it pays, by the tensor's own memory.

    A tensor that looks as if it did is converted and counted then, as counting takes a quarter of that; one that does
    not is counted only, as converted it would take several times its memory.
    """
    tensor = tensor.detach()
    dense, item, count = storage_bytes([tensor]), tensor.element_size(), tensor.numel()
    index = index_type(tensor.shape, count, layout, None) if index_dtype is None else index_dtype
    even = break_even(tensor.shape, dense, item, layout, index.itemsize)
    sparse = None
    if layout != "2:4" and count and _looks(tensor) < _SURELY * even:
        sparse = convert(tensor, layout, index_type(tensor.shape, count, layout, index_dtype))
        nnz = sparse._nnz()
    else:
        nnz = int(tensor.count_nonzero())
    index = index_type(tensor.shape, nnz, layout, index_dtype)
    size = sparse_bytes(tensor.shape, nnz, item, layout, index.itemsize)
    share = nnz / count if count else 0.0
    why = ""
    if layout == "2:4" and (tensor.shape[1] % 4 or int((tensor.reshape(-1, 4) != 0).sum(1).max()) > 2):
        why = "more than two of four neighbouring elements are not zero: call prune_(method='2:4') first"
    elif size >= dense:
        why = (
            f"{layout} would take {_C.format_size(size)} of {_C.format_size(dense)}, saving {signed(dense - size)}: "
            f"its density is {share:.4g}, and {layout} breaks even at {even:.4g}"
        )
    if not why and sparse is None:
        sparse = convert(tensor, layout, index)
    return _Found(SparseChoice(name, share, even, dense, size, not why), why, None if why else sparse)


_SURELY = 0.9
"""Of the break-even: what looks denser is counted first."""


def _looks(tensor: torch.Tensor) -> float:
    """Estimate the density from some 64 rows."""
    some = tensor[:: max(1, len(tensor) // 64)]
    return int(some.count_nonzero()) / int(some.numel())


# ---- bytes in sparse layouts -----------------------------------------------------------------------------------------
# Bytes of a matrix in sparse layouts, and the densities below which they save memory: of nnz elements, not zero, of
# s bytes each, with indices of i bytes (PyTorch's documentation of torch.sparse, "Sparse COO tensors" and "Sparse
# CSR Tensor", https://docs.pytorch.org/docs/stable/sparse.html):
#
# - coo: nnz * (8 * dimensions + s); indices are int64 always
# - csr: (rows + 1) * i + nnz * (i + s); indices int32 or int64
# - 2:4: half of the elements, and two bits for each of them: of 16-bit numbers 9/16, of 8-bit ones 10/16


LAYOUTS = ("coo", "csr", "2:4")


@dataclass(frozen=True)
class SparseChoice:
    """The choice of a layout for one tensor.

    The share of its elements that are not zero, the density below which the layout takes less memory, its bytes as it
    was and in the layout, and whether it was converted.
    """

    name: str
    density: float
    break_even: float
    dense_bytes: int
    sparse_bytes: int
    converted: bool

    def __str__(self) -> str:
        return (
            f"density {self.density:.4g}, the layout saves memory below {self.break_even:.4g}: {self.dense_bytes} "
            f"bytes dense, {self.sparse_bytes} sparse"
        )


def sparse_bytes(shape: torch.Size, nnz: int, item: int, layout: str, index: int) -> int:
    """Return the bytes in the layout. item, index: bytes of an element and of an index."""
    if layout == "coo":
        return nnz * (8 * len(shape) + item)
    if layout == "csr":
        return (int(shape[0]) + 1) * index + nnz * (index + item)
    kept = int(shape.numel()) // 2
    return kept * item + kept // 4


def break_even(shape: torch.Size, dense: int, item: int, layout: str, index: int) -> float:
    """Return the density at which the layout takes as much as `dense` bytes; for 2:4 the only density."""
    count = shape.numel()
    if layout == "2:4":
        return 0.5
    fixed = sparse_bytes(shape, 0, item, layout, index)
    each = sparse_bytes(shape, 1, item, layout, index) - fixed
    return min(1.0, max(0.0, (dense - fixed) / (each * count))) if count else 0.0


def convert(tensor: torch.Tensor, layout: str, index_dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach()
    if layout == "coo":
        return tensor.to_sparse_coo()
    if layout == "2:4":
        from torch.sparse import to_sparse_semi_structured

        return to_sparse_semi_structured(tensor)  # type: ignore[no-any-return]
    csr = tensor.to_sparse_csr()
    # torch's column indices show every other element of a storage of twice their size.
    found = [_alone(part.to(index_dtype)) for part in (csr.crow_indices(), csr.col_indices())]
    return torch.sparse_csr_tensor(*found, _alone(csr.values()), csr.shape, check_invariants=False)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is a view or a part of a larger storage, since a view keeps the whole
    storage."""
    alone = tensor._base is None and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def index_type(shape: torch.Size, nnz: int, layout: str, index_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the indices: int32 if they fit and nothing else was requested."""
    fits = max(nnz, *shape, 1) < 2**31
    if layout != "csr":
        return torch.int64
    if index_dtype == torch.int32 and not fits:
        raise ValueError(
            f"index_dtype=torch.int32 cannot index {nnz} elements of {tuple(shape)}: use torch.int64"
        )
    return index_dtype or (torch.int32 if fits else torch.int64)
