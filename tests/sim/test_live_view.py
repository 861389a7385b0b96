"""Figures of a device while a program runs, and the line of `python -m memopt run --live --sim`."""

from __future__ import annotations

import os
import re
import sys
import threading
import time

import torch
from terminals import Screen, run_in_terminal

import memopt.sim
from memopt._memory.live.figures import FiguresReader, FiguresThread

SIM = {"memory": "256MiB", "context": "8MiB"}
MIB = 1 << 20
ALONE = {name: value for name, value in os.environ.items() if name != "MEMOPT_SIM"}


def in_a_thread(work) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_the_figures_are_torchs_and_the_drivers():
    kept = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    reader = FiguresReader()
    free, total = torch.cuda.mem_get_info()
    found = in_a_thread(reader.read)
    assert found.device == "cuda:0" and found.live == torch.cuda.memory_allocated() == 20 * MIB
    assert (found.peak, found.reserved) == (60 * MIB, torch.cuda.memory_reserved())
    assert (found.used, found.total) == (total - free, total) and found.used > found.reserved
    torch.cuda.reset_peak_memory_stats()
    assert in_a_thread(reader.read).peak == 60 * MIB  # whatever the program resets
    del kept


def test_nothing_waits_for_the_device():
    reader = FiguresReader()
    x = torch.ones(1024, device="cuda")
    memopt.sim.lazy(True)
    x += 1
    in_a_thread(reader.read)
    assert memopt.sim.progress() > 0  # the work is still there


def test_a_capture_in_another_thread_stays_valid():
    reader, graph, x = FiguresReader(), torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.graph(graph):  # in the mode that watches every thread
        x += 1
        # The query is a call that a thread may not make then, unless it has said that it does no harm.
        assert in_a_thread(lambda: (reader.read(), event.query()))[0].live > 0
    graph.replay()
    torch.cuda.synchronize()


def test_a_thread_tells_until_its_end():
    told, enough = [], threading.Event()
    x = torch.ones(MIB, device="cuda")
    thread = FiguresThread(lambda figures: (told.append(figures), enough.set()), interval=0.01)
    assert enough.wait(60) and told[0].live == x.nbytes
    thread.end()
    count = len(told)
    time.sleep(0.05)
    assert len(told) == count and "memopt live" not in {one.name for one in threading.enumerate()}


TRAINING = """
import os, time
import torch
kept = torch.ones(5 << 18, device="cuda")
print("begins")
while not os.path.exists("seen"):
    time.sleep(0.05)
print("ends")
"""
LINE = re.compile(
    rb"memopt: live 5.00 MiB, peak 5.00 MiB, reserved ([0-9.]+) MiB, cuda:0 ([0-9.]+) MiB/1.00 GiB"
)


def test_the_line_has_the_cards_figures_and_no_other_progress(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)

    def seen(output: bytes, press) -> None:
        if LINE.search(output):
            (tmp_path / "seen").touch()

    command = [sys.executable, "-m", "memopt", "run", "--live", "-q", "--sim", "1GiB", "train.py"]
    status, output = run_in_terminal(command, seen, columns=100, cwd=tmp_path, env=ALONE)
    reserved, used = map(float, LINE.search(output).groups())
    assert status == 0 and 5 <= reserved < used
    assert Screen(100).show(output).text == "begins\nends"
