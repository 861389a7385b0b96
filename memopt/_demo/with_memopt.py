"""The same training inside a memory budget: what memopt puts in the place of torch's pieces, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

import memopt
from memopt._checkpoint.plan.plan import Plan
from memopt._demo.tasks import Batch, Task, TaskData

AHEAD = 2  # batches that are on their way while one is used


class TrainingWithinBudget:
    """half: as in OrdinaryTraining. memory_budget: bytes, of all that lives in a step.

    Raises memopt.chain.InfeasibleBudget where no schedule is that small."""

    def __init__(self, task: Task, device: torch.device, half: bool, memory_budget: int) -> None:
        self.task, self.device, self.half = task, device, half
        self.model = task.build_model(device)
        self.optimizer = memopt.optim.AdamW(self.model.parameters(), lr=task.learning_rate, state_bits=8)
        self.scaler = memopt.amp.GradScaler(device.type)
        inputs, targets = next(task.batches(1, device))
        self.beside = AHEAD * (inputs.nbytes + targets.nbytes)
        if device.type == "cpu":
            self.beside += task.data_bytes()
        with torch.autocast(device.type, torch.float16, enabled=half):
            memopt.auto_checkpoint(
                self.model,
                inputs,
                memory_budget=memory_budget - self.beside,
                optimizer=self.optimizer,
                loss=lambda logits: task.loss_of(logits, targets),
            )
        # Batch norm averages over the batch, so a batch in pieces would be another training: memopt.backward refuses.
        self.in_pieces = not any(isinstance(m, torch.nn.BatchNorm2d) for m in self.model.modules())

    @property
    def plan(self) -> Plan:
        return cast(Plan, self.model.plan)

    def batches(self, steps: int) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(TaskData(self.task, steps), batch_size=None)
        yield from memopt.data.Prefetcher(loader, self.device, depth=AHEAD)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.float16, enabled=self.half):
            return self.task.loss(self.model, (inputs, targets))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.in_pieces:  # if memory runs out in spite of all, the step runs again in pieces
            loss = memopt.backward(self.loss, inputs, targets, model=self.model, scaler=self.scaler)
        else:
            loss = self.loss(inputs, targets)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()
