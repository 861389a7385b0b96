"""The training as most scripts have it: torch's own pieces, and everything kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt._demo.tasks import Batch, Task, TaskData


class OrdinaryTraining:
    """half: autocast to fp16, as on a GPU; the CPU's fp16 is slow."""

    def __init__(self, task: Task, device: torch.device, half: bool) -> None:
        self.task, self.device, self.half = task, device, half
        self.model = task.build_model(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.learning_rate)
        self.scaler = torch.amp.GradScaler(device.type)

    def batches(self, steps: int) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(TaskData(self.task, steps), batch_size=None)
        for inputs, targets in loader:
            yield inputs.to(self.device), targets.to(self.device)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.float16, enabled=self.half):
            loss = self.task.loss(self.model, (inputs, targets))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()
