"""torch's statistics while memopt's allocator is current: torch's keys, and true values."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import memopt.cuda
from memopt import sim

SIM = {"memory": "512MiB", "devices": 2}
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("MEMOPT_SEED", random.SystemRandom().randrange(1 << 31)))
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(autouse=True, scope="module")
def current_allocator():
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


def block(size: int, device: int = 0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def rounded(size: int) -> int:
    return -(-size // 512) * 512


@pytest.fixture(autouse=True)
def nothing_is_live():
    def clean() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 0
        for device in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)

    clean()
    yield
    clean()


# ---- beside torch's own allocator ------------------------------------------------------------------------------------

# The same program under both allocators, and what it is told.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import memopt.sim
memopt.sim.activate(memory="1GiB", devices=2)
import torch
from torch.cuda import memory_allocated

if ALLOCATOR == "memopt":
    import memopt.cuda
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

def kinds(value):
    "The types of what is nested in a value, each once."
    if isinstance(value, dict):
        return {str(type(key).__name__ if isinstance(key, tuple) else key): kinds(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *sorted({json.dumps(kinds(v), sort_keys=True) for v in value})]
    return type(value).__name__

def block(size, device=0):
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")

counted = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")
said = {"values": [], "kinds": {}}

def look():
    stats, twin = torch.cuda.memory_stats(), torch.accelerator.memory_stats()
    said["values"].append([
        memory_allocated(), torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated(),
        torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated(),
        torch.cuda.memory_allocated("cuda:0"), torch.cuda.memory_allocated(torch.device("cuda", 1)),
        torch.cuda.get_per_process_memory_fraction() if torch.cuda.is_initialized() else None,
        {key: stats[key] for key in stats if key.split(".")[0] in counted and ".all." in key},
        {key: twin[key] for key in twin if key.split(".")[0] in counted and ".all." in key},
        [stats.get(key) for key in ("num_ooms", "max_split_size", "num_oom_rejections", "oversize_segments.peak")],
        torch.cuda.memory_reserved() >= memory_allocated(),
        torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved(),
    ])

look()
said["before"] = [torch.cuda.memory_snapshot(), dict(torch.cuda.memory_stats()), dict(torch.accelerator.memory_stats())]
torch.cuda.reset_peak_memory_stats()
look()
a, b, c = block(4000), block(5 << 20), block(3_000_001)
look()
del b
d = block(700, device=1)
look()
torch.cuda.reset_peak_memory_stats()
look()
e = [block(size) for size in (1, 511, 512, 513, 1 << 20, (1 << 20) + 1)]
del e[::2]
look()
torch.cuda.reset_accumulated_memory_stats()
look()
del a, e
look()
torch.accelerator.reset_peak_memory_stats()
torch.accelerator.reset_accumulated_memory_stats()
look()
try:
    block(1 << 40)
except torch.OutOfMemoryError:
    pass
look()
torch.cuda.set_per_process_memory_fraction(0.25)
look()
assert block(0).data_ptr() == 0
look()
graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
with torch.cuda.graph(graph, pool=pool):
    f = block(100)
look()
torch.cuda.memory._record_memory_history(stacks="python")
g = block(100)
del g
g = block(200)
said["kinds"]["stats"] = kinds(dict(torch.cuda.memory_stats()))
said["kinds"]["nested"] = kinds(torch.cuda.memory.memory_stats_as_nested_dict())
said["kinds"]["twin"] = kinds(dict(torch.accelerator.memory_stats()))
said["kinds"]["snapshot"] = kinds(torch.cuda.memory._snapshot()["segments"])
said["kinds"]["all"] = {key: type(value).__name__ for key, value in torch.cuda.memory._snapshot().items()}
said["kinds"]["settings"] = kinds(torch.cuda.memory._snapshot()["allocator_settings"])
# torch notes in a trace that somebody looked.
traces = torch.cuda.memory._snapshot()["device_traces"]
traces = [[entry for entry in trace if entry["action"] != "snapshot"] for trace in traces]
said["traces"] = [len(traces), sorted({tuple(entry) for entry in traces[0]}), len(traces[1])]
said["actions"] = [entry["action"] for entry in traces[0] if not entry["action"].startswith("segment")]
said["summary"] = [line[:26] for line in torch.cuda.memory_summary().splitlines()]
said["pools"] = [
    len(torch.cuda.memory_snapshot((0, 0))) == len(torch.cuda.memory_snapshot()),
    sum(segment["allocated_size"] for segment in torch.cuda.memory_snapshot(pool)),
    torch.cuda.memory_snapshot((12345, 0)),
]
print(json.dumps(said, default=str))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict[str, Any]]:
    found = {}
    for allocator in ("native", "memopt"):
        script = tmp_path_factory.mktemp(allocator) / "program.py"
        script.write_text(PROGRAM.replace("ALLOCATOR", repr(allocator)))
        done = subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        found[allocator] = json.loads(done.stdout)
    return found


def test_a_program_is_told_the_same_numbers_as_under_torchs_own_allocator(told):
    assert told["memopt"]["values"] == told["native"]["values"]
    assert told["memopt"]["before"] == told["native"]["before"]


@pytest.mark.parametrize("what", ["stats", "nested", "twin", "snapshot", "all", "settings"])
def test_keys_types_and_nesting_are_those_of_this_torch(told, what):
    assert told["memopt"]["kinds"][what] == told["native"]["kinds"][what]


@pytest.mark.parametrize("what", ["traces", "actions", "summary", "pools"])
def test_history_summary_and_pools_have_torchs_form(told, what):
    assert told["memopt"][what] == told["native"][what]


# ---- against a model -------------------------------------------------------------------------------------------------


class Model:
    """The expected statistics, from nothing but the requests."""

    def __init__(self) -> None:
        self.live: list[torch.Tensor] = []
        self.count = self.freed = self.allocated_in_all = self.peak = self.requested_peak = 0

    def allocate(self, size: int) -> None:
        self.live.append(block(size))
        self.count += 1
        self.allocated_in_all += rounded(size)
        self.peak = max(self.peak, self.allocated())
        self.requested_peak = max(self.requested_peak, self.requested())

    def free(self, which: int) -> None:
        del self.live[which % len(self.live)]
        self.freed += 1

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.peak, self.requested_peak = self.allocated(), self.requested()

    def requested(self) -> int:
        return sum(tensor.numel() for tensor in self.live)

    def allocated(self) -> int:
        return sum(rounded(tensor.numel()) for tensor in self.live)

    def check(self) -> None:
        stats = torch.cuda.memory_stats()
        assert torch.cuda.memory_allocated() == self.allocated() == stats["active_bytes.all.current"]
        assert torch.cuda.max_memory_allocated() == self.peak
        assert stats["requested_bytes.all.current"] == self.requested()
        assert stats["requested_bytes.all.peak"] == self.requested_peak
        assert stats["allocation.all.current"] == len(self.live)
        assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (self.count, self.freed)
        assert stats["allocated_bytes.all.allocated"] == self.allocated_in_all
        assert torch.cuda.memory_reserved() >= self.allocated()
        assert torch.cuda.max_memory_reserved() >= self.peak
        self.check_snapshot()

    def check_snapshot(self) -> None:
        segments = torch.cuda.memory_snapshot()
        blocks = [block for segment in segments for block in segment["blocks"]]
        found = {b["address"]: b for b in blocks if b["state"] == "active_allocated"}
        assert sorted(found) == sorted(tensor.data_ptr() for tensor in self.live)
        for tensor in self.live:
            there = found[tensor.data_ptr()]
            assert (there["size"], there["requested_size"]) == (rounded(tensor.numel()), tensor.numel())
        assert sum(segment["total_size"] for segment in segments) <= torch.cuda.memory_reserved()
        for segment in segments:
            end = segment["address"]
            for there in segment["blocks"]:  # in a row, and all of it
                assert there["address"] == end
                end += there["size"]
            assert end == segment["address"] + segment["total_size"]
            states = {name: [b for b in segment["blocks"] if b["state"] == name] for name in STATES}
            allocated = sum(b["size"] for b in states["active_allocated"])
            assert segment["allocated_size"] == allocated
            assert segment["active_size"] == allocated + sum(b["size"] for b in states["active_pending_free"])
            assert segment["requested_size"] == sum(b["requested_size"] for b in segment["blocks"])
        ends = [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]
        assert ends == sorted(ends) and all(a[1] <= b[0] for a, b in pairwise(ends))


STATES = ("active_allocated", "active_pending_free", "inactive")
SIZES = st.one_of(
    st.integers(1, 5000), st.integers(1, 3 * MIB), st.sampled_from([512, MIB, 2 * MIB, 20 * MIB])
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("peaks"), st.just(0)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=40,
)


@seed(SEED)
@settings(max_examples=2000 if SOAK else 60, deadline=None, database=None)
@given(STEPS)
def test_any_requests_and_frees_are_counted_and_listed_as_a_model_says(steps):
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    model = Model()
    for what, argument in steps:
        if what == "allocate" and model.allocated() + argument < 256 * MIB:
            model.allocate(argument)
        elif what == "free" and model.live:
            model.free(argument)
        elif what == "peaks":
            model.reset_peaks()
        elif what == "trim":
            torch.cuda.empty_cache()
    model.check()


# ---- what only some programs see -------------------------------------------------------------------------------------


def test_a_block_that_another_stream_uses_is_active_until_that_stream_is_done():
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda.synchronize()
    sim.lazy(True)
    x = block(3 * MIB)
    with torch.cuda.stream(other):
        x.fill_(1)
    x.record_stream(other)
    address = x.data_ptr()
    del x
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == 3 * MIB and stats["active.all.current"] == 1
    states = {b["address"]: b["state"] for s in torch.cuda.memory_snapshot() for b in s["blocks"]}
    assert states[address] == "active_pending_free"
    assert sum(s["active_size"] for s in torch.cuda.memory_snapshot()) >= 3 * MIB
    assert memopt.cuda.fragmentation()["pending_bytes"] >= 3 * MIB
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == stats["active.all.current"] == 0
    assert stats["active.all.freed"] == stats["active.all.allocated"] == 1
    assert "active_pending_free" not in {
        b["state"] for s in torch.cuda.memory_snapshot() for b in s["blocks"]
    }


def test_each_device_has_its_own():
    x, y = block(1000, device=0), block(5000, device=1)
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (1024, 5120)
    assert {s["device"] for s in torch.cuda.memory_snapshot()} == {0, 1}
    with torch.cuda.device(1):
        assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 5120
        assert memopt.cuda.memory_stats()["live_bytes"] == 5000
    torch.cuda.reset_peak_memory_stats(1)
    del x, y


def test_what_is_no_device_is_refused():
    for device in (2, -3, 64, 1000):
        with pytest.raises(RuntimeError, match="Invalid device argument"):
            torch._C._cuda_memoryStats(device)
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch._C._cuda_memoryStats("0")
    with pytest.raises(ValueError, match="not a CUDA device"):
        memopt.cuda.fragmentation("cpu")
    with pytest.raises(ValueError, match="expected a device number from 0"):
        memopt.cuda.memory_stats(64)


def test_the_equations_hold_whenever_somebody_looks_while_four_threads_allocate():
    done = threading.Event()
    broken: list[object] = []

    def work(number: int) -> None:
        rng = random.Random(SEED + number)
        live: list[torch.Tensor] = []
        while not done.is_set():
            if len(live) < 20 and rng.random() < 0.6:
                live.append(block(rng.randrange(1, 2 * MIB)))
            elif live:
                live.pop(rng.randrange(len(live)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000 if SOAK else 200):
            s = torch.cuda.memory_stats()
            chain = [
                s[f"{key}_bytes.all.current"] for key in ("requested", "allocated", "active", "reserved")
            ]
            sums = [
                s[f"{key}.all.{column}"] == s[f"{key}.small_pool.{column}"] + s[f"{key}.large_pool.{column}"]
                for key in (
                    "allocation",
                    "allocated_bytes",
                    "requested_bytes",
                    "active_bytes",
                    "reserved_bytes",
                )
                for column in ("current", "allocated", "freed")
            ]
            if chain != sorted(chain) or not all(sums):
                broken.append((chain, sums))
            assert all(b["size"] > 0 for segment in torch.cuda.memory_snapshot() for b in segment["blocks"])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not broken, f"seed {SEED}"


def test_a_graphs_private_pool_is_listed_under_its_number():
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        x = block(3 * MIB)
    segments = torch.cuda.memory_snapshot(pool)
    assert sum(s["allocated_size"] for s in segments) == 3 * MIB
    assert {s["segment_pool_id"] for s in segments} == {pool}
    nested = torch.cuda.memory.memory_stats_as_nested_dict()
    if "reserved_bytes_by_private_pools" in nested:
        held = nested["reserved_bytes_by_private_pools"][pool]["all"]
        assert held["current"] == held["peak"] == sum(s["total_size"] for s in segments)
    del x, graph
    gc.collect()
    assert torch.cuda.memory_snapshot(pool) == []


def test_fragmentation_says_what_is_held_free_and_lost():
    torch.cuda.empty_cache()
    empty = memopt.cuda.fragmentation()
    assert (empty["live_bytes"], empty["internal"]) == (0, 0)
    live = [block(3 * MIB - 100) for _ in range(8)]
    del live[::2]
    f = memopt.cuda.fragmentation()
    assert f["held_bytes"] == f["live_bytes"] + f["free_bytes"] == torch.cuda.memory_reserved()
    assert f["live_bytes"] == torch.cuda.memory_allocated()
    assert f["requested_bytes"] == sum(x.numel() for x in live)
    assert f["internal"] == pytest.approx(1 - f["requested_bytes"] / f["live_bytes"])
    assert 0 < f["largest_free"] <= f["free_bytes"]
    assert f["largest_free"] <= f["largest_allocatable"]
    assert 0 <= f["external"] <= 1 and 0 <= f["unused_at_peak"] < 1
    largest = block(f["largest_allocatable"] - 8 * MIB)  # and can really be had, but for rounding
    del largest


def test_memory_stats_counts_what_happened():
    before = memopt.cuda.memory_stats()
    x, y = block(1000), block(2000)
    del x
    after = memopt.cuda.memory_stats()
    assert after["allocations"] - before["allocations"] == 2 and after["frees"] - before["frees"] == 1
    assert (after["live_blocks"], after["live_bytes"]) == (1, 2000)
    assert after["peak_bytes"] == 3000 and after["held_bytes"] <= after["peak_held_bytes"]
    assert all(isinstance(value, int) and value >= 0 for value in after.values())
    del y


def test_a_forked_child_is_told_nothing_and_hangs_nowhere():
    x = block(1000)
    child = os.fork()
    if child == 0:
        told = (
            torch.cuda.memory_allocated(),
            memopt.cuda.memory_stats()["live_blocks"],
            memopt.cuda.memory_snapshot(),
        )
        os._exit(0 if told == (0, 0, []) else 1)
    assert os.waitpid(child, 0)[1] == 0
    del x
