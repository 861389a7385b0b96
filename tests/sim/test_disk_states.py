"""offload_states= with a directory, on the simulated device with real numbers: trainings whose states lie on a disk end
with the bits of those whose states stay."""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
import memopt.amp
import memopt.optim
from memopt import _C, sim
from memopt.optim import _disk_states, _turns
from memopt.optim._disk_states import AREA, CHUNK, DiskState
from tests.helpers.failing_disk import Plan
from tests.helpers.offload_pairs import KINDS, SEED, WAYS, loss_of, pair, same, step

SIM = {"memory": "1GiB", "devices": 2}

SOAK = os.environ.get("MEMOPT_SOAK") == "1"
STEPS = 20 if SOAK else 6
WHOLE = ("factored", "Muon", "Muon of 8 bits")  # of which no parameter is cut
MORE: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "master": {"dtype": torch.bfloat16, "master_weights": True},
}


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have parameters cut into small pieces, and areas that hold few chunks."""
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 4096)
        monkeypatch.setattr(module, "GRAIN", 512)
    monkeypatch.setattr(_disk_states, "CHUNK", 4096)
    monkeypatch.setattr(_disk_states, "AREA", 3 * 4096)


def on_disk(optimizer: torch.optim.Optimizer) -> bool:
    found = [v for states in optimizer.state.values() for name, v in states.items() if name != "step"]
    return bool(found) and all(type(value) is DiskState for value in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("way", ["accumulated", "scaled", "twice"])
@pytest.mark.parametrize("kind", [*KINDS, *MORE])
@pytest.mark.parametrize("pieces", [False, True])
def test_states_on_a_disk_have_the_bits_of_those_that_stay(
    kind: str, way: str, gradients: bool, pieces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cut: list[_turns.Piece] = []
    if pieces:
        whole = _turns._pieces
        small_turns(monkeypatch)
        monkeypatch.setattr(
            _turns, "_pieces", lambda *args: [cut.append(piece) or piece for piece in whole(*args)]
        )
    both = pair(**(KINDS | MORE)[kind], offload_states=str(tmp_path), offload_gradients=gradients)
    ways = WAYS[way]()
    for n in range(STEPS):
        for model, optimizer in both:
            ways(model, optimizer, n)
        assert on_disk(both[1][1])
        if n % 6 == 1:
            same(both)
    same(both)
    assert any(piece.first_index for piece in cut) == (pieces and kind not in WHOLE)
    assert list(tmp_path.iterdir()) == []


def test_states_on_a_disk_and_in_pinned_memory_have_the_same_bits(tmp_path: Path) -> None:
    (model, _), (_, _) = pair()
    other = copy.deepcopy(model)
    first = memopt.optim.AdamW(model.parameters(), lr=0.01, offload_states=True)
    second = memopt.optim.AdamW(other.parameters(), lr=0.01, offload_states=tmp_path)
    for n in range(STEPS):
        step(model, first, n)
        step(other, second, n)
    first.state_dict()
    same([(model, first), (other, second)])


@pytest.mark.parametrize("target", [{}, {"state_bits": 8}, {"offload_states": True}])
def test_states_are_saved_and_loaded_from_wherever_they_are(target: dict[str, Any], tmp_path: Path) -> None:
    (plain, stays), (_, leaves) = both = pair(offload_states=tmp_path)
    for n in range(2):
        for run in both:
            step(*run, n)
    held, there = (copy.deepcopy(optimizer.state_dict()) for _, optimizer in both)
    for state, read in zip(held["state"].values(), there["state"].values(), strict=True):
        assert all(torch.equal(state[name].cpu(), read[name].cpu()) for name in state)
    torch.save(leaves.state_dict(), tmp_path / "saved")
    stays.load_state_dict(torch.load(tmp_path / "saved"))
    leaves.load_state_dict(held)
    assert on_disk(leaves)
    for n in range(2):
        for run in both:
            step(*run, n)
    same(both)
    # Into another kind of optimizer, and back.
    models = [copy.deepcopy(plain) for _ in range(2)]
    others = [memopt.optim.AdamW(m.parameters(), lr=0.01, min_8bit_size=256, **target) for m in models]
    for optimizer, source in zip(others, (stays, leaves), strict=True):
        optimizer.load_state_dict(source.state_dict())
    for run in zip(models, others, strict=True):
        step(*run, 7)
    for optimizer in others:
        optimizer.state_dict()
    same(list(zip(models, others, strict=True)))
    stays.load_state_dict(copy.deepcopy(others[0].state_dict()))
    leaves.load_state_dict(copy.deepcopy(others[0].state_dict()))
    assert on_disk(leaves)
    for run in both:
        step(*run, 8)
    same(both)


def test_loading_again_and_again_takes_no_more_of_the_disk(tmp_path: Path) -> None:
    _, (model, optimizer) = pair(offload_states=tmp_path)
    step(model, optimizer, 0)
    (file,) = optimizer._files.values()  # type: ignore[attr-defined]
    end = file._end
    for _ in range(3):
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 0)
    assert file._end == end and list(optimizer._files.values()) == [file]  # type: ignore[attr-defined]


def test_a_state_dict_is_the_moments_of_its_time(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=0.5, momentum=1.0, offload_states=tmp_path)
    for _ in range(2):
        p.grad = torch.ones(4, device="cuda")
        optimizer.step()
        held = optimizer.state_dict()
    optimizer.step()
    assert torch.equal(held["state"][0]["momentum_buffer"], torch.full((4,), 2.0))
    assert held["state"][0]["momentum_buffer"].device.type == "cpu"


def test_an_optimizer_is_copied_and_pickled_with_its_states(tmp_path: Path) -> None:
    _, (model, optimizer) = pair(offload_states=tmp_path)
    for n in range(2):
        step(model, optimizer, n)
    runs = [
        (model, optimizer),
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ]
    files = [next(iter(run[1]._files.values())) for run in runs]
    assert len({id(file) for file in files}) == 3
    for n in range(2):
        for run in runs:
            step(*run, n)
    assert all(on_disk(run[1]) for run in runs)
    same([runs[0], runs[1]])
    same([runs[0], runs[2]])


def test_param_groups_come_later_with_states_elsewhere(tmp_path: Path) -> None:
    ends = []
    for where in ((False, False, False), (str(tmp_path), True, False), (False, tmp_path, str(tmp_path))):
        torch.manual_seed(SEED)
        layers = [nn.Linear(64, 64).cuda() for _ in range(3)]
        optimizer = memopt.optim.AdamW(layers[0].parameters(), offload_states=where[0])
        for n in range(6):
            if n in (1, 3):
                later = {"params": layers[(n + 1) // 2].parameters(), "offload_states": where[(n + 1) // 2]}
                optimizer.add_param_group(later)
            optimizer.zero_grad()
            nn.Sequential(*layers)(torch.full((2, 64), 1.0 + n, device="cuda")).square().mean().backward()
            optimizer.step()
        ends.append([p.detach().cpu() for layer in layers for p in layer.parameters()])
    assert all(map(torch.equal, ends[0], ends[1]))
    assert all(map(torch.equal, ends[0], ends[2]))


def test_two_devices_have_states_in_one_file(tmp_path: Path) -> None:
    ends = []
    for where in (False, tmp_path):
        torch.manual_seed(SEED)
        ps = [nn.Parameter(torch.randn(1000).to(f"cuda:{n % 2}")) for n in range(4)]
        optimizer = memopt.optim.AdamW(ps, offload_states=where)
        for n in range(3):
            for p in ps:
                p.grad = p.detach() * (n + 1)
            optimizer.step()
        ends.append([p.detach().cpu() for p in ps])
    assert all(map(torch.equal, *ends))


def test_an_optimizer_tells_where_its_bytes_are(tmp_path: Path) -> None:
    (plain, _), (model, optimizer) = pair(offload_states=tmp_path)
    step(model, optimizer, 0)
    size, count = sum(p.nbytes for p in plain.parameters()), len([*plain.parameters()])
    assert optimizer.memory() == {  # type: ignore[attr-defined]
        "cuda:0": {"parameters": size, "states": 4 * count},
        "cpu": {"gradients": size},
        "disk": {"states": 2 * size},
    }


def test_states_that_are_away_refuse_what_would_read_them(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([p], lr=0.5, momentum=1.0, offload_states=tmp_path)
    p.grad = torch.ones(4, device="cuda")
    optimizer.step()
    state = optimizer.state[p]["momentum_buffer"]
    for use in (lambda: state + 1, lambda: state.zero_(), lambda: torch.ones(4).copy_(state)):
        with pytest.raises(RuntimeError, match=r"keeps? .*: read optimizer.state_dict\(\)"):
            use()
    for read in (state.cpu(), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.cuda().cpu()):
        assert type(read) is torch.Tensor and torch.equal(read, torch.ones(4))


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_pinned_memory_has_a_bound(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two areas, each of a few chunks, though states are larger, and less where states are."""
    assert 2 * AREA == 256 << 20 and AREA == 4 * CHUNK
    live: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    pinned = _disk_states.pinned_tensor

    def counted(device: torch.device, nbytes: int) -> torch.Tensor:
        made = pinned(device, nbytes)
        live.append(weakref.ref(made.untyped_storage()))
        most[0] = max(most[0], sum(s.nbytes() for one in live if (s := one()) is not None))
        return made

    small_turns(monkeypatch)
    monkeypatch.setattr(_disk_states, "pinned_tensor", counted)
    (_, _), (model, optimizer) = pair(**KINDS[kind], offload_states=tmp_path, offload_gradients=False)
    for n in range(3):
        step(model, optimizer, n)
    assert max(s.nbytes for held in optimizer.state.values() for s in held.values()) > 2 * 4096
    assert 0 < most[0] <= 2 * _disk_states.AREA
    monkeypatch.undo()
    tiny = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = memopt.optim.SGD([tiny], lr=0.5, momentum=1.0, offload_states=tmp_path)
    tiny.grad = torch.ones(4, device="cuda")
    optimizer.step()
    (file,) = optimizer._files.values()  # type: ignore[attr-defined]
    assert [area.nbytes for areas in file._areas.values() for area in areas] == [4096, 4096]


def test_the_device_has_two_turns_of_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 1 << 20)
    ps = [nn.Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(4)]
    optimizer = memopt.optim.AdamW(ps, offload_states=tmp_path)
    for _ in range(2):
        for p in ps:
            p.grad = torch.zeros_like(p)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 2.3 * (1 << 20)


def test_a_plan_of_a_budget_counts_no_states_on_a_disk(tmp_path: Path) -> None:
    peaks = []
    for where in (False, tmp_path):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(24))).cuda()
        optimizer = memopt.optim.AdamW(model.parameters(), offload_states=where)
        x = torch.ones(1, 256, device="cuda")
        memopt.auto_checkpoint(model, x, memory_budget="900MiB", optimizer=optimizer)
        peaks.append(model.plan.peak_bytes / (4 * 256 * 256))
    assert peaks[0] - peaks[1] > 40


def test_what_cannot_be_is_refused_before_anything_changes(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(4, device="cuda"))
    with pytest.raises(ValueError, match="offload_gradients=True instead, or offload_states=True"):
        memopt.optim.AdamW([p], offload_states=tmp_path, step_in_backward=True)
    assert not getattr(p, "_post_accumulate_grad_hooks", None)
    for wrong in ("", b"/tmp", 3, 1.0, [str(tmp_path)]):
        with pytest.raises(ValueError, match="give True, False, or a directory on a disk"):
            memopt.optim.AdamW([p], offload_states=wrong)  # type: ignore[arg-type]


# ---- faults ----------------------------------------------------------------------------------------------------------


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Of each parameter its value and its states."""
    held = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        [p.detach().cpu().clone(), *(v.cpu().clone() for v in held.get(n, {}).values())]
        for n, p in enumerate(parameters)
    ]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def some(apart: int) -> range:
    """The numbers of calls that fail in turn; about a third as many in the short form."""
    return range(0, 1000, apart if SOAK else 3 * apart - SEED % 3)


@pytest.mark.sampled("what fails while states are on a disk")
@pytest.mark.parametrize("pieces", [False, True])
def test_whatever_write_fails_the_step_is_taken_and_nothing_is_lost(
    pieces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if pieces:
        small_turns(monkeypatch)
    for number in some(7 if pieces else 3):
        plan = Plan()
        with monkeypatch.context() as patch:
            patch.setattr(_C, "Disk", plan.disk)
            both = (plain, stays), (model, optimizer) = pair(offload_states=tmp_path)
            for run in both:
                step(*run, 0)
            plan.after["write"] = plan.begun["write"] + number
            step(plain, stays, 1)
            try:
                step(model, optimizer, 1)
            except OSError as error:
                assert str(tmp_path) in str(error) and "planted" in str(error)
                assert "optimizer.load_state_dict(optimizer.state_dict())" in str(error)
            else:
                break
        same(list(both))
        with pytest.raises(OSError, match=r"the step was taken.*in the host's memory"):
            step(model, optimizer, 2)
        same(list(both))
        optimizer.load_state_dict(optimizer.state_dict())
        for n in range(2, 4):
            for run in both:
                step(*run, n)
        same(list(both))
    assert number > 10


@pytest.mark.sampled("what fails while states are on a disk")
def test_whatever_read_fails_each_parameter_is_before_the_step_or_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 1 << 14)
    monkeypatch.setattr(_turns, "_pieces", lambda *_: [])
    kinds = set()
    for number in some(3):
        plan = Plan()
        with monkeypatch.context() as patch:
            patch.setattr(_C, "Disk", plan.disk)
            (_, _), (model, optimizer) = pair(offload_states=tmp_path)
            step(model, optimizer, 0)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            before = values(model, optimizer)
            optimizer.zero_grad()
            loss_of(model, 1).backward()
            plan.after["read"] = plan.begun["read"] + number
            try:
                optimizer.step()
            except OSError as error:
                assert "planted" in str(error) and "load a state dict that was saved" in str(error)
            else:
                break
            plan.after["read"] = -1
        now = values(model, optimizer)
        with pytest.raises(OSError, match="planted"):
            optimizer.step()
        assert all(map(equal, now, values(model, optimizer)))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step(model, optimizer, 1)
        after = values(model, optimizer)
        stepped = [equal(n, a) for n, a in zip(now, after, strict=True)]
        assert all(done or equal(n, b) for done, n, b in zip(stepped, now, before, strict=True))
        assert sum(stepped) > 0 or number < 30
        kinds.add(any(stepped))
        assert number or not any(stepped)
    assert kinds == {False, True}


@pytest.mark.sampled("what fails while states are on a disk")
def test_whatever_write_of_the_first_states_fails_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(0, 1000, 5):
        plan = Plan(write=number)
        with monkeypatch.context() as patch:
            patch.setattr(_C, "Disk", plan.disk)
            both = (plain, stays), (model, optimizer) = pair(offload_states=tmp_path)
            loss_of(model, 0).backward()
            before = [p.detach().cpu() for p in model.parameters()]
            states = sum(2 for p in model.parameters() if p.grad is not None)
            if number >= states:
                break
            with pytest.raises(OSError, match="planted"):
                optimizer.step()
        assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        step(plain, stays, 0)
        same(list(both))
    assert number > 10


@pytest.mark.sampled("what fails while states are on a disk")
def test_an_exception_in_a_turn_leaves_each_parameter_with_its_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (_disk_states, _turns):
        monkeypatch.setattr(module, "DISK_TURN", 1 << 14)
    (_, _), (model, optimizer) = pair(offload_states=tmp_path)
    step(model, optimizer, 0)
    before = values(model, optimizer)
    update, left = type(optimizer)._update, [3]

    def failing(self: Any, scaling: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ArithmeticError
        update(self, scaling)

    optimizer.zero_grad()
    loss_of(model, 1).backward()
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(type(optimizer), "_update", failing)
        optimizer.step()
    now = values(model, optimizer)
    assert on_disk(optimizer)
    changed = [not equal(a, b) for a, b in zip(before, now, strict=True)]
    assert 0 < sum(changed) < len(changed)
    for was, after, done in zip(before, now, changed, strict=True):
        assert all(not torch.equal(a, b) for a, b in zip(was, after, strict=True)) == done
    optimizer.step()


def test_without_memory_that_can_be_locked_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, (model, optimizer) = pair(offload_states=tmp_path)
    loss_of(model, 0).backward()
    before = [p.detach().cpu() for p in model.parameters()]

    def none(*_: object) -> torch.Tensor:
        raise MemoryError

    with (
        monkeypatch.context() as patch,
        pytest.raises(MemoryError, match="to and from a disk: raise `ulimit -l`"),
    ):
        patch.setattr(_disk_states, "pinned_tensor", none)
        optimizer.step()
    assert all(map(torch.equal, before, (p.detach().cpu() for p in model.parameters())))
    optimizer.step()
    assert on_disk(optimizer)
