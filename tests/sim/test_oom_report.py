"""The report of an out-of-memory error: its parts add up, its culprits are the planted ones, the exception is torch's.
Scripts run on a device of their own, with torch's allocator and memopt's."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt._memory.oom import observer
from memopt._memory.oom.fixes import Fix
from memopt._memory.oom.report import LINES, OomReport, shares
from memopt._memory.oom.trials import TriedFixes
from memopt._memory.recording.recording import CATEGORIES

SIM = {"memory": "256MiB", "context": "8MiB"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch):
    """And cuBLAS's workspaces, which torch keeps, are gone. Names are searched for as long as that takes."""
    monkeypatch.setattr("memopt._memory.oom.report._SEARCH", 60.0)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    memopt.enable()
    yield
    memopt.disable()


def out_of_memory(size: int = 1 << 30) -> tuple[torch.OutOfMemoryError, OomReport]:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    report = observer.report_of(caught.value)
    assert report is not None and report.asked == size
    return caught.value, report


def check(report: OomReport) -> None:
    """Assertions on every report."""
    assert sum(report.bytes.parts.values()) == report.bytes.total_bytes == torch.cuda.mem_get_info()[1]
    assert all(size >= 0 for size in report.bytes.parts.values())
    assert len(str(report).splitlines()) <= LINES
    number, _, parts = shares(report.bytes).partition(" ")
    shown = [float(part.split()[0]) for part in shares(report.bytes).split(" + ")]
    assert sum(round(100 * one) for one in shown) == round(100 * 256.0), (number, parts)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_the_parts_are_those_that_there_are():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(4096, 256, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    loss = model(x).square().mean()
    _, report = out_of_memory()
    check(report)
    sizes = report.bytes.parts
    weights = 9 * (256 * 256 + 256) * 4
    assert sizes["parameters"] == sizes["gradients"] == weights
    assert sizes["optimizer"] == 2 * weights  # its steps are on the host
    assert sizes["inputs"] == 0 and sizes["activations"] == (1 + 9 + 1) * x.nbytes + 512 - x.nbytes * 1
    assert sizes["context and other processes"] == 8 * MIB
    assert loss.requires_grad


def test_the_allocators_numbers_are_the_bars():
    held = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(20)]
    del held[::2]
    _, report = out_of_memory()
    check(report)
    live = sum(report.bytes.parts[name] for name in ("inputs", "other", "activations"))
    stats = torch.cuda.memory_stats()
    assert live == stats["active_bytes.all.current"]
    assert report.bytes.parts["cache"] == stats["reserved_bytes.all.current"] - live
    assert report.bytes.parts["free"] == torch.cuda.mem_get_info()[0]
    assert len(held) == 10


def pieces() -> list[torch.Tensor]:
    """One block of 4 MiB in each of twelve segments of 20 MiB."""
    held = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(60)]
    return held[::5]


def test_free_memory_in_pieces_is_fragmentation():
    held = pieces()
    _, report = out_of_memory(110 * MIB)
    check(report)
    assert report.fragmentation.fragmented and report.fragmentation.pinning_blocks == len(held)
    assert "Fragmentation: yes. Largest free run 16.0 MiB, free in cache 192 MiB" in str(report)
    _, report = out_of_memory(220 * MIB)
    assert not report.fragmentation.fragmented


def test_a_replay_decides_where_something_is_recorded():
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        held = pieces()
        _, report = out_of_memory(110 * MIB)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    line = pieces.__code__.co_firstlineno + 2
    assert report.fragmentation.fragmented and report.fragmentation.how == "a replay of the recorded history"
    assert report.lines == [(f"test_oom_report.py:{line}", 48 * MIB)] and len(held) == 12
    assert f"pinned by 12 blocks from test_oom_report.py:{line}" in str(report)


def test_an_error_in_the_backward_pass_is_at_the_users_line_and_its_graph_is_seen():
    x = torch.ones(20 * MIB // 4, device="cuda", requires_grad=True)
    y = x.exp().sin().exp()  # 20 MiB each; x and two results are saved, y is the third
    with pytest.raises(torch.OutOfMemoryError) as caught:
        filler = torch.empty(160 * MIB, dtype=torch.uint8, device="cuda")
        y.backward(y)
        del filler
    report = observer.report_of(caught.value)
    assert report is not None
    check(report)
    assert report.location.phase == "backward" and report.location.text == "y.backward(y)"
    assert report.location.where.startswith("test_oom_report.py:")


def test_an_error_that_is_caught_says_nothing(capfd: pytest.CaptureFixture[str]):
    out_of_memory()
    assert "memopt: CUDA out of memory" not in capfd.readouterr().err


def test_nothing_is_kept_of_what_was_reported():
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    y = x.exp()
    out_of_memory()
    before = torch.cuda.memory_allocated()
    del x, y
    assert before - torch.cuda.memory_allocated() == 8 * MIB


def test_a_thread_shows_it_too(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def work() -> None:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")

    thread = threading.Thread(target=work)
    seen: list[object] = []
    monkeypatch.setitem(observer._before, "threading", seen.append)
    monkeypatch.setattr(threading, "excepthook", observer._thread)  # pytest has one of its own
    thread.start()
    thread.join()
    assert "memopt: CUDA out of memory at test_oom_report.py:" in capfd.readouterr().err
    assert len(seen) == 1


def test_modes_of_the_program_do_not_see_the_report():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            Counting.count += 1
            return function(*arguments, **(named or {}))

    with Counting(), torch.device("cuda"):
        _, report = out_of_memory()
    check(report)
    assert Counting.count == 1


def test_a_kept_batch_a_growing_list_and_the_way_out_are_named():
    class Loader:
        last: torch.Tensor

        def batch(self) -> torch.Tensor:
            self.last = torch.ones(2048, 256, device="cuda")
            return self.last

    model, loader, losses = Net().cuda(), Loader(), []
    for _ in range(3):
        losses.append(model(loader.batch()).square().mean())
    line = sys._getframe().f_lineno - 1
    _, report = out_of_memory(200 * MIB)
    check(report)
    held = {group.name: group for group in report.holders}
    # Of each step the batch, nine outputs, and their mean; the last batch has a name of its own.
    assert held["losses[*]"].where == f"test_oom_report.py:{line}"
    assert held["losses[*]"].nbytes >= 3 * 9 * 2 * MIB
    assert held["loader.last"].nbytes == 2 * MIB
    assert report.situation.holders[
        report.contents.columns["address"][0].item()
    ].name  # whose it is, to try it


def test_where_nothing_is_recorded_nothing_is_said_to_fit():
    model, history = Net().cuda(), []
    history.append(model(torch.ones(2048, 256, device="cuda")).mean())
    _, report = out_of_memory(230 * MIB)
    check(report)
    assert report.tried is None and "Would fit" not in str(report)
    known = report.tried_out()
    assert known.tried.fixes == [] and "`memopt run" in known.tried.why
    said = " ".join(str(known).split())
    assert "Not tried changes on the recording: nothing is being recorded" in said
    assert "detach" not in said and "Would fit" not in said and history


def test_the_advice_has_room_within_the_lines_of_a_report():
    _, report = out_of_memory()
    long = [f"x{n}" + "y" * 100 for n in range(6)]
    full = replace(
        report, facts={name: name for name in long}, tried=TriedFixes([Fix(one, MIB) for one in long])
    )
    lines = str(full).splitlines()
    assert len(lines) <= LINES and lines[-len(full.advice()) :] == full.advice()
    assert all(one in str(full) for one in long)


SCRIPT = """
import memopt.sim
memopt.sim.activate(memory="96MiB", context="8MiB")
import torch, memopt
from torch import nn
memopt.enable({arguments})
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
history = []
while True:
    x = torch.randn(512, 128, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    history.append(model(x).mean())  # here it grows
"""


@pytest.mark.parametrize("backend", ["native", "pool"])
def test_an_unmodified_script_gets_the_report_after_torchs_traceback(backend, run_script):
    done = run_script(SCRIPT.format(arguments=""), MEMOPT_BACKEND=backend, RANK="3", WORLD_SIZE="8")
    assert done.returncode == 1
    begin = done.stderr.index("memopt [rank 3 of 8]: CUDA out of memory at script.py:")
    report, (_, _, traceback) = done.stderr[begin:], done.stderr[:begin].partition("Traceback (most recent ")
    assert len(report.splitlines()) <= LINES
    where = next(i for i, line in enumerate(SCRIPT.splitlines(), 1) if "here it grows" in line)
    assert "history[*]" in report and f"(script.py:{where}, graph of" in " ".join(report.split())
    assert "nothing is being recorded; `memopt run " in " ".join(report.split())
    assert "8.0 context and other processes" in report
    # The exception as it is without memopt: torch's own text.
    assert traceback.splitlines()[-1].startswith(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
    )
    assert str(Path(memopt.__file__).parent) not in traceback


def test_raise_leaves_it_at_the_exception():
    memopt.enable(on_oom="raise")
    assert sys.excepthook is sys.__excepthook__
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert observer.report_of(caught.value) is None


def test_a_budget_limits_torchs_allocator_too_and_is_named():
    memopt.enable(memory_budget="64MiB")
    held = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    _, report = out_of_memory(40 * MIB)
    check(report)
    assert "  Limit       64.0 MiB of the device, set by this process itself" in str(report)
    assert report.limit == 64 * MIB and report.fragmentation.free_on_device == 24 * MIB
    memopt.disable()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0 and held.nbytes == 40 * MIB


def test_the_pool_after_the_first_allocation_is_refused_and_nothing_changes():
    memopt.disable()
    x = torch.ones(3, device="cuda")
    with pytest.raises(memopt.Error, match="backend='pool' comes too late"):
        memopt.enable(backend="pool")
    assert sys.excepthook is sys.__excepthook__ and torch.cuda.memory_allocated() == x.numel() // 3 * 512


def test_a_program_that_goes_on_trying_does_not_wait_for_a_report_each_time(monkeypatch: pytest.MonkeyPatch):
    out_of_memory()
    monkeypatch.setattr(observer, "_spent", 1e9)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    assert observer.report_of(caught.value) is None


def test_the_report_is_added_to_the_file_that_the_environment_names(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MEMOPT_REPORT", str(tmp_path / "report.txt"))
    error, report = out_of_memory()
    observer.show(error)
    observer.show(error)
    assert (tmp_path / "report.txt").read_text() == f"{report.tried_out()}\n" * 2
    assert capfd.readouterr().err.count(f"  Report      {tmp_path}/report.txt\n") == 2
    monkeypatch.setenv("MEMOPT_REPORT", str(tmp_path / "nowhere" / "report.txt"))
    observer.show(error)
    assert "not written: MEMOPT_REPORT=" in capfd.readouterr().err


def test_what_lived_is_kept_for_a_page_to_the_byte():
    outputs = [torch.ones(MIB, device="cuda") for _ in range(3)]
    line = sys._getframe().f_lineno - 1
    model = Net().cuda()
    _, report = out_of_memory()
    kept = report.contents
    live = {name: size for name, size in report.bytes.parts.items() if name in CATEGORIES}
    assert kept.by_category() == live and kept.peak() == (sum(live.values()), -1) and kept.events == 0
    assert kept.capacity == 248 * MIB and int(kept.reserved_bytes[0]) == torch.cuda.memory_reserved()
    by_name = {row.name: row.bytes for row in kept.by_module()}
    assert by_name["outputs[*]"] == 12 * MIB and len(outputs) == 3
    assert by_name["model.layers.3.0.weight"] == 256 * 256 * 4, by_name
    rows = {row.name: (row.bytes, row.text) for row in kept.by_line()}
    assert rows[f"test_oom_report.py:{line}"] == (
        12 * MIB,
        'outputs = [torch.ones(MIB, device="cuda") for _ in range(3)]',
    )
    assert model


@pytest.mark.parametrize("why", ["fails", "folder", "hangs"])
def test_a_page_that_cannot_be_written_is_said_and_nothing_hangs(why, tmp_path, monkeypatch, capfd):
    wanted = tmp_path / ("nowhere" if why == "folder" else ".") / "page.html"
    monkeypatch.setenv("MEMOPT_REPORT", str(wanted))
    error, report = out_of_memory()
    goes_on, began = threading.Event(), threading.Event()

    def html(*_: object, **__: object) -> str:
        if why == "hangs":
            began.set()
            assert goes_on.wait(600)
        if why == "fails":
            raise ValueError("a number is too large")
        return "the page"

    monkeypatch.setattr("memopt._memory.html.report_page.html", html)
    if why == "hangs":
        monkeypatch.setattr(observer, "_PAGE_SECONDS", 0.05)
    capfd.readouterr()
    observer.show(error)
    said = capfd.readouterr().err
    advice = "".join(f"{line}\n" for line in report.tried_out().advice())
    assert said.startswith(
        f"{report}\n{advice}  Page        {wanted}\n  The page was not written: MEMOPT_REPORT={wanted}: "
    )
    reason = {
        "fails": "ValueError: a number is too large",
        "folder": "FileNotFoundError",
        "hangs": "it was not finished after",
    }
    assert reason[why] in said
    assert list(tmp_path.iterdir()) == []
    if why == "hangs":
        assert began.wait(600)
        goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "memopt-oom-page":
                thread.join(600)
        assert wanted.read_text() == "the page"


class Nvml(ModuleType):
    """As nvidia-ml-py answers: this process and another one."""

    class NVMLError(Exception):
        pass

    def __init__(self, others: dict[int, int | None]) -> None:
        super().__init__("pynvml")
        self.others = others

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        free, total = torch.cuda.mem_get_info(handle)
        own = total - free - sum(size or 0 for size in self.others.values())
        sizes = {os.getpid(): own, **self.others}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()]


@pytest.mark.parametrize(
    ("others", "parts"),
    [
        ({}, {"context": 8 * MIB}),
        ({4711: 3 * MIB}, {"context": 5 * MIB, "process 4711": 3 * MIB}),
        ({4711: None}, {"context and other processes": 8 * MIB}),  # no permission to know
        ({4711: 64 * MIB}, {"context and other processes": 8 * MIB}),  # does not agree with the driver
    ],
)
def test_the_bar_names_other_processes_where_nvml_does(others, parts, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(others))
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: device, raising=False)
    held = torch.ones(MIB, device="cuda")
    bar = memopt.device_bar()
    assert sum(bar.parts.values()) == bar.total_bytes == torch.cuda.mem_get_info()[1]
    assert {name: size for name, size in bar.parts.items() if "context" in name or "process" in name} == parts
    assert bar.parts["inputs"] == held.nbytes
    assert str(bar).startswith("cuda:0: 256 MiB = 4.00 MiB inputs + ") and "width:" in bar._repr_html_()
