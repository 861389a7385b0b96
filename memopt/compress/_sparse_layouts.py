"""Bytes of a matrix in sparse layouts, and the densities below which they save memory.

Of nnz elements that are not zero, of s bytes each, with indices of i bytes (PyTorch's documentation of torch.sparse,
"Sparse COO tensors" and "Sparse CSR Tensor", https://docs.pytorch.org/docs/stable/sparse.html):

- coo: nnz * (8 * dimensions + s); indices are int64 always
- csr: (rows + 1) * i + nnz * (i + s); indices int32 or int64
- 2:4: half of the elements, and two bits for each of them: of 16-bit numbers 9/16, of 8-bit ones 10/16
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    """item, index: bytes of an element and of an index."""
    if layout == "coo":
        return nnz * (8 * len(shape) + item)
    if layout == "csr":
        return (int(shape[0]) + 1) * index + nnz * (index + item)
    kept = int(shape.numel()) // 2
    return kept * item + kept // 4


def break_even(shape: torch.Size, dense: int, item: int, layout: str, index: int) -> float:
    """The density at which the layout takes as much as `dense` bytes; 2:4 has one density alone."""
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
    """In a storage of its own size, and no view: a view of a part keeps the whole it is a part of."""
    alone = tensor._base is None and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def index_type(shape: torch.Size, nnz: int, layout: str, index_dtype: torch.dtype | None) -> torch.dtype:
    """The type of the indices: int32 where they fit and nothing else was asked for."""
    fits = max(nnz, *shape, 1) < 2**31
    if layout != "csr":
        return torch.int64
    if index_dtype == torch.int32 and not fits:
        raise ValueError(
            f"index_dtype=torch.int32 cannot count {nnz} elements of {tuple(shape)}: take torch.int64"
        )
    return index_dtype or (torch.int32 if fits else torch.int64)
