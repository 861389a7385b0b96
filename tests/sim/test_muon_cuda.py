"""memopt.optim.Muon on CUDA, on the simulated device: the CPU's and torch's results in bits, one parameter's work
memory at a time, and no step for which the host waits but to know whether a scaler skips it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memopt.amp
import memopt.optim
from memopt import sim
from memopt.optim import _turns

SIM = {"memory": "1GiB", "devices": 1}
SEED = int(os.environ["MEMOPT_SEED"])
SHAPES = [(64, 65), (96, 64), (64, 64), (3, 5)]
KINDS = [(bits, dtype) for bits in (32, 8) for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


def parameters(device: str, dtype: torch.dtype, shapes=SHAPES) -> list[torch.nn.Parameter]:
    make = torch.Generator().manual_seed(SEED)
    made = [torch.randn(shape, generator=make).to(device, dtype) for shape in shapes]
    made[0] = made[0].t().contiguous().t()  # another order
    return [torch.nn.Parameter(t) for t in made]


def give_gradients(params: list[torch.nn.Parameter], number: int, scale: float = 1.0) -> None:
    make = torch.Generator().manual_seed(SEED + 100 + number)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=make) * scale)


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    return [p.detach().cpu().clone() for p in params] + [
        v.cpu().clone() for p in params for _, v in sorted(optimizer.state.get(p, {}).items())
    ]


@pytest.mark.parametrize(("bits", "dtype"), KINDS)
def test_steps_are_those_of_the_cpu_and_with_32_bits_torchs(bits: int, dtype: torch.dtype) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    made = [
        memopt.optim.Muon(parameters(device, dtype), state_bits=bits, min_8bit_size=64, **options)
        for device in ("cuda", "cpu")
    ]
    if bits == 32:
        made.append(torch.optim.Muon(parameters("cuda", dtype), **options))
    for number in range(3):
        for optimizer in made:
            give_gradients(optimizer.param_groups[0]["params"], number)
            optimizer.step()
    found = [everything(optimizer) for optimizer in made]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def peak_of(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that a step takes besides the states, which are there."""
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return torch.cuda.max_memory_allocated() - before


def test_a_step_takes_one_parameters_work_memory() -> None:
    taken = {}
    for name, kind, options in (
        ("torch", torch.optim.Muon, {}),
        ("32", memopt.optim.Muon, {}),
        ("8", memopt.optim.Muon, {"state_bits": 8}),
    ):
        for count in (1, 6):
            params = parameters("cuda", torch.float32, [(128, 512)] * count)
            give_gradients(params, 0)
            taken[name, count] = peak_of(kind(params, **options)) / (128 * 512)
    assert taken["torch", 6] == taken["torch", 1]
    assert taken["32", 1] == taken["32", 6] == taken["torch", 1]
    assert taken["8", 1] == taken["8", 6] <= taken["torch", 1] - 1.9


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("offload", [False, True])
def test_the_host_waits_once_a_step_and_only_for_a_scalers_flag(
    bits: int, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_turns, "TURN", 1)  # a parameter a turn
    asked = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: asked.append(self.device.type) or item(self))
    for scaled in (False, True):
        params = parameters("cuda", torch.float32)
        optimizer = memopt.optim.Muon(params, state_bits=bits, offload_states=offload)
        scaler = memopt.amp.GradScaler("cuda", init_scale=4.0, enabled=scaled)
        scaler.scale(torch.ones((), device="cuda"))
        for number in range(3):
            give_gradients(params, number, 4.0 if scaled else 1.0)
            asked.clear()
            scaler.step(optimizer)
            scaler.update()
            assert number == 0 or asked == ["cuda"] * scaled


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("scaling", [torch.amp.GradScaler, memopt.amp.GradScaler], ids=["torch", "memopt"])
def test_under_a_scaler_they_are_those_of_the_cpu(bits: int, scaling: type) -> None:
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device, torch.float32)
        optimizer = memopt.optim.Muon(params, lr=0.1, state_bits=bits)
        scaler = scaling(device, init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.ones((), device=device))
        for number, bad in enumerate([float("inf"), None, None, float("nan"), None]):
            give_gradients(params, number, scale=scaler.get_scale())
            if bad is not None:
                params[1].grad[3, 4] = bad
            before = everything(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert bad is None or all(
                torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True)
            )
        found.append([*everything(optimizer), torch.tensor(scaler.get_scale())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_parameter_is_stepped_whole_however_large_and_whenever(
    at_once: bool, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_turns, "TURN", 1024)
    ends = []
    for leaves in (False, True):
        torch.manual_seed(SEED)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).cuda()
        offload = {"offload_states": True, "step_in_backward" if at_once else "offload_gradients": True}
        optimizer = memopt.optim.Muon(
            model.parameters(), state_bits=bits, min_8bit_size=256, **(offload if leaves else {})
        )
        for n in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(n)).cuda()
            model(x).square().mean().backward()
            optimizer.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
