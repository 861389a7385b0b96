"""A script on fake tensors, where there is no CUDA build of torch.

Tensors that it puts on a CUDA device and tensors on the CPU count alike, because all are CPU tensors here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt._estimate.training import TrainingTask


@dataclass
class FakeScript(TrainingTask):
    """A script that ends with the last of `count` optimizer steps."""

    subject: None = None
    argv: list[str] = field(default_factory=list)
    module: bool = False
    count: int | None = 3

    def run(self, device: str) -> None:
        from memopt._estimate import script
        from memopt._estimate.loops import Loops

        loops = Loops(self.count, stop=True)
        end = script.run(self.argv, self.module)
        if end.error is not None:
            raise end.error
        if end.stopped == "exit" and end.status:
            raise RuntimeError(f"it ended with status {end.status} after {loops.done} steps")
