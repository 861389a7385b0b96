"""`memopt estimate` of scripts that train in processes of their own: those count, together where they use a card at the
same time, and their loops are shortened."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "helpers"
MIB = 1 << 20
pytestmark = pytest.mark.sampled("estimates as processes")
WEIGHT = 1024 * 1024 * 4
CONTEXT = 450 * MIB
TRAINING = """
import os, subprocess, sys, time
import torch
import torch.multiprocessing as mp

def fit(model, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1 << 40):
        loss = model(torch.ones(8, 1024, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() > 1e9:
            raise RuntimeError("a value that nobody knows")

def train(rank=0, device="cuda"):
    fit(torch.nn.Linear(1024, 1024, bias=False).to(device), device)

"""
MAIN = "if __name__ == '__main__':\n"


@pytest.fixture(scope="module")
def estimate(request, tmp_path_factory):
    """Runs the command; returns its exit code, its JSON, what it said."""
    sim = request.config.getoption("--sim-python")
    folder = tmp_path_factory.mktemp("estimate")

    def run(end, *options):
        (folder / "train.py").write_text(TRAINING + end)
        (folder / "alone.py").write_text(TRAINING + "train()")
        done = subprocess.run(
            [sim, "-m", "memopt", "estimate", "--quick", "--json", *options, "train.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    return run


@pytest.fixture(scope="module")
def alone(estimate):
    """The bytes that the training takes in the script's own process."""
    status, found, said = estimate("train()")
    assert status == 0 and found["processes"] is None, said
    return found


def test_spawned_processes_on_one_card_are_added(estimate, alone):
    status, found, said = estimate(MAIN + "    mp.spawn(train, nprocs=2)")
    assert status == 0, said
    assert found["allocated_bytes"][0] == 2 * alone["allocated_bytes"][0]
    assert found["reserved_bytes"][0] == 2 * alone["reserved_bytes"][0]
    assert found["context_bytes"] == 2 * CONTEXT and len(found["processes"]["held"]) == 2
    assert found["steps"] == alone["steps"] == 4
    assert found["by_category"] == alone["by_category"]
    assert any("2 processes" in line and "shortened loops" in line for line in found["covered"])


def test_the_verdict_is_about_all_of_them(estimate, alone):
    """Each would fit alone."""
    room = CONTEXT + alone["reserved_bytes"][0] + 100 * MIB
    status, found, said = estimate(MAIN + "    mp.spawn(train, nprocs=2)", "--gpu", str(room))
    assert status == 1 and found["verdict"] == "does not fit", said
    status, found, said = estimate(MAIN + "    mp.spawn(train, nprocs=2)", "--gpu", str(2 * room))
    assert status == 0 and found["verdict"] == "fits", said


def test_ranks_with_a_card_each_are_not_added(estimate, alone):
    ranks = """
def rank_of(rank):
    torch.distributed.init_process_group("nccl", "tcp://localhost:1", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    model = torch.nn.Linear(1024, 1024, bias=False).to(rank)
    fit(torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank]), rank)

if __name__ == "__main__":
    mp.spawn(rank_of, nprocs=torch.cuda.device_count())
"""
    status, found, said = estimate(ranks, "--devices", "2")
    assert status == 0, said
    assert len(found["processes"]["held"]) == 1 and found["context_bytes"] == CONTEXT
    assert found["allocated_bytes"][0] == alone["allocated_bytes"][0] + WEIGHT  # DDP's bucket
    assert any("2 processes" in line for line in found["covered"])


def test_forked_processes_count_one_that_is_killed_too(estimate, alone):
    source = """
def hold(queue):
    held = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    time.sleep(2)  # it is told of it
    queue.put("held")
    time.sleep(600)

def leave():
    train()
    os._exit(0)

if __name__ == "__main__":
    context = mp.get_context("fork")
    queue = context.Queue()
    holding = context.Process(target=hold, args=(queue,))
    holding.start()
    queue.get()
    for target in (train, leave):
        process = context.Process(target=target)
        process.start()
        process.join()
    holding.kill()
"""
    status, found, said = estimate(source)
    assert status == 0, said
    assert found["allocated_bytes"][0] == alone["allocated_bytes"][0] + 64 * MIB
    assert len(found["processes"]["held"]) == 2 and found["steps"] == 4


def test_scripts_that_are_started_count_each_in_its_time(estimate, alone):
    source = MAIN + (
        "    for _ in range(2):\n"
        "        subprocess.run([sys.executable, 'alone.py'], check=True)\n"
        "    train()\n"
    )
    status, found, said = estimate(source)
    assert status == 0, said
    assert found["allocated_bytes"][0] == alone["allocated_bytes"][0] and found["context_bytes"] == CONTEXT
    assert any("2 processes" in line for line in found["covered"])


def test_a_model_that_processes_share_counts_once(estimate, alone):
    source = MAIN + (
        "    model = torch.nn.Linear(1024, 1024, bias=False).cuda().share_memory()\n"
        "    mp.spawn(shared, args=(model,), nprocs=2)\n"
    )
    status, found, said = estimate("def shared(rank, model): fit(model, 'cuda')\n" + source)
    assert status == 0, said
    assert found["allocated_bytes"][0] == WEIGHT + 2 * (alone["allocated_bytes"][0] - WEIGHT)
    assert len(found["processes"]["held"]) == 3


def test_a_process_that_runs_out_of_memory_is_told_by_its_line(estimate):
    source = (
        "def large(rank):\n    train()\n    torch.empty(1 << 28, device='cuda')\n"
        + MAIN
        + "    mp.spawn(large)"
    )
    status, found, said = estimate(source, "--gpu", "1GiB")
    assert status == 1 and found["verdict"] == "does not fit", said
    assert found["oom"]["text"].startswith("torch.empty(") and found["oom"]["asked"] == 1 << 30


def test_a_process_that_fails_leaves_the_verdict_open(estimate):
    """Its parent does not ask how it ended."""
    source = (
        "def fails():\n    train()\n    raise ValueError('no such data')\n"
        + MAIN
        + (
            "    process = mp.get_context('spawn').Process(target=fails)\n"
            "    process.start()\n"
            "    process.join()\n"
        )
    )
    status, found, said = estimate(source, "--gpu", "24GiB")
    assert status == 1 and found["verdict"] == "unsure", said
    assert any("ValueError: no such data" in line for line in found["covered"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_loaders_change_nothing(estimate, method):
    source = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(1024)

if __name__ == "__main__":
    model = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(Data(), 2, WORKERS):
        model(x.cuda()).sum().backward()
        optimizer.step()
"""
    figures = []
    for workers in ("num_workers=0", f"num_workers=2, multiprocessing_context={method!r}"):
        status, found, said = estimate(source.replace("WORKERS", workers))
        assert status == 0 and found["processes"] is None, said
        figures.append(
            [found[name] for name in ("allocated_bytes", "reserved_bytes", "by_category", "steps")]
        )
    assert figures[0] == figures[1]
