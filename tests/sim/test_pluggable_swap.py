"""change_current_allocator: what torch does when an allocator of the user's takes the caching allocator's place."""

import ctypes

import pytest
import torch
from test_pluggable_allocator import Allocator

SIM = {"memory": "1GiB"}
MIB = 1 << 20

# Before the first allocation of the process, and for all of it.
OURS = Allocator()
TORCHS = OURS.torch_allocator()
SET_RECORD = getattr(TORCHS, "set_record_stream_fn", None)
if SET_RECORD is not None:
    SET_RECORD(ctypes.cast(OURS._record, ctypes.c_void_p).value)
HOLDER = type("Holder", (), {"allocator": lambda self: TORCHS})()


@pytest.fixture(scope="module", autouse=True)
def swapped():
    torch.cuda.memory.change_current_allocator(HOLDER)


def test_every_request_reaches_the_allocator_and_every_free_too():
    asked, freed = len(OURS.asked), OURS.freed
    x = torch.empty(MIB, device="cuda")
    host = torch.randn(100)
    y = host.cuda()
    assert OURS.asked[asked:] == [4 * MIB, 400]
    assert torch.equal(y.cpu(), host)
    del x, y
    assert OURS.freed == freed + 2


def test_torchs_statistics_are_refused():
    with pytest.raises(RuntimeError, match="does not yet support"):
        torch.cuda.memory_allocated()


def test_record_stream_reaches_the_hook():
    x = torch.empty(10, device="cuda")
    stream = torch.cuda.Stream()
    x.record_stream(stream)
    assert OURS.recorded[-1] == (x.data_ptr(), stream.cuda_stream)


def test_a_null_from_the_allocator_is_not_noticed():
    x = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    assert x.data_ptr() == 0  # so an allocator must throw


def test_a_second_swap_is_refused():
    with pytest.raises(RuntimeError, match="Can't swap an already initialized allocator"):
        torch.cuda.memory.change_current_allocator(HOLDER)
