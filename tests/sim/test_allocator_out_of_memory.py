"""Out of memory through memopt's allocator: what is tried before, that it may come anywhere in a training step, and
that nothing is the worse for it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt import sim

SIM = {"memory": "128MiB"}
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())


@pytest.fixture(autouse=True)
def empty_device():
    """torch keeps a workspace for cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert sim.stats()["bytes"] == 0
    yield
    sim.lazy(False)


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def filled() -> list[torch.Tensor]:
    """Blocks of every size down to the smallest, until there is nothing left."""
    blocks, size = [], 64 * MIB
    while size >= 512:
        try:
            blocks.append(block(size))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


# ---- anywhere in a step ----------------------------------------------------------------------------------------------


class FullAt(TorchDispatchMode):
    """From the position-th operation on (counted from 0) the device is full."""

    def __init__(self, position: int):
        super().__init__()
        self.position, self.count, self.blocks = position, 0, []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if self.count == self.position:
            self.blocks = filled()
        self.count += 1
        return function(*arguments, **(named or {}))


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, 1, 8, 8)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(self.batch.cuda())
        (output * output).mean().backward()
        self.optimizer.step()


def test_an_out_of_memory_may_come_at_any_operation_of_a_step_and_the_next_step_succeeds():
    trainer = Trainer()
    trainer.step()  # the first, with the optimizer's state to come
    with FullAt(-1) as counter:
        trainer.step()
    live, raised = None, 0
    for position in range(counter.count):
        full = FullAt(position)
        try:
            with full:
                trainer.step()
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate ")
            raised += 1
        full.blocks.clear()
        gc.collect()
        trainer.step()
        torch.cuda.synchronize()
        stats = memopt.cuda.memory_stats()
        live = live or stats["live_blocks"]
        assert stats["live_blocks"] == live, f"operation {position}"
    assert raised >= counter.count // 4, (raised, counter.count)
    assert stats["failed_frees"] == 0


# ---- what is tried before --------------------------------------------------------------------------------------------


def test_what_is_cached_for_other_sizes_is_used_before_a_request_fails():
    held = [block(10 * MIB) for _ in range(12)]
    del held
    assert block(100 * MIB).numel() == 100 * MIB  # of pieces that lie apart
    held = [block(MIB // 2) for _ in range(200)]
    del held
    assert block(100 * MIB).numel() == 100 * MIB


def test_memory_that_waits_for_work_is_waited_for_before_a_request_fails():
    sim.lazy(True)
    stream = torch.cuda.Stream()
    x = block(100 * MIB)
    with torch.cuda.stream(stream):
        x.fill_(1)
    x.record_stream(stream)
    del x
    assert block(100 * MIB).numel() == 100 * MIB


def test_holes_between_live_blocks_are_put_together():
    blocks = [block(4 * MIB) for _ in range(30)]
    del blocks[::2]
    assert block(56 * MIB).numel() == 56 * MIB
    assert memopt.cuda.memory_stats()["granules_moved"] > 0


def test_a_retry_after_freeing_succeeds_at_once():
    held = [block(100 * MIB)]
    with pytest.raises(torch.OutOfMemoryError):
        block(100 * MIB)
    held.clear()
    assert block(100 * MIB).numel() == 100 * MIB


def test_python_may_free_in_the_handler_and_go_on():
    held = [block(60 * MIB), block(60 * MIB)]
    try:
        x = block(50 * MIB)
    except torch.OutOfMemoryError:
        held.pop()
        x = block(50 * MIB)
    assert x.numel() == 50 * MIB


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1025, 1 << 48])
def test_sizes_beyond_all_devices_are_an_out_of_memory_and_no_overflow(size: int):
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as caught:
        block(size)
    assert "out of memory" in str(caught.value) or "overflow" in str(caught.value).lower()


def test_a_fraction_refuses_what_the_device_would_have_had_and_says_so():
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert block(30 * MIB).numel() == 30 * MIB
        with pytest.raises(torch.OutOfMemoryError) as caught:
            block(40 * MIB)
        assert "32.00 MiB allowed" in str(caught.value)
        assert "a larger memory_budget or memory fraction" in str(caught.value)
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        assert sim.stats()["bytes"] <= 32 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert block(40 * MIB).numel() == 40 * MIB


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float):
    with pytest.raises((ValueError, RuntimeError)):
        torch.cuda.set_per_process_memory_fraction(fraction)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


# ---- giving back -----------------------------------------------------------------------------------------------------


def test_empty_cache_gives_back_what_no_tensor_uses():
    kept = block(10 * MIB)
    del kept
    kept, gone = block(10 * MIB), [block(5 * MIB) for _ in range(10)]
    del gone
    assert sim.stats()["bytes"] >= 60 * MIB
    torch.cuda.empty_cache()
    live = memopt.cuda.memory_stats()["live_blocks"]
    assert 10 * MIB <= sim.stats()["bytes"] <= 10 * MIB + 2 * MIB * live
    assert kept.numel() == 10 * MIB


def test_trim_gives_back_down_to_what_is_to_be_kept():
    gone = [block(5 * MIB) for _ in range(10)]
    del gone
    before = sim.stats()["bytes"]
    freed = memopt.cuda.trim(keep="20MiB")
    assert before - freed == sim.stats()["bytes"] == 20 * MIB
    assert memopt.cuda.trim(0, keep=1 << 40) == 0
    assert memopt.cuda.trim("cuda:0") == 20 * MIB
    assert memopt.cuda.trim(63) == 0  # never used
    for wrong in ("cpu", 64, -1):
        with pytest.raises(ValueError):
            memopt.cuda.trim(wrong)
    with pytest.raises(ValueError, match="lots"):
        memopt.cuda.trim(keep="lots")
