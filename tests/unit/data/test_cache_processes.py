"""Many processes at one cache: killed at any moment, dead with a lease in hand, or all wanting one entry at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import cache_killing
import pytest
from cached_squares import Squares

from memopt.data import cached
from memopt.data._cache import cache_folder

ROOT = Path(__file__).resolve().parents[3]
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


def test_processes_that_are_killed_at_random_leave_no_wrong_value_and_no_lock(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    processes, kills, values = (10, 200, 300) if SOAK else (3, 8, 80)
    arguments = [str(folder), *map(str, (processes, kills, values, 1))]
    done = subprocess.run(
        [sys.executable, cache_killing.__file__, *arguments], capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    happened = json.loads(done.stdout)
    assert happened["kills"] == kills and len(happened["last processes"]) == processes
    assert happened["bytes at the end"] <= 1.1 * happened["max_size"]
    # Whoever comes after them waits for none of the dead, however long a lease is believed of those not known.
    monkeypatch.setattr(cache_folder, "LEASE_SECONDS", 1e9)
    call = cached(cache_killing.make, folder, max_size=happened["max_size"])
    for index in range(values):
        assert cache_killing.same(call(index), cache_killing.make(index))
    if SOAK:
        report = ROOT / "benchmarks/results/soak_cache_kills.json"
        report.write_text(json.dumps(happened, indent=1) + "\n")


HOLDER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import os, signal
from cached_squares import Squares
from memopt.data import cached

class Dies(Squares):
    pass

Squares.__getitem__ = lambda self, index: os.kill(os.getpid(), signal.SIGKILL)
cached(Squares(), {folder!r}, version=1)[4]
"""


def test_a_lease_of_a_killed_process_holds_up_nobody(tmp_path, monkeypatch):
    source = HOLDER.format(root=str(ROOT), tests=str(ROOT / "tests/helpers"), folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", source]).returncode == -9
    (lease,) = tmp_path.rglob("*.lease")
    monkeypatch.setattr(cache_folder, "LEASE_SECONDS", 1e9)
    dataset = cached(Squares(), tmp_path, version=1)
    assert dataset[4]["index"] == 4 and dataset.cache.statistics().misses == 1
    assert not os.path.lexists(lease)
    assert dataset[4]["index"] == 4 and dataset.cache.statistics().hits == 1


def test_who_holds_no_lease_releases_none(tmp_path, monkeypatch):
    dataset = cached(Squares(), tmp_path, version=1)
    folder = dataset.cache.folder
    lease = Path(folder._beside(dataset.cache.key(4, "the index"), "lease"))
    lease.parent.mkdir()
    lease.symlink_to("another machine 1 1")
    monkeypatch.setattr(folder, "_paused", lambda: True)
    assert dataset[4]["index"] == 4 and os.path.lexists(lease)
    monkeypatch.undo()

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "symlink", refuse)
    assert dataset[4]["index"] == 4 and os.path.lexists(lease)


def test_a_process_id_that_another_process_has_now_is_not_its_lease(tmp_path):
    lease = tmp_path / "one.lease"
    assert cache_folder.take_lease(str(lease)) and not cache_folder.take_lease(str(lease))
    assert cache_folder.is_leased(str(lease), time.time)
    *machine, started = os.readlink(lease).split(" ")
    lease.unlink()
    lease.symlink_to(" ".join([*machine, str(int(started) - 1)]))
    assert not cache_folder.is_leased(str(lease), time.time)


@pytest.mark.parametrize("content", ["x", "no lease", "another machine 1 1", "\xff 1"])
def test_a_lease_of_another_machine_or_of_nobody_is_believed_for_its_time_only(tmp_path, content):
    lease = tmp_path / "one.lease"
    lease.symlink_to(content)
    written = lease.lstat().st_mtime
    assert cache_folder.is_leased(str(lease), lambda: written + cache_folder.LEASE_SECONDS - 1)
    assert not cache_folder.is_leased(str(lease), lambda: written + cache_folder.LEASE_SECONDS + 1)
    assert not cache_folder.is_leased(str(tmp_path / "none"), time.time)


def test_who_waits_for_an_entry_gets_it_and_does_not_make_it_too(tmp_path):
    """The second caller comes while the first, in another thread, is making the value."""
    began, go_on, made = threading.Event(), threading.Event(), []

    def slow(x):
        made.append(x)
        began.set()
        assert go_on.wait(300)
        return x + 1

    call = cached(slow, tmp_path, version=1, ignore=("made", "began", "go_on"))
    got = []
    first = threading.Thread(target=lambda: got.append(call(1)))
    first.start()
    assert began.wait(300)
    second = threading.Thread(target=lambda: got.append(call(1)))
    second.start()
    waits = list(tmp_path.rglob("*.lease"))
    assert len(waits) == 1
    go_on.set()
    first.join()
    second.join()
    assert got == [2, 2] and made == [1]
    assert call.cache.statistics().hits == 1


def test_waiting_has_an_end_though_the_maker_lives(tmp_path, monkeypatch):
    lease = tmp_path / "one.lease"
    assert cache_folder.take_lease(str(lease))  # by this process, which lives
    monkeypatch.setattr(cache_folder, "LEASE_SECONDS", 0.05)
    assert not cache_folder.wait_for_lease(str(lease), lambda: False, time.time)


def test_counts_are_those_of_all_processes_and_their_files_go(tmp_path):
    dataset = cached(Squares(), tmp_path)
    child = os.fork()
    if child == 0:
        _ = dataset[1], dataset[1]
        os._exit(0)
    os.waitpid(child, 0)
    _ = dataset[1]
    counts = dataset.cache.statistics()
    assert (counts.misses, counts.hits) == (1, 2)
    folder = dataset.cache.folder.counters._folder
    assert os.path.isdir(folder)
    del dataset
    assert not os.path.exists(folder)


def test_what_was_made_between_the_look_and_the_lease_is_not_made_again(tmp_path, monkeypatch):
    made = []
    call = cached(lambda x: made.append(x) or x + 1, tmp_path, version=1, ignore=("made",))
    assert call(1) == 2
    folder = call.cache.folder
    get = folder.get
    misses = iter([(False, None)])  # the first look came too early
    monkeypatch.setattr(folder, "get", lambda key: next(misses, None) or get(key))
    assert call(1) == 2 and made == [1]
    assert not [*tmp_path.rglob("*.lease")]
