"""offload_gradients=True on the simulated device, with real numbers: trainings whose gradients wait in the host's
memory end with the bits of those whose gradients stay."""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
import memopt.amp
import memopt.optim
from memopt import sim
from memopt._offload import pinned_memory
from memopt.optim import _turns
from memopt.optim._offloaded_gradients import HostGradient
from memopt.optim._one_pass import OnePass
from tests.helpers.offload_pairs import (
    KINDS,
    STEPS,
    WAYS,
    away,
    deep,
    loss_of,
    pair,
    same,
    step,
)
from tests.helpers.offloaded_models import words_of

SIM = {"memory": "1GiB", "devices": 2}


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


# Gradients of 16 bits that scaler.step(max_norm=) only reads are not rounded there; here they are, after both products.
CASES = [
    (way, kind) for way in WAYS for kind in KINDS if way != "scaled, clipped" or "dtype" not in KINDS[kind]
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_a_training_has_the_bits_of_one_whose_gradients_stay(way: str, kind: str) -> None:
    both = pair(**KINDS[kind])
    ways = WAYS[way]()
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=4) for _, o in both]
    for n in range(STEPS):
        for (model, optimizer), schedule in zip(both, schedules, strict=True):
            ways(model, optimizer, n)
            schedule.step()
        same(both)
    assert away(both[1][0]) or way == "accumulated"
    assert not away(both[0][0])


def test_what_stands_for_a_gradient_says_what_it_is_and_lets_nobody_read_nothing() -> None:
    (plain, _), (model, optimizer) = both = pair()
    for one, _ in both:
        loss_of(one, 0).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (b.grad.shape, b.grad.dtype, b.grad.device) == (a.grad.shape, a.grad.dtype, a.grad.device)
        assert torch.equal(b.grad.cpu(), a.grad.cpu()) and b.grad.cpu().device.type == "cpu"
        assert repr(b.grad) == f"HostGradient({tuple(a.shape)}, torch.float32, device='cuda:0')"
    memopt.amp.clip_grad_norm_(plain.parameters(), 0.01)
    memopt.amp.clip_grad_norm_(model.parameters(), 0.01)
    assert all(
        torch.equal(a.grad.cpu(), b.grad.cpu())
        for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    said = r"offload_gradients=True keeps in the host's memory: read grad.cpu\(\), clip with memopt.amp"
    with pytest.raises(RuntimeError, match=said):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=said):
        optimizer.zero_grad(set_to_none=False)
    scaler = torch.amp.GradScaler(init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))
    with pytest.raises(RuntimeError, match=said):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="norm_type=inf: gradients that .* have norms of order 2 alone"):
        memopt.amp.clip_grad_norm_(model.parameters(), 1.0, float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        next(model.parameters()).grad.multiply(torch.full((), float("inf"), device="cuda"))
        memopt.amp.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_a_gradient_is_read_as_any_type_and_a_model_does_not_move_with_it() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.5, offload_gradients=True)
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    read = model.weight.grad.to("cpu", torch.float64, non_blocking=True)
    assert read.dtype is torch.float64 and torch.equal(read, torch.ones(4, 4, dtype=torch.float64))
    assert torch.equal(model.weight.grad.data.cpu(), torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="_to_copy.* of a gradient that offload_gradients=True keeps"):
        model.half()
    model.float()
    with pytest.raises(RuntimeError, match="a model moves .* drop them before with zero_grad"):
        model.cpu()
    model.cuda()
    optimizer.step()
    assert torch.equal(model.bias.grad.cpu(), torch.ones(4))


def test_a_model_with_gradients_that_left_is_not_converted() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = memopt.optim.SGD(model.parameters(), lr=0.5, offload_gradients=True)
    model(torch.ones(1, 4, device="cuda")).sum().backward()
    with pytest.raises(ValueError, match="weight has a gradient that offload_gradients=True keeps"):
        memopt.to_dtype_(model, torch.bfloat16)
    assert away(model) and model.weight.dtype is torch.float32
    optimizer.step()


def test_gradients_with_a_graph_stay() -> None:
    ends = []
    for offload in (False, True):
        p = nn.Parameter(torch.full((4,), 2.0, device="cuda"))
        optimizer = memopt.optim.SGD([p], lr=0.5, offload_gradients=offload)
        p.square().sum().backward()
        p.pow(3).sum().backward(create_graph=True)
        assert type(p.grad) is torch.Tensor
        p.grad.square().sum().backward()
        optimizer.step()
        ends.append((p.detach().cpu(), p.grad.detach().cpu()))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("offload", ["offload_gradients", "offload_states"])
def test_a_scalers_step_leaves_gradients_as_it_has_used_them(offload: str) -> None:
    ends = []
    for options in ({}, {offload: True}):
        p = nn.Parameter(torch.arange(1.0, 7.0, device="cuda").view(2, 3))
        q = nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = memopt.optim.SGD([p, q], lr=0.2, momentum=0.5, **options)  # type: ignore[arg-type]
        scaler = memopt.amp.GradScaler(init_scale=3.0, growth_interval=1)
        found = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * (p * p).sum() + factor * (q * q * q).sum()).backward()
            if offload == "offload_states":
                p.grad = p.grad.t().contiguous().t()  # the step makes a copy of it
            scaler.step(optimizer)
            found += [p.grad.cpu(), q.grad.cpu()]
            scaler.update()
        optimizer.step()
        ends.append([p.detach().cpu(), q.detach().cpu(), *found])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_fp16_gradients_are_unscaled_only_where_that_is_allowed() -> None:
    p = nn.Parameter(torch.ones(8, device="cuda", dtype=torch.float16))
    optimizer = memopt.optim.SGD([p], lr=1.0, offload_gradients=True)
    for allow in (False, True):
        scaler = memopt.amp.GradScaler(init_scale=2.0, allow_fp16=allow)
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if allow:
            scaler.unscale_(optimizer)
            assert torch.equal(p.grad.cpu(), torch.ones(8, dtype=torch.float16))
        else:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler.unscale_(optimizer)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_of_gradients_two_of_the_largest_are_on_the_device_at_most(accumulate: int) -> None:
    taken = {}
    for offload in (False, True):
        model, optimizer, layer = deep(offload)
        x = torch.ones(1, 256, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for _ in range(accumulate):
                model(x).sum().backward()
            memopt.amp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            taken[offload] = (torch.cuda.max_memory_allocated() - before) / layer
        assert before - torch.cuda.memory_allocated() <= layer / 4 or not offload  # beside norms
        del model, optimizer
        gc.collect()
    assert taken[False] > 24
    assert taken[True] < (2.6 if accumulate == 1 else 3.6), "one more where one adds to another"


def test_dropped_gradients_give_the_hosts_memory_back() -> None:
    model, optimizer, _ = deep(True)
    memory = pinned_memory.host_memory(torch.device("cuda", 0))
    x = torch.ones(1, 256, device="cuda")
    for n in range(6):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if n == 2:
            held = memory.nbytes
    assert memory.nbytes == held
    model.zero_grad()
    del model, optimizer
    gc.collect()
    assert memory.trim() >= 24 * 4 * 256 * 256


def test_without_room_on_the_host_gradients_stay_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = pair()
    taken = pinned_memory.PinnedPool.take
    left = 0

    def take(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        return taken(self, *args) if left >= 0 else None

    for room in range(3):
        left = room
        monkeypatch.setattr(pinned_memory.PinnedPool, "take", take)
        step(*both[0], room)
        with (
            pytest.warns(UserWarning, match="stays on the device") if room == 0 else warnings.catch_warnings()
        ):
            step(*both[1], room)
        same(both)
        assert sum(type(p.grad) is HostGradient for p in both[1][0].parameters()) == room
    # What has left adds up nowhere else: the step before is whole.
    monkeypatch.setattr(pinned_memory.PinnedPool, "take", taken)
    model, _ = both[1]
    model.zero_grad()
    loss_of(model, 0).backward()
    kept = [p.grad.cpu() for p in model.parameters()]
    monkeypatch.setattr(pinned_memory.PinnedPool, "take", lambda *_: None)
    with pytest.raises(
        MemoryError, match="the host cannot lock .* for a gradient that adds up: raise `ulimit -l`"
    ):
        loss_of(model, 0).backward()
    assert all(torch.equal(p.grad.cpu(), grad) for p, grad in zip(model.parameters(), kept, strict=True))


# ---- what is refused, and what ends a step ---------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = (nn.Parameter(torch.ones(4, device="cuda")) for _ in range(2))
    first = memopt.optim.SGD([p], lr=1.0, offload_gradients=True)
    with pytest.raises(ValueError, match=r"a parameter of shape \(4,\) is another optimizer's already"):
        memopt.optim.SGD([q, p], lr=1.0, offload_gradients=True)
    q.sum().backward()
    assert type(q.grad) is torch.Tensor
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="before DDP or FSDP has added up those of all ranks"):
        first.add_param_group({"params": [q]})
    assert len(first.param_groups) == 1
    with pytest.raises(RuntimeError, match="before DDP or FSDP"):  # the ranks came after the optimizer
        p.sum().backward()


def test_gradients_stay_once_the_optimizer_is_gone_and_leave_for_each_group_that_says_so() -> None:
    p, q, r = (nn.Parameter(torch.ones(4, device="cuda")) for _ in range(3))
    optimizer = memopt.optim.SGD(
        [{"params": [p], "offload_gradients": True}, {"params": [q]}], lr=1.0, momentum=0.5
    )
    optimizer.add_param_group({"params": [r], "offload_gradients": True})
    (p + q + 2 * r).sum().backward()
    assert [type(one.grad) is HostGradient for one in (p, q, r)] == [True, False, True]
    memopt.amp.clip_grad_norm_([p, q, r], 1.0)
    optimizer.step()
    factor = 1 / 24**0.5
    for one, slope in ((p, 1), (q, 1), (r, 2)):
        assert torch.allclose(one.cpu(), torch.full((4,), 1 - slope * factor))
    other = pickle.loads(pickle.dumps(optimizer))
    again = other.param_groups[0]["params"][0]
    again.sum().backward()
    assert type(again.grad) is HostGradient
    optimizer.load_state_dict(other.state_dict())
    del optimizer
    gc.collect()
    for one in (p, q, r):
        one.grad = None
    (p + q + r).sum().backward()
    assert all(type(one.grad) is torch.Tensor for one in (p, q, r))


def test_gradients_of_a_parameter_that_is_unfrozen_leave_after_a_step() -> None:
    p, q = (nn.Parameter(torch.ones(4, device="cuda"), requires_grad=k == 0) for k in range(2))
    optimizer = memopt.optim.SGD([p, q], lr=1.0, offload_gradients=True)
    q.requires_grad_(True)
    for n in range(2):
        optimizer.zero_grad()
        (p + q).sum().backward()
        assert [type(one.grad) is HostGradient for one in (p, q)] == [True, n == 1]
        optimizer.step()


def test_sparse_gradients_and_a_model_on_the_cpu_train_as_ever() -> None:
    torch.manual_seed(0)
    for device, sparse in (("cuda", True), ("cpu", False)):
        table = nn.Embedding(10, 8, sparse=sparse).to(device)
        other = copy.deepcopy(table)
        for one, offload in ((table, False), (other, True)):
            optimizer = memopt.optim.SGD(one.parameters(), lr=0.1, offload_gradients=offload)
            one(torch.tensor([1, 2, 2], device=device)).square().sum().backward()
            assert type(one.weight.grad) is torch.Tensor
            optimizer.step()
        assert torch.equal(table.weight, other.weight)


def test_a_step_that_began_ends_before_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair()
    step(*both[0], 0)
    update, turns = OnePass._update, []

    def interrupting(self: OnePass, scaling: Any) -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            signal.raise_signal(signal.SIGINT)
        update(self, scaling)

    monkeypatch.setattr(OnePass, "_update", interrupting)
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        step(*both[1], 0)
    assert len(turns) > 2
    same(both)


def test_a_step_leaves_signals_to_handlers_in_c(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=1.0, offload_gradients=True)
    with (tmp_path / "dumped").open("w+") as file:
        faulthandler.register(signal.SIGTERM, file)
        try:
            p.sum().backward()
            optimizer.step()
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        finally:
            faulthandler.unregister(signal.SIGTERM)


def test_a_step_takes_all_its_memory_before_anything_changes() -> None:
    model, optimizer, layer = deep(True)
    memopt_step = memopt.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    optimizer = memopt.optim.AdamW(model.parameters(), lr=0.1, offload_gradients=True)
    del memopt_step
    model(torch.ones(1, 256, device="cuda")).sum().backward()
    before = [p.detach().cpu() for p in model.parameters()]
    fraction = (torch.cuda.memory_reserved() + 20 * layer) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))
        assert away(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    optimizer.step()
    assert not any(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))


@pytest.mark.parametrize("when", ["states", "turns", "second turn"])
def test_a_first_step_that_failed_is_still_the_first(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A damped momentum buffer begins with the whole gradient."""
    both = pair(memopt.optim.SGD, momentum=0.9, dampening=0.5, offload_states=True)
    for model, _ in both:
        loss_of(model, 0).backward()
    model, optimizer = both[1]
    with monkeypatch.context() as patch:
        calls, failing = [0], {"states": 3, "turns": 1, "second turn": 2}[when]
        owner: Any = {"states": _turns, "turns": _turns.Turns, "second turn": OnePass}[when]
        name = {"states": "pinned_tensor", "turns": "__init__", "second turn": "_update"}[when]
        function = getattr(owner, name)

        def fails(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == failing:
                raise MemoryError
            return function(*args)

        patch.setattr(owner, name, fails)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert away(model)
    stepped = [p for p, states in optimizer.state.items() if states.get("momentum_buffer") is not None]
    assert bool(stepped) == (when == "second turn")
    for p in stepped:
        p.grad = None
    optimizer.step()
    both[0][1].step()
    same(both)


# ---- beside other parts of memopt ------------------------------------------------------------------------------------


def mean_square(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return model(words).square().mean()  # type: ignore[no-any-return]


def test_a_step_in_micro_batches_leaves_the_same_gradients() -> None:
    both = pair()
    sums = []
    for model, optimizer in both:
        for _ in range(2):
            memopt.backward(mean_square, model, words_of(model, 8).cuda(), model=model, unbatched=[0])
        sums.append([p.grad.cpu() for p in model.parameters()])
        optimizer.step()
    assert away(both[1][0])
    assert all(map(torch.equal, *sums))
    same(both)


def test_a_batch_that_runs_out_of_memory_leaves_the_gradients_of_the_whole() -> None:
    """Numbers are integers, whose sums are exact however the batch is cut. Gradients of a pass before are there."""
    x = torch.randint(-1, 2, (1 << 15, 256), generator=torch.Generator().manual_seed(1)).float().cuda()
    ends = []
    for offload in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()).cuda()
        for p in model.parameters():
            p.data = torch.randint(-1, 2, p.shape).float().cuda()
        optimizer = memopt.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, offload_gradients=offload)
        runs = [0]

        def total(rows: torch.Tensor, model: nn.Module = model, runs: list[int] = runs) -> torch.Tensor:
            runs[0] += 1
            return model(rows).sum()  # type: ignore[no-any-return]

        for cut in (False, True, False):
            gc.collect()
            torch.cuda.empty_cache()
            left, whole = torch.cuda.memory_reserved() + (100 << 20), torch.cuda.mem_get_info()[1]
            if cut and offload:
                torch.cuda.set_per_process_memory_fraction(left / whole)
            runs[0] = 0
            try:
                memopt.backward(total, x, model=model, reduction="sum", exact=False)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            assert (runs[0] > 1) == (cut and offload)
        assert away(model) == offload
        optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_planned_model_knows_that_its_gradients_leave() -> None:
    peaks = []
    for offload in (False, True):
        model, optimizer, layer = deep(offload)
        x = torch.ones(1, 256, device="cuda")
        memopt.auto_checkpoint(model, x, memory_budget="900MiB")
        peaks.append(model.plan.peak_bytes / layer)
        model(x).sum().backward()
        optimizer.step()
        assert model.plan.check().within
    assert peaks[0] - peaks[1] > 20


def test_a_search_for_a_batch_size_puts_back_gradients_that_left() -> None:
    both = pair(offload_states=True)
    for model, optimizer in both:
        loss_of(model, 0).backward()

        def train(n: int, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            step(model, optimizer, n)

        memopt.find_batch_size(train, model=model, optimizer=optimizer, maximum=4)
        optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
    same(both)
