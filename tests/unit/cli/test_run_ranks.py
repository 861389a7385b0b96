"""`memopt run` under torchrun: each rank leaves what it saw, and one of them tells of all, also of those that died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from made_recordings import figures, rank

from memopt.__main__ import main
from memopt._run import merged_report
from memopt._run.ranks_folder import Place, RanksFolder

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

TRAINING = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    samples = torch.randn(4096 if dist.get_rank() else 64, 256)
    model(samples).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.sampled("several processes")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_ranks_of_torchrun_are_told_together(tmp_path, capsys):
    (tmp_path / "train.py").write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "memopt", "run", "train.py"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("memopt run:") == 1 and "train.py in 2 ranks" in done.stderr
    (folder,) = tmp_path.glob("memopt-train.*")
    assert {"rank0.mopt", "rank1.mopt", "report.html"} <= {path.name for path in folder.iterdir()}
    assert main(["report", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    peaks = [rank["figures"]["peak_bytes"] for rank in told["ranks"]]
    # x, what the model makes of it, and its gradient: 4096 rows more of each.
    assert told["highest_peak"] == 1 and peaks[1] - peaks[0] > 3 * (4096 - 64) * 256 * 4
    assert main(["report", str(folder), "--text"]) == 0
    text = capsys.readouterr().out
    assert "all ended with 0" in text and "rank 1 needs the most" in text and "category activations" in text
    assert "line train.py:9  model(samples).square().mean().backward()" in text
    assert text.splitlines()[0] in done.stderr
    page = (folder / "report.html").read_text()
    assert "rank 1 needs the most" in page and "<h3>rank 0</h3>" in page


# ---- ranks that nobody started but this test; their script needs no torch --------------------------------------------


def started(folder: Path, source: str, ranks: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    (folder / "work.py").write_text(source)
    return [
        subprocess.Popen(
            [sys.executable, "-m", "memopt", "run", "-o", "out", "work.py"],
            cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": "1"} | environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, err) for process, (_, err) in zip(processes, said, strict=True)]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} has not come"
        time.sleep(0.05)


DIES = """
import os, pathlib, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
other = pathlib.Path("out/rank1.json")  # it may start later
while not (other.exists() and '"ended"' in other.read_text()):
    time.sleep(0.05)
"""


def test_a_rank_that_dies_is_told_of_at_once_and_by_the_last(tmp_path):
    (first, said), (second, of_one) = ended(started(tmp_path, DIES))
    assert (first, second) == (0, 128 + 9)
    assert "memopt run: rank 1 of 2 was ended by signal 9 (SIGKILL)" in of_one
    assert "work.py in 2 ranks" in said and "rank 1: ended by signal 9 (SIGKILL)" in said
    assert "limit of host memory" in said and "not recorded" in said


WAITS = """
import os, pathlib, time
def waits():
    pathlib.Path("waits" + os.environ["RANK"]).touch()
    time.sleep(1000)
waits()
"""


def test_ranks_that_are_ended_say_where_they_were_and_keep_their_status(tmp_path):
    processes = started(tmp_path, WAITS)
    for number in range(2):
        wait_for(tmp_path / f"waits{number}")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    outcomes = ended(processes)
    assert [status for status, _ in outcomes] == [128 + signal.SIGTERM] * 2
    # The one that ends last; where the other has waited for long before, it has told too.
    (said,) = [text for _, text in outcomes if "ranks 0-1: ended by signal 15 (SIGTERM)" in text]
    assert "it was at work.py:5 in waits, called by work.py:6 in <module>" in said


def test_an_earlier_jobs_ranks_are_not_this_ones(tmp_path):
    for count in (3, 2):
        outcomes = ended(started(tmp_path, "pass", ranks=count, MASTER_PORT=str(count)))
        assert sum(f"work.py in {count} ranks" in text for _, text in outcomes) == 1
    assert len(merged_report.as_dict(tmp_path / "out")["ranks"]) == 2


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_ranks_that_are_alike_are_said_to_be(tmp_path):
    for number in range(12):
        rank(tmp_path, number, 12, figures=figures(1000 << 20))
    text = merged_report.text(tmp_path)
    assert "in 12 ranks on 2 nodes, 2.0 s: all ended with 0" in text and "the ranks are similar" in text
    assert "node1" in text and text.splitlines()[12].split()[0] == "10"  # by number


def test_the_worst_rank_is_named_with_what_it_has_more_of(tmp_path):
    for number in range(4):
        rank(tmp_path, number, 4, figures=figures((900 if number == 2 else 600) << 20))
    text = merged_report.text(tmp_path)
    assert "rank 2 needs the most, 900 MiB: 1.50 times the median, 600 MiB of rank 0" in text
    assert "+300 MiB  category activations" in text and "+300 MiB  line a.py:3  x = f(y)" in text


def test_missing_running_and_out_of_memory_ranks_are_told(tmp_path):
    rank(tmp_path, 0, 4, figures=figures(5 << 20))
    rank(tmp_path, 1, 4, status=1, ended="ended with 1", figures=figures(9 << 20, oom="wanted 2 GiB"))
    rank(tmp_path, 3, 4, state="running")
    text = merged_report.text(tmp_path)
    assert "rank 1: ended with 1" in text and "rank 1: out of memory: wanted 2 GiB" in text
    assert (
        "rank 2 left no recording" in text and "rank 3 (pid 5 on node1) has not reported how it ended" in text
    )
    assert merged_report.as_dict(tmp_path)["ended_badly"] == [1, 3]


def test_what_is_no_folder_of_ranks_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no rank*.json" in capsys.readouterr().err
    (tmp_path / "rank0.json").write_text('{"rank": "x"}')
    assert main(["report", "--text", str(tmp_path)]) == 2
    assert "not the report of a rank of `memopt run`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None),
        ({"RANK": "one", "WORLD_SIZE": "4"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a/b", "MASTER_PORT": "9"}, (3, 4, 4, "a_b-9")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
             "TORCHELASTIC_RESTART_COUNT": "2"},
            (3, 4, 2, "x.restart2"),
        ),
    ],
)  # fmt: skip
def test_a_rank_knows_its_place_by_the_environment(environment, expected):
    place = Place.of(environment)
    assert (None if place is None else (place.rank, place.count, place.local_count, place.job)) == expected


def test_exactly_one_of_the_ranks_that_end_together_is_the_last(tmp_path):
    """All in one process, which a lock on a file holds apart as it does processes."""
    from concurrent.futures import ThreadPoolExecutor

    for attempt in range(20):
        folders = [RanksFolder(tmp_path / str(attempt), Place(number, 8, 8, "j")) for number in range(8)]
        for folder in folders:
            folder.begin()
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda folder: folder.end({}, wait=False), folders))
        assert sum(told) == 1


def test_a_node_that_sees_its_own_ranks_alone_tells_of_those(tmp_path):
    folders = [RanksFolder(tmp_path, Place(number, 4, 2, "j")) for number in range(2)]
    for folder in folders:
        folder.begin()
    assert [folder.end({}, wait=False) for folder in folders] == [False, True]
    assert "ranks 2-3 left no recording" in merged_report.text(tmp_path)
