"""memopt.data.tune: what it measures, what it leaves as it was, and what becomes of loaders that fail."""

from __future__ import annotations

import gc
import os
import random
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from tuned_datasets import Dies, Hoards, Numbers, Stream, Waits

from memopt.data import tune
from memopt.data._tuning import tuning, tuning_trial, worker_watch
from memopt.data._tuning.tuning_trial import LoaderTrial, Settings, with_settings

SHORT = {"seconds": 100, "batches": 20, "startup": 600}  # 20 batches, however busy the machine is


@pytest.fixture
def uncollected():
    """A fork that collects garbage has copies of all objects of this process, of which there are many."""
    gc.disable()
    yield
    gc.enable()


def states():
    return (
        random.getstate(),
        *(np.random.get_state()[1].tolist(), np.random.get_state()[2]),
        torch.random.get_rng_state().tolist(),
    )


def test_everything_stays_as_it_was_and_the_tuned_loader_gives_the_same_batches():
    generator = torch.Generator().manual_seed(7)
    dataset = Numbers()
    loader = DataLoader(
        dataset, batch_size=8, sampler=RandomSampler(dataset, generator=generator), generator=generator
    )
    before = states(), generator.get_state().tolist(), dict(loader.__dict__)
    found = tune(loader, memory_budget="4GiB", workers=[0, 1], **SHORT)
    assert (states(), generator.get_state().tolist(), dict(loader.__dict__)) == before
    assert dataset.seen == 0
    measured = [one for one in found.trials if one.complete]
    assert {one.settings.num_workers for one in measured} == {0, 1} and len(measured) >= 2
    for one in measured:
        assert 0 <= one.own_bytes < 4 << 30 and one.batches > 0 and one.start > 0
    assert found.trials[0].batch_bytes == 8 * 3 * 4
    assert found.proposal.num_workers in (0, 1) and not found.proposal.pin_memory
    state = generator.get_state()
    expected = [batch.tolist() for batch, _ in zip(loader, range(20), strict=False)]
    generator.set_state(state)
    tuned = found.loader()
    assert [batch.tolist() for batch, _ in zip(tuned, range(20), strict=False)] == expected


def test_the_table_and_the_notebooks_say_what_was_measured():
    found = tune(DataLoader(Numbers(), batch_size=8), memory_budget="2GiB", workers=[0], **SHORT)
    text, page = str(found), found._repr_html_()
    assert text.splitlines()[0].split()[:4] == ["workers", "prefetch", "pinned", "persistent"]
    assert f"{found.trials[0].rate:.4g}" in text and "budget 2.00 GiB (memory_budget=2GiB)" in text
    assert "proposed: num_workers=0, pin_memory=False" in text and "page cache" in text
    assert page.count("<tr>") == 1 + len(found.trials) and f"<td>{found.trials[0].rate:.4g}</td>" in page


def collate(items):
    return torch.stack(items)


def begin(worker):
    torch.manual_seed(worker)


class Named(DataLoader):
    """A subclass with arguments of its own."""

    def __init__(self, name):
        super().__init__(Numbers(64), batch_size=4)
        self.name = name


def test_the_tuned_loader_differs_in_what_was_tuned_alone():
    dataset = Numbers(64)
    loader = DataLoader(
        dataset,
        batch_sampler=torch.utils.data.BatchSampler(RandomSampler(dataset), 4, drop_last=True),
        num_workers=2,
        collate_fn=collate,
        timeout=600,
        worker_init_fn=begin,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
    )
    made = with_settings(loader, Settings(3, 5, False, False))
    tuned = {"num_workers": 3, "prefetch_factor": 5, "persistent_workers": False}
    assert made.__dict__ == loader.__dict__ | tuned and type(made) is DataLoader
    assert made.multiprocessing_context.get_start_method() == "spawn"
    alone = with_settings(loader, Settings.of(loader).with_workers(0))
    assert (alone.num_workers, alone.prefetch_factor, alone.persistent_workers, alone.timeout) == (
        *(0, None, False, 0),
    )
    assert len(list(alone)) == 16 and loader.timeout == 600
    named = with_settings(Named("a"), Settings(1, 2, False, False))
    assert type(named) is Named and named.name == "a" and len(list(named)) == 16


def test_a_trial_that_would_go_over_the_budget_is_stopped_with_its_workers(
    tmp_path, monkeypatch, uncollected
):
    """The worker takes 4 MiB between two looks."""
    file, budget = tmp_path / "taken", 192
    file.touch()
    read, write = os.pipe()
    look = worker_watch.FamilyMemory.look
    let = []

    def looks(*arguments, **keywords):
        seen = look(*arguments, **keywords)
        if len(file.read_text().splitlines()) == len(let):
            let.append(os.write(write, b"1"))
        return seen

    monkeypatch.setattr(worker_watch.FamilyMemory, "look", looks)
    found = tune(
        DataLoader(Hoards(read, file)),
        memory_budget=f"{budget}MiB",
        workers=[1, 2],
        seconds=600,
        startup=600,
        batches=4000,
    )
    os.close(read)
    os.close(write)
    (stopped,) = found.trials
    assert "exceed the budget" in stopped.problem and stopped.own_bytes <= (budget + 1) << 20
    said = [line.split() for line in file.read_text().splitlines()]
    # It is not stopped for nothing.
    assert budget / 3 < max(int(size) for _, size in said) <= budget
    assert not any(worker_watch.is_running(int(pid)) for pid in {pid for pid, _ in said})
    assert found.proposal == found.current and "nothing else could be measured" in str(found)


def test_more_workers_than_would_fit_are_not_tried(monkeypatch):
    tried = []

    def measure(loader, settings, bounds, **_):
        tried.append(settings.num_workers)
        rate = 1.0 + settings.num_workers
        return LoaderTrial(settings, 50, rate, 0.1, own_bytes=(100 + 200 * settings.num_workers) << 20)

    monkeypatch.setattr(tuning_trial, "measure", measure)
    found = tune(DataLoader(Numbers()), memory_budget="1GiB", workers=[0, 1, 2, 4, 8, 16])
    assert tried[:4] == [0, 1, 2, 4] and 8 not in tried
    (left_out,) = (one for one in found.trials if one.settings.num_workers == 8)
    assert left_out.problem == "not tried: would take about 1.66 GiB" and found.proposal.num_workers == 4


def chosen(monkeypatch, rows, **arguments):
    """The proposal where (workers, prefetch) have these (rate, MiB)."""

    def measure(loader, settings, bounds, **_):
        rate, own = rows.get((settings.num_workers, settings.prefetch_factor), (1.0, 10))
        return LoaderTrial(settings, 50, rate, 0.1, again=0.1, own_bytes=own << 20)

    monkeypatch.setattr(tuning_trial, "measure", measure)
    return tune(DataLoader(Numbers()), memory_budget="1GiB", workers=[0, 1, 2, 4], **arguments).proposal


def test_the_least_memory_that_is_as_fast_is_proposed(monkeypatch):
    rows = {(0, None): (10, 5), (1, 2): (20, 50), (2, 2): (39, 90), (4, 2): (40, 170)}
    assert chosen(monkeypatch, rows)[:2] == (2, 2)
    assert chosen(monkeypatch, {**rows, (2, 1): (38.5, 70), (2, 4): (40, 130)})[:2] == (2, 1)
    assert chosen(monkeypatch, {**rows, (2, 4): (80, 130)})[:2] == (2, 4)
    assert chosen(monkeypatch, rows, step_seconds=0.06)[:2] == (1, 2)
    assert chosen(monkeypatch, rows, step_seconds=1)[:2] == (0, None)
    assert chosen(monkeypatch, rows, step_seconds=1e-3)[:2] == (2, 2)


def test_a_data_set_whose_copy_in_the_workers_would_grow_old_keeps_no_workers(monkeypatch):
    def measure(loader, settings, bounds, *, epochs=False, device=None):
        again = 0.1 if settings.persistent_workers else 3.0
        return LoaderTrial(
            settings, 50, 1.0 + settings.num_workers, 0.1, again=again if epochs else None, own_bytes=1
        )

    monkeypatch.setattr(tuning_trial, "measure", measure)
    loader = DataLoader(Numbers())
    assert tune(loader, memory_budget="1GiB", workers=[0, 1]).proposal.persistent_workers
    loader.dataset.set_epoch = lambda epoch: None
    found = tune(loader, memory_budget="1GiB", workers=[0, 1])
    assert not found.proposal.persistent_workers and "do not see the dataset's set_epoch()" in str(found)


def test_a_worker_that_dies_is_a_row():
    found = tune(DataLoader(Dies(), batch_size=4), memory_budget="4GiB", workers=[0, 1, 2], **SHORT)
    none, one = found.trials
    assert none.complete and one.problem.startswith("failed: ") and "worker" in one.problem
    assert found.proposal.num_workers == 0 and one.problem in str(found)


def test_a_worker_whose_end_is_noticed_while_an_error_is_told_is_a_row(monkeypatch):
    """DataLoader's handler of SIGCHLD raises wherever the process is that iterates."""
    words, noticed = tuning_trial._said, RuntimeError("DataLoader worker (pid 1) is killed")
    interrupted = Mock(side_effect=[noticed, words(noticed)])
    monkeypatch.setattr(tuning_trial, "_said", interrupted)  # the processes of trials are forks
    found = tune(DataLoader([1, None], batch_size=2), memory_budget="4GiB", workers=[0], **SHORT)
    assert [one.problem for one in found.trials] == [f"failed: {words(noticed)}"]


def test_a_worker_that_gives_nothing_is_a_row(monkeypatch):
    began = time.monotonic()
    found = tune(
        DataLoader(Waits(), batch_size=4), memory_budget="4GiB", workers=[0, 1], **{**SHORT, "startup": 0.5}
    )
    assert found.trials[1].problem == "stopped: no batch came within 0.5 s (startup= waits longer)"
    assert found.proposal.num_workers == 0 and time.monotonic() - began < 300


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_set_that_spawned_workers_cannot_have_is_a_row(method):
    dataset = Numbers()
    dataset.unpicklable = lambda: None
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    found = tune(loader, memory_budget="4GiB", workers=[0, 1], **SHORT)
    none, one = found.trials
    # CPython 3.11 cannot "pickle" it, 3.13 cannot "get" it.
    assert none.complete and "local object" in one.problem and found.proposal.num_workers == 0


def test_a_data_set_that_fails_everywhere_leaves_the_loader_as_it_is():
    loader = DataLoader([1, None], batch_size=2, num_workers=1)
    found = tune(loader, memory_budget="4GiB", workers=[0, 1], **SHORT)
    assert (
        all("Could not infer dtype" in one.problem for one in found.trials)
        and found.proposal == found.current
    )


def test_a_stream_is_tuned_and_one_that_is_not_split_is_told(tmp_path):
    found = tune(DataLoader(Stream(), batch_size=5), memory_budget="4GiB", workers=[0, 2], **SHORT)
    assert [one.complete for one in found.trials[:2]] == [True, True] and not found.trials[1].note
    assert sum(len(batch) for batch in found.loader()) == 3000
    same = tune(DataLoader(Stream(split=False), batch_size=5), memory_budget="4GiB", workers=[2], **SHORT)
    assert "the workers return the same batches" in same.trials[0].note and same.trials[0].note in str(same)


def test_an_epoch_of_one_batch_is_too_short_and_says_so():
    found = tune(DataLoader(Numbers(3), batch_size=4), memory_budget="4GiB", workers=[0], **SHORT)
    assert (
        found.trials[0].problem == "too short to measure: 1 batches came" and found.proposal == found.current
    )


def test_batches_on_their_way_count_and_what_was_there_before_does_not(uncollected):
    before = torch.zeros(64 << 20, dtype=torch.uint8).share_memory_()
    memory = worker_watch.FamilyMemory()
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _ = before.numpy().sum()  # torch would wait for threads that are not here
        descriptor = os.memfd_create("a batch")  # mapped by nobody
        os.write(descriptor, bytes(16 << 20))
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    seen = memory.look(child, stands_for_parent=False)
    os.write(go_on[1], b"1")
    os.waitpid(child, 0)
    assert 16 << 20 <= seen.own < 48 << 20


def test_the_budget_is_never_more_than_the_host_or_its_cgroup_has_free(monkeypatch):
    monkeypatch.setattr(tuning, "available", lambda **_: 10 << 30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert tuning._budget("8GiB") == (8 << 30, "memory_budget=8GiB")
    assert tuning._budget(None) == (9 << 30, "nine tenths of the 10.0 GiB that are free")
    assert tuning._budget("20GiB")[0] == 9 << 30 and "more than nine tenths" in tuning._budget("20GiB")[1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert tuning._budget(None) == (3 << 30, "nine tenths of the 10.0 GiB that are free, 3 ranks share it")
    monkeypatch.setattr(tuning, "available", lambda **_: None)
    with pytest.raises(ValueError, match="give memory_budget="):
        tuning._budget(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"ram": "some"}, "some"),
        ({"seconds": 0}, "seconds=0"),
        ({"batches": -1}, "batches=-1"),
        ({"startup": 0}, "startup=0"),
        ({"workers": []}, "workers="),
        ({"workers": [-1]}, "workers="),
        ({"step_seconds": 0}, "step_seconds=0"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        tune(DataLoader(Numbers()), **arguments)


def test_what_is_no_dataloader_is_refused():
    with pytest.raises(TypeError, match="a list is not a torch DataLoader"):
        tune([1, 2])
