"""The process of the simulated GPU: a training that does not fit its memory, and the same one that does."""

from __future__ import annotations

import gc
import os

from memopt import sim
from memopt._demo.request import Asked
from memopt._runtime.process import requests, tell

# Two of 8 MiB each would be most of so small a budget. They are read when cuBLAS is first used.
_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}


def main() -> None:
    asked = Asked(**next(requests()))
    os.environ.update(_WORKSPACES)
    sim.activate(memory="4GiB")

    import torch

    import memopt
    from memopt._demo.baseline import OrdinaryTraining
    from memopt._demo.measured_run import FIRST
    from memopt._demo.tasks import task_of
    from memopt._demo.with_memopt import TrainingWithinBudget
    from memopt.sim._compute import Compute

    task = task_of(asked.task)
    torch.set_num_threads(asked.threads)
    # Before anything else of torch: in its CUDA build even training on the CPU would be too late for this.
    memopt.enable(backend="pool", on_oom="raise")

    def ordinary(device: str, steps: int) -> None:
        training = OrdinaryTraining(task, torch.device(device), False)
        for batch in training.batches(steps):
            training.step(*batch)

    def within_budget(device: str, where: str) -> list[float]:
        tell("plans")
        training = TrainingWithinBudget(task, torch.device(device), False, budget)
        losses = []
        for batch in training.batches(asked.steps):
            losses.append(training.step(*batch).item())
            tell("step", step=len(losses), of=asked.steps, where=where)
        return losses

    with memopt.profile("cpu") as memory:
        ordinary("cpu", FIRST)
        budget = memory.peak // 2
    on_cpu = within_budget("cpu", "the CPU, to compare with")
    # Memory comes in granules of 2 MiB, and the smaller the budget, the more of them are half used.
    capacity = budget * 5 // 4 + (4 << 20)
    torch.cuda.set_per_process_memory_fraction(capacity / torch.cuda.get_device_properties(0).total_memory)
    with Compute():
        said = ""
        try:
            ordinary("cuda", 1)
        except torch.OutOfMemoryError as error:
            said = str(error).split(". ", 1)[0]
        gc.collect()  # the graph that the exception's frames held
        on_device = within_budget("cuda", "the simulated GPU")
    stats = memopt.cuda.memory_stats()
    tell(
        "end",
        budget=budget,
        capacity=capacity,
        plain=said,
        losses=on_device,
        difference=max(abs(a - b) for a, b in zip(on_cpu, on_device, strict=True)),
        held=stats["peak_held_bytes"],
        requests=stats["allocations"],
        failed=stats["out_of_memory"],
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
