"""First light: a training loop as people write them, on a GPU that is not there.

A small transformer learns scikit-learn's digits, each image a sequence of 8 rows of 8 pixels, with AdamW, and
with fp16 autocast and torch.amp.GradScaler. It runs on the CPU, and again on memopt's simulated CUDA device,
under PyTorch's real CUDA code, with PyTorch's allocator replaced by memopt's:

    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())

`memopt.sim.Compute` does the arithmetic by the CPU's kernels in the device's memory, so every loss must come
out *equal*, bit for bit: a tensor placed over another one that lives, freed too early, or copied wrongly,
changes it. fp16 is held to the same: the CPU's autocast and CUDA's keep different operations in float32, but
the model names the precision itself where they differ (softmax), and there is nothing left to round
differently. The scaler starts too high, so that steps are skipped on the way.

Exit status: 0 equal, 1 not equal (or something was not freed), 2 this environment cannot run it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # never at the top: memopt.sim has to be activated before torch is imported

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/first_light.py` finds the memopt that was built in place
    sys.path.insert(0, str(ROOT))

MEMORY = "1GiB"
STEPS = 60
FIRST_SCALE = 2.0**20
PRECISIONS = ("fp32", "fp16")


@dataclass(frozen=True)
class Run:
    """One training: losses by step, held-out accuracy before and after, and the loss scale at the end."""

    device: str
    precision: str
    losses: list[float]
    accuracy_before: float
    accuracy_after: float
    scale: float
    seconds: float


@dataclass(frozen=True)
class Result:
    runs: dict[str, dict[str, Run]]  # by precision, then "cpu" and "cuda"
    memopt: dict[str, int]  # memopt.cuda.memory_stats() at the end
    device: dict[str, int]  # the simulated device's own counts
    versions: dict[str, str]

    def disagreements(self) -> list[str]:
        """The expectations that were missed, in words; empty if none was."""
        found = []
        for precision, by_device in self.runs.items():
            cpu, cuda = by_device["cpu"], by_device["cuda"]
            for step, (a, b) in enumerate(zip(cpu.losses, cuda.losses, strict=True), 1):
                if a != b:  # also when one is NaN
                    found.append(f"{precision}: step {step}: loss {a!r} on the CPU, {b!r} on the device")
                    break
            if cpu.accuracy_after != cuda.accuracy_after or cpu.scale != cuda.scale:
                found.append(f"{precision}: accuracy or loss scale differ between the CPU and the device")
            for run in by_device.values():
                if not run.accuracy_after > run.accuracy_before + 0.3:
                    where = f"{run.accuracy_before:.0%} to {run.accuracy_after:.0%}"
                    found.append(
                        f"{precision} on {run.device}: accuracy went from {where} only; it did not learn"
                    )
        if not self.memopt["allocations"]:
            found.append("memopt's allocator was never called")
        if self.device["cudaMalloc"]:
            found.append(
                f"torch's own allocator was used too ({self.device['cudaMalloc']} calls of cudaMalloc)"
            )
        if self.memopt["live_blocks"] or self.memopt["live_bytes"]:
            found.append(
                f"memopt still holds {self.memopt['live_bytes']} bytes in {self.memopt['live_blocks']} blocks"
            )
        if self.memopt["failed_frees"] or self.device["faults"]:
            found.append(
                f"{self.memopt['failed_frees']} frees refused, {self.device['faults']} device faults"
            )
        if self.device["live_allocations"]:
            found.append(f"the device still has {self.device['live_allocations']} live allocations")
        return found


def build_model() -> torch.nn.Module:
    """8 rows of 8 pixels -> 10 logits: a linear embedding, two transformer blocks, the mean over rows, a
    head."""
    import torch
    from torch import nn

    from benchmarks.tasks import Block

    class DigitRows(nn.Module):
        def __init__(self, dim: int = 64) -> None:
            super().__init__()
            self.embed = nn.Linear(8, dim)
            self.position = nn.Parameter(torch.randn(8, dim) * 0.02)
            self.blocks = nn.Sequential(*(Block(dim, heads=4, causal=False) for _ in range(2)))
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            rows = images.squeeze(1)
            return self.head(self.norm(self.blocks(self.embed(rows) + self.position)).mean(1))

    return DigitRows()


def train(device: str, precision: str, steps: int = STEPS, batch_size: int = 64) -> Run:
    """The training loop. Nothing in it knows of memopt, or that the device is simulated."""
    import torch
    from torch.nn import functional as F

    from benchmarks.tasks import digits

    start = time.perf_counter()
    half = precision == "fp16"
    torch.manual_seed(0)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    # A scale far too large: the first steps overflow, are skipped, and halve it.
    scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE, enabled=half)
    images, labels = digits("train")
    held_out, held_out_labels = (tensor.to(device) for tensor in digits("val"))

    def accuracy() -> float:
        with torch.no_grad():
            return (model(held_out).argmax(1) == held_out_labels).float().mean().item()

    before, losses = accuracy(), []
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        chosen = order[(torch.arange(batch_size) + step * batch_size) % len(order)]
        batch, targets = images[chosen].to(device), labels[chosen].to(device)
        with torch.autocast(device, dtype=torch.float16, enabled=half):
            loss = F.cross_entropy(model(batch).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(device, precision, losses, before, accuracy(), scaler.get_scale(), time.perf_counter() - start)


def run(steps: int = STEPS, say: Callable[[str], None] = lambda text: None) -> Result:
    """Swaps the allocator, trains on the CPU, then on the device, frees all. memopt.sim must be active."""
    import torch

    import memopt
    from memopt import sim

    # Matrices this small gain nothing from two threads, and lose much where another process wants the core.
    torch.set_num_threads(1)
    # First of all: even training on the CPU makes torch start its own allocator, which can't be replaced
    # then.
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    runs: dict[str, dict[str, Run]] = {precision: {} for precision in PRECISIONS}
    for precision in PRECISIONS:
        say(f"training on the CPU, {precision}")
        runs[precision]["cpu"] = train("cpu", precision, steps)
    for precision in PRECISIONS:
        say(f"training on the simulated device, {precision}")
        with sim.Compute():
            runs[precision]["cuda"] = train("cuda", precision, steps)

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps these for its next matrix product
    torch.cuda.synchronize()
    return Result(
        runs=runs,
        memopt=memopt.cuda.memory_stats(),
        device=device_counts(),
        versions={
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "device": torch.cuda.get_device_name(),
        },
    )


def device_counts() -> dict[str, int]:
    """The simulated device's record: calls by CUDA's names, and what is left on it."""
    from memopt import sim

    stats = sim.stats()
    calls = {name: sim.calls(name) for name in ("cuMemAlloc", "cuMemFree", "cudaMalloc")}
    return calls | {
        "launches": stats["launches"],
        "copies": stats["copies"],
        "faults": stats["faults"],
        "bytes_peak": stats["bytes_peak"],
        "live_allocations": stats["allocations"],
    }


# ---- the screen -----------------------------------------------------------------------------------


def loss_table(result: Result) -> list[str]:
    head = "".join(f"{'CPU':>15}{'device':>11}" for _ in PRECISIONS)
    lines = [f"  {'':4}{'fp32':>20}{'fp16 autocast + GradScaler':>34}", f"  step{head}"]
    count = len(result.runs["fp32"]["cpu"].losses)
    for step in sorted({0, count // 4, count // 2, 3 * count // 4, count - 1}):
        row = ""
        for precision in PRECISIONS:
            by_device = result.runs[precision]
            row += f"{by_device['cpu'].losses[step]:>15.6f}{by_device['cuda'].losses[step]:>11.6f}"
        lines.append(f"  {step + 1:>4}{row}")
    cells: dict[str, list[str]] = {"largest difference": [], "held-out accuracy": [], "loss scale": []}
    for precision in PRECISIONS:
        cpu, cuda = result.runs[precision]["cpu"], result.runs[precision]["cuda"]
        largest = max(abs(a - b) for a, b in zip(cpu.losses, cuda.losses, strict=True))
        cells["largest difference"].append(f"{largest:.2g}")
        cells["held-out accuracy"].append(f"{cuda.accuracy_before:.0%} -> {cuda.accuracy_after:.0%}")
        cells["loss scale"].append(f"{FIRST_SCALE:.0f} -> {cuda.scale:.0f}" if precision == "fp16" else "")
    lines += [f"  {name:<18}{first:>14}{second:>26}" for name, (first, second) in cells.items()]
    return lines


def screen(result: Result, steps: int, seconds: float) -> str:
    mine, device = result.memopt, result.device
    wrong = result.disagreements()
    verdict = "NOT EQUAL:\n  " + "\n  ".join(wrong) if wrong else (
        f"equal: all {2 * steps} losses are the same on both, bit for bit; everything was freed"
    )  # fmt: skip
    return "\n".join(
        [
            "memopt: first light",
            f"A small transformer learns handwritten digits in {steps} steps, on the CPU and on a simulated",
            "GPU whose memory comes from memopt's allocator. PyTorch's CUDA code is the real one.",
            "",
            f"  torch      {result.versions['torch']}, CUDA {result.versions['cuda']}",
            f"  device     {result.versions['device']}, {MEMORY}",
            "  allocator  torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())",
            "",
            *loss_table(result),
            "",
            f"  memopt     {mine['allocations']:,} allocations, {mine['frees']:,} frees, "
            f"{mine['peak_bytes'] / 2**20:.1f} MiB at the peak, {mine['live_bytes']} bytes left",
            f"  device     {device['cuMemAlloc']:,} cuMemAlloc, {device['cuMemFree']:,} cuMemFree, "
            f"{device['cudaMalloc']} cudaMalloc, {device['launches']:,} kernels launched",
            "",
            f"{verdict} ({seconds:.0f} s)",
            "",
            "next:  python -m memopt doctor       what works on this machine, and why the rest does not",
            "       make test                     every test, with no GPU",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A real training loop on a simulated GPU, through memopt's allocator."
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"training steps of each run ({STEPS}; at least 40)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the screen")
    options = parser.parse_args(arguments)
    if options.steps < 40:
        parser.error(f"--steps {options.steps}: fewer than 40 steps do not learn enough to tell")

    try:
        from memopt import sim

        sim.activate(memory=MEMORY)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(
            f"first light cannot run here: {error}\n`make demo` makes the environment it needs.",
            file=sys.stderr,
        )
        return 2

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    start = time.perf_counter()
    result = run(options.steps, say)
    seconds = time.perf_counter() - start
    say("")
    wrong = result.disagreements()
    if options.json:
        print(json.dumps({**asdict(result), "disagreements": wrong, "seconds": seconds}, indent=1))
    else:
        print(screen(result, options.steps, seconds))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
