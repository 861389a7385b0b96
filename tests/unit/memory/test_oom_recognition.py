"""Recognition of out-of-memory errors."""

from __future__ import annotations

import errno

import pytest
import torch

from memopt._memory.oom.exceptions import bytes_asked, followed, is_out_of_memory, out_of_memory_in

OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError("whatever it says"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("unable to mmap 8 bytes from file </x>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    ExceptionGroup("two", [MemoryError(), RuntimeError("CUDA out of memory.")]),
]
NOT = [
    None,
    ValueError("out of memory"),  # the words alone make none
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(…)`"),
    OSError(errno.ENOSPC, "No space left on device"),
    torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"),
    ExceptionGroup("one is not", [MemoryError(), ValueError()]),
]


@pytest.mark.parametrize("error", OUT, ids=lambda e: str(e)[:30])
def test_what_is_one(error: BaseException) -> None:
    assert is_out_of_memory(error) and out_of_memory_in(error) is error


@pytest.mark.parametrize("error", NOT, ids=lambda e: str(e)[:30])
def test_what_is_none(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)


def raised(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "from":
                raise outer from error
            if how == "from None":
                raise outer from None
            raise outer  # noqa: B904
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("outer", "how", "expected"),
    [
        (ValueError(), "from", True),
        (ValueError(), "during", True),
        (ValueError(), "from None", False),
        (KeyboardInterrupt(), "during", False),
        (torch.distributed.DistBackendError(), "during", False),
    ],
    ids=repr,
)
def test_what_followed_one(outer: BaseException, how: str, expected: bool) -> None:
    inner = MemoryError()
    assert out_of_memory_in(raised(outer, inner, how)) is (inner if expected else None)


def test_a_chain_that_is_a_ring_ends() -> None:
    one, two = ValueError(), ValueError()
    one.__context__, two.__context__ = two, one
    assert not is_out_of_memory(one)


def test_the_bytes_asked_for() -> None:
    assert (
        bytes_asked(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 MiB. GPU 0"))
        == 5 << 19
    )
    assert bytes_asked(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes.")) == 512
    assert bytes_asked(MemoryError()) is None


def test_what_torch_raises_when_the_host_has_no_more() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert bytes_asked(caught.value) == 4 << 60


def test_what_an_exception_followed_is_what_a_traceback_shows_or_all_that_it_keeps_alive():
    first, hidden, member = KeyError("first"), ValueError("hidden"), TypeError("member")
    group = ExceptionGroup("group", [member])
    group.__cause__, group.__context__ = first, first
    outer = RuntimeError("outer")
    outer.__context__, outer.__suppress_context__ = hidden, True
    hidden.__context__ = group
    assert list(followed(outer)) == [outer] and list(followed(hidden)) == [hidden, group, first]
    assert set(followed(outer, everything=True)) == {outer, hidden, group, first, member}
    first.__context__ = group
    assert list(followed(group)) == [group, first] and list(followed(None)) == []
