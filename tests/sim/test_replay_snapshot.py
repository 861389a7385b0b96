"""Snapshots of PyTorch's own allocator, as torch writes them, replayed."""

import json

import torch

from memopt.__main__ import main

SIM = {"memory": "4GiB"}


def replay(path, capsys):
    assert main(["replay", str(path), "--json", "--check"]) == 0
    return json.loads(capsys.readouterr().out)


def train(steps):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.zeros(128 + 64 * step, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_snapshots_live_peak_is_torchs_own(tmp_path, capsys):
    before = train(1)  # live when history begins
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history("all", stacks="python")
    kept = train(3)
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(None)
    found = replay(tmp_path / "snapshot.pickle", capsys)
    stats = torch.cuda.memory_stats()
    assert found["live_peak"] == stats["requested_bytes.all.peak"]
    assert found["completed"] and found["peak_reserved"] >= found["live_peak"]
    assert found["operations"] > 300
    del before, kept


def test_a_ring_that_lost_the_beginning_still_replays(tmp_path, capsys):
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=100)
    kept = train(3)
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(None)
    found = replay(tmp_path / "snapshot.pickle", capsys)
    assert (
        found["completed"] and found["live_peak"] >= torch.cuda.memory_stats()["requested_bytes.all.current"]
    )
    del kept


def test_a_snapshot_without_history_is_refused(tmp_path, capsys):
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert main(["replay", str(tmp_path / "snapshot.pickle")]) == 2
    assert "_record_memory_history" in capsys.readouterr().err
