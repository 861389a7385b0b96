"""Streams and events in lazy mode: device work completes only when something waits, so the test chooses the order."""

import pytest
import torch

import memopt.sim

SIM = {"memory": "1GiB"}
MIB = 1 << 20
N = MIB


def test_work_is_pending_until_it_is_waited_for():
    memopt.sim.lazy(True)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.zeros(10, device="cuda")
        event.record()
    assert not event.query()
    assert not stream.query()
    stream.synchronize()
    assert event.query()


def test_a_pinned_copy_is_asynchronous_and_arrives_by_progress():
    memopt.sim.lazy(True)
    source = torch.arange(1000).pin_memory()
    target = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    target.copy_(source, non_blocking=True)
    assert not torch.cuda.current_stream().query()
    assert memopt.sim.progress() > 0
    assert torch.cuda.current_stream().query()
    assert torch.equal(target.cpu(), source)


def test_a_wait_orders_two_streams():
    memopt.sim.lazy(True)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.arange(N, dtype=torch.int32).pin_memory()
    middle, last = (torch.zeros(N, dtype=torch.int32, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        middle.copy_(source, non_blocking=True)
    second.wait_stream(first)  # torch makes an event for it and destroys it at once
    with torch.cuda.stream(second):
        last.copy_(middle, non_blocking=True)
    second.synchronize()
    assert torch.equal(last.cpu(), source)


def test_many_waits_on_events_that_are_gone_end_well():
    memopt.sim.lazy(True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    target = torch.zeros(100, dtype=torch.int32, device="cuda")
    for i in range(200):
        streams[i % 4].wait_stream(streams[(i + 1) % 4])
        with torch.cuda.stream(streams[i % 4]):
            target.fill_(i)
    torch.cuda.synchronize()
    assert all(stream.query() for stream in streams)


def free_while_in_use(record: bool) -> tuple[bool, bool]:
    """A block is freed by its own stream while another still reads it. (block reused, data right)."""
    good, bad = (torch.full((N,), v, dtype=torch.int32).pin_memory() for v in (1, 2))
    out = torch.empty(N, dtype=torch.int32).pin_memory()
    reader, current = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.empty(N, dtype=torch.int32, device="cuda")
    x.copy_(good)
    torch.cuda.synchronize()
    memopt.sim.lazy(True)
    with torch.cuda.stream(reader):
        out.copy_(x, non_blocking=True)
    if record:
        x.record_stream(reader)
    address = x.data_ptr()
    del x
    y = torch.empty(N, dtype=torch.int32, device="cuda")
    y.copy_(bad, non_blocking=True)
    current.synchronize()  # the writer is done first
    reader.synchronize()
    memopt.sim.lazy(False)
    return y.data_ptr() == address, bool((out == 1).all())


@pytest.mark.parametrize("round_", range(3))
def test_without_record_stream_the_block_is_reused_and_the_data_is_wrong(round_):
    assert free_while_in_use(record=False) == (True, False)


@pytest.mark.parametrize("round_", range(3))
def test_with_record_stream_the_block_is_held_back_and_the_data_is_right(round_):
    assert free_while_in_use(record=True) == (False, True)


def test_a_recorded_block_comes_back_when_the_stream_is_done():
    memopt.sim.lazy(True)
    stream = torch.cuda.Stream()
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    x.record_stream(stream)
    with torch.cuda.stream(stream):
        x.fill_(1)
    del x
    while_pending = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert while_pending.data_ptr() != address
    torch.cuda.synchronize()
    after = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert after.data_ptr() == address


def test_event_times_grow_with_the_order_of_the_work():
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.zeros(1000, device="cuda")
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 0


def test_a_side_stream_is_a_stream_of_its_own_and_the_default_one_is_legacy():
    assert torch.cuda.default_stream().cuda_stream == 0
    assert torch.cuda.Stream().cuda_stream != 0
    assert torch.cuda.Stream(priority=-1).priority == -1
