"""memopt's allocator and several streams, on a device whose work is late: contents are never wrong, and would be
without the record_stream hook."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from stream_race import race

import memopt
from memopt import sim

SIM = {"memory": "256MiB"}
MIB = 1 << 20
SEED = int(os.environ.get("MEMOPT_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
ROUNDS = 200 if os.environ.get("MEMOPT_SOAK") == "1" else 5


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_what_a_stream_reads_is_what_was_written(streams: int):
    print(f"MEMOPT_SEED={SEED}")
    assert [race(SEED + i, streams) for i in range(ROUNDS)] == [0] * ROUNDS
    assert memopt.cuda.memory_stats()["failed_frees"] == 0


def test_so_it_is_where_memory_is_short():
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(16 / 256)
    try:
        assert [race(SEED + i, 3) for i in range(ROUNDS)] == [0] * ROUNDS
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


WITHOUT = """
import sys
sys.path.insert(0, {folder!r})
import memopt.sim
memopt.sim.activate(memory="256MiB")
import torch, memopt
hooks = memopt._C.allocator_hooks
memopt._C.allocator_hooks = lambda: {{k: v for k, v in hooks().items() if k != "set_record_stream_fn"}}
torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
from stream_race import race
print(sum(race({seed} + i, 3) for i in range(5)))
"""


def test_without_the_record_stream_hook_readers_see_what_was_never_meant_for_them(run_script):
    done = run_script(WITHOUT.format(folder=str(Path(__file__).parent), seed=SEED))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, f"MEMOPT_SEED={SEED}: the race is no test"


def test_a_block_that_one_stream_only_used_comes_back_to_it_at_once():
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    events = sim.calls("cuEventRecord")
    sim.lazy(True)
    x.fill_(1)
    del x
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address
    assert sim.calls("cuEventRecord") == events


def test_a_recorded_block_comes_back_when_the_stream_is_done():
    sim.lazy(True)
    stream = torch.cuda.Stream()
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(stream):
        x.fill_(1)
    x.record_stream(stream)
    del x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert memopt.cuda.fragmentation()["pending_bytes"] == 0


def test_recording_the_stream_that_has_it_already_is_nothing():
    events = sim.calls("cuEventRecord")
    x = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    x.record_stream(torch.cuda.current_stream())
    del x
    assert torch.empty(30 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address
    assert sim.calls("cuEventRecord") == events


def test_many_streams_record_one_block():
    sim.lazy(True)
    streams = [torch.cuda.Stream() for _ in range(20)]
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    for stream in streams:
        with torch.cuda.stream(stream):
            x.fill_(1)
        x.record_stream(stream)
    del x
    torch.cuda.synchronize()
    assert torch.empty(200 * MIB, dtype=torch.uint8, device="cuda").numel() == 200 * MIB
