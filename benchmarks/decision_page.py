"""RESULTS.md's table of what to do when memory runs out: each technique on the demo task, beside the plain step.

    python benchmarks/decision_page.py              measures, writes results/decision_page.json and the table
    python benchmarks/decision_page.py --render     the table from the results that are kept
    python benchmarks/decision_page.py --quick      fewer steps; nothing is kept

The character GPT of memopt.demo, plain AdamW. What needs a CUDA device runs on a simulated one, with the numbers
computed: bytes and losses are what they are, and no time is told. The rest runs on the CPU and is timed. In the
environment `notebook`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

RESULT = ROOT / "benchmarks/results/decision_page.json"
PAGE = ROOT / "benchmarks/RESULTS.md"
BEGIN = "<!-- decisions: begin -->"
END = "<!-- decisions: end -->"

Build = Callable[[], Callable[[], Any]]


# ---- the table ------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """The table in Markdown, and what it was measured on."""
    lines = [
        "| What is too large | Technique | One line | Saves | Costs |",
        "| --- | --- | --- | ---: | --- |",
    ]
    lines += [
        f"| {row['problem']} | {row['technique']} | `{row['line']}` | {saving(row)} | {cost(row)} |"
        for row in result["rows"]
    ]
    peak = result["plain_peak"] / 2**20
    lines += [
        "",
        f"Measured by `python benchmarks/decision_page.py` on a character GPT of {result['parameters']:,} parameters, "
        f"whose plain step peaks at {peak:.1f} MiB of live bytes. *Simulated*: bytes and losses on the simulated "
        "device, where no time can be told; a GPU has measured none of it.",
    ]
    return "\n".join(lines)


def saving(row: dict[str, Any]) -> str:
    share = 1 - row["after"] / row["before"] if row["before"] else 0.0
    return f"{round(share, 2) + 0.0:.0%} of {row['what']}"  # + 0.0: no "-0%"


def cost(row: dict[str, Any]) -> str:
    said = []
    if row["time_ratio"] is not None:
        said.append(f"{row['time_ratio']:.2f} x the time")
    elif row["timed"]:
        said.append("time within the noise")
    if row["loss_difference"] is not None:
        said.append(f"loss {row['loss_difference']:+.2g}" if row["loss_difference"] else "the same loss")
    if row["timed"] is False:
        said.append("simulated")
    return ", ".join(said) or "nothing measured"


def rewritten(page: str, table: str) -> str:
    """The page with the table between the marks. Raises ValueError where they are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no line {BEGIN!r} with {END!r} behind it")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# ---- the steps ------------------------------------------------------------------------------------


class Steps:
    """Ways of doing the demo task's step, as memopt.compare_steps wants them."""

    def __init__(self, steps: int) -> None:
        from memopt import demo

        self.task = demo.get_task("gpt", "small")
        self.steps = steps

    def batches(self, device: str) -> Iterator[Any]:
        return self.task.batches(self.steps, device)

    def way(
        self,
        device: str = "cpu",
        *,
        budget: int | None = None,
        state_bits: int | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        layers: bool = False,
        half: bool = False,
        pieces: bool = False,
    ) -> Build:
        import torch

        import memopt

        def build() -> Callable[[], Any]:
            model = self.task.build_model(device)
            if layers:
                memopt.offload_layers(model)
            if state_bits:
                optimizer: Any = memopt.optim.AdamW(
                    model.parameters(), lr=self.task.learning_rate, state_bits=state_bits
                )
            else:
                optimizer = torch.optim.AdamW(
                    model.parameters(), lr=self.task.learning_rate, fused=None if layers else True
                )
            if budget:
                sample = next(self.task.batches(1, device))[0]
                memopt.auto_checkpoint(model, sample, memory_budget=budget, optimizer=optimizer)
            scaler = memopt.amp.GradScaler(device, enabled=half)
            batches = self.batches(device)

            def loss_of(*batch: Any) -> torch.Tensor:
                with around(), torch.autocast(device, torch.float16, enabled=half):
                    return self.task.loss(model, batch)

            def step() -> torch.Tensor:
                batch = next(batches)
                if pieces:
                    loss = memopt.backward(loss_of, *batch, model=model)
                else:
                    loss = loss_of(*batch)
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                return loss

            return step

        return build


def row(
    problem: str, technique: str, line: str, found: Any, name: str, what: str = "the peak"
) -> dict[str, Any]:
    plain, mine = found[found.base], found[name]
    if mine.failed or plain.failed:
        raise RuntimeError(f"{name}: {mine.failed or plain.failed}")
    return {
        "problem": problem,
        "technique": technique,
        "line": line,
        "what": what,
        "before": plain.peak_bytes,
        "after": mine.peak_bytes,
        "timed": bool(mine.seconds),
        "time_ratio": found.time_ratio(name),
        "loss_difference": mine.loss - plain.loss,
        "measured": {"plain": plain.as_dict(), name: mine.as_dict()},
    }


def on_the_cpu(steps: int) -> list[dict[str, Any]]:
    import memopt

    ways = Steps(steps)
    first = memopt.compare_steps({"plain": ways.way()}, steps=3, device="cpu")["plain"]
    half = first.peak_bytes // 2
    found = memopt.compare_steps(
        {
            "plain": ways.way(),
            "auto_checkpoint": ways.way(budget=half),
            "8 bits": ways.way(state_bits=8),
            "both": ways.way(budget=half, state_bits=8),
        },
        steps=steps,
        device="cpu",
    )
    checkpoint = 'memopt.auto_checkpoint(model, sample, memory_budget="…")'
    return [
        row("activations", "checkpointing to a budget, here half", checkpoint, found, "auto_checkpoint"),
        row(
            "the optimizer's state",
            "8-bit states",
            "memopt.optim.AdamW(parameters, state_bits=8)",
            _states(found, "8 bits"),
            "8 bits",
            "the state",
        ),
        row("both", "both", f"{checkpoint}; memopt.optim.AdamW(…, state_bits=8)", found, "both"),
    ]


def _states(found: Any, name: str) -> Any:
    """The same comparison, of the bytes of optimizer state alone."""
    from memopt.types import StepComparison

    alone = {
        key: dataclasses.replace(one, peak=one.by_category["optimizer"])
        for key, one in found.measured.items()
        if key in (found.base, name)
    }
    return StepComparison(alone, found.steps, found.device)


def on_the_simulated_device() -> list[dict[str, Any]]:
    import torch

    import memopt

    steps = 3
    ways = Steps(steps)
    with memopt.sim.Compute():
        found = memopt.compare_steps(
            {
                "plain": ways.way("cuda"),
                "fp16": ways.way("cuda", half=True),
                "activations": ways.way("cuda", around=lambda: memopt.offload_activations(min_size="64KiB")),
                "layers": ways.way("cuda", layers=True),
            },
            steps=steps,
            device="cuda",
        )
        memopt.sim.set_memory(int(found["plain"].peak_bytes * 0.6))
        torch.cuda.empty_cache()
        survived = memopt.compare_steps({"pieces": ways.way("cuda", pieces=True)}, steps=steps, device="cuda")
        memopt.sim.set_memory("1GiB")
    found.measured["pieces"] = survived["pieces"]
    return [
        row(
            "the batch, now and then",
            "a step in micro-batches after an out-of-memory error, here on a card of 60 % of the peak",
            "loss = memopt.backward(compute_loss, x, y, model=model)",
            found,
            "pieces",
        ),
        row(
            "activations",
            "half precision and a gradient scaler",
            'scaler = memopt.amp.GradScaler("cuda")',
            found,
            "fp16",
        ),
        row(
            "activations",
            "offload to the host until the backward pass",
            "with memopt.offload_activations(): loss = …",
            found,
            "activations",
        ),
        row(
            "parameters, gradients, states",
            "offload to the host, layer by layer",
            "memopt.offload_layers(model)",
            found,
            "layers",
        ),
    ]


def allocators(steps: int) -> list[dict[str, Any]]:
    """Of lengths that change from step to step: what each allocator holds of the device beyond what is live."""
    found = {}
    for name in ("torch", "memopt"):
        command = [sys.executable, __file__, "--allocator", name, "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return [
        {
            "problem": "what the allocator holds and nobody uses",
            "technique": "memopt's allocator; batches of changing length",
            "line": "torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())",
            "what": "what is held beyond the live peak",
            "before": found["torch"]["held"] - found["torch"]["live"],
            "after": found["memopt"]["held"] - found["memopt"]["live"],
            "timed": False,
            "time_ratio": None,
            "loss_difference": None,
            "measured": found,
        }
    ]


def one_allocator(name: str, steps: int) -> dict[str, int]:
    """In this process: bytes held at the most and live at the most; kernels do nothing."""
    import torch

    import memopt

    if name == "memopt":
        torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    ways = Steps(steps)
    model = ways.task.build_model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    lengths = torch.randint(16, 129, (steps,), generator=torch.Generator().manual_seed(0)).tolist()
    for (inputs, targets), length in zip(ways.batches("cuda"), lengths, strict=True):
        ways.task.loss(model, (inputs[:, :length], targets[:, :length].contiguous())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"held": torch.cuda.max_memory_reserved(), "live": torch.cuda.max_memory_allocated()}


def workers(quick: bool) -> list[dict[str, Any]]:
    """The bytes of the text's lines that two workers copy in an epoch."""
    from torch.utils.data import DataLoader

    import memopt
    from memopt.demo import standard_library_text

    text = standard_library_text()["train"].decode().splitlines()
    lines = [f"{n}: {line}" for n in range(2 if quick else 8) for line in text]
    copied = {}
    for name, container in (("list", lines), ("SharedStrings", memopt.data.SharedStrings(lines))):
        watched = memopt.data.watch(
            DataLoader(
                container, 1000, shuffle=True, num_workers=2, collate_fn=len, multiprocessing_context="fork"
            )
        )
        for _ in watched:
            pass
        copied[name] = watched.copied_bytes
    return [
        {
            "problem": "the host's memory, with workers",
            "technique": "strings that workers share",
            "line": "memopt.data.SharedStrings(lines)",
            "what": "what two workers copy",
            "before": copied["list"],
            "after": copied["SharedStrings"],
            "timed": None,
            "time_ratio": None,
            "loss_difference": None,
            "measured": copied,
        }
    ]


def compressed(steps: int) -> list[dict[str, Any]]:
    """The model's own bytes in inference, after a few steps of training; what its held-out loss is then."""
    import copy

    import torch

    import memopt

    ways = Steps(steps)
    model = ways.task.build_model()
    optimizer = ways.task.optimizer(model)
    for batch in ways.batches("cpu"):
        ways.task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    sample = next(ways.task.batches(1))[0]

    def held_out_loss(model: torch.nn.Module) -> float:
        return ways.task.evaluate(model)["loss"]

    quantized, pruned = copy.deepcopy(model), copy.deepcopy(model)
    reports = [
        (
            "8-bit weights",
            'memopt.compress.quantize_(model, "int8_weight_only")',
            memopt.compress.quantize_(quantized, "int8_weight_only", evaluate=held_out_loss),
        ),
        (
            "half the channels of the MLPs taken out, before any training on",
            'memopt.compress.prune_(model, 0.5, "structured", sample=x)',
            memopt.compress.prune_(
                pruned,
                0.5,
                "structured",
                sample=sample,
                evaluate=held_out_loss,
                layers=[f"blocks.{n}.mlp.0" for n in range(len(pruned.blocks))],
            ),
        ),
        (
            "half of the weights zero",
            'memopt.compress.prune_(model, 0.5, "l1_unstructured")',
            memopt.compress.prune_(model, 0.5, "l1_unstructured", evaluate=held_out_loss),
        ),
    ]
    return [
        {
            "problem": "the model in inference",
            "technique": technique,
            "line": line,
            "what": "the weights",
            "before": report.before.memory_bytes,
            "after": report.after.memory_bytes,
            "timed": None,
            "time_ratio": None,
            "loss_difference": report.accuracy_change,
            "measured": {"loss before": report.accuracy_before, "loss after": report.accuracy_after},
        }
        for technique, line, report in reports
    ]


# ---- the program ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps; nothing is kept")
    parser.add_argument("--render", action="store_true", help="write the table from the kept results")
    parser.add_argument("--allocator", choices=["torch", "memopt"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=12, help="steps of each way that is timed (12)")
    options = parser.parse_args()
    if not options.render:
        from memopt import sim

        sim.activate(memory="1GiB")
    if options.allocator:
        print(json.dumps(one_allocator(options.allocator, options.steps)))
        return 0
    result = json.loads(RESULT.read_text()) if options.render else measured(options)
    table = render(result)
    print(table)
    if not options.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.write_text(rewritten(PAGE.read_text(), table))
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import environment

    steps = 4 if options.quick else options.steps
    cpu = on_the_cpu(steps)
    rows = [*cpu, *on_the_simulated_device(), *compressed(steps), *allocators(steps), *workers(options.quick)]
    return {
        "environment": environment.describe(),
        "steps": steps,
        "parameters": sum(p.numel() for p in Steps(1).task.build_model().parameters()),
        "plain_peak": cpu[0]["before"],
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
