"""Savings and costs of memopt.offload_activations: 12 transformer blocks under AdamW, activations 70 % of the peak.

Memory, on the simulated device, whose allocators are the real ones (PyTorch's, and memopt's pool) and whose kernels do
nothing, after a first step: the most bytes live at once for

    plain           everything that is saved stays
    save_on_cpu     torch.autograd.graph.save_on_cpu(pin_memory=True)
    offload         memopt.offload_activations()

against the bound: states (parameters, gradients, AdamW's two) + what two blocks save + 5 %. And the bytes that a step
copies beside the plain one's, against those that leave, out and back: none twice.

Time: the host's, of a step on the simulated device, where kernels and copies take no time of a device's: what each way
costs the host in calls. A GPU's times need --cuda. On the CPU with a disk times are real: plain, offload with copies
beside the computation, and the same with none beside it (each waited for at once); torch has no such thing to compare.

Goals: the peak within the bound under both allocators, bytes copied as bytes needed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402

BLOCKS, SHARE, BLOCKS_ALLOWED, SPARE = 12, 0.7, 2, 1.05
DIM, TOKENS = 1024, 256  # of a sequence
PLAIN, TORCHS, MEMOPTS = "plain", "save_on_cpu", "offload"


# ---- the model ------------------------------------------------------------------------------------------------------


def transformer(dim: int, blocks: int) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            parts = self.qkv(self.norm_1(x)).view(b, t, 3, dim // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, dim))
            return x + self.narrow(functional.gelu(self.wide(self.norm_2(x))))

    return nn.Sequential(*(Block() for _ in range(blocks)))


class Training:
    """A model, its optimizer, a batch, and steps."""

    def __init__(self, dim: int, blocks: int, batch: int, device: str) -> None:
        import torch

        torch.manual_seed(0)
        self.model = transformer(dim, blocks).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(batch, TOKENS, dim, device=device)

    def step(self, context: Any) -> Any:
        """The context, entered."""
        with context as entered:
            loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return entered


def context_of(name: str, **options: Any) -> Any:
    import torch

    import memopt

    if name == TORCHS:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return memopt.offload_activations(**options) if name == MEMOPTS else contextlib.nullcontext()


# ---- memory: one allocator and one way a process --------------------------------------------------------------------


def measure(name: str, allocator: str, dim: int, real: bool) -> dict[str, Any]:
    """Peaks in bytes, times in seconds, of steps after the first."""
    from memopt import sim

    if not real:
        sim.activate(memory=80 << 30, blank=True)
    import torch

    import memopt

    if allocator == "memopt":
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

    def live() -> int:
        return int(torch.cuda.memory_allocated())

    # What one sample's block saves says how many make the activations the share of the peak that they are to be.
    probe = Training(dim, 1, 1, "cuda")
    probe.step(contextlib.nullcontext())  # workspaces of libraries come with the first
    before = live()
    out = probe.model(probe.x)
    a_block = live() - before
    del probe, out
    training = Training(dim, BLOCKS, 1, "cuda")
    states = 4 * sum(p.nbytes for p in training.model.parameters())
    # The plain peak is where the backward pass begins: all of those, and the states without the gradients.
    batch = round(states * 3 / 4 * SHARE / (1 - SHARE) / (BLOCKS * a_block))
    training.x = torch.randn(batch, TOKENS, dim, device="cuda")
    context = context_of(name)
    training.step(context)
    seconds = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    copied = sim.stats()["copied_bytes"] if not real else 0
    for _ in range(5):
        start = time.perf_counter()
        context = context_of(name)
        training.step(context)
        seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    answer = {
        "peak": torch.cuda.max_memory_allocated(),
        "states": states,
        "a block": a_block * batch,
        "batch": batch,
        "seconds": min(seconds),
    }
    if not real:
        answer["copied"] = (sim.stats()["copied_bytes"] - copied) // 5
    if name == MEMOPTS:
        answer["left"] = context.last.bytes_out
    return answer


def asked(name: str, allocator: str, dim: int, options: Any) -> dict[str, Any]:
    words = [sys.executable, __file__, "--measure", name, allocator, str(dim), str(int(options.cuda))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{name} under {allocator}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(report: harness.Report, options: Any) -> None:
    dim = DIM // 2 if options.quick else DIM
    for allocator in ("native",) if options.quick else ("native", "memopt"):
        found = {name: asked(name, allocator, dim, options) for name in (PLAIN, TORCHS, MEMOPTS)}
        plain, ours = found[PLAIN], found[MEMOPTS]
        bound = (plain["states"] + BLOCKS_ALLOWED * plain["a block"]) * SPARE
        share = BLOCKS * plain["a block"] / plain["peak"]
        report.note(f"{allocator} allocator", {"activations' share of the plain peak": share, **found})
        values = {"bound": bound / 2**20, **{name: found[name]["peak"] / 2**20 for name in found}}
        report.record(f"peak, {allocator} allocator", values, unit="MiB", peer=PLAIN)
        within = {"bound": bound / 2**20, MEMOPTS: ours["peak"] / 2**20}
        report.record(
            f"peak within the bound, {allocator} allocator", within, unit="MiB", peer="bound", goal=1.0
        )
        if not options.cuda:
            copied = {"needed": 2.0 * ours["left"], MEMOPTS: float(ours["copied"] - plain["copied"])}
            report.record(
                f"bytes copied, {allocator} allocator", copied, unit="bytes", peer="needed", goal=1.0
            )
        times = {name: found[name]["seconds"] * 1e3 for name in found}
        where = "GPU" if options.cuda else "simulated device: the host's time alone"
        report.record(f"a step, {allocator} allocator, {where}", times, unit="ms", peer=PLAIN)


# ---- time, on the CPU with a disk -----------------------------------------------------------------------------------


def on_disk(report: harness.Report, options: Any) -> None:
    dim, blocks, batch = (128, 3, 4) if options.quick else (512, 4, 8)
    training = Training(dim, blocks, batch, "cpu")
    with tempfile.TemporaryDirectory(prefix="memopt-bench-") as path:

        def by(**how: Any) -> Callable[[], object]:
            return lambda: training.step(context_of(MEMOPTS, to=path, min_size="256KiB", **how))

        contenders = {
            PLAIN: lambda: training.step(contextlib.nullcontext()),
            "disk, copies beside": by(),
            "disk, each waited for": by(in_flight=0),
        }
        report.compare(f"a step, CPU and disk, dim {dim}, {blocks} blocks", contenders, peer=PLAIN)
        entered = training.step(context_of(MEMOPTS, to=path, min_size="256KiB"))
        report.note("disk: bytes out and in", (entered.last.bytes_out, entered.last.bytes_in))


def main() -> int:
    if sys.argv[1:2] == ["--measure"]:
        name, allocator, dim, real = sys.argv[2:]
        print(json.dumps(measure(name, allocator, int(dim), real == "1")))
        return 0
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_offload_activations", options)
    memory(report, options)
    if not options.cuda:
        from memopt import sim

        sim.activate(memory="1GiB")  # a CUDA build of torch is imported with a device, or not at all
    on_disk(report, options)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
