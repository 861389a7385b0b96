"""A script on fake tensors, where there is no CUDA build of torch: those that it puts on a CUDA device and its own are
counted alike, for here all are a CPU's."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.estimation.training import Training


@dataclass
class FakeScript(Training):
    """Ends with the last of `steps` of an optimizer."""

    subject: None = None
    argv: list[str] = field(default_factory=list)
    module: bool = False
    count: int | None = 3

    def run(self, device: str) -> None:
        from memopt.estimation import script
        from memopt.estimation.scratch_files import ScratchFiles
        from memopt.estimation.watch import Steps

        files, steps = ScratchFiles(), Steps(self.count)
        try:
            end = script.run(self.argv, self.module)
        finally:
            files.remove()
        if end.error is not None:
            raise end.error
        if end.stopped == "exit" and end.status:
            raise RuntimeError(f"it ended with status {end.status} after {steps.done} steps")
