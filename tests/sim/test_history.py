"""torch's memory history of memopt's allocator: what is recorded, and that torch's own viewer opens it."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import threading
import time

import pytest
import torch
import torch.cuda._memory_viz as viz

import memopt.cuda
from memopt import sim

SIM = {"memory": "512MiB", "devices": 2}
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def current_allocator():
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    torch.cuda.init()


@pytest.fixture(autouse=True)
def nothing_recorded():
    gc.collect()
    torch.cuda.memory._record_memory_history(clear_history=True)
    torch.cuda.memory._record_memory_history(None)
    yield
    torch.cuda.memory._record_memory_history(None)


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def entries(*actions: str) -> list[dict]:
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return [entry for entry in trace if entry["action"] in actions] if actions else trace


def live_frames() -> dict[int, list[dict]]:
    segments = torch.cuda.memory_snapshot()
    return {
        b["address"]: b["frames"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"
    }


def test_a_device_that_comes_into_use_later_is_recorded_too_and_is_not_begun_for_that():
    contexts = sim.calls("cuDevicePrimaryCtxRetain")
    torch.cuda.memory._record_memory_history(stacks="python")
    assert sim.calls("cuDevicePrimaryCtxRetain") == contexts
    assert torch.cuda.memory._snapshot()["device_traces"][1] == []
    x = torch.empty(1000, dtype=torch.uint8, device="cuda:1")
    requests = [e for e in torch.cuda.memory._snapshot()["device_traces"][1] if e["action"] == "alloc"]
    assert [e["size"] for e in requests] == [1000] and requests[0]["frames"]
    torch.cuda.memory._record_memory_history(None)
    del x


def test_nothing_is_recorded_before_it_is_asked_for():
    assert torch._C._cuda_isHistoryEnabled() is False
    x = block(1000)
    assert entries() == [] and live_frames() == {x.data_ptr(): []}


def test_requests_and_frees_are_there_in_order_and_with_their_line():
    torch.cuda.memory._record_memory_history(stacks="python")
    assert torch._C._cuda_isHistoryEnabled() is True
    before = time.time_ns() // 1000
    x = block(1000); line = inspect.currentframe().f_lineno  # fmt: skip  # noqa: E702
    address = x.data_ptr()
    del x
    y = block(2000)
    trace = entries("alloc", "free_requested", "free_completed")
    assert [(e["action"], e["size"]) for e in trace] == [
        ("alloc", 1000), ("free_requested", 1000), ("free_completed", 1000), ("alloc", 2000),
    ]  # fmt: skip
    assert [e["addr"] for e in trace] == [address] * 3 + [y.data_ptr()]
    assert before <= trace[0]["time_us"] <= trace[-1]["time_us"] <= time.time_ns() // 1000
    names = [(frame["name"], frame["line"]) for frame in trace[0]["frames"] if frame["filename"] == __file__]
    assert names[0][0] == "block"
    assert names[1] == ("test_requests_and_frees_are_there_in_order_and_with_their_line", line)
    assert live_frames()[y.data_ptr()] == trace[-1]["frames"]


def test_what_was_recorded_ends_where_it_was_switched_off():
    torch.cuda.memory._record_memory_history()
    x = block(1000)
    torch.cuda.memory._record_memory_history(None)
    y = block(2000)
    torch.cuda.memory._record_memory_history()
    z = block(3000)
    assert [e["size"] for e in entries("alloc")] == [1000, 3000]
    torch.cuda.memory._record_memory_history(clear_history=True)
    assert entries("alloc") == []
    del x, y, z


def test_the_last_max_entries_are_kept():
    torch.cuda.memory._record_memory_history(max_entries=10)
    live = [block(1000 + i) for i in range(30)]
    sizes = [e["size"] for e in entries("alloc")]
    assert len(sizes) <= 10 and sizes == list(range(1030 - len(sizes), 1030))
    del live


def test_state_keeps_the_lines_of_what_lives_and_no_history():
    torch.cuda.memory._record_memory_history("state", stacks="python")
    x = block(1000)
    assert entries() == []
    assert live_frames()[x.data_ptr()][0]["name"] == "block"


def test_without_context_there_are_events_and_no_frames():
    torch.cuda.memory._record_memory_history(context=None)
    x = block(1000)
    assert all("frames" not in entry for entry in entries("alloc"))
    assert live_frames() == {x.data_ptr(): []}


def test_actions_that_are_to_be_skipped_are():
    if "skip_actions" not in inspect.signature(torch.cuda.memory._record_memory_history).parameters:
        pytest.skip("this torch skips none")
    torch.cuda.memory._record_memory_history(skip_actions=["free_requested", "segment_map"])
    x = block(1000)
    del x
    assert {e["action"] for e in entries()} == {"alloc", "free_completed"}
    with pytest.raises(RuntimeError, match="Unknown TraceEntry action: nonsense"):
        torch.cuda.memory._record_memory_history(skip_actions=["nonsense"])


def test_arguments_are_refused_as_torch_refuses_them():
    for arguments in ({"enabled": "x"}, {"context": "x"}, {"stacks": "x"}):
        with pytest.raises(RuntimeError, match="^expected "):
            torch.cuda.memory._record_memory_history(**arguments)
    assert torch._C._cuda_isHistoryEnabled() is False


def test_the_older_form_is_understood():
    torch.cuda.memory._record_memory_history(
        True, trace_alloc_max_entries=100, trace_alloc_record_context=True
    )
    x = block(1000)
    assert [e["size"] for e in entries("alloc")] == [1000] and live_frames()[x.data_ptr()]
    torch.cuda.memory._record_memory_history(False)
    assert torch._C._cuda_isHistoryEnabled() is False


def test_an_out_of_memory_is_in_it():
    torch.cuda.memory._record_memory_history(stacks="python")
    with pytest.raises(torch.OutOfMemoryError):
        block(4096 * MIB)
    [entry] = entries("oom")
    assert entry["size"] == 4096 * MIB and entry["device_free"] == torch.cuda.mem_get_info()[0] > 0
    assert "addr" not in entry
    assert entry["frames"][0]["name"] == "block"


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_allocationTraceback"), reason="this torch cannot be asked")
def test_where_a_tensor_was_made_can_be_asked():
    assert torch.cuda.memory._allocation_traceback(1) is None
    torch.cuda.memory._record_memory_history(stacks="python")
    x = block(1000)
    assert torch.cuda.memory._allocation_traceback(x.data_ptr())[0]["name"] == "block"
    address = x.data_ptr()
    del x
    assert torch.cuda.memory._allocation_traceback(address) is None


def test_pinned_memory_cannot_be_recorded_and_that_is_said():
    if (
        "record_pinned_host_memory"
        not in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    ):
        pytest.skip("this torch records none")
    with pytest.warns(RuntimeWarning, match="record_pinned_host_memory") as told:
        torch.cuda.memory._record_memory_history(record_pinned_host_memory=True)
    assert [warning.filename for warning in told] == [__file__]


def lines_only(lines, script=None) -> str:
    """In place of torch's flame graphs, for which it downloads a program."""
    return lines if isinstance(lines, str) else "\n".join(lines)


@pytest.fixture
def snapshot(tmp_path) -> dict:
    """Of a little training, as dumped by torch and read again."""
    torch.cuda.memory._record_memory_history(stacks="python")
    model = torch.nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.empty(64, 1000, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    return pickle.loads((tmp_path / "snapshot.pickle").read_bytes())


@pytest.mark.parametrize("plot", [viz.trace_plot, viz.segment_plot])
def test_torchs_viewer_embeds_it(snapshot, plot):
    page = plot(snapshot)
    assert "snapshot.pickle" in page and len(page) > 1000


def test_torchs_viewer_lists_its_segments(snapshot):
    said = viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}\n" in said
    live = sum(s["requested_size"] for s in snapshot["segments"])
    assert f"total_allocated: {viz.Bytes(live)}" in said


def test_torchs_viewer_replays_its_trace(snapshot):
    said = viz.trace(snapshot)
    requests = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert len(re.findall(r" = (?:MEM|seg_\d+)\[", said)) == len(requests) > 10


@pytest.mark.parametrize("plot", [viz.memory, viz.segments])
def test_torchs_viewer_sums_its_frames_up(snapshot, plot):
    said = plot(snapshot, format_flamegraph=lines_only)
    assert "active_allocated" in said and "linear.py" in said.lower()
    total = sum(int(line.rsplit(" ", 1)[1]) for line in said.splitlines())
    assert total == sum(s["total_size"] for s in snapshot["segments"])


def test_torchs_viewer_compares_two(snapshot):
    x = block(20 * MIB)
    said = viz.compare(snapshot["segments"], torch.cuda.memory_snapshot(), format_flamegraph=lines_only)
    assert isinstance(said, str)
    del x


def test_torchs_viewer_filters_what_was_freed(snapshot):
    left = viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    assert not [e for e in left if e["action"].startswith("free")]
    assert [e for e in left if e["action"] == "alloc"]


def test_a_thread_that_holds_the_gil_and_frees_does_not_stop_one_that_allocates_with_stacks():
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)

    def work() -> None:
        for _ in range(200):
            live = [block(1000 + i) for i in range(20)]
            torch.cuda.memory_snapshot()
            del live

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
