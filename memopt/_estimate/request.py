"""Request to an estimate's child process: a script, a device, and the limits of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from memopt._estimate.protection import Protection

BACKENDS = ("native", "expandable", "pool")
# Techniques that a script can be run with; CHECKPOINT is followed by ":" and a budget in bytes.
FUSED, EIGHT_BITS, CHECKPOINT = "fused", "eight bits", "checkpoint"
OFFLOAD_ACTIVATIONS, OFFLOAD_LAYERS, LOSS_HEAD = "offload activations", "offload layers", "loss head"
SHORTEN = ("all", "training", "none")  # of a script's loops


@dataclass(frozen=True)
class Request:
    """argv: a script, or where `module` is set a module, and its arguments. The device has `memory` bytes, of which a
    context takes `context`; each cuDNN plan asks for `cudnn_workspace`. fraction: the part of an unknown mask that
    holds (guesses.py). steps: of an optimizer, after which its loops end, and the script where `shorten` says none;
    0: it does not train. seconds: after which the script ends. backend: which allocator. batch_size: of each
    DataLoader, instead of the script's. protection, share_memory: of the user's files, protection.py's; the answer's
    folder is private, and is for what the script writes too. compute: every operation is computed, so nothing is
    guessed: for sizes that the host can hold. ranks: of a job in which it is number `rank`, 0 for none; spread: how a
    script that knows of one device is spread over them ("ddp", "fsdp", "tp"). techniques: of those above, which the
    script is run with. answer, recording: files to write."""

    argv: list[str]
    answer: str
    memory: int
    module: bool = False
    compute_capability: str = "8.0"
    multiprocessors: int = 108
    devices: int = 1
    context: int = 0
    cudnn_workspace: int = 0
    fraction: float = 1.0
    steps: int | None = None
    shorten: str = "all"
    seconds: float | None = None
    backend: str = "native"
    batch_size: int | None = None
    record: bool = False
    recording: str | None = None
    protection: str = "redirect"
    share_memory: bool = True
    compute: bool = False
    ranks: int = 0
    rank: int = 0
    spread: str | None = None
    techniques: list[str] = field(default_factory=list)

    def protection_of(self) -> Protection:
        return Protection(self.protection, self.share_memory)


def read(path: str) -> Request:
    given = json.loads(Path(path).read_text())
    unknown = sorted(set(given) - {one.name for one in fields(Request)})
    if unknown:
        raise ValueError(f"{path} asks for {', '.join(unknown)}, which there is not")
    request = Request(**given)
    if not request.argv:
        raise ValueError(f"{path} names no script: argv is empty")
    if request.backend not in BACKENDS:
        raise ValueError(f"{path}: backend is one of {', '.join(BACKENDS)}, not {request.backend!r}")
    if request.shorten not in SHORTEN:
        raise ValueError(f"{path}: shorten is one of {', '.join(SHORTEN)}, not {request.shorten!r}")
    return request
