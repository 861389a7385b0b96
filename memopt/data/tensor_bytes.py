"""A tensor's elements as bytes, whatever its dtype, without NumPy."""

from __future__ import annotations

import ctypes
from typing import Any


def bytes_of(tensor: Any) -> memoryview:
    """The elements in C order. A view of the tensor's own memory where that is contiguous and on the CPU, else of a
    copy; the memory stays as long as the view does."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    count = plain.numel() * plain.element_size()
    if count == 0:
        return memoryview(b"")
    block: Any = (ctypes.c_char * count).from_address(plain.data_ptr())
    block.tensor = plain  # the view holds the block, the block the tensor
    return memoryview(block).cast("B")
