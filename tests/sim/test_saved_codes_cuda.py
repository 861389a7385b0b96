"""memopt.offload_activations(to="8bit") on the simulated device: gradients, memory, streams."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import memopt
from memopt import sim
from memopt._checkpoint import shape_plans
from memopt._offload.schedule_sets import CodingSpeed
from tests.helpers.small_gpt import SmallGPT, next_token_loss, sentences

SIM = {"memory": "1GiB"}
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def ops_with_a_cpu_twin() -> None:
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


def coded() -> memopt.offload_activations:
    return memopt.offload_activations(1024, to="8bit")


def step(model: torch.nn.Module, x: torch.Tensor, *contexts) -> list[torch.Tensor]:
    model.zero_grad()
    with contextlib.ExitStack() as around:
        for context in contexts:
            around.enter_context(context)
        loss = next_token_loss(model(x).float(), x)
    loss.backward()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("streams", ["one", "two"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_near_the_plain_runs(autocast: bool, streams: str) -> None:
    torch.manual_seed(0)
    model, x = SmallGPT(width=32, depth=2).to(CUDA), sentences(2).to(CUDA)
    cast = torch.autocast("cuda", torch.bfloat16, enabled=autocast)
    place = coded()
    other = torch.cuda.stream(torch.cuda.Stream() if streams == "two" else None)
    with sim.Compute():
        wanted = step(model, x, cast)
        got = step(model, x, cast, other, place)
    torch.cuda.synchronize()
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
    assert 0 < max(errors) < 0.03
    assert place.last.bytes_in == place.last.bytes_out > 0


@pytest.mark.parametrize("default", [False, True])
def test_a_stream_waits_for_codes_that_another_one_made(
    monkeypatch: pytest.MonkeyPatch, default: bool
) -> None:
    waits, wait = [], torch.cuda.Stream.wait_stream

    def noted(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        waits.append((self.cuda_stream, other.cuda_stream))
        wait(self, other)

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", noted)
    one, other = torch.cuda.default_stream() if default else torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(1 << 16, device=CUDA, requires_grad=True)
    with coded() as place, torch.cuda.stream(one):
        y = (x * 1).exp()
        z = y.sum() + (x * 2).exp().sum()
        node = y.grad_fn
        del y
        (x * 3).exp()
    assert place.last.bytes_out > 0 and not waits
    with torch.cuda.stream(other):
        _ = node._saved_result
    assert waits[0] == (other.cuda_stream, one.cuda_stream)
    del z


def test_the_peak_on_the_card_is_about_half() -> None:
    torch.manual_seed(0)
    model, x = SmallGPT(width=128, depth=8).to(CUDA), sentences(16).to(CUDA)
    torch._C._cuda_clearCublasWorkspaces()

    def peak(*contexts) -> int:
        step(model, x, *contexts)
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, x, *contexts)
        return torch.cuda.max_memory_allocated() - before

    plain, less = peak(), peak(memopt.offload_activations("64KiB", to="8bit"))
    assert less < 0.55 * plain


def test_a_plan_codes_within_its_budget_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: CodingSpeed(1e13, 1e13))
    torch.manual_seed(0)
    model, x = SmallGPT(width=128, depth=8).to(CUDA), sentences(16).to(CUDA)
    step(model, x)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    step(model, x)
    model.zero_grad()
    budget = int(0.7 * torch.cuda.max_memory_allocated())
    memopt.auto_checkpoint(
        model,
        x,
        memory_budget=budget,
        loss=lambda out: next_token_loss(out, x),
        to="8bit",
        keeps_output=False,
    )
    assert model.plan.offloaded and "in 8 bits" in str(model.plan)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        step(model, x)
        assert torch.cuda.max_memory_allocated() <= budget


def test_a_plan_codes_while_parameters_visit_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: CodingSpeed(1e13, 1e13))
    torch.manual_seed(0)
    model, x = SmallGPT(depth=6), sentences(8).to(CUDA)
    plain = copy.deepcopy(model).to(CUDA)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return next_token_loss(logits, x)

    with sim.Compute():
        wanted = step(plain, x)
        layers = memopt.offload_layers(model)
        memopt.auto_checkpoint(model, x, memory_budget="1GiB", loss=loss, keeps_output=False)
        budget = (3 * model.plan.peak_bytes + 2 * model.plan.fixed_bytes) // 5
        memopt.auto_checkpoint(model, x, memory_budget=budget, loss=loss, to="8bit", keeps_output=False)
        assert model.plan.offloaded and model.plan.check().within
        got = step(model, x)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
    assert 0 < max(errors) < 0.03
    memopt.undo_checkpoint(model)
    layers.remove()


def test_coding_takes_little_besides() -> None:
    flat = torch.empty(64 << 20, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.ones(1, device=CUDA, requires_grad=True)
    with coded() as place:
        y = x * flat
        del flat
        y = (y.sum() * x) * torch.empty(1024, device=CUDA)
        y = y * torch.empty(1024, device=CUDA)
    assert place.last.bytes_out >= 128 << 20
    most = torch.cuda.max_memory_allocated() - before
    product = 256 << 20  # in fp32
    assert most <= product + (65 << 20) + 3 * 4 * (64 << 20) // 16
