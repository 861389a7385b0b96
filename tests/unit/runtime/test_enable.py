"""memopt.enable() and disable() on a machine without a GPU: what is asked for, by whom, and that all goes back."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

import memopt
from memopt._memory.live.device_bytes import DeviceBytes
from memopt._memory.oom import observer
from memopt._memory.oom.report import shares
from memopt._runtime import enabling


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for name in ("MEMOPT_BACKEND", "MEMOPT_BUDGET", "MEMOPT_ON_OOM", "MEMOPT_DISABLE", "MEMOPT_REPORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    memopt.disable()


def test_the_hooks_are_there_and_gone_again():
    before = sys.excepthook, threading.excepthook
    memopt.enable()
    memopt.enable()
    assert sys.excepthook is not before[0] and threading.excepthook is not before[1]
    memopt.disable()
    assert (sys.excepthook, threading.excepthook) == before
    memopt.disable()


def test_a_hook_that_came_later_stays():
    before = sys.excepthook
    memopt.enable()
    ours = sys.excepthook

    def later(*arguments: object) -> None:
        ours(*arguments)

    sys.excepthook = later
    try:
        memopt.disable()
        assert sys.excepthook is later
    finally:
        sys.excepthook = before


def test_argument_then_environment_then_default(monkeypatch: pytest.MonkeyPatch):
    memopt.enable()
    assert enabling.settings() == ("native", None, "report")
    monkeypatch.setenv("MEMOPT_ON_OOM", "raise")
    monkeypatch.setenv("MEMOPT_BUDGET", "2GiB")
    memopt.enable()
    assert enabling.settings() == ("native", 2 << 30, "raise")
    memopt.enable(on_oom="report", memory_budget="1GiB")
    assert enabling.settings() == ("native", 1 << 30, "report")
    memopt.disable()
    assert enabling.settings() is None


def test_disabled_by_the_environment_it_does_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMOPT_DISABLE", "1")
    before = sys.excepthook
    memopt.enable()
    assert sys.excepthook is before and enabling.settings() is None


@pytest.mark.parametrize(
    ("named", "environment", "said"),
    [
        ({"backend": "mine"}, {}, "backend='mine' is not one of 'native', 'pool'"),
        ({"on_oom": "retry"}, {}, "on_oom='retry' is not one of 'report', 'raise'"),
        ({}, {"MEMOPT_BACKEND": "cuda"}, "MEMOPT_BACKEND='cuda' is not one of"),
        ({}, {"MEMOPT_BUDGET": "lots"}, "MEMOPT_BUDGET: .*lots"),
        ({"memory_budget": 0}, {}, "memory_budget=0 leaves nothing"),
        ({"memory_budget": "-1GiB"}, {}, "memory_budget: .*-1GiB"),
    ],
)
def test_nonsense_is_refused_by_name_and_nothing_changes(named, environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = sys.excepthook
    with pytest.raises(ValueError, match=said):
        memopt.enable(**named)
    assert sys.excepthook is before and enabling.settings() is None


def test_an_exception_that_is_no_out_of_memory_has_no_report():
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error.__context__ = error
    assert observer.report_of(error) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (512, "512 bytes"),
        (1 << 20, "1024.00 KiB"),
        (3 << 19, "1.50 MiB"),
        (1 << 30, "1024.00 MiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_sizes_are_as_torch_writes_them(size, text):
    assert observer.torch_size(size) == text


def test_what_is_shown_of_the_parts_adds_up_to_what_is_shown_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = (torch.rand(7, generator=generator) ** 4 * 2**34).long().tolist()
        parts = dict(zip((*"abcdef", "free"), sizes, strict=True))
        device = DeviceBytes("cuda:0", sum(sizes), parts, "")
        shown = [float(part.split()[0]) for part in shares(device).split(" + ")]
        whole = memopt._C.format_size(device.total_bytes).split()[0]
        digits = len(whole.partition(".")[2])
        assert round(sum(shown) * 10**digits) == round(float(whole) * 10**digits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_bar_of_a_device_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        memopt.device_bar()


def test_the_doctor_says_what_is_enabled():
    def said() -> str:
        return next(
            f"{one.state} {one.text}" for one in memopt.doctor().findings if one.topic == "oom report"
        )

    assert said().startswith("absent off")
    memopt.enable()
    assert said() == "ok memopt.enable() chose native, None, report"


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has an NVIDIA driver")
def test_the_pool_without_a_device_says_what_is_missing_and_not_that_it_is_late():
    with pytest.raises(memopt.Error, match="driver|device") as caught:
        memopt.enable(backend="pool")
    assert "too late" not in str(caught.value)
