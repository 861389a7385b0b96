"""`python -m memopt run --sim`: a script as it is, on a simulated card, with the values that the CPU computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memopt._memory.recording import recording_file

SIM = {"memory": "64MiB"}
pytestmark = pytest.mark.sampled("scripts under `memopt run`")
ROOT = Path(__file__).resolve().parents[2]
ALONE = {
    name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MEMOPT_SIM")
}

TRAINING = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
device = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 2, (64,)))
for epoch in range(2):
    for x, y in DataLoader(data, 16, num_workers=2, multiprocessing_context="fork"):
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
"""
MAIN = "\nif __name__ == '__main__':\n    exec(sys.argv[1])\n"


def memopt(folder: Path, *arguments: str, text: str = TRAINING, **environment: str):
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "memopt", "run", *arguments],
        cwd=folder,
        env=ALONE | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        timeout=600,  # a hang; a busy host may take minutes
    )


def test_a_training_has_the_cpus_losses_and_the_cards_memory(tmp_path):
    done = memopt(tmp_path, "--sim", "8GiB", "-o", "out.mopt", "train.py", "cuda")
    assert done.returncode == 0, done.stderr
    expected = memopt(tmp_path, "--sim", "8GiB", "--device", "cpu", "-q", "train.py", "cpu")
    assert done.stdout == expected.stdout != "" and expected.stderr == ""
    seen = recording_file.load(tmp_path / "out.mopt")
    assert seen.device == "cuda:0" and seen.peak()[0] > 0
    assert "simulated" in seen.source and "train.py on a simulated card of 8.00 GiB" in done.stderr


def test_a_card_that_is_too_small_ends_it_as_one_would(tmp_path):
    text = "import torch\nkept = [torch.ones(64 << 18, device='cuda') for _ in range(20)]\n"
    small = memopt(tmp_path, "--sim", "1GiB", "train.py", text=text)
    assert small.returncode == 1 and "torch.OutOfMemoryError: CUDA out of memory" in small.stderr
    assert "simulated" in small.stderr and "train.py:2" in small.stderr
    # The traceback is the script's alone, and what torch's C++ logs of the failure is in its message already.
    assert "memopt/" not in small.stderr.partition("torch.OutOfMemoryError")[0] and "[W" not in small.stderr
    large = memopt(tmp_path, "--sim", "2GiB", "train.py", text=text)
    assert large.returncode == 0, large.stderr


def test_a_card_by_its_name_is_what_the_script_sees(tmp_path):
    text = "import torch\nprint(torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[1])\n"
    done = memopt(tmp_path, "-q", "--no-record", "--sim", "h100", "train.py", text=text)
    assert done.stdout.startswith("(9, 0)") and int(done.stdout.split()[-1]) > 79 << 30, done.stderr


CHILDREN = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp
def of_a_child(queue):
    queue.put((torch.ones(3, device="cuda") * 2).sum().item())
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, n): return torch.tensor([n, torch.cuda.is_available()])
"""


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_processes_that_the_script_starts_have_a_card_with_values_too(tmp_path, way):
    call = (
        f"context = mp.get_context({way!r}); queue = context.Queue(); "
        "process = context.Process(target=of_a_child, args=(queue,)); process.start(); print(queue.get(timeout=300)); "
        "process.join(); "
        f"print(*torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context={way!r}))"
    )
    # Recorded: nothing of CUDA's may begin before the script does, or a forked process could not use it.
    done = memopt(tmp_path, "-q", "--sim", "1GiB", "train.py", call, text=CHILDREN + MAIN)
    assert done.stdout == "6.0\ntensor([[0, 1]]) tensor([[1, 1]])\n", done.stderr


def test_a_tensor_on_the_card_is_not_shared_and_the_remedy_is_said(tmp_path):
    call = "mp.get_context('spawn').Process(target=print, args=(torch.ones(3).cuda(),)).start()"
    done = memopt(tmp_path, "-q", "--no-record", "--sim", "1GiB", "train.py", call, text=CHILDREN + MAIN)
    assert done.returncode == 1 and "which has its own card: share it before" in done.stderr


def test_a_python_of_its_own_has_one_and_its_path_is_its_own(tmp_path):
    inner = (
        "import sys, torch; print((torch.ones(2).cuda() + 1).tolist(), any('startup' in p for p in sys.path))"
    )
    call = f"subprocess.run([sys.executable, '-c', {inner!r}])"
    (tmp_path / "sitecustomize.py").write_text("print('the next one')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = memopt(
        tmp_path,
        "-q",
        "--no-record",
        "--sim",
        "1GiB",
        "train.py",
        call,
        text=CHILDREN + MAIN,
        PYTHONPATH=path,
    )
    # The parent's, the script's and that of the script's child, each when it writes out what it has printed.
    assert "[2.0, 2.0] False" in done.stdout.splitlines(), done.stderr
    assert done.stdout.splitlines().count("the next one") == 3


def test_an_interrupt_is_one_line_and_leaves_nothing(tmp_path):
    text = (
        "import os, signal, time, torch\ntorch.ones(3).cuda()\nos.kill(os.getppid(), signal.SIGINT)\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = memopt(tmp_path, "--sim", "1GiB", "train.py", text=text, TMPDIR=str(folder))
    assert done.returncode == 128 + signal.SIGINT and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()[1:]
    assert "was interrupted after" in line and "recorded in memopt-train." in line
    assert list(folder.glob("memopt*")) == []


def test_a_wrong_call_is_told_with_the_remedy(tmp_path):
    cases = {
        ("--sim", "many", "train.py"): "write a size, as '24GiB'",
        ("--sim", "100MiB", "train.py"): "CUDA context",
        ("--sim", "8GiB", "--python", "/nowhere/python", "train.py"): "no Python at '/nowhere/python'",
        ("--python", sys.executable, "train.py"): "--python needs --sim",
    }
    for arguments, message in cases.items():
        done = memopt(tmp_path, *arguments)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


RANKS = """
import os
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[rank])
model(torch.full((4, 8), rank + 1.0, device="cuda")).sum().backward()
total = torch.full((2,), rank + 1.0, device="cuda")
dist.all_reduce(total)
print(f"rank {rank} {total.tolist()} {model.module.weight.grad[0, 0].item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_ranks_have_a_card_each_and_reduce_real_values(tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    job = ALONE | {
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "memopt", "run", "-q", "--sim", "1GiB", "train.py"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=job | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    # Of 4 rows of ones and 4 of twos, the mean over the ranks.
    assert [out for out, _ in told] == ["rank 0 [3.0, 3.0] 6.0\n", "rank 1 [3.0, 3.0] 6.0\n"]
    assert "communicate over gloo" in told[0][1] and "communicate over gloo" not in told[1][1]
