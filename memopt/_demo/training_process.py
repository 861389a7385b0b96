"""The process in which one training runs; on a simulated GPU, one that does not fit its memory and then one that does.

The request comes first: the simulated device has to be there before torch.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import memopt
from memopt import sim
from memopt._runtime.process import requests, tell

# Two of 8 MiB each would be most of so small a budget. They are read when cuBLAS is first used.
_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}


@dataclass(frozen=True)
class Asked:
    """A training. task: the fields of a Task. threads: of torch's on a CPU. memory_budget: bytes; None: the ordinary
    training. recording: the file for its last steps' recording. simulated: on a simulated GPU, by a budget that it
    chooses, and without a recording."""

    task: dict[str, Any]
    steps: int
    threads: int
    memory_budget: int | None = None
    recording: str = ""
    simulated: bool = False


def main() -> None:
    asked = Asked(**next(requests()))
    if asked.simulated:
        os.environ.update(_WORKSPACES)
        sim.activate(memory="4GiB")
    import torch

    torch.set_num_threads(asked.threads)
    (_train_on_simulated_gpu if asked.simulated else _train)(asked)


def _train(asked: Asked) -> None:
    import torch

    from memopt._demo.tasks import task_of
    from memopt._demo.training_variants import OrdinaryTraining, TrainingWithinBudget, measure
    from memopt.chain import InfeasibleBudget

    task = task_of(asked.task)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"the CPU, {asked.threads} of its threads a training"
    tell("device", type=device.type, name=name, torch=torch.__version__)

    facts: dict[str, Any] = {}
    found: dict[str, Any] = {}
    training: OrdinaryTraining
    if asked.memory_budget is None:
        training = OrdinaryTraining(task, device, half=on_gpu)
    else:
        if on_gpu:
            memopt.enable(backend="pool")
        tell("plans")
        try:
            within = TrainingWithinBudget(task, device, on_gpu, asked.memory_budget)
        except InfeasibleBudget as error:
            tell("infeasible", text=str(error))
            return
        training = within
        plan = facts["plan"] = within.plan.as_dict()
        found["predicted"] = within.plan.peak_bytes + within.beside
        found["plan"] = {key: value for key, value in plan.items() if key != "stages"}
    found |= measure(training, asked.steps, device, tell, facts=facts, path=asked.recording)
    found["held_out"] = task.evaluate(training.model)
    if on_gpu:
        found["reserved"] = torch.cuda.max_memory_reserved()
    tell("end", **found)


def _train_on_simulated_gpu(asked: Asked) -> None:
    import torch

    from memopt._demo.tasks import task_of
    from memopt._demo.training_variants import FIRST, OrdinaryTraining, TrainingWithinBudget
    from memopt.sim._compute import Compute

    task = task_of(asked.task)
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
        budget = memory.peak_bytes // 2
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
