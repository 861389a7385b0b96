"""Runs that are begun before they are asked for: beside runs one by one."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from memopt._estimate.runs_ahead import RunsAhead

A_WHILE = 60.0  # seconds: a bound on what must happen, not a measurement


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_each_runs_once_and_no_more_than_allowed_at_a_time(jobs):
    chance = random.Random(int(os.environ["MEMOPT_SEED"]))
    lock, made, now, most = threading.Lock(), [], 0, 0

    def square(n):
        nonlocal now, most
        with lock:
            made.append(n)
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.0005)
        with lock:
            now -= 1
        if n % 7 == 3:
            raise ValueError(n)
        return n * n

    with RunsAhead(square, jobs) as runs:
        for _ in range(200):
            if chance.random() < 0.5:
                runs.expect([chance.randrange(40) for _ in range(chance.randrange(6))], chance.randrange(40))
                continue
            n = chance.randrange(40)
            if n % 7 == 3:
                with pytest.raises(ValueError, match=str(n)):
                    runs.result(n)
            else:
                assert runs.result(n) == n * n
    assert most <= jobs
    assert sorted(made) == sorted({*made})


def test_what_is_waited_for_is_behind_nothing_else():
    begun, done = threading.Event(), threading.Event()

    def run(name):
        if name == "expected":
            begun.set()
            assert done.wait(A_WHILE)
        return name

    with RunsAhead(run, 2) as runs:
        runs.expect(["wanted", "expected", "later"], beside="wanted")
        assert begun.wait(A_WHILE)  # in the place of "wanted", which is not begun
        assert runs.result("wanted") == "wanted"
        assert runs.result("later") == "later"
        done.set()
        assert runs.result("expected") == "expected"


@pytest.mark.parametrize("given_up", ["by another expectation", "at the end"])
def test_what_has_not_begun_is_given_up(given_up):
    begun, done, made = threading.Event(), threading.Event(), []

    def run(name):
        made.append(name)
        begun.set()
        assert done.wait(A_WHILE)

    with RunsAhead(run, 2) as runs:
        runs.expect(["first", "second"])
        assert begun.wait(A_WHILE)
        if given_up == "by another expectation":
            runs.expect(["third"])
            done.set()
            runs.result("third")
    done.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(A_WHILE)
    assert made == (["first", "third"] if given_up == "by another expectation" else ["first"])
