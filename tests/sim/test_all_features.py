"""Everything at once, with real numbers: under memopt's allocator a schedule of recomputation and offload, prefetched
batches, memopt.backward, the scaler, the optimizer, a CUDA graph where it is allowed. What is learned is what plain
torch learns on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import memopt
from memopt import sim
from memopt._demo.tasks import Batch, Task, TaskData

SIM = {"memory": "1GiB"}
# cuBLAS's own would be most of what so small a model takes.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}
TASK = Task("gpt", "tiny", 4, 1e-3, (("length", 64), ("dim", 32), ("layers", 3), ("heads", 2)))
STEPS = 4
# The CPU's and the device's kernels of memopt.optim round once where torch's rounds twice.
NEAR = 1e-6
BUDGET = 2_300_000  # bytes, of the 3.2 million of the plain step
AHEAD = 2 * 2 * 4 * 64 * 8  # bytes of the batches that are on their way
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(scope="module", autouse=True)
def pool() -> None:
    """Before all else: training on the CPU starts torch's own allocator, too."""
    memopt.enable(backend="pool")
    torch.set_num_threads(1)


def plain(device: str) -> list[float]:
    """Torch's own pieces."""
    model = TASK.build_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TASK.learning_rate)
    scaler = torch.amp.GradScaler(device)
    losses = []
    for batch in TASK.batches(STEPS, device):
        loss = TASK.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches(device: str) -> Iterator[Batch]:
    loader = torch.utils.data.DataLoader(TaskData(TASK, STEPS), batch_size=None)
    return iter(memopt.data.Prefetcher(loader, device))


def pieces(
    device: str, **options: object
) -> tuple[torch.nn.Module, memopt.optim.AdamW, memopt.amp.GradScaler]:
    model = TASK.build_model(device)
    optimizer = memopt.optim.AdamW(model.parameters(), lr=TASK.learning_rate, **options)
    return model, optimizer, memopt.amp.GradScaler(device)


def trained(
    device: str,
    bits: int = 32,
    schedule: bool = False,
    offload: bool = False,
    layers: bool = False,
    activations: bool = False,
) -> list[float]:
    """An eager loop with memopt's pieces."""
    model, optimizer, scaler = pieces(device, state_bits=bits)
    if schedule:
        x, y = next(TASK.batches(1, device))
        kept = {"optimizer": optimizer, "loss": lambda logits: TASK.loss_of(logits, y)}
        memopt.auto_checkpoint(model, x, memory_budget=BUDGET, to="cpu" if offload else None, **kept)
        assert not model.plan.keeps_all
    if layers:
        memopt.offload_layers(model)

    def compute_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not activations:
            return TASK.loss(model, (inputs, targets))
        with memopt.offload_activations(min_size=1):
            return TASK.loss(model, (inputs, targets))

    losses = []
    for batch in batches(device):
        loss = memopt.backward(compute_loss, *batch, model=model, scaler=scaler)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_allocator_schedule_offload_scaler_and_a_captured_optimizer_train_as_plain_torch_does() -> None:
    """The optimizer's kernels are memopt's own, so that a replayed graph computes; eager ones are Compute's."""
    with sim.Compute():
        model, optimizer, scaler = pieces("cuda", capturable=True)
        x, y = next(TASK.batches(1, "cuda"))
        for parameter in model.parameters():  # where they stay: the graph knows their addresses
            parameter.grad = torch.zeros_like(parameter)
        memopt.auto_checkpoint(
            model,
            x,
            memory_budget=BUDGET - AHEAD,
            optimizer=optimizer,
            accumulate=True,
            to="cpu",
            loss=lambda logits: TASK.loss_of(logits, y),
        )
    assert model.plan.offloaded
    graph, losses = torch.cuda.CUDAGraph(), []
    torch.cuda.reset_peak_memory_stats()
    for number, batch in enumerate(batches("cuda")):
        with sim.Compute():
            loss = memopt.backward(lambda x, y: TASK.loss(model, (x, y)), *batch, model=model, scaler=scaler)
            scaler.unscale_(optimizer)
            memopt.amp.clip_grad_norm_(model.parameters(), 1.0)
            if number == 0:
                optimizer.step()
        if number == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
        if number:
            graph.replay()
        with sim.Compute():
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
            losses.append(loss.item())
    assert losses == pytest.approx(plain("cpu"), rel=NEAR)
    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] <= BUDGET


def test_states_of_8_bits_with_layers_and_activations_elsewhere_give_the_cpus_losses_bit_for_bit() -> None:
    with sim.Compute():
        found = trained("cuda", bits=8, layers=True, activations=True)
    assert found == trained("cpu", bits=8)


@pytest.mark.skipif(not SOAK, reason="a long form: MEMOPT_SOAK=1")
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize(
    "ways",
    [
        {"schedule": True},
        {"schedule": True, "offload": True},
        {"schedule": True, "activations": True},
        {"layers": True, "activations": True},
        {"activations": True},
        {"layers": True},
    ],
    ids=" ".join,
)
def test_every_pair_of_ways_trains_alike(ways: dict[str, bool], bits: int) -> None:
    with sim.Compute():
        found = trained("cuda", bits=bits, **ways)
    assert found == trained("cpu", bits=bits)
    assert found == pytest.approx(plain("cpu"), rel=NEAR if bits == 32 else 1e-3)
