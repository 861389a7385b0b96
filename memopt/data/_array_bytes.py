"""Arrays and tensors as plain values: their elements as bytes, and NumPy dtypes as in the header of a .npy file."""

from __future__ import annotations

import ctypes
from typing import Any


def dtype_description(dtype: Any) -> Any:
    """Return a str, or a list of tuples (name, description, shape) for the fields.

    None for a dtype that NumPy cannot describe so: Python objects, fields that overlap or are out of order."""
    import numpy as np

    if dtype.hasobject:
        return None
    try:
        written = _plain(np.lib.format.dtype_to_descr(dtype))
        return written if dtype_of(written) == dtype else None
    except ValueError:
        return None


def _plain(descr: Any) -> Any:
    """Return the description with plain ints, since NumPy's shapes may contain NumPy's own."""
    if isinstance(descr, list):
        return [
            (
                name,
                _plain(kind),
                *(tuple(map(int, one)) if isinstance(one, tuple) else (int(one),) for one in shape),
            )
            for name, kind, *shape in descr
        ]
    return descr


def dtype_of(written: Any) -> Any:
    """Return the dtype of a description; JSON's lists may stand for its tuples.

    Raises ValueError, TypeError or SyntaxError for anything else."""
    import numpy as np

    return np.lib.format.descr_to_dtype(_with_tuples(written))


def _with_tuples(written: Any) -> Any:
    if not isinstance(written, list):
        return written
    return [
        (
            tuple(name) if isinstance(name, list) else name,
            _with_tuples(kind),
            *(tuple(one) if isinstance(one, list) else one for one in shape),
        )
        for name, kind, *shape in written
    ]


def bytes_of(tensor: Any) -> memoryview:
    """Return the elements in C order: a view of the tensor's own memory if it is contiguous and on the CPU, else of a
    copy. The memory lives as long as the view."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    count = plain.numel() * plain.element_size()
    if count == 0:
        return memoryview(b"")
    block: Any = (ctypes.c_char * count).from_address(plain.data_ptr())
    block.tensor = plain  # the view holds the block, the block the tensor
    return memoryview(block).cast("B")
