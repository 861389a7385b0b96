"""The time that a step of AdamW adds to a training step of a large model, by where gradients and states are, as the
simulated device's virtual clock tells it.

A Llama of 7 billion parameters in bf16, checkpointed by block, 4096 tokens, on a device that is said to compute
80 TFLOP/s, to move 1008 GB/s of its memory and 25 GB/s each way over its link. An operation takes what its size says
(roofline.py); copies, waits and the order of streams are those of the program. Nothing is measured on a GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402

FLOPS, BYTES, LINK = 80e12, 1008e9, 25e9  # a second
CASES: dict[str, dict[str, Any]] = {
    "8-bit states on the device, clipped": {"state_bits": 8},
    "gradients on the host, clipped": {"state_bits": 8, "offload_gradients": True},
    "gradients and states on the host, clipped": {
        "state_bits": 8,
        "offload_gradients": True,
        "offload_states": True,
    },
    "… of 4 bits": {"state_bits": 4, "offload_gradients": True, "offload_states": True},
    "states on the host, in backward": {"state_bits": 8, "offload_states": True, "step_in_backward": True},
    "… of 4 bits, in backward": {"state_bits": 4, "offload_states": True, "step_in_backward": True},
}
NO_STEP = "no step"


def seconds(case: str, model: str, length: int, micro_batches: int) -> float:
    """Return the seconds of a training step; in a process of its own."""
    from memopt import sim

    sim.activate("400GiB", blank=True, lazy=True)
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import memopt.amp
    import memopt.nn
    import memopt.optim
    from benchmarks.llama_train import SIZES, Llama
    from benchmarks.roofline import tensors, work_of
    from memopt.optim._one_pass import OnePass

    sim.price("link GiB", int((1 << 30) / LINK * 1e9))
    sim.price("device GiB", int((1 << 30) / BYTES * 1e9))
    sim.price("kernel", 0)

    def spend(took: float) -> None:
        sim.price("kernel", int(took * 1e9))
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        sim.price("kernel", 0)

    class Priced(TorchDispatchMode):
        """Has each operation take its time, on the stream that it is on."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            flops, moved, _ = work_of(func, args, kwargs, out)
            if tensors((args, kwargs)) and moved and "copy" not in func._schema.name:
                spend(max(flops / FLOPS, moved / BYTES))
            return out

    update = OnePass._update

    def priced_update(self: OnePass, scaling: Any) -> None:
        update(self, scaling)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moved = sum(
            3 * p.nbytes + 2 * sum(value.nbytes for name, value in self.state[p].items() if name != "step")
            for p in stepped
        )
        spend(moved / BYTES)

    OnePass._update = priced_update  # type: ignore[method-assign]
    size, options = SIZES[model], CASES.get(case)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        net = Llama(size)
        words = torch.zeros(1, length, dtype=torch.int64)
    made = None if options is None else memopt.optim.AdamW(net.parameters(), lr=1e-5, **options)

    def step() -> None:
        with Priced():
            for _ in range(micro_batches):
                memopt.nn.linear_cross_entropy(net(words), net.head.weight, words).backward()
            if made is not None and not (options or {}).get("step_in_backward"):
                memopt.amp.clip_grad_norm_(net.parameters(), 1.0)
        if made is not None:
            made.step()
        net.zero_grad()

    step()
    torch.cuda.synchronize()
    before = sim.clock()["device"]
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return (sim.clock()["device"] - before) / 2e9


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--case", choices=[NO_STEP, *CASES], help=argparse.SUPPRESS)
    parser.add_argument("--micro-batches", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, length = ("1b", 1024) if options.quick else ("7b", 4096)
    if options.case:
        print(json.dumps(seconds(options.case, model, length, options.micro_batches)))
        return 0
    report = harness.Report("bench_step_overlap", options)
    for micro_batches in (1, 4):
        found: dict[str, float] = {}
        for case in (NO_STEP, *CASES):
            if micro_batches > 1 and "in backward" in case:  # which does not accumulate
                continue
            command = [sys.executable, __file__, "--case", case, "--micro-batches", str(micro_batches)]
            ended = subprocess.run(
                command + ["--quick"] * options.quick, capture_output=True, text=True, cwd=ROOT
            )
            if ended.returncode:
                raise SystemExit(f"{case} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
            found[case] = json.loads(ended.stdout.splitlines()[-1])
        title = f"a training step of a Llama of {model}, {length} tokens, {micro_batches} micro-batches"
        report.record(title, found, unit="s", peer=NO_STEP)
        exposed = {case: 100 * (took / found[NO_STEP] - 1) for case, took in found.items() if case != NO_STEP}
        report.record(f"what its step adds, {micro_batches} micro-batches", exposed, unit="%")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
