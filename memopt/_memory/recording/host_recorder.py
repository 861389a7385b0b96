"""Base of the CPU recorders: one device, and a list of births and deaths that become blocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from memopt._memory.recording.blocks import pair
from memopt._memory.recording.recorder import Recorder, Watch, categories_of, facts, marks_of
from memopt._memory.recording.recording import Recording, Stack
from memopt._memory.recording.unrecorded import unrecorded

Columns = dict[str, torch.Tensor]
EVENT = ("birth", "address", "size", "time", "stack", "module")
BLOCK = ("address", "size", "stack", "module")


class HostRecorder(Recorder):
    source: ClassVar[str]  # a recording's

    def __init__(self, max_events: int) -> None:
        super().__init__(max_events)
        self._watch = Watch()
        self._stacks: list[Stack] = [()]
        self._running = True

    @abstractmethod
    def _seen(self) -> tuple[Columns, Columns, int]:
        """Return the EVENT fields of each kept event, the BLOCK fields of each older block, and the first event's
        position."""

    def _all_stacks(self) -> list[Stack]:
        return list(self._stacks)

    # ---- what the program tells ---------------------------------------------------------------------------------

    def begins(self, phase: str, stack: Stack) -> None:
        self._watch.phases.begin(phase, self.position("cpu"), stack)

    def ends(self, phase: str) -> None:
        self._watch.phases.end(phase, self.position("cpu"))
        if phase == "step":
            self.mark("step")

    def mark(self, kind: str, text: str = "") -> None:
        self._watch.marks.append((self.position("cpu"), kind, text))

    # ---- reading ------------------------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        return ["cpu"]

    def recording(
        self, device: torch.device | str | int | None = None, *, since: int | None = None
    ) -> Recording:
        if device is not None and (isinstance(device, int) or torch.device(device).type != "cpu"):
            raise ValueError(f"device={device!r}: only the CPU is recorded here")
        with unrecorded():
            self._program.attribute_all()
            columns, times, first = self._columns()
            position = first + len(times)
            columns["category"] = categories_of(columns, self._watch, first, position, len(times))
            made = Recording(
                device="cpu",
                source=self.source,
                columns=columns,
                times_us=times,
                stacks=self._all_stacks(),
                modules=list(self._program.modules.names),
                marks=marks_of(self._watch, first),
                facts=facts() | self._program.facts() | {"events_lost": first},
            )
            return made if since is None else made.since(since - first - 1)

    def _columns(self) -> tuple[Columns, torch.Tensor, int]:
        """Return everything kept as a recording's columns, the times of the events, and the position of the first."""
        told, kept, first = self._seen()
        times = told["time"]
        # What was there before is born before the first event: put in its front, then taken back.
        before = len(kept["address"])
        told |= {name: torch.cat((kept[name], told[name])) for name in BLOCK}
        births = torch.cat((torch.ones(before, dtype=torch.bool), told["birth"].bool()))
        born, died, event = pair(births, told["address"])
        columns = {name: told[name][event] for name in BLOCK}
        columns["born"] = (born - before).clamp(min=-1)
        columns["died"] = died - before
        columns["stream"] = torch.zeros_like(born)
        return columns, times, first
