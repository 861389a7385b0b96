"""The process in which one training runs."""

from __future__ import annotations

from typing import Any

import torch

import memopt
from memopt._demo import measured_run
from memopt._demo.baseline import OrdinaryTraining
from memopt._demo.request import Asked
from memopt._demo.tasks import task_of
from memopt._demo.with_memopt import TrainingWithinBudget
from memopt._runtime.process import requests, tell
from memopt.chain import InfeasibleBudget


def main() -> None:
    asked = Asked(**next(requests()))
    task = task_of(asked.task)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.set_num_threads(asked.threads)
    name = torch.cuda.get_device_name() if on_gpu else f"the CPU, {asked.threads} of its threads a training"
    tell("device", type=device.type, name=name, torch=torch.__version__)

    facts: dict[str, Any] = {}
    found: dict[str, Any] = {}
    training: measured_run.Training
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
    found |= measured_run.run(training, asked.steps, device, tell, facts=facts, path=asked.recording)
    found["held_out"] = task.evaluate(training.model)
    if on_gpu:
        found["reserved"] = torch.cuda.max_memory_reserved()
    tell("end", **found)


if __name__ == "__main__":
    main()
