"""The same training twice, as most scripts have it and inside a memory budget, and its measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

import memopt
from memopt._checkpoint.plan import Plan
from memopt._demo.tasks import Batch, Task, TaskData
from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import Recording


class OrdinaryTraining:
    """The training as most scripts have it: torch's own pieces, and everything kept for the backward pass.

    half: autocast to fp16, as on a GPU; the CPU's fp16 is slow.
    """

    def __init__(self, task: Task, device: torch.device, half: bool) -> None:
        self.task, self.device, self.half = task, device, half
        self.model = task.build_model(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate
        )
        self.scaler = torch.amp.GradScaler(device.type)

    def batches(self, steps: int) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(TaskData(self.task, steps), batch_size=None)
        for inputs, targets in loader:
            yield inputs.to(self.device), targets.to(self.device)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.float16, enabled=self.half):
            return self.task.loss(self.model, (inputs, targets))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(inputs, targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


AHEAD = 2  # batches that are on their way while one is used


class TrainingWithinBudget(OrdinaryTraining):
    """The same training inside a memory budget: memopt's in the place of torch's pieces, line by line.

    memory_budget: bytes, of all that lives in a step. Raises memopt.chain.InfeasibleBudget where no schedule is that
    small.
    """

    def __init__(self, task: Task, device: torch.device, half: bool, memory_budget: int) -> None:
        super().__init__(task, device, half)
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


# ---- the measurement -------------------------------------------------------------------------------------------------


FIRST = 3  # steps after which the peak is told: the optimizer's state is there from the second on
_LAST = 5  # steps whose losses the final one is the mean of
_MAX_EVENTS = 5_000_000  # births and deaths; a step of the demo's has about a thousand


def measure(
    training: OrdinaryTraining,
    steps: int,
    device: torch.device,
    tell: Callable[..., None],
    *,
    facts: dict[str, Any],
    path: str,
) -> dict[str, Any]:
    """Run the steps under a recording, which takes about 1 % of their time.

    tell(kind, …) is called at the end of each step, and with the peak after the first few. The last steps' recording,
    with `facts`, is written to `path`."""
    losses: list[float] = []
    seconds: list[float] = []
    with memopt.profile(device.type, max_events=_MAX_EVENTS) as memory:
        batches = training.batches(steps)
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            losses.append(training.step(*batch).item())  # .item() waits for the device
            del batch
            seconds.append(time.perf_counter() - begun)
            tell("step", step=len(losses), of=steps, loss=losses[-1])
            if len(losses) == FIRST:
                tell("peak", bytes=memory.peak_bytes)
        recording = memory.recording
    recording_file.save(_last_steps(recording, facts), path)
    return {
        "peak": recording.peak()[0],
        "by_category": recording.by_category(),
        "seconds": statistics.median(seconds[FIRST - 1 :]),
        "losses": losses,
        "loss": statistics.fmean(losses[-_LAST:]),
    }


def _last_steps(recording: Recording, facts: dict[str, Any], count: int = 3) -> Recording:
    ends = [mark.event for mark in recording.marks if mark.kind == "step"]
    cut = recording.since(ends[-count - 1]) if len(ends) > count else recording
    cut.facts |= facts
    return cut
