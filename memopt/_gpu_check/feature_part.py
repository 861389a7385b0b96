"""The part `features`: what memopt does to a training step, beside plain torch, under memopt's allocator."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._gpu_check import processes
from memopt._gpu_check.part_outcome import (
    Check,
    Figures,
    PartOutcome,
    PartRequest,
    heard,
    run_checks,
    use_memopts_allocator,
)
from memopt._runtime import process

if TYPE_CHECKING:
    import torch

# Relative: of a loss after some steps, whose gradients' sums are rounded in another order.
LOSS_ERROR = 1e-5
# Relative: of gradients in 64 bits, summed over micro-batches.
GRADIENT_ERROR = 1e-12


def features(request: PartRequest) -> PartOutcome:
    use_memopts_allocator()
    return run_checks(CHECKS, request, {})


def _model(width: int, dtype: torch.dtype | None = None, depth: int = 4) -> torch.nn.Sequential:
    import torch

    torch.manual_seed(7)
    layers = (
        part for _ in range(depth) for part in (torch.nn.Linear(width, width, dtype=dtype), torch.nn.Tanh())
    )
    return torch.nn.Sequential(*layers).cuda()


def _batch(request: PartRequest, dtype: torch.dtype | None = None) -> torch.Tensor:
    import torch

    width = 32 if request.simulated else 1024
    return torch.randn(2 * width, width, generator=torch.Generator().manual_seed(8), dtype=dtype).cuda()


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [param.grad for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return found


def optimizers(request: PartRequest, figures: Figures) -> str:
    """The losses of a few scaled and clipped steps equal those with torch's scaler and optimizers."""
    import torch

    from memopt import amp, optim

    pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
        "AdamW": (torch.optim.AdamW, optim.AdamW, {"lr": 1e-2}),
        "SGD": (torch.optim.SGD, optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    }
    batch, wrong = _batch(request), []
    for name, (theirs, ours, settings) in pairs.items():
        losses = []
        for make, scaler in ((theirs, torch.amp.GradScaler("cuda")), (ours, amp.GradScaler("cuda"))):
            model = _model(batch.shape[1])
            optimizer = make(model.parameters(), **settings)
            for step in range(6):
                loss = (model(batch) - 0.5).square().mean()
                # The third step is skipped: its gradients are not finite.
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        error = abs(losses[1] - losses[0]) / losses[0]
        figures[f"GradScaler and {name}, difference of the loss"] = error
        if not error <= LOSS_ERROR:
            wrong.append(f"{name}'s loss differs from torch's by {error:.1e} of it")
    return "; ".join(wrong)


def backward(request: PartRequest, figures: Figures) -> str:
    """After an out-of-memory error the gradients are the whole batch's."""
    import torch

    import memopt

    batch = _batch(request, torch.float64)
    model = _model(batch.shape[1], torch.float64)
    model(batch).square().mean().backward()
    whole = _gradients(model)
    sizes: list[int] = []

    def loss(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        if len(part) > len(batch) // 2:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return model(part).square().mean()  # type: ignore[no-any-return]

    memopt.backward(loss, batch, model=model)
    error = max(float((a - b).norm() / a.norm()) for a, b in zip(whole, _gradients(model), strict=True))
    figures["backward, samples of the micro-batches"] = min(sizes)
    figures["backward, difference of the gradients"] = error
    return "" if error <= GRADIENT_ERROR else f"its gradients differ from the whole batch's by {error:.1e}"


def offloading(request: PartRequest, figures: Figures) -> str:
    """Gradients with offloaded activations are bit-equal."""
    import torch

    import memopt

    batch = _batch(request)
    model = _model(batch.shape[1])
    model(batch).square().mean().backward()
    plain = _gradients(model)
    for _ in range(2):  # the first makes the pinned memory
        with memopt.offload_activations(min_size=0, in_flight=batch.nbytes) as offload:
            loss = model(batch).square().mean()
        loss.backward()
        offloaded = _gradients(model)
    moved = offload.last.bytes_out if offload.last else 0
    figures["offload_activations, bytes moved"] = moved
    if not moved:
        return "nothing was offloaded"
    equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(plain, offloaded, strict=True))
    return "" if equal else "the gradients differ in bits"


def checkpointing(request: PartRequest, figures: Figures) -> str:
    """A checkpointed model keeps its budget by the allocator's count."""
    import torch

    import memopt
    from memopt._checkpoint.stages.costs import workspace_bytes
    from memopt.chain import InfeasibleBudget

    before = torch.cuda.memory_allocated() - workspace_bytes(torch.device("cuda"))
    batch = _batch(request).repeat(128 if request.simulated else 8, 1)  # more than cuBLAS's workspaces
    model = _model(batch.shape[1], depth=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        memopt.auto_checkpoint(model, batch, memory_budget=1, optimizer=optimizer)
    except InfeasibleBudget as error:
        least = error.least_budget
    budget = least + least // 16
    memopt.auto_checkpoint(model, batch, memory_budget=budget, optimizer=optimizer)
    plan: Any = model.plan
    step()
    workspace_bytes(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    measured = torch.cuda.max_memory_allocated() - before
    figures |= {
        "auto_checkpoint, budget, bytes": budget,
        "auto_checkpoint, predicted peak, bytes": plan.peak_bytes,
        "auto_checkpoint, measured peak, bytes": measured,
        "auto_checkpoint, without it, predicted, bytes": plan.plain_bytes,
        "auto_checkpoint, predicted stages, ms": plan.seconds * 1e3,
        "auto_checkpoint, measured step, ms": seconds * 1e3,
    }
    return "" if measured <= budget else f"a step took {measured} bytes of a budget of {budget}"


def loss_head(request: PartRequest, figures: Figures) -> str:
    """The loss head's loss and gradients are the plain head's, to a few units in the last place."""
    import torch
    from torch.nn import functional

    from memopt import nn

    generator = torch.Generator().manual_seed(10)
    worst = 0.0
    for dtype, bound in ((torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        made = [torch.randn(size, 64, generator=generator) for size in (300, 5003)]
        target = torch.randint(5003, (300,), generator=generator).cuda()
        target[::7] = -100
        found = []
        for fused in (False, True):
            hidden, weight = (x.to(dtype if fused else torch.float64).cuda() / 8 for x in made)
            hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
            if fused:
                loss = nn.linear_cross_entropy(
                    hidden, weight, target, softcap=20.0, reduction="sum", chunk_bytes="300KiB"
                )
            else:
                logits = 20 * torch.tanh(functional.linear(hidden, weight) / 20)
                loss = functional.cross_entropy(logits, target, reduction="sum")
            loss.backward()
            assert hidden.grad is not None and weight.grad is not None
            found.append((loss.detach().double() / 300, hidden.grad.double(), weight.grad.double()))
        error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))
        figures[f"linear_cross_entropy, error in {str(dtype).removeprefix('torch.')}"] = error
        worst = max(worst, error / bound)
    return "" if worst <= 1 else f"the loss head's error is {worst:.3g} of what its types allow"


def prefetching(request: PartRequest, figures: Figures) -> str:
    """Prefetched batches are the loader's."""
    import torch

    from memopt.data import Prefetcher

    generator = torch.Generator().manual_seed(9)
    images = torch.randint(0, 256, (64, 3, 31, 33), dtype=torch.uint8, generator=generator)
    batches = [(images[i : i + 8], torch.arange(i, i + 8)) for i in range(0, 64, 8)]
    count = 0
    for (image, label), (wanted, number) in zip(
        Prefetcher(batches, "cuda", widen=0, scale=True), batches, strict=True
    ):
        count += torch.equal(image.cpu(), wanted.float().div(255)) and torch.equal(label.cpu(), number)
    figures["Prefetcher, equal batches"] = f"{count} of {len(batches)}"
    return "" if count == len(batches) else f"{len(batches) - count} of {len(batches)} batches differ"


def pool(request: PartRequest, figures: Figures) -> str:
    """A paused pool gives its memory back; resumed, its tensors have their addresses and contents."""
    import torch

    from memopt.cuda import CudaPool

    if not _C.cuda_driver()["devices"][0]["virtual_memory"]:
        figures["CudaPool, bytes held before and while it is paused"] = (
            "not here: no virtual memory management"
        )
        return ""
    limited = CudaPool("64MiB")
    tensor = limited.allocate((1 << 20,), dtype=torch.int64)
    numbers = torch.arange(1 << 20)
    tensor.copy_(numbers)
    address, held = tensor.data_ptr(), limited.stats()["reserved_bytes"]
    limited.pause()
    paused = limited.stats()["reserved_bytes"]
    limited.resume()
    same = tensor.data_ptr() == address and torch.equal(tensor.cpu(), numbers)
    figures["CudaPool, bytes held before and while it is paused"] = f"{held}, {paused}"
    del tensor
    limited.close()
    if paused:
        return f"a paused CudaPool holds {paused} bytes"
    return "" if same else "after pause() and resume() a tensor has another address or other contents"


def refused_sending(request: PartRequest, figures: Figures) -> str:
    """A tensor in memopt's memory, for which CUDA IPC has no handles, is refused with the remedy when it is sent to
    another process."""
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing

    try:
        ForkingPickler.dumps(torch.empty(1 << 20, device="cuda"))  # as a queue or a pipe does
    except RuntimeError as error:
        text = str(error)
    else:
        return "a tensor in memopt's memory was sent to another process"
    figures["CUDA IPC"] = text
    named = text.startswith("CUDA tensors cannot be sent") and "Send tensor.cpu()" in text
    return "" if named else f"the refusal names no remedy: {text}"


# ---- several devices -------------------------------------------------------------------------------------------------


def all_reduce(request: PartRequest, figures: Figures) -> str:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        figures["NCCL all-reduce"] = "not here: one GPU"
        return ""
    return reduced(request, figures, count)


def reduced(request: PartRequest, figures: Figures, count: int) -> str:
    """NCCL's sum of tensors in memopt's memory, over one process a device."""
    with tempfile.TemporaryDirectory() as folder, process.Children() as children:
        ranks = [
            children.start(
                processes.MODULE,
                request=request._replace(part="rank", contender=f"{number}/{count}", folder=folder)._asdict(),
            )
            for number in range(count)
        ]
        answers = [heard(child) for child in ranks]
    wrong = [f"rank {number}: {said}" for number, (_, said) in enumerate(answers) if said]
    if not wrong:
        expected = count * (count + 1) // 2
        wrong = [
            f"rank {number} has {found['sums']}, not {expected}"
            for number, (found, _) in enumerate(answers)
            if found["sums"] != [expected]
        ]
    figures["NCCL all-reduce"] = f"{count} ranks" if not wrong else "wrong"
    return "; ".join(wrong)


def rank(request: PartRequest) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    number, count = map(int, request.contender.split("/"))
    use_memopts_allocator()
    torch.cuda.set_device(number)
    dist.init_process_group(
        "nccl", init_method=f"file://{request.folder}/ranks", rank=number, world_size=count
    )
    values = torch.full((1 << 20,), float(number + 1)).cuda()
    dist.all_reduce(values)
    sums = values.cpu().unique().tolist()
    dist.destroy_process_group()
    return {"sums": [int(value) for value in sums]}


CHECKS: dict[str, Check] = {
    "optimizers": optimizers,
    "backward": backward,
    "offload_activations": offloading,
    "auto_checkpoint": checkpointing,
    "linear_cross_entropy": loss_head,
    "Prefetcher": prefetching,
    "CudaPool": pool,
    "CUDA IPC": refused_sending,
    "NCCL": all_reduce,
}
