"""Results of the demo, and the promises that they break."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from memopt import _C

LOSS_SHARE = 0.03
"""Of what plain training gained: how far from its final loss the other one may end. Among four seeds of plain training
that loss spread by 10 % of it (the GPT) and 3 % (the CNN), at the sizes of --quick."""
DEVICE_LOSSES = 1e-3
"""Between the simulated GPU's losses and the CPU's: 0 where no step ran in pieces, which round otherwise."""
LEARNED = 0.9  # a training that ends above this share of its first loss has learned nothing


@dataclass
class TaskResult:
    """Of one task. budget: bytes, half of the plain step's peak. plain, within: what the processes told at their end:
    "peak" (bytes), "by_category", "seconds" (a step's, the median), "losses", "loss" (the mean of the last five),
    "held_out"; of the second "plan" and "predicted" (bytes, with what lies beside the plan), too, or "infeasible", why
    there is none."""

    name: str
    about: str
    budget: int = 0
    plain: dict[str, Any] = field(default_factory=dict)
    within: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        return "peak" in self.within and int(self.within["peak"]) <= self.budget

    @property
    def slower(self) -> float:
        """The step's time over the plain one's, less 1."""
        return float(self.within["seconds"] / self.plain["seconds"] - 1)

    @property
    def slower_predicted(self) -> float:
        """Of forward and backward pass, by the plan."""
        plan = self.within["plan"]
        return float(plan["seconds"] / plan["plain_seconds"] - 1)

    def wrong(self) -> list[str]:
        size = _C.format_size
        if "infeasible" in self.within:
            return [f"{self.name}: no schedule is within the budget: {self.within['infeasible']}"]
        found = []
        if not self.kept:
            found.append(
                f"{self.name}: the budget of {size(self.budget)} was not kept: {size(self.within['peak'])} were live"
            )
        first, plain, within = self.plain["losses"][0], self.plain["loss"], self.within["loss"]
        if not plain <= LEARNED * first:
            found.append(
                f"{self.name}: plain training did not learn: its loss went from {first:.4f} to {plain:.4f}"
            )
        elif not abs(within - plain) <= LOSS_SHARE * (first - plain):
            found.append(
                f"{self.name}: the loss is off: {within:.4f} within the budget, {plain:.4f} without; within "
                f"{LOSS_SHARE * (first - plain):.4f} was to be expected"
            )
        return found


@dataclass
class DemoResult:
    """device: its name; torch: the version that trained. simulated: what the simulated GPU's process told at its end,
    or "missing": why there was none. replays: memopt's allocator on the trainings' own requests, bytes by task and
    training. notes: what was left out, and why."""

    tasks: list[TaskResult] = field(default_factory=list)
    device: str = ""
    on_gpu: bool = False
    torch: str = ""
    simulated: dict[str, Any] = field(default_factory=dict)
    replays: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cores: int = 1
    load: float = 0.0  # of the machine, the demo's own among it

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: all figures, "kept" of each task, and "wrong"."""
        told = asdict(self)
        for task, shown in zip(self.tasks, told["tasks"], strict=True):
            shown["kept"] = task.kept
        return {**told, "wrong": self.wrong()}

    def wrong(self) -> list[str]:
        """In words; empty where all is as it must be."""
        found = [line for task in self.tasks for line in task.wrong()]
        if not self.tasks:
            found.append("nothing was trained")
        if "difference" in self.simulated:
            if not self.simulated["plain"]:
                found.append("simulated GPU: the plain step fits where it must not")
            if not self.simulated["difference"] <= DEVICE_LOSSES:
                found.append(f"simulated GPU: a loss is {self.simulated['difference']:.3g} off the CPU's")
        return found
