"""Copies between a device and pinned memory (memopt._C.copy_out, copy_in, copy_batch), on a device that runs late: what
comes back is what went, and each wait is needed."""

from __future__ import annotations

import itertools

import pytest
import torch

from memopt import _C, sim
from memopt._offload.pinned_memory import IncomingBytes, pinned_tensor

SIM = {"memory": "1GiB"}

CUDA = torch.device("cuda", 0)
SIZE = 1 << 20
values = itertools.count(1, 2)  # none twice: what is left in memory is not what is looked for


def full(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8).pin_memory()


def run_ahead(which: str) -> None:
    """One of the streams runs as far as it may."""
    streams = _C.copy_counts(0)
    sim.progress(-1, 1 if which == "computation" else streams[f"stream_{which}"])


def there_and_back(ahead: str, *, await_out: bool = True, after: bool = True, await_in: bool = True) -> bool:
    """Return whether a tensor that is made, copied out, overwritten, brought back and read is the same. The flags:
    faults."""
    value = next(values)
    source, other, seen = full(value), full(value + 1), full(0)
    host = pinned_tensor(CUDA, SIZE)
    reader = torch.cuda.Stream()
    sim.lazy(True)
    tensor = torch.empty(SIZE, dtype=torch.uint8, device=CUDA)
    tensor.copy_(source, non_blocking=True)
    out = _C.copy_out(tensor, host)
    run_ahead(ahead)
    if await_out:
        _C.copy_await(0, out)
    tensor.copy_(other, non_blocking=True)
    run_ahead(ahead)
    with torch.cuda.stream(reader):
        incoming = IncomingBytes(SIZE, CUDA)
        incoming.begin(host, out if after else 0)
        run_ahead(ahead)
        if await_in:
            back = incoming.tensor()
        else:
            back, incoming._awaited = incoming._tensor, True
        seen.copy_(back, non_blocking=True)
        sim.progress(-1, reader.cuda_stream)
    run_ahead(ahead)
    torch.cuda.synchronize()
    sim.lazy(False)
    return torch.equal(seen, source)


@pytest.mark.parametrize("ahead", ["computation", "out", "in"])
def test_what_comes_back_is_what_went_whoever_is_ahead(ahead: str) -> None:
    assert there_and_back(ahead)


@pytest.mark.parametrize(
    ("fault", "ahead"), [("await_out", "computation"), ("after", "in"), ("await_in", "computation")]
)
def test_each_wait_is_needed(fault: str, ahead: str) -> None:
    assert not there_and_back(ahead, **{fault: False})


def test_the_memory_of_a_copy_in_that_nobody_wanted_is_kept_until_it_is_there() -> None:
    for fault in (False, True):
        host, source, seen = pinned_tensor(CUDA, SIZE), full(2), full(0)
        host.fill_(1)
        sim.lazy(True)
        incoming = IncomingBytes(SIZE, CUDA)
        incoming.begin(host)
        incoming._awaited = fault
        del incoming
        other = torch.empty(SIZE, dtype=torch.uint8, device=CUDA)  # in the same memory
        other.copy_(source, non_blocking=True)
        run_ahead("computation")
        run_ahead("in")
        seen.copy_(other, non_blocking=True)
        torch.cuda.synchronize()
        sim.lazy(False)
        assert torch.equal(seen, source) != fault


def test_a_copy_waits_for_its_tensor_and_the_host_for_nothing() -> None:
    source, host = full(1), pinned_tensor(CUDA, SIZE)
    sim.lazy(True)
    before = sim.stats()
    tensor = torch.empty(SIZE, dtype=torch.uint8, device=CUDA)
    tensor.copy_(source, non_blocking=True)
    ticket = _C.copy_out(tensor, host)
    assert not _C.copy_over(0, ticket)
    run_ahead("out")
    assert not _C.copy_over(0, ticket)
    run_ahead("computation")
    run_ahead("out")
    assert _C.copy_over(0, ticket)
    assert torch.equal(host, source)
    assert sim.stats()["syncs"] == before["syncs"]


def test_another_streams_reader_keeps_the_memory() -> None:
    host, source, seen = pinned_tensor(CUDA, SIZE), full(2), full(0)
    host.fill_(1)
    sim.lazy(True)
    incoming = IncomingBytes(host.numel(), CUDA)
    incoming.begin(host)
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        seen.copy_(incoming.tensor(), non_blocking=True)
    del incoming
    other = torch.empty(SIZE, dtype=torch.uint8, device=CUDA)
    other.copy_(source, non_blocking=True)
    run_ahead("in")
    run_ahead("computation")
    torch.cuda.synchronize()
    sim.lazy(False)
    assert bool((seen == 1).all())


def test_floating_types_are_copied_as_they_are() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        source = torch.arange(1000).to(dtype).to(CUDA)
        host = pinned_tensor(CUDA, source.nbytes).view(dtype)
        _C.copy_await(0, _C.copy_out(source, host))
        torch.cuda.synchronize()
        assert torch.equal(host, source.cpu())


def test_what_cannot_be_copied_is_refused() -> None:
    host = pinned_tensor(CUDA, 16)
    for wrong in (
        torch.empty(16, dtype=torch.uint8),
        torch.empty(15, dtype=torch.uint8, device=CUDA),
        torch.empty(32, dtype=torch.uint8, device=CUDA)[::2],
        torch.empty(0, dtype=torch.uint8, device=CUDA),
    ):
        with pytest.raises(ValueError, match="both dense, of the same number of bytes, more than 0"):
            _C.copy_out(wrong, host)
    with pytest.raises(ValueError, match="expected 1 or more"):
        _C.PinnedMemory(0, 0)


def test_a_batch_is_copied_from_where_it_is_pinned_and_by_way_of_the_room() -> None:
    made = [
        torch.arange(37, dtype=torch.int64),
        (torch.rand(3 << 20) * 9).to(torch.int16),  # more than a thread's share
        torch.rand(5, 7, dtype=torch.complex64).t(),
        torch.ones(9, dtype=torch.bool),
    ]
    room = pinned_tensor(CUDA, 8 << 20)
    for pinned in itertools.product([False, True], repeat=len(made)):
        hosts = [one.pin_memory() if lies else one.clone() for one, lies in zip(made, pinned, strict=True)]
        there = [torch.empty_like(one, device=CUDA) for one in made]
        ticket = _C.copy_batch(hosts, there, bytes(pinned), None if all(pinned) else (room, 4096, 8 << 20))
        _C.copy_await(0, ticket)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, made, strict=True))
    assert _C.copy_batch([], [], b"", None) == 0


def test_plain_bytes_are_all_there_is_to_a_tensor() -> None:
    x, z = torch.ones(6, 4), torch.ones(3, dtype=torch.complex64)
    for plain in (
        x,
        x.t(),
        x[2:],
        x.long(),
        x > 0,
        x.bfloat16(),
        torch.nn.Parameter(x),
        x.pin_memory(),
        x[0, 0],
    ):
        assert _C.plain_bytes(plain) == plain.nbytes
    others = [x[:, ::2], x[:0], x[:1].expand(3, 4), x.to_sparse(), z, z.conj(), z.conj().imag, z._neg_view()]
    others += [x.to(CUDA), x.to("meta"), torch.nn.Buffer(x).as_subclass(Other), "x", None]
    for other in others:
        assert _C.plain_bytes(other) == 0


class Other(torch.Tensor):
    pass


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_copied() -> None:
    host, there = torch.ones(16), torch.zeros(16, device=CUDA)
    memory = pinned_tensor(CUDA, 300)
    memory.fill_(7)
    before = _C.copy_counts(0)["copies_in"]
    room = memory, 0, 100
    for hosts, targets, pinned, into, says in (
        (
            [host, host],
            [there, there],
            bytes(2),
            room,
            "number 1, which is not pinned, does not fit in room",
        ),
        ([host], [there], bytes(1), None, "number 0, which is not pinned"),
        ([host], [there], bytes(1), memory, "room: expected"),
        ([host], [there], bytes(1), (memory, 0), "room: expected"),
        ([host], [there], bytes(1), (there, 0, 64), "room: expected"),
        ([host], [there], bytes(1), (host, 0, 64), "room: expected"),
        ([host], [there], bytes(1), (memory, 237, 301), "room: expected"),
        ([host], [there], bytes(1), (memory, -1, 64), "room: expected"),
        ([host], [there], bytes(1), (memory, 64, 0), "room: expected"),
        ([host], [there], bytes(1), (memory, 237, 300), "number 0, which is not pinned"),
        ([host, host[1:]], [there, there], b"11", room, "number 1: expected a tensor on the host"),
        ([host[::2]], [there[:8]], bytes(1), room, "number 0: expected"),
        ([host[:0]], [there[:0]], bytes(1), room, "number 0: expected"),
        ([there], [host], b"1", room, "number 0: expected"),
        ([host], [host], b"1", room, "number 0: expected"),
        ([1], [there], b"1", room, "number 0: expected"),
        ([host], [], b"1", room, "1 tensors on the host, 0 on the device, 1 flags"),
        ([host], [there], b"", room, "1 on the device, 0 flags"),
    ):
        with pytest.raises(ValueError, match=says):
            _C.copy_batch(hosts, targets, pinned, into)
    assert _C.copy_counts(0)["copies_in"] == before and bool((memory == 7).all())


def test_memory_of_any_type_is_described_alike_without_dlpacks_table() -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex128, torch.uint16):
        tensor = torch.ones(3, 4, dtype=dtype).t()
        seen = {_C._tensor_view(tensor, by_methods, True) for by_methods in (False, True)}
        assert seen == {(tensor.data_ptr(), 12, tensor.nbytes, -1)}, dtype
    for other in (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)):
        assert _C._tensor_view(other) is None and _C._tensor_view(other, True) is None, (
            "no type of a kernel's"
        )
    for by_methods in (False, True):
        assert _C._tensor_view(torch.eye(3).to_sparse(), by_methods, True) is None
        assert _C._tensor_view(torch.ones(8)[::2], by_methods, True) is None


def test_pinned_memory_is_exact_and_goes_when_its_tensor_does() -> None:
    before, taken = sim.stats()["host_allocations"], sim.stats()["host_bytes"]
    host = pinned_tensor(CUDA, 1000001)
    assert host.numel() == 1000001
    assert host.is_pinned()
    assert sim.stats()["host_allocations"] == before + 1
    assert sim.stats()["host_bytes"] == taken + 1000001 <= sim.stats()["host_bytes_peak"]
    half = host[:10]
    del host
    assert sim.stats()["host_allocations"] == before + 1
    half.fill_(3)
    del half
    assert sim.stats()["host_allocations"] == before and sim.stats()["host_bytes"] == taken
    assert sim.stats()["host_bytes_peak"] >= taken + 1000001


def test_a_stream_that_is_captured_is_refused() -> None:
    tensor, host = torch.empty(SIZE, dtype=torch.uint8, device=CUDA), pinned_tensor(CUDA, SIZE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="captured into a graph"):
        _C.copy_out(tensor, host)
