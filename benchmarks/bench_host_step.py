"""AdamW's step where states are on the host: memopt's on bf16 parameters beside DeepSpeedCPUAdam, the optimizer of
ZeRO-Offload.

DeepSpeed's states are fp32 by default, and bf16 where that is asked for. It is compiled at its first use.
By hand, in an environment with a CPU build of torch and deepspeed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import memopt.optim  # noqa: E402
from benchmarks import harness  # noqa: E402

PEER, BF16 = "DeepSpeedCPUAdam", "DeepSpeedCPUAdam, bf16 states"
GOAL = 3.0
TENSORS = 64


def parameters(elements: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(elements).bfloat16()) for _ in range(TENSORS)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        raise SystemExit(
            "bench_host_step: needs deepspeed (pip install --no-deps deepspeed, and what it names)"
        ) from None
    report = harness.Report("bench_host_step", options)
    elements = 100_000 if options.quick else 1_000_000

    def ours(**more: object) -> torch.optim.Optimizer:
        return memopt.optim.AdamW(parameters(elements), lr=1e-4, **more)  # type: ignore[arg-type]

    optimizers = {
        PEER: DeepSpeedCPUAdam(parameters(elements), lr=1e-4),
        BF16: DeepSpeedCPUAdam(parameters(elements), lr=1e-4, fp32_optimizer_states=False),
        "memopt, bf16 states": ours(),
        "memopt, fp32 master weights and states": ours(master_weights=True),
        "memopt, 8-bit states": ours(state_bits=8),
        "memopt, 4-bit states": ours(state_bits=4),
    }
    report.compare(
        f"AdamW's step, {TENSORS * elements / 1e6:.0f} million bf16 parameters",
        {name: optimizer.step for name, optimizer in optimizers.items()},
        goal={"memopt, 8-bit states": GOAL},
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
