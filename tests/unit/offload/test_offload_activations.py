"""memopt.offload_activations to a disk, on the CPU: gradients, what is written, what is held, and a disk that fails."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memopt
from memopt import _C
from memopt._offload.transfers import _spaces, disk_space
from tests.helpers.processes import run_python
from tests.helpers.residual import Residual

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path):
    yield
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not [key for key in _spaces if key[1] == str(tmp_path)]


def offload(path: Path, **options) -> memopt.offload_activations:
    return memopt.offload_activations(**{"min_size": 1024, "to": path, "in_flight": 0, **options})


def step(model: nn.Module, x: torch.Tensor, context, backwards: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with context:
        loss = model(x).float().square().mean()
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    return [p.grad.clone() for p in model.parameters()]


class Around(nn.Module):
    def __init__(self, modules: list[nn.Module], around: Callable | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.around = around or (lambda part, x: part(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = self.around(part, x)
        return x


AROUND = {
    "plain": None,
    "memopt.checkpoint": lambda part, x: memopt.checkpoint(part, x, use_reentrant=False),
    "torch's": lambda part, x: torch_checkpoint(part, x, use_reentrant=False),
}


@pytest.mark.parametrize("in_flight", [0, "16KiB", None])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_gradients_are_the_plain_runs(tmp_path: Path, around: str, autocast: bool, in_flight) -> None:
    model, x = Around([Residual(32, 0.1) for _ in range(4)], AROUND[around]), torch.randn(64, 32)
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    expected = step(model, x, cast)
    disk = offload(tmp_path, in_flight=in_flight)
    with contextlib.ExitStack() as both:
        both.enter_context(cast)
        got = step(model, x, disk)
    assert all(map(torch.equal, got, expected))
    assert disk.last.bytes_out == disk.last.bytes_in
    assert disk.last.bytes_out > 0 or in_flight is None


def test_a_graph_that_is_kept_gives_all_again(tmp_path: Path) -> None:
    model, x = Around([Residual(32, 0.1) for _ in range(4)], None), torch.randn(64, 32)
    expected = step(model, x, contextlib.nullcontext(), 3)
    disk = offload(tmp_path)
    assert all(map(torch.equal, step(model, x, disk, 3), expected))
    assert disk.last.bytes_in == 3 * disk.last.bytes_out > 0


def test_as_a_decorator(tmp_path: Path) -> None:
    model, x = Around([Residual(32, 0.1) for _ in range(2)], None), torch.randn(64, 32)
    expected = step(model, x, contextlib.nullcontext())
    model.forward = offload(tmp_path)(model.forward)
    assert all(map(torch.equal, step(model, x, contextlib.nullcontext()), expected))
    del model.forward


def files_in(directory: Path) -> list[str]:
    """The files without a name that this process has there, under the names that the system has for them."""
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [f for f in files if os.path.lexists(f) and os.readlink(f).startswith(f"{directory}/")]


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad, *(None for _ in ctx.saved_tensors))


def saves(context, count: int, nbytes: int = MIB) -> torch.Tensor:
    x = torch.ones(4, requires_grad=True)
    with context:
        for _ in range(count):
            x = Saves.apply(x, torch.empty(nbytes, dtype=torch.uint8))
    return x.sum()


def test_memory_is_let_go_and_the_file_with_the_graph(tmp_path: Path) -> None:
    disk = offload(tmp_path)
    loss = saves(disk, 6)
    file = disk_space(str(tmp_path))
    assert file.disk.counts()[:2] == (5 * MIB, 0)  # the last stays: its maker still held it
    loss.backward()
    assert file.disk.counts()[:2] == (5 * MIB, 5 * MIB)
    assert file._ring.held()[0] == 0
    del file


def test_a_step_that_repeats_uses_the_same_part_of_the_file(tmp_path: Path) -> None:
    space = disk_space(str(tmp_path))
    for _ in range(3):
        saves(offload(tmp_path), 4).backward()
        assert space._ring.held()[:2] == (0, 3 * MIB)
    del space


def test_passes_that_overlap_take_no_more_of_the_disk_than_what_lives(tmp_path: Path) -> None:
    """Each begins before the graph of the one before goes."""
    loss = saves(offload(tmp_path), 5)
    for _ in range(20):
        following = saves(offload(tmp_path), 5)
        loss.backward()
        loss = following
        assert sum(os.stat(file).st_blocks for file in files_in(tmp_path)) * 512 <= 3 * 4 * MIB
        assert all(os.stat(file).st_size <= 2 * 4 * MIB for file in files_in(tmp_path))


def test_on_the_cpu_there_is_nothing_to_send_to_the_host() -> None:
    context = memopt.offload_activations(1024)
    with pytest.warns(
        UserWarning, match=r"in the host's memory already.*a directory on a disk as to="
    ) as seen:
        saves(context, 3).backward()
    assert len(seen) == 1
    assert context.last.bytes_out == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saves(memopt.offload_activations(2 * MIB), 3)


def test_what_changed_in_place_is_refused(tmp_path: Path) -> None:
    x = torch.ones(MIB, requires_grad=True)
    with offload(tmp_path):
        y = (x * 1).exp()
        z = y.sum()
        Saves.apply(torch.ones(1, requires_grad=True), torch.empty(MIB))
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


# ---- a disk that fails ----------------------------------------------------------------------------------------------


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "none", Path(__file__)):
        with pytest.raises(NotADirectoryError, match="a directory on a disk") as raised:
            memopt.offload_activations(to=wrong)
        assert raised.value.filename == str(wrong)


def test_a_directory_that_vanishes_takes_nothing_away_and_is_told_at_the_next_pass(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    disk = offload(gone)
    loss = saves(disk, 4)
    gone.rmdir()
    loss.backward()  # what has no name cannot vanish
    assert disk.last.bytes_in == 3 * MIB
    del loss
    with pytest.raises(FileNotFoundError, match=f"{gone}.*give a directory that exists"):
        saves(disk, 4)


def test_a_file_that_is_cut_off_is_an_error_and_no_data(tmp_path: Path) -> None:
    loss = saves(offload(tmp_path), 4)
    os.truncate(*files_in(tmp_path), MIB)
    with pytest.raises(OSError, match=f"{tmp_path}: it ends before the bytes that were written there"):
        loss.backward()


def test_a_file_that_somebody_writes_to_is_an_error_and_no_data(tmp_path: Path) -> None:
    loss = saves(offload(tmp_path), 4)
    with open(*files_in(tmp_path), "r+b", buffering=0) as file:
        file.seek(MIB + 77)
        byte = file.read(1)
        file.seek(MIB + 77)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(OSError, match="differ from the bytes that were written"):
        loss.backward()


def in_a_process(body: str, tmp_path: Path, **options) -> subprocess.CompletedProcess[str]:
    script = f"""
import sys, torch, memopt
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.unit.offload.test_offload_activations import MIB, Saves, offload, saves
path = Path({str(tmp_path)!r})
{body}
"""
    return run_python(script, **options)


def test_a_full_disk_is_told_with_the_mend_and_another_works(tmp_path: Path) -> None:
    """Full: a limit on the size of files, which any user may set."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))

    done = in_a_process(
        """
disk = offload(path)
try:
    saves(disk, 20)
except OSError as error:
    print(error)
else:
    raise SystemExit("no error")
saves(disk, 3).backward()
print("and goes on")
""",
        tmp_path,
        preexec_fn=limited,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert "ulimit -f" in done.stdout
    assert done.stdout.endswith("and goes on\n")


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = in_a_process("loss = saves(offload(path), 8)\nimport os\nos.kill(os.getpid(), 9)", tmp_path)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_with_a_graph_ends_well(tmp_path: Path) -> None:
    done = in_a_process(
        "disk = offload(path, in_flight='8MiB')\nloss = saves(disk, 40)\nprint('ends')", tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_a_fork_begins_anew(tmp_path: Path) -> None:
    done = in_a_process(
        """
import os
disk = offload(path)
loss = saves(disk, 4)
child = os.fork()
if not child:
    try:
        loss.backward()
    except memopt.Error as error:
        assert "belongs to the parent" in str(error), error
        saves(disk, 4).backward()
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
loss.backward()
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


# ---- the engine's types ---------------------------------------------------------------------------------------------


def test_a_ring_gives_what_it_has(tmp_path: Path) -> None:
    ring = _C.Ring(8192, 4096)
    assert ring.take(1) == (0, 0, 0)
    assert ring.take(4096) == (1, 4096, 0)
    assert ring.take(1) is None
    ring.give(1, 9)
    assert ring.take(1) == (1, 4096, 9)
    with pytest.raises(ValueError, match="slot 5 is not in use"):
        ring.give(5)
    with pytest.raises(ValueError, match="a power of two"):
        _C.Ring(8192, 3)
    with pytest.raises(ValueError, match="expected 1 or more"):
        ring.take(0)


def test_a_disk_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    disk = _C.Disk(tmp_path)
    whole = torch.zeros(8192, dtype=torch.uint8)
    for tensor, at in ((whole[::2], 0), (whole.float(), 0), (whole[:0], 0), (whole, 5)):
        with pytest.raises(ValueError, match="expected a dense, non-empty CPU tensor"):
            disk.write(tensor, at)
    job = disk.write(whole, 4096)
    job.finish()
    assert job.over()
    with pytest.raises(ValueError, match="only what was written to the same disk"):
        disk.read(whole, disk.read(whole.clone(), job))
    with pytest.raises(TypeError):
        disk.read(whole, None)
    with pytest.raises(OSError, match="give a directory that exists"):
        _C.Disk(tmp_path / "none")
    assert disk.counts()[0] == 8192


def test_a_job_that_nobody_wants_is_waited_for_or_taken_back(tmp_path: Path) -> None:
    disk = _C.Disk(tmp_path)
    for n in range(20):
        disk.write(torch.zeros(MIB, dtype=torch.uint8), n * MIB)
    del disk


def test_backward_passes_on_several_threads(tmp_path: Path) -> None:
    context, failures = offload(tmp_path, in_flight="2MiB"), []
    losses = [saves(context, 6) for _ in range(3)]

    def run(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[loss]) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    del losses, threads
