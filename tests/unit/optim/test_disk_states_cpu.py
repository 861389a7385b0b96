"""offload_states= with a directory, of parameters on the CPU: bits, a disk that is full or none, processes that end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt.amp
import memopt.optim
from memopt.optim import _disk_states, _turns
from memopt.optim._disk_states import DiskState
from tests.helpers.processes import run_python

ROOT = Path(__file__).resolve().parents[3]
SEED = int(os.environ.get("MEMOPT_SEED", "0"))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (memopt.optim.AdamW, {"amsgrad": True}),
    "8 bits": (memopt.optim.AdamW, {"state_bits": 8, "min_8bit_size": 256}),
    "4 bits": (memopt.optim.Adam, {"state_bits": 4, "min_8bit_size": 256}),
    "factored": (memopt.optim.AdamW, {"state_bits": 4, "factored": True, "min_8bit_size": 256}),
    "SGD": (memopt.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "Muon": (memopt.optim.Muon, {"state_bits": 8, "min_8bit_size": 256}),
}


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_on_a_disk_have_the_bits_of_those_in_memory(
    kind: str, pieces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        for module in (_disk_states, _turns):
            monkeypatch.setattr(module, "DISK_TURN", 1 << 14)
            monkeypatch.setattr(module, "GRAIN", 512)
        monkeypatch.setattr(_disk_states, "CHUNK", 1 << 13)
        monkeypatch.setattr(_disk_states, "AREA", 3 << 13)
    make, options = KINDS[kind]
    ends = []
    for where in (False, tmp_path):
        torch.manual_seed(SEED)
        model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 33, bias=False))
        optimizer = make(model.parameters(), lr=0.01, offload_states=where, **options)
        scaler = memopt.amp.GradScaler("cpu", init_scale=8.0)
        for n in range(20):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean() * (float("inf") if n == 7 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            memopt.amp.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        states = optimizer.state_dict()["state"]
        assert any(type(v) is DiskState for s in optimizer.state.values() for v in s.values()) == bool(where)
        ends.append([*model.parameters(), *(value for held in states.values() for value in held.values())])
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(ends[0]) == len(ends[1]) and all(map(torch.equal, *ends))
    assert list(tmp_path.iterdir()) == []


def test_memory_counts_them_at_the_disk(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(1000))
    optimizer = memopt.optim.SGD([p], lr=0.1, momentum=0.9, offload_states=tmp_path)
    p.sum().backward()
    optimizer.step()
    assert optimizer.memory() == {"cpu": {"parameters": 4000, "gradients": 4000}, "disk": {"states": 4000}}


def test_a_directory_that_is_none_is_told_when_the_optimizer_is_made(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(4))
    with pytest.raises(FileNotFoundError, match=r"offload_states='.*none'.*give a directory that exists"):
        memopt.optim.AdamW([p], offload_states=tmp_path / "none")
    with pytest.raises(NotADirectoryError, match="give a directory that exists"):
        memopt.optim.AdamW([p], offload_states=__file__)
    optimizer = memopt.optim.AdamW([p])
    later = {"params": [nn.Parameter(torch.ones(4))], "offload_states": str(tmp_path / "none")}
    with pytest.raises(FileNotFoundError, match="give a directory that exists"):
        optimizer.add_param_group(later)
    assert len(optimizer.param_groups) == 1


def test_a_directory_that_cannot_be_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        tmp_path = Path("/proc/self")  # where nobody writes
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=rf"offload_states='{tmp_path}': creating a file in {tmp_path}"):
        memopt.optim.AdamW([nn.Parameter(torch.ones(4))], offload_states=tmp_path)


def in_a_process(body: str, tmp_path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    script = f"""
import os, torch, memopt.optim
from torch import nn
path = {str(tmp_path)!r}
ps = [nn.Parameter(torch.ones(1 << 18)) for _ in range(4)]  # 2 MiB of states each
optimizer = memopt.optim.AdamW(ps, offload_states=path)
for p in ps:
    p.grad = torch.ones_like(p)
{body}
"""
    return run_python(script, **options)


@pytest.mark.sampled("what fails while states are on a disk")
def test_a_full_disk_is_told_before_anything_has_changed(tmp_path: Path) -> None:
    """Full: a limit on the size of files, which any user may set."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))

    done = in_a_process(
        """
for _ in range(2):
    try:
        optimizer.step()
    except OSError as error:
        print(error)
    else:
        raise SystemExit("no error")
assert all((p == 1).all() for p in ps)
import resource, signal
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
optimizer.step()
assert not any((p == 1).any() for p in ps)
print("and goes on")
""",
        tmp_path,
        preexec_fn=limited,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        f"offload_states={str(tmp_path)!r}: ",
        "2097152 bytes are needed there for the states of a parameter, beside 4194304 bytes of others', and ",
        " are free: ",
        "raise the limit (ulimit -f) or give another directory",
    ):
        assert words in done.stdout
    assert done.stdout.endswith("and goes on\n")


@pytest.mark.sampled("what fails while states are on a disk")
@pytest.mark.parametrize("moment", ["after a step", "in a step"])
def test_a_process_that_is_killed_leaves_nothing(moment: str, tmp_path: Path) -> None:
    kill = "os.kill(os.getpid(), 9)"
    if moment == "in a step":
        kill = f"from memopt.optim._one_pass import OnePass\nOnePass._update = lambda *_: {kill}\noptimizer.step()"
    done = in_a_process(f"optimizer.step()\n{kill}", tmp_path)
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled("what fails while states are on a disk")
def test_ctrl_c_in_a_step_comes_after_it(tmp_path: Path) -> None:
    done = in_a_process(
        """
import signal
from memopt.optim._one_pass import OnePass
from memopt.optim import _disk_states, _turns
_disk_states.DISK_TURN = _turns.DISK_TURN = 3 << 20
update, left = OnePass._update, [2]
def interrupted(*args):
    left[0] -= 1
    if not left[0]:
        signal.raise_signal(signal.SIGINT)
    update(*args)
OnePass._update = interrupted
optimizer.step()
""".replace("optimizer.step()", "try:\n    optimizer.step()\nexcept KeyboardInterrupt:\n    print('heard')")
        + "assert not any((p == 1).any() for p in ps)\n"
        + "assert all(s['step'] == 1 for s in optimizer.state.values())",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


@pytest.mark.sampled("what fails while states are on a disk")
def test_a_fork_has_states_of_its_own_to_begin_with(tmp_path: Path) -> None:
    done = in_a_process(
        """
import memopt
optimizer.step()
child = os.fork()
if not child:
    try:
        optimizer.step()
    except memopt.Error as error:
        assert "belongs to the parent" in str(error), error
        os._exit(0)
    except OSError as error:
        os._exit(0 if "belongs to the parent" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
optimizer.step()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
