"""memopt.amp on CUDA tensors, on the simulated device: torch's results on the CPU in bits, and a step in which the host
waits for nothing."""

from __future__ import annotations

import math

import pytest
import torch
from amp_sequences import bits

import memopt
from memopt import _C, optim, sim
from memopt.amp import GradScaler, clip_grad_norm_

SIM = {"memory": "1GiB", "devices": 2}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 3, 64, 1000, 30_001]

# What the host would wait by, or see the device's memory by.
WAITS = [
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2",
]  # fmt: skip


def waits() -> int:
    return sum(sim.calls(name) for name in WAITS)


def parameters(dtypes: list[torch.dtype], device: str, bad: float | None = None) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for i, n in enumerate(SIZES):
        dtype = dtypes[i % len(dtypes)]
        p = torch.nn.Parameter(torch.zeros(n, dtype=dtype).to(device))
        grad = (torch.randn(n, generator=generator) * 300).to(dtype)
        if bad is not None and i == 4:
            grad[999] = bad
        p.grad = grad.to(device)
        made.append(p)
    return made


def scaler_of(cls, device: str, scale: float = 1000.1, **options):
    scaler = cls(torch.device(device).type, init_scale=scale, growth_interval=2, **options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def grads(made: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.cpu() for p in made if p.grad is not None]


@pytest.fixture
def computing():
    with sim.Compute():
        yield


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
@pytest.mark.parametrize(
    "dtypes", [[d] for d in DTYPES[:3]] + [DTYPES[:3]], ids=["fp32", "fp64", "bf16", "all"]
)
def test_what_it_unscales_and_finds_is_torchs_on_the_cpu(dtypes: list[torch.dtype], bad: float | None):
    seen = []
    for cls, device in ((torch.amp.GradScaler, "cpu"), (GradScaler, "cuda")):
        made, scaler = parameters(dtypes, device, bad), scaler_of(cls, device)
        optimizer = torch.optim.SGD(made, 0.1)
        checked = scaler._check_inf_per_device(optimizer)
        before = bits(grads(made))
        (found,) = checked.values()
        scaler.unscale_(optimizer)
        assert all(d.type == device for d in scaler._found_inf_per_device(optimizer))
        scaler.step(optimizer)
        scaler.update()
        seen.append(
            (before, float(found), bits(grads(made)), bits([p.cpu() for p in made]), scaler.state_dict())
        )
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_and_what_is_clipped_are_those_of_the_cpu(norm_type: float, dtype: torch.dtype):
    for max_norm in (0.7, 1e9):
        seen = []
        for device in ("cpu", "cuda"):
            made, scaler = parameters([dtype], device), scaler_of(GradScaler, device, allow_fp16=True)
            norm = scaler.unscale_and_clip_(torch.optim.SGD(made, 0.1), max_norm, norm_type)
            again = clip_grad_norm_(made, 0.3, norm_type)
            assert norm.device.type == again.device.type == device
            seen.append(([norm.item(), again.item()], grads(made)))
        assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-6)
        for one, other in zip(seen[0][1], seen[1][1], strict=True):
            assert torch.allclose(one.double(), other.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.usefixtures("computing")
def test_gradients_on_several_devices_share_one_verdict():
    for bad in (None, 0, 1, 2):
        made = []
        for i, device in enumerate(("cpu", "cuda:0", "cuda:1")):
            p = torch.nn.Parameter(torch.zeros(5, device=device))
            p.grad = torch.full((5,), math.inf if bad == i else 8.0).to(device)
            made.append(p)
        scaler, optimizer = scaler_of(GradScaler, "cuda:0", 4.0), torch.optim.SGD(made, 1.0)
        scaler.unscale_(optimizer)
        founds = scaler._found_inf_per_device(optimizer)
        assert [str(d) for d in founds] == ["cpu", "cuda:0", "cuda:1"]
        assert [float(f) for f in founds.values()] == [float(bad == i) for i in range(3)]
        assert all(p.grad.cpu()[0] == (math.inf if bad == i else 2.0) for i, p in enumerate(made))
        scaler.step(optimizer)
        assert bool(scaler.step_skipped(optimizer)) == (bad is not None)
        scaler.update()


def take_step(scaler, optimizer):
    scaler.step(optimizer)


def take_unscale(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def take_clip(scaler, optimizer):
    scaler.unscale_and_clip_(optimizer, 1.0)
    scaler.step(optimizer)


def take_clipped(scaler, optimizer):
    scaler.step(optimizer, max_norm=1.0)


OPTIONS = [
    {},
    {"min_scale": 1.0, "max_scale": 2.0**20, "hysteresis": 2, "repair": True, "no_gradients": "finite"},
]


MAKES = {
    "torch's": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all options"])
@pytest.mark.parametrize("take", [take_step, take_unscale, take_clip, take_clipped])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_an_iteration_waits_for_nothing(make, take, options: dict):
    """With optimizers that know scales; torch's other ones wait by themselves."""
    made, scaler = parameters([torch.float32], "cuda"), scaler_of(GradScaler, "cuda", **options)
    optimizer = make(made)
    for iteration in range(4):
        for p in made:
            p.grad = torch.ones_like(p)
        before = waits()
        scaler.scale(torch.ones((), device="cuda"))
        take(scaler, optimizer)
        skipped = scaler.step_skipped(optimizer)
        scaler.update()
        after = waits()
        assert iteration == 0 or after == before  # the first uploads constants and tables
    bool(skipped)
    assert waits() > after  # the control


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.float32, lambda p: optim.AdamW(p, 0.01)),
        (torch.bfloat16, lambda p: optim.AdamW(p, 0.01)),
        (torch.float32, lambda p: optim.SGD(p, 0.1, momentum=0.9)),
        (torch.bfloat16, lambda p: optim.SGD(p, 0.1, momentum=0.9)),
    ],
    ids=["AdamW", "AdamW of bf16", "SGD", "SGD of bf16"],
)
def test_a_clipped_step_is_that_of_the_cpu(dtype: torch.dtype, make):
    seen = []
    for device in ("cpu", "cuda"):
        made, scaler = parameters([dtype], device), scaler_of(GradScaler, device)
        optimizer, told = make(made), []
        for bad in (None, math.inf, None):
            for p, q in zip(made, parameters([dtype], device, bad), strict=True):
                p.grad = q.grad
            before = bits(grads(made))
            scaler.step(optimizer, max_norm=0.5)
            assert bits(grads(made)) == before
            told.append((bool(scaler.step_skipped(optimizer)), scaler.gradient_norm(optimizer).item()))
            scaler.update()
        seen.append((told, scaler.state_dict(), [p.detach().cpu() for p in made]))
    assert [skipped for skipped, _ in seen[1][0]] == [False, True, False]
    assert seen[0][0] == [(skipped, pytest.approx(norm, rel=1e-6)) for skipped, norm in seen[1][0]]
    assert seen[0][1] == seen[1][1]
    for one, other in zip(seen[0][2], seen[1][2], strict=True):
        assert torch.allclose(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-6) and (one != 0).all()


def test_torchs_optimizers_that_do_not_know_scales_wait_once_a_device():
    made, scaler = parameters([torch.float32], "cuda"), scaler_of(GradScaler, "cuda")
    optimizer = torch.optim.SGD(made, 0.1, foreach=False)
    for _ in range(2):
        before = sim.calls("cudaStreamSynchronize")
        scaler.step(optimizer)
        scaler.update()
    assert sim.calls("cudaStreamSynchronize") - before == 1


def test_a_pass_is_one_launch_and_a_clip_another():
    made, scaler = parameters(DTYPES[:1] + DTYPES[2:3], "cuda"), scaler_of(GradScaler, "cuda")
    gradients = _C.Gradients(made, of_parameters=True)
    number, clip = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    gradients.run(0, found_inf=number)
    before = sim.calls("cuLaunchKernel")
    gradients.run(0, store=True, inv_scale=clip, found_inf=number, norm=number, factor=number)
    assert sim.calls("cuLaunchKernel") - before == 1
    gradients.multiply(0, clip)
    assert sim.calls("cuLaunchKernel") - before == 2
    assert scaler.get_growth_interval() == 2


def test_scalars_of_another_device_are_refused():
    grad = torch.ones(3, device="cuda:0")
    for device, name in (("cpu", "found_inf"), ("cuda:1", "norm")):
        with pytest.raises(
            ValueError, match=f"{name}: expected a tensor of a single float32 on CUDA device 0"
        ):
            _C.Gradients([grad]).run(0, **{name: torch.zeros((), device=device)})


@pytest.mark.parametrize("take", [take_step, take_unscale, take_clip, take_clipped])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_an_iteration_is_captured_in_a_graph(make, take):
    """That the host asked the device for anything would end the capture."""
    made, scaler = parameters([torch.float32], "cuda"), scaler_of(GradScaler, "cuda")
    optimizer = make(made)

    def iteration():
        take(scaler, optimizer)
        scaler.update()

    iteration()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()


def test_a_captured_pass_is_replayed_with_another_scale_and_an_inf():
    grad = torch.tensor([3.0, 4.0]).cuda()
    inverse, found, norm, factor = (torch.tensor(x).cuda() for x in (0.5, 0.0, 0.0, 0.0))
    gradients = _C.Gradients([grad])

    def replayed() -> list[float]:
        graph.replay()
        return [float(found), float(norm), float(factor), *grad.tolist()]

    def set_to(tensor: torch.Tensor, *values: float) -> None:
        tensor.copy_(torch.tensor(values if tensor.dim() else values[0]))

    gradients.run(0, found_inf=found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients.run(0, inv_scale=inverse, found_inf=found, norm=norm, factor=factor, max_norm=1.0)
        gradients.multiply(0, factor)
    assert replayed() == pytest.approx([0, 2.5, 0.2, 0.6, 0.8], rel=1e-5)
    set_to(inverse, 0.25), set_to(grad, 6.0, 8.0)
    assert replayed() == pytest.approx([0, 2.5, 0.1, 0.6, 0.8], rel=1e-5)
    set_to(grad, 6.0, math.inf)
    found_inf, infinite, zero, *_ = replayed()
    assert (found_inf, infinite, zero) == (1, math.inf, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_model_runs_without_autocast(dtype):
    """CUDA's host code refuses a norm whose parameters are of another type than its input, where it cannot take it."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.InstanceNorm2d(8, True, True),
        torch.nn.GroupNorm(2, 8), torch.nn.Flatten(2), torch.nn.LayerNorm(36), torch.nn.RMSNorm(36),
        torch.nn.BatchNorm1d(8), torch.nn.Linear(36, 4),
    ).cuda()  # fmt: skip
    report = memopt.to_dtype_(model, dtype)
    assert "1.running_mean" in report.kept and "5.weight" in report.converted
    model(torch.zeros(2, 3, 8, 8, dtype=dtype, device="cuda")).float().sum().backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
