"""offload_states=True on the simulated device, with real numbers: trainings whose states lie in the host's memory end
with the bits of those whose states stay."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memopt
import memopt.amp
import memopt.optim
from memopt import sim
from memopt.optim import _turns
from memopt.optim._backward_steps import SteppedGradient
from tests.helpers.offload_pairs import (
    KINDS,
    SEED,
    STEPS,
    WAYS,
    deep,
    loss_of,
    pair,
    same,
    step,
)

SIM = {"memory": "1GiB", "devices": 2}


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


WHOLE = ("factored", "Muon", "Muon of 8 bits")  # of which no parameter is cut


def note_pieces(cut: list[_turns.Piece], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parameters cut into small pieces, and note these."""
    whole = _turns._pieces
    monkeypatch.setattr(_turns, "TURN", 4096)
    monkeypatch.setattr(_turns, "GRAIN", 512)
    monkeypatch.setattr(
        _turns, "_pieces", lambda *args: [cut.append(piece) or piece for piece in whole(*args)]
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("way", ["accumulated", "scaled", "twice"])
@pytest.mark.parametrize("kind", [*KINDS, "amsgrad", "master"])
@pytest.mark.parametrize("pieces", [False, True])
def test_states_on_the_host_have_the_bits_of_those_that_stay(
    kind: str, way: str, gradients: bool, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[_turns.Piece] = []
    if pieces:
        note_pieces(cut, monkeypatch)
    more: dict[str, dict[str, Any]] = {
        "amsgrad": {"amsgrad": True},
        "master": {"dtype": torch.bfloat16, "master_weights": True},
    }
    both = pair(**(KINDS | more)[kind], offload_states=True, offload_gradients=gradients)
    ways = WAYS[way]()
    for n in range(STEPS):
        for model, optimizer in both:
            ways(model, optimizer, n)
        for optimizer in (o for _, o in both):
            optimizer.state_dict()  # waits for them
        same(both)
        for states in both[1][1].state.values():
            assert {name: value.device.type for name, value in states.items() if name != "step"} == {
                name: "cpu" for name in states if name != "step"
            }
    assert any(piece.first_index for piece in cut) == (pieces and kind not in WHOLE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", [False, True])
def test_a_step_in_the_backward_pass_has_the_bits_of_one_after_it(
    states: bool, kind: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[_turns.Piece] = []
    if pieces:
        note_pieces(cut, monkeypatch)
    both = pair(**KINDS[kind], offload_states=states, step_in_backward=True)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=4) for _, o in both]
    for n in range(STEPS):
        for (model, optimizer), schedule in zip(both, schedules, strict=True):
            optimizer.zero_grad()
            loss_of(model, n).backward()
            stepped = [type(p.grad) is SteppedGradient for p in model.parameters() if p.requires_grad]
            assert all(stepped) if optimizer is both[1][1] else not any(stepped)
            optimizer.step()
            schedule.step()
        both[1][1].state_dict()  # waits for its states
        same(both)
    assert any(piece.first_index for piece in cut) == (states and pieces and kind not in WHOLE)


def test_two_devices_step_in_the_backward_pass_at_once() -> None:
    ends = []
    for at_once in (False, True):
        torch.manual_seed(SEED)
        first, second = nn.Linear(64, 64).to("cuda:0"), nn.Linear(64, 64).to("cuda:1")
        optimizer = memopt.optim.AdamW(
            [*first.parameters(), *second.parameters()], step_in_backward=at_once, offload_states=at_once
        )
        for n in range(10):
            optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(n))
            apart = first(x.to("cuda:0")).square().mean().to("cuda:1")
            (second(x.to("cuda:1")).square().mean() + apart).backward()
            kinds = {type(p.grad) for p in (*first.parameters(), *second.parameters())}
            assert kinds == {SteppedGradient if at_once else torch.Tensor}
            optimizer.step()
        ends.append([p.detach().cpu() for p in (*first.parameters(), *second.parameters())])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("option", ["offload_gradients", "step_in_backward"])
def test_pieces_have_gradients_of_another_type_than_their_parameter(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[_turns.Piece] = []
    note_pieces(cut, monkeypatch)
    p = nn.Parameter(torch.ones(4096, device="cuda"))
    p.grad_dtype = torch.float16  # type: ignore[attr-defined]
    optimizer = memopt.optim.SGD(
        [p],
        lr=0.5,
        momentum=0.9,
        offload_states=True,
        **{option: True},  # type: ignore[arg-type]
    )
    (p * 2).sum().backward()
    assert p.grad is not None and p.grad.dtype is torch.float16
    optimizer.step()
    assert cut and torch.equal(p.cpu(), torch.zeros(4096))


def test_a_failed_backward_pass_gives_back_what_its_steps_read() -> None:
    """Without a call of the optimizer's: as soon as autograd's threads let go of the pass."""
    first, last = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
    optimizer: Any = memopt.optim.AdamW(
        [*first.parameters(), *last.parameters()], offload_states=True, step_in_backward=True
    )

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    hidden = first(torch.ones(8, 64, device="cuda"))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        last(hidden).square().mean().backward()
    (side,) = optimizer._backward_steps._sides.values()
    for _ in range(3000):
        if not side._reading:
            break
        time.sleep(0.01)
    assert not side._reading


def test_layers_on_the_host_step_there_as_their_gradients_come() -> None:
    ends = []
    for at_once in (False, True):
        torch.manual_seed(SEED)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()
        handle = memopt.offload_layers(model)
        optimizer = memopt.optim.AdamW(
            model.parameters(), state_bits=8, min_8bit_size=64, step_in_backward=at_once
        )
        for n in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(n)).cuda()
            model(x).square().mean().backward()
            assert (type(model[0].weight.grad) is SteppedGradient) == at_once
            optimizer.step()
        assert set(optimizer.memory()) == {"cpu"}
        handle.remove()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_of_gradients_a_step_in_the_backward_pass_leaves_the_device_two() -> None:
    model, _, layer = deep(False)
    optimizer = memopt.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, offload_states=True, step_in_backward=True
    )
    x = torch.ones(1, 256, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 4.6 * layer, (
        "two gradients and the rooms of two states"
    )


def test_states_are_saved_loaded_and_copied_from_wherever_they_are() -> None:
    (plain, stays), (other, leaves) = both = pair(offload_states=True)
    for n in range(2):
        for model, optimizer in both:
            step(model, optimizer, n)
    dicts = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in both]
    for state, there in zip(*(d["state"].values() for d in dicts), strict=True):
        assert all(torch.equal(state[name].cpu(), there[name].cpu()) for name in state)
    stays.load_state_dict(dicts[1])
    leaves.load_state_dict(dicts[0])
    copied = pickle.loads(pickle.dumps((other, leaves)))
    for n in range(2):
        step(plain, stays, n)
        step(other, leaves, n)
        step(*copied, n)
        same([(plain, stays), (other, leaves)])
        same([(plain, stays), copied])


def test_an_optimizer_tells_where_its_bytes_are() -> None:
    (plain, stays), (_, leaves) = both = pair(offload_states=True)
    for model, optimizer in both:
        step(model, optimizer, 0)
    size = sum(p.nbytes for p in plain.parameters())
    steps = 4 * len([*plain.parameters()])
    assert stays.memory() == {"cuda:0": {"parameters": size, "gradients": size, "states": 2 * size + steps}}
    assert leaves.memory() == {
        "cuda:0": {"parameters": size, "states": steps},
        "cpu": {"gradients": size, "states": 2 * size},
    }


def test_of_states_the_device_has_two_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, taken = 4 * 256 * 256, {}
    for offload in (False, True):
        model, _, _ = deep(False)
        optimizer = memopt.optim.AdamW(model.parameters(), offload_states=offload, offload_gradients=offload)
        x = torch.ones(1, 256, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).sum().backward()
            optimizer.step()
        taken[offload] = before / layer, (torch.cuda.max_memory_allocated() - before) / layer
        del model, optimizer
        gc.collect()
    standing, more = taken[True]
    assert taken[False][0] > standing + 47
    assert more < 6.6, "two turns of a gradient and two moments"


def test_loading_leaves_a_state_dict_that_others_have_as_it_is() -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=0.5, momentum=0.9, offload_states=True)
    p.sum().backward()
    optimizer.step()
    best = optimizer.state_dict()
    other = copy.deepcopy(best)
    other["state"][0]["momentum_buffer"].fill_(9.0)
    for held, value in ((other, 9.0), (best, 1.0)):
        optimizer.load_state_dict(held)
        buffer = optimizer.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(buffer, torch.full((4,), value))


def test_states_are_loaded_a_parameter_at_a_time() -> None:
    layer = 4 * 256 * 256
    model, _, _ = deep(False)
    optimizer = memopt.optim.AdamW(model.parameters(), offload_states=True)
    model(torch.ones(1, 256, device="cuda")).sum().backward()
    optimizer.step()
    held = optimizer.state_dict()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(held)
    assert torch.cuda.max_memory_allocated() - before < 3 * layer


@pytest.mark.parametrize("numbers", [(4, 1), (1, 4)])
def test_states_of_a_parameter_of_another_size_have_a_home_of_it(numbers: tuple[int, int]) -> None:
    p = nn.Parameter(torch.ones(0, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=0.5, momentum=0.9, offload_states=True)
    for number in numbers:
        p.grad, p.data = None, torch.ones(number, device="cuda")
        optimizer.state.clear()
        p.sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], torch.ones(number))


def test_beside_what_torch_steps_and_makes_states_of_all_have_the_bits() -> None:
    torch.manual_seed(SEED)
    made = [torch.randn(64, dtype=dtype) for dtype in (torch.complex64, *[torch.float32] * 3)]
    for kind, options in (
        (memopt.optim.AdamW, {}),
        (memopt.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    ):
        ends = []
        for offload in (False, True):
            ps = [nn.Parameter(one.cuda()) for one in made]
            optimizer: Any = kind(  # type: ignore[operator]
                ps, lr=0.1, offload_gradients=offload, offload_states=offload, **options
            )
            for n in range(3):
                optimizer.zero_grad()
                sum((p * p.conj()).real.sum() for p in ps).backward()
                optimizer.step()
                if n == 1:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            name = "exp_avg" if kind is memopt.optim.AdamW else "momentum_buffer"
            assert [optimizer.state[p][name].is_cuda for p in ps] == [True, *[not offload] * 3]
            ends.append([p.detach().cpu() for p in ps])
        assert all(map(torch.equal, *ends))


def test_states_come_from_the_host_where_their_group_no_longer_wants_them_there() -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=0.5, momentum=0.5, offload_states=True)
    for offload in (True, False, False):
        optimizer.param_groups[0]["offload_states"] = offload
        p.grad = torch.ones(4, device="cuda")
        optimizer.step()
    assert torch.equal(p.cpu(), torch.full((4,), 1 - 0.5 * (1 + 1.5 + 1.75)))


def test_without_memory_for_states_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (model, optimizer) = pair(offload_states=True)
    loss_of(model, 0).backward()
    before = [p.detach().cpu() for p in model.parameters()]

    def none(*_: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(_turns, "pinned_tensor", none)
    with pytest.raises(
        MemoryError, match="cannot lock .* for a parameter's optimizer states: raise `ulimit -l`"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))
    monkeypatch.undo()
    optimizer.step()
    assert not all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))


def test_the_plan_of_a_budget_counts_no_states_that_are_on_the_host() -> None:
    peaks = []
    for offload in (False, True):
        model, _, layer = deep(False)
        optimizer = memopt.optim.AdamW(model.parameters(), offload_states=offload, offload_gradients=offload)
        memopt.auto_checkpoint(
            model, torch.ones(1, 256, device="cuda"), memory_budget="900MiB", optimizer=optimizer
        )
        peaks.append(model.plan.peak_bytes / layer)
    assert peaks[0] - peaks[1] > 60
