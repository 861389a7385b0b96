"""Results of the demo, the promises that they break, and how they are shown on the screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memopt import _C
from memopt._runtime.table import ResultTable, folded_lines

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
        """The step's time divided by the plain step's, minus 1."""
        return float(self.within["seconds"] / self.plain["seconds"] - 1)

    @property
    def slower_predicted(self) -> float:
        """The same for the forward and backward pass, as predicted by the plan."""
        plan = self.within["plan"]
        return float(plan["seconds"] / plan["plain_seconds"] - 1)

    def wrong(self) -> list[str]:
        size = _C.format_size
        if "infeasible" in self.within:
            return [f"{self.name}: no schedule fits the budget: {self.within['infeasible']}"]
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
                f"{self.name}: the loss is off: {within:.4f} within the budget, {plain:.4f} without it; a difference "
                f"of at most {LOSS_SHARE * (first - plain):.4f} was expected"
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
        """Return JSON-able values: all figures, whether each task's budget was kept, and what is wrong."""
        told = asdict(self)
        for task, shown in zip(self.tasks, told["tasks"], strict=True):
            shown["kept"] = task.kept
        return {**told, "wrong": self.wrong()}

    def wrong(self) -> list[str]:
        """The broken promises in words; empty if there are none."""
        found = [line for task in self.tasks for line in task.wrong()]
        if not self.tasks:
            found.append("nothing was trained")
        if "difference" in self.simulated:
            if not self.simulated["plain"]:
                found.append("simulated GPU: the plain step fits, but it must not")
            if not self.simulated["difference"] <= DEVICE_LOSSES:
                found.append(
                    f"simulated GPU: a loss differs from the CPU's by {self.simulated['difference']:.3g}"
                )
        return found


# ---- the screen ------------------------------------------------------------------------------------------------------


_WIDTH = 100
HEADS = ("", "peak memory", "predicted", "budget kept", "a step", "final loss")
_NEXT = """\
next:  python -m memopt estimate --gpu 24GiB train.py    will your script fit a card? (no GPU needed)
       python -m memopt fit --gpu 24GiB train.py         with which changes it does
       python -m memopt run train.py                     your script as it is, and where its memory went
       memopt.auto_checkpoint(model, batch, memory_budget="8GiB", optimizer=optimizer)
                                                         what this demo did, in your script
       python -m memopt doctor                           what works on this machine"""


def text(result: DemoResult, page: str | None) -> str:
    table = [rows(task) for task in result.tasks]
    heads, *cells = ResultTable([row for of_task in table for row in of_task], HEADS).lines()
    lines = [f"memopt demo: trained on {result.device} (torch {result.torch}), in half the memory", "", heads]
    for task, of_task in zip(result.tasks, table, strict=True):
        lines += [f"  {task.about}", *cells[: len(of_task)]]
        del cells[: len(of_task)]
    lines += ["", *words(result), ""]
    wrong = result.wrong()
    if wrong:
        lines += ["FAILED CHECKS:", *(f"  {line}" for line in wrong)]
    else:
        lines += [
            f"every budget kept ({result.seconds:.0f} s)",
            f"losses differ because the optimizer states have 8 bits: here by less than {LOSS_SHARE:.0%} of the loss "
            "reduction of plain training",
        ]
    if page:
        lines.append(f"what was in memory at each moment, and which code held it: {page}")
    return "\n".join([*lines, "", _NEXT])


def rows(task: TaskResult) -> list[tuple[str, ...]]:
    size, plain, within = _C.format_size, task.plain, task.within
    first = ("  plain", size(plain["peak"]), "", "", _time(plain["seconds"]), f"{plain['loss']:.4f}")
    label = f"  within {size(task.budget)}"
    if "infeasible" in within:
        return [first, (label, "", "", "no", "", "")]
    peaks = size(within["peak"]), size(within["predicted"])
    kept = "yes" if task.kept else "NO"
    ratio, more = within["peak"] / plain["peak"], within["loss"] - plain["loss"]
    return [
        first,
        (label, *peaks, kept, _time(within["seconds"]), f"{within['loss']:.4f}"),
        ("", f"x {ratio:.2f}", "", "", f"{task.slower:+.0%}", f"{more:+.4f}"),
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def words(result: DemoResult) -> list[str]:
    """Return further results as text to fold away."""
    size = _C.format_size
    told = []
    planned = [task for task in result.tasks if "plan" in task.within]
    if planned:
        slower = ", ".join(f"{task.name} {task.slower_predicted:+.0%}" for task in planned)
        told.append(
            f"how: memopt.auto_checkpoint's schedule (it predicted the time of forward and backward: {slower}), "
            "AdamW's states in 8 bits, memopt's GradScaler, prefetched batches; memory is the peak of live bytes "
            "over all steps, with each training in its own process"
        )
    device = result.simulated
    if "difference" in device:
        same = "bit for bit" if device["difference"] == 0 else f"within {device['difference']:.1g}"
        told.append(
            f"on a simulated GPU with {size(device['capacity'])}, under memopt's allocator: plain training: "
            f'"{device["plain"]}"; within {size(device["budget"])}: {len(device["losses"])} steps, the losses are the '
            f"CPU's {same}; it held at most {size(device['held'])}"
        )
    elif "missing" in device:
        told.append(f"no simulated GPU: {device['missing']}")
    replays = [
        f"{size(replay['held'])} for the {size(replay['live'])} of {name}"
        for name, replay in result.replays.items()
    ]
    if replays:
        told.append(
            f"given the requests of these trainings, memopt's allocator holds {', '.join(replays)} (it takes memory "
            "in granules of 2 MiB)"
        )
    if result.load > 2 * result.cores:
        told.append(
            f"this machine is busy (a load of {result.load:.1f} on {result.cores} cores): times are unreliable"
        )
    told += result.notes
    return [line for words in told for line in folded_lines(words, _WIDTH, "  ", "    ")]


def recording_of(folder: Path, kind: str, which: str) -> Path:
    """Return the file of a training's recording. which: "plain" or "within"."""
    return folder / f"{kind}.{which}.mopt"
