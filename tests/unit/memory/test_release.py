"""memopt.release(): what an exception's frames hold goes, whoever keeps the exception; what is left is named."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import traceback
import weakref

import pytest
import torch

import memopt
from memopt._memory.oom import exceptions

MIB = 1 << 20


held: list[weakref.ref[torch.Tensor]] = []


def fails() -> None:
    activations = torch.ones(8 * MIB // 4)
    held.append(weakref.ref(activations))
    deeper(activations * 2)


def deeper(more: torch.Tensor) -> None:
    held.append(weakref.ref(more))
    raise KeyError("planted")


def failure() -> KeyError:
    held.clear()
    try:
        fails()
    except KeyError as error:
        return error
    raise AssertionError


def gone() -> bool:
    return len(held) == 2 and all(ref() is None for ref in held)


def test_a_kept_exception_keeps_its_lines_and_no_tensor():
    kept = [failure()]
    text = "".join(traceback.format_exception(kept[0]))
    assert not gone()
    found = memopt.release()
    assert gone() and "".join(traceback.format_exception(kept[0])) == text and "deeper" in text
    assert found.freed_bytes["cpu"] == 16 * MIB and found.frames >= 2
    assert found.before["cpu"].allocated_bytes - found.after["cpu"].allocated_bytes == 16 * MIB
    assert (
        "released: 16.0 MiB on cpu" in str(found)
        and "resident" in str(found)
        and "<pre>" in found._repr_html_()
    )
    again = memopt.release()
    assert again.freed_bytes["cpu"] == 0


def test_gc_and_an_emptied_cache_are_not_enough():
    kept = failure()
    gc.collect()
    assert not gone() and kept
    memopt.release()
    assert gone()


@pytest.mark.parametrize("name", ["last_exc", "last_value"])
def test_pythons_last_exception(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, name, failure(), raising=False)
    memopt.release()
    assert gone()


def test_a_last_traceback_without_its_exception(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "last_traceback", failure().__traceback__, raising=False)
    memopt.release()
    assert gone()


def test_a_futures_exception_and_one_behind_another():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(fails)
        held.clear()
        concurrent.futures.wait([future])
    outer = ValueError("outer")
    outer.__context__ = failure()
    memopt.release()
    assert all(ref() is None for ref in held) and future.exception() is not None and outer.__context__


def test_one_exception_alone():
    kept, other = failure(), None
    refs = list(held)
    other = failure()
    memopt.release(kept)
    assert all(ref() is None for ref in refs) and not gone()
    memopt.release(other)
    assert gone()


def test_what_runs_still_keeps_its_variables():
    mine = torch.ones(3)

    def running() -> torch.Tensor:
        local = torch.ones(5)
        held.clear()
        try:
            fails()
        except KeyError as error:
            kept = error
            memopt.release()
            assert kept.__traceback__ is not None
        return local

    assert running().numel() == 5 and gone() and mine.numel() == 3


def test_a_generator_that_caught_one_goes_on():
    def batches():
        state = torch.zeros(4)
        kept = None
        for number in range(3):
            try:
                fails()
            except KeyError as error:
                kept = error
            state += 1
            yield number, state, kept

    running = batches()
    _, state, kept = next(running)
    assert kept is not None
    memopt.release()
    assert [number for number, *_ in running] == [1, 2] and float(state[0]) == 3


def test_who_holds_the_rest_is_named():
    leftover = [torch.ones(3 * MIB)]
    found = memopt.release(top=100)
    assert any("leftover" in group.name for group in found.live.groups) and "leftover" in str(found)
    assert sum(leftover[0][:2]) == 2
    with pytest.raises(ValueError, match="top=-1"):
        memopt.release(top=-1)


def test_frames_that_are_emptied_are_counted():
    assert exceptions.empty_frames(failure()) == 3  # failure, fails, deeper
