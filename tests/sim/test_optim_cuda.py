"""memopt.optim on CUDA, on the simulated device: the CPU's results in bits, under scalers and in CUDA graphs,
and no step for which the host waits."""

from __future__ import annotations

import pytest
import torch

import memopt.amp
import memopt.optim
from memopt import sim
from memopt.optim._scaled_step import ScaledStep

SIM = {"memory": "1GiB", "devices": 2}
SHAPES = [(), (3,), (0,), (64, 65), (4999,), (8, 3, 4, 4)]
KINDS = {
    "adamw": (memopt.optim.AdamW, {}),
    "8 bits": (memopt.optim.AdamW, {"state_bits": 8}),
    "4 bits": (memopt.optim.AdamW, {"state_bits": 4}),
    "factored": (memopt.optim.Adam, {"factored": True, "weight_decay": 0.1, "maximize": True}),
    "factored, 4 bits": (memopt.optim.AdamW, {"factored": True, "state_bits": 4}),
    "amsgrad": (memopt.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "sgd": (memopt.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "nesterov": (memopt.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": (memopt.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "8-bit momentum": (memopt.optim.SGD, {"lr": 0.1, "momentum": 0.95, "nesterov": True, "state_bits": 8}),
}
FORMS = {
    "fp32": (torch.float32, {}),
    "fp64": (torch.float64, {}),
    "bf16": (torch.bfloat16, {}),
    "master": (torch.float16, {"master_weights": True}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
}

# What the host would wait by, or see the device's memory by.
WAITS = [
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2",
]  # fmt: skip


def waits() -> int:
    return sum(sim.calls(name) for name in WAITS)


def parameters(device: str, dtype=torch.float32) -> list[torch.nn.Parameter]:
    make = torch.Generator().manual_seed(7)
    made = [torch.randn(shape, generator=make).to(dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(t.to(device)) for t in made]


def give_gradients(params, number: int, scale: float = 1.0) -> None:
    make = torch.Generator().manual_seed(100 + number)
    for p in params:
        grad = torch.randn(p.shape, generator=make).to(p.dtype) * scale
        like_p = torch.empty_like(p.detach().cpu(), memory_format=torch.preserve_format).copy_(grad)
        p.grad = like_p.to(p.device)


def everything(optimizer) -> list[torch.Tensor]:
    params = optimizer.param_groups[0]["params"]
    kept = [p.detach().cpu().clone() for p in params]
    kept += [p.grad.detach().cpu().clone() for p in params if p.grad is not None]
    return kept + [v.cpu().clone() for p in params for _, v in sorted(optimizer.state.get(p, {}).items())]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and x.dtype is y.dtype for x, y in zip(a, b, strict=True)
    )


def cloned(state_dict: dict) -> dict:
    states = {k: {name: v.clone() for name, v in s.items()} for k, s in state_dict["state"].items()}
    return {**state_dict, "state": states}


@pytest.fixture
def computing():
    with sim.Compute():
        yield


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_cpu(kind: str, form: str):
    cls, options = KINDS[kind]
    dtype, more = FORMS[form]
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device, dtype)
        optimizer = cls(params, **options, **more)
        for number in range(3):
            give_gradients(params, number)
            optimizer.step()
            assert all(v.device == p.device for p in params for v in optimizer.state.get(p, {}).values())
        assert (
            optimizer._plan.collect(optimizer.state, optimizer.param_groups) == []
        )  # nothing is left to torch
        found.append(everything(optimizer))
    assert same_bits(*found)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("kind", ["8 bits", "4 bits", "8-bit momentum"])
def test_states_of_few_bits_after_gradients_that_are_huge_or_no_numbers_are_those_of_the_cpu(kind: str):
    cls, options = KINDS[kind]
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device)
        optimizer = cls(params, **options)
        for number, bad in enumerate([1e20, float("inf"), 3e38, float("nan"), 1.0]):
            give_gradients(params, number)
            params[3].grad[number, 9] = params[4].grad[300 + number] = bad
            optimizer.step()
        lost = 3 if cls is memopt.optim.SGD else 2  # 3e38 and its momentum are beyond fp32
        assert [int((~p.isfinite()).sum()) for p in params] == [0, 0, 0, lost, lost, 0]
        found.append([t.nan_to_num(7) if t.is_floating_point() else t for t in everything(optimizer)])
    assert same_bits(*found)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("scaling", [torch.amp.GradScaler, memopt.amp.GradScaler], ids=["torch", "memopt"])
@pytest.mark.parametrize("kind", KINDS)
def test_under_a_scaler_they_are_those_of_the_cpu(kind: str, scaling):
    cls, options = KINDS[kind]
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device)
        optimizer = cls(params, **options)
        scaler = scaling(device, init_scale=1024.0, growth_interval=2)
        scaler.scale(torch.ones((), device=device))
        for number, bad in enumerate([float("inf"), None, None, float("nan"), None]):
            give_gradients(params, number, scale=scaler.get_scale())
            if bad is not None:
                params[1].grad = torch.full((3,), bad).to(device)
            scaler.step(optimizer)
            scaler.update()
        found.append([*everything(optimizer), torch.tensor(scaler.get_scale())])
    assert same_bits([t.nan_to_num(7) for t in found[0]], [t.nan_to_num(7) for t in found[1]])


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_clips_is_that_of_the_cpu(kind: str):
    cls, options = KINDS[kind]
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device)
        optimizer = cls(params, **options)
        scaler = memopt.amp.GradScaler(device, init_scale=1024.0)
        scaler.scale(torch.ones((), device=device))
        for number in range(3):
            give_gradients(params, number, scale=1024.0)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
        found.append(everything(optimizer)[: len(SHAPES)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)  # the norm is summed in another order


@pytest.mark.usefixtures("computing")
def test_parameters_on_several_devices_and_a_scale_on_one():
    devices = ("cpu", "cuda:0", "cuda:1")
    params = [torch.nn.Parameter(torch.ones(5).to(device)) for device in devices]
    optimizer = memopt.optim.AdamW(params, lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda:0"))
    for bad in (None, 0, 1, 2, None):
        before = [p.detach().cpu().clone() for p in params]
        for i, p in enumerate(params):
            p.grad = torch.full((5,), float("inf") if bad == i else 8.0).to(p.device)
        scaler.step(optimizer)
        scaler.update(4.0)
        now = [p.detach().cpu() for p in params]
        assert same_bits(before, now) == (bad is not None)
        assert torch.equal(now[0], now[1]) and torch.equal(now[0], now[2])
    assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0, 2.0]


@pytest.mark.usefixtures("computing")
def test_lr_on_the_device_and_on_another():
    rate = torch.tensor(0.25, dtype=torch.float64)
    expected = parameters("cpu")
    plain = memopt.optim.SGD(expected, lr=0.25)
    give_gradients(expected, 0)
    plain.step()
    for given, left in ((rate.to("cuda"), []), (rate.float().to("cuda"), []), (rate.clone(), [])):
        params = parameters("cuda")
        optimizer = memopt.optim.SGD(params, lr=given)
        give_gradients(params, 0)
        optimizer.step()
        assert optimizer._plan.collect(optimizer.state, optimizer.param_groups) == left
        assert same_bits(everything(optimizer), everything(plain))
    params = parameters("cuda:1")[:2]
    optimizer = memopt.optim.SGD(params, lr=rate.to("cuda:0"))
    give_gradients(params, 0)
    optimizer._plan = plan = memopt._C.UpdatePlan(optimizer.state, optimizer.param_groups, True)
    assert plan.collect(optimizer.state, optimizer.param_groups) == [0, 1]  # torch's to deal with
    plan.drop()


@pytest.mark.usefixtures("computing")
def test_states_move_between_devices_with_state_dicts():
    for kind in ("adamw", "8 bits", "4 bits", "nesterov", "8-bit momentum"):
        cls, options = KINDS[kind]
        on_cuda, on_cpu = (cls(parameters(device), **options) for device in ("cuda", "cpu"))
        for optimizer in (on_cuda, on_cpu):
            give_gradients(optimizer.param_groups[0]["params"], 0)
            optimizer.step()
        swapped = cloned(on_cuda.state_dict()), cloned(on_cpu.state_dict())
        on_cuda.load_state_dict(swapped[1])
        on_cpu.load_state_dict(swapped[0])
        for optimizer in (on_cuda, on_cpu):
            for p in optimizer.param_groups[0]["params"]:
                assert all(v.device == p.device for v in optimizer.state.get(p, {}).values())
            give_gradients(optimizer.param_groups[0]["params"], 1)
            optimizer.step()
        assert same_bits(everything(on_cuda), everything(on_cpu))


@pytest.mark.parametrize(
    "scaling", [None, torch.amp.GradScaler, memopt.amp.GradScaler], ids=["none", "torch", "memopt"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_for_no_step(kind: str, scaling):
    cls, options = KINDS[kind]
    params = parameters("cuda")
    optimizer = cls(params, **options)
    scaler = scaling("cuda") if scaling else None
    wanted = 2 if options.get("factored") else 1
    if scaler:
        scaler.scale(torch.ones((), device="cuda"))
    for number in range(4):
        give_gradients(params, number)
        before, launches = waits(), sim.calls("cuLaunchKernel")
        if scaler is None:
            optimizer.step()
            assert sim.calls("cuLaunchKernel") - launches == wanted
        elif scaling is memopt.amp.GradScaler:
            scaler.step(optimizer, max_norm=1.0)
            assert sim.calls("cuLaunchKernel") - launches == wanted + 1
            scaler.update()
        else:
            scaler.step(optimizer)
            scaler.update()
        # The first step makes the states and uploads constants. torch's scaler copies two numbers, on the device.
        assert number == 0 or waits() - before == (2 if scaling is torch.amp.GradScaler else 0)
    params[0].detach().cpu()
    assert waits() > before  # the control


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_replayed_with_other_factors_and_flags(kind: str):
    """Beside the CPU after each replay: the factor, the flag, the gradients and the learning rate are read by
    the kernel."""
    cls, options = KINDS[kind]
    params, twins = parameters("cuda"), parameters("cpu")
    rate = torch.tensor(0.1).cuda()
    plain = cls(twins, **{**options, "lr": rate.item()})
    with sim.Compute():
        captured = cls(params, **{**options, "lr": rate})
        for optimizer in (captured, plain):
            give_gradients(optimizer.param_groups[0]["params"], 0)
            optimizer.step()
        assert same_bits(everything(captured), everything(plain))
    factor, found_inf = torch.tensor(0.5).cuda(), torch.tensor(0.0).cuda()
    scaled = ScaledStep(found_inf, None, {torch.device("cuda", 0): factor}, False)
    graph = torch.cuda.CUDAGraph()
    before = everything(captured)
    with torch.cuda.graph(graph):
        captured._memopt_step(lambda _: scaled)
    assert same_bits(before, everything(captured))  # nothing has run yet
    given = [p.grad for p in params]
    for number, (scale, bad, lr) in enumerate(
        [
            (0.5, 0.0, 0.1),
            (0.25, 0.0, 0.1),
            (0.25, 1.0, 0.1),
            (2.0, 0.0, 0.05),
            (2.0, float("inf"), 0.05),
            (1.0, 0.0, 0.05),
        ]
    ):
        give_gradients(twins, number + 1)
        for grad, p in zip(given, twins, strict=True):
            grad.copy_(p.grad)
        factor.copy_(torch.tensor(scale))
        found_inf.copy_(torch.tensor(bad))
        rate.copy_(torch.tensor(lr))
        graph.replay()
        plain.param_groups[0]["lr"] = float(torch.tensor(lr))
        by = {torch.device("cpu"): torch.tensor(scale)}
        plain._memopt_step(lambda _: ScaledStep(torch.tensor(bad), None, by, False))  # noqa: B023
        assert same_bits(everything(captured), everything(plain))


def test_what_the_device_refuses_is_an_error_and_changes_nothing():
    params = parameters("cuda")
    optimizer = memopt.optim.AdamW(params)
    with sim.Compute():
        give_gradients(params, 0)
        optimizer.step()
        before = everything(optimizer)
    sim.fail("cuLaunchKernel", code=700)
    try:
        with pytest.raises(memopt.Error, match="memopt_update"):
            optimizer.step()
    finally:
        sim.fail_clear()
    assert same_bits(before, everything(optimizer))
