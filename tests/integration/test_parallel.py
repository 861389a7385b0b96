"""csrc/base/parallel.c on torch's own pool: it is found, torch.set_num_threads() is obeyed, and a forked child
comes to its end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    target = tmp_path_factory.mktemp("parallel") / "parallel.so"
    compiler = os.environ.get("CC", "gcc").split()
    sources = [ROOT / "csrc/base/parallel.c"]
    subprocess.run(
        [*compiler, "-std=c11", "-D_GNU_SOURCE", "-Icsrc", "-shared", "-fPIC", "-O1", "-o", target, *sources],
        cwd=ROOT,
        check=True,
    )
    return target


def ranges(loop, count: int, grain: int) -> tuple[list[tuple[int, int]], set[int]]:
    """The parts that [0, count) was divided into, in order, and their threads."""
    seen: list[tuple[int, int]] = []
    threads: set[int] = set()

    def body(_user, begin, end):
        seen.append((begin, end))
        threads.add(threading.get_native_id())

    loop.mo_parallel_for(ctypes.c_size_t(count), ctypes.c_size_t(grain), BODY(body), None)
    return sorted(seen), threads


def test_torchs_threads_are_used_as_many_as_it_was_told(library):
    import torch

    loop = ctypes.CDLL(str(library))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            assert loop.mo_parallel_threads() == threads
            seen, ran_on = ranges(loop, 1000, 1)
            assert len(seen) == threads and len(ran_on) == threads
            assert [end for _, end in seen] == [begin for begin, _ in seen[1:]] + [1000] and seen[0][0] == 0
            assert len(ranges(loop, 1000, 1000)[0]) == 1
    finally:
        torch.set_num_threads(before)


def test_without_torch_nothing_is_loaded_and_the_caller_does_all(library):
    code = """if True:
        import ctypes, sys
        loop = ctypes.CDLL(sys.argv[1])
        seen = []
        body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(
            lambda _, begin, end: seen.append((begin, end)))
        loop.mo_parallel_for(ctypes.c_size_t(1000), ctypes.c_size_t(1), body, None)
        assert seen == [(0, 1000)] and loop.mo_parallel_threads() == 1
        assert "libtorch" not in open("/proc/self/maps").read()
    """
    subprocess.run([sys.executable, "-c", code, str(library)], check=True, timeout=600)


def test_a_child_of_a_process_that_used_the_pool_comes_to_its_end(library):
    code = """if True:
        import ctypes, os, signal, sys, torch
        torch.set_num_threads(2)
        loop = ctypes.CDLL(sys.argv[1])
        seen = []
        body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(
            lambda _, begin, end: seen.append((begin, end)))
        run = lambda: loop.mo_parallel_for(ctypes.c_size_t(1000), ctypes.c_size_t(1), body, None)
        run()
        assert len(seen) == 2
        seen.clear()
        child = os.fork()
        if child == 0:
            signal.alarm(500)
            run()
            os._exit(0 if seen == [(0, 1000)] and loop.mo_parallel_threads() == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", code, str(library)], check=True, timeout=600)
