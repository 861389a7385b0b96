"""A script on fake tensors, where there is no CUDA build of torch: those that it puts on a CUDA device and its own are
counted alike, for here all are a CPU's."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.estimation.descendants import fork_watched
from memopt.estimation.protection import Protection, confine, redirected, saved
from memopt.estimation.training import Training


@dataclass
class FakeScript(Training):
    """Ends with the last of `count` steps of an optimizer. `folder`: private, for what it writes."""

    subject: None = None
    argv: list[str] = field(default_factory=list)
    module: bool = False
    count: int | None = 3
    protection: Protection = Protection("redirect")  # noqa: RUF009 (it is a tuple)
    folder: str = ""

    def prepare(self) -> None:
        fork_watched()
        confine(self.protection, self.folder)

    def run(self, device: str) -> None:
        from memopt.estimation import script
        from memopt.estimation.loops import Loops

        saved(redirected(self.protection, self.folder))
        loops = Loops(self.count, stop=True)
        end = script.run(self.argv, self.module)
        if end.error is not None:
            raise end.error
        if end.stopped == "exit" and end.status:
            raise RuntimeError(f"it ended with status {end.status} after {loops.done} steps")
