"""The plan of `memopt fit`, in a file: techniques with which a script fits a card, and what they were found for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, get_args, get_type_hints

import memopt
from memopt import _C

BACKENDS = ("native", "expandable", "pool")
# Techniques that a script can be run with. CHECKPOINT is followed by ":" and a budget in bytes; one of
# SAVED_ELSEWHERE may be followed by ":" and the bytes that stay as they are; STATES_ON_DISK is followed by ":" and a
# directory.
FUSED, EIGHT_BITS, FOUR_BITS, CHECKPOINT = "fused", "eight bits", "four bits", "checkpoint"
OFFLOAD_ACTIVATIONS, OFFLOAD_LAYERS, LOSS_HEAD = "offload activations", "offload layers", "loss head"
CODED_ACTIVATIONS = "activations in 8 bits"
SAVED_ELSEWHERE = {OFFLOAD_ACTIVATIONS: "cpu", CODED_ACTIVATIONS: "8bit"}  # by their places
TILES = "tiles"  # of rows, of MLPs
OFFLOAD_GRADIENTS, OFFLOAD_STATES, STATES_ON_DISK = "offload gradients", "offload states", "states on disk"
STEP_IN_BACKWARD, FACTORED = "step in backward", "factored"
# What a script may keep: gradients until the next backward pass, a model's output until its own.
KEEPS = GRADIENTS, OUTPUT = "gradients", "output"
BF16 = "bf16"  # autocast of the model's calls
MICRO_BATCHES = "micro-batches"  # followed by ":" and their number; of memopt.fit() alone
LEAST_BUDGET = "least budget"  # where techniques were applied: CHECKPOINT's, if its own was too small
HAVE_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # optimizers of torch's that FUSED is for
PLANNING, PLANNED = "planning", "planned"  # marks of a recording
OPTIONS: dict[str, dict[str, Any]] = {  # of memopt.optim's optimizers, by technique
    EIGHT_BITS: {"state_bits": 8},
    FOUR_BITS: {"state_bits": 4},
    FACTORED: {"factored": True},
    OFFLOAD_GRADIENTS: {"offload_gradients": True},
    OFFLOAD_STATES: {"offload_states": True},
    STATES_ON_DISK: {"offload_states": ""},  # what follows its name
    STEP_IN_BACKWARD: {"step_in_backward": True},
}


def plain(technique: str) -> str:
    """Return a technique's name without what follows it."""
    return technique.partition(":")[0]


def of_optimizers(techniques: Iterable[str]) -> frozenset[str]:
    """Return those of techniques that are options of memopt.optim's optimizers."""
    return frozenset(name for name in techniques if plain(name) in OPTIONS)


def options_of(techniques: Iterable[str]) -> dict[str, Any]:
    """Return the options of memopt.optim's optimizers that techniques are."""
    behind = {name: rest for name, _, rest in (one.partition(":") for one in techniques)}
    return {
        key: behind[name] or value
        for name in OPTIONS
        if name in behind
        for key, value in OPTIONS[name].items()
    }


def in_code(options: Mapping[str, Any]) -> str:
    """Return options as a call has them."""
    written = (json.dumps(value) if isinstance(value, str) else repr(value) for value in options.values())
    return ", ".join(f"{key}={value}" for key, value in zip(options, written, strict=True))


@dataclass(frozen=True)
class Plan:
    """script: its path, without links, and sha256: of its text. card_bytes: that the plan needs the card to have.
    techniques, backend: as a request of an estimate has them. peak_bytes: of tensors in the run that confirmed it.
    step_seconds: of a step, by a roofline of the card's data sheet; 0 where no whole step was seen.
    trained_bytes: of the parameters of the optimizer that steps first; 0 where none steps.
    keeps: of KEEPS, what the script does. host_memory: bytes of the host's for what stages offload; None for no limit.
    ranks: of the job, for each of which the plan is."""

    script: str
    sha256: str
    arguments: list[str]
    torch: str
    card_bytes: int
    peak_bytes: int
    backend: str = "native"
    techniques: list[str] = field(default_factory=list)
    step_seconds: float = 0.0
    trained_bytes: int = 0
    keeps: list[str] = field(default_factory=lambda: [*KEEPS])
    ranks: int = 1
    host_memory: int | None = None
    memopt: str = memopt.__version__

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def check_call(self, argv: Sequence[str], module: bool = False) -> None:
        """Raise ValueError, which names the difference, if the plan was made for another call or another memopt.

        module: argv[0] is a module's name, as for python -m."""
        script, text = described(argv[0], module)
        for what, planned, given in (
            ("the script", self.script, script),
            ("the text of the script, by its sha256", self.sha256, text),
            ("the script's arguments", " ".join(self.arguments) or "none", " ".join(argv[1:]) or "none"),
            ("memopt", self.memopt, memopt.__version__),
        ):
            _same(what, planned, given)
        if self.arguments != list(argv[1:]):
            raise ValueError(_differs("the script's arguments", str(self.arguments), str(list(argv[1:]))))

    def check_ranks(self, count: int) -> None:
        """Raise ValueError if the plan was made for a job of another number of ranks."""
        _same("the number of ranks", f"{self.ranks}", f"{count}")

    def check_torch(self, version: str) -> None:
        """Raise ValueError if the plan was made with another torch."""
        _same("torch", self.torch, version)

    def check_model(self, trained_bytes: int) -> None:
        """Raise ValueError if the optimizer that steps first has parameters of another size."""
        if self.trained_bytes:
            what = "the model, by the size of the parameters that its first optimizer steps"
            _same(what, f"{self.trained_bytes} bytes", f"{trained_bytes} bytes")

    def check_card(self, usable: int) -> None:
        """Raise ValueError if the card is smaller than the one planned for."""
        if usable < self.card_bytes:
            size = _C.format_size
            planned, given = size(self.card_bytes), size(usable)
            if planned == given:
                planned, given = f"{self.card_bytes} bytes", f"{usable} bytes"
            raise ValueError(_differs("a smaller card", f"at least {planned}", given))

    def check_disk(self) -> None:
        """Raise ValueError if the directory that the plan keeps states in is gone, or cannot be written to."""
        for name in self.techniques:
            if plain(name) == STATES_ON_DISK:
                try:
                    _C.Disk(directory := name.partition(":")[2])
                except OSError as error:
                    raise ValueError(
                        f"the plan keeps optimizer states in {directory} ({os.strerror(error.errno or 0)}): make that "
                        "directory, or plan again with `memopt fit --disk DIR`"
                    ) from None


def read(path: str) -> Plan:
    """Read a plan. Raises ValueError if the file has none, OSError if it cannot be read."""
    try:
        told = json.loads(Path(path).read_text())
        kinds = get_type_hints(Plan)
        if not isinstance(told, dict) or set(told) != kinds.keys():
            raise ValueError("it has other entries")
        for name, kind in kinds.items():
            if not _is_of(told[name], kind):
                raise ValueError(f"{name} is {json.dumps(told[name])}")
        if unknown := [one for one in told["techniques"] if not _is_technique(one)]:
            raise ValueError(f"it has unknown techniques: {', '.join(unknown)}")
        if told["backend"] not in BACKENDS:
            raise ValueError(f"its backend is none of {', '.join(BACKENDS)}, but {told['backend']}")
        return Plan(**told)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a plan of this memopt's `memopt fit`: {error}. Make one with `memopt fit -o {path}`"
        ) from None


def _is_technique(name: str) -> bool:
    if name.startswith(tuple(f"{sized}:" for sized in (CHECKPOINT, *SAVED_ELSEWHERE))):
        return name.partition(":")[2].isdecimal()
    if plain(name) == STATES_ON_DISK:
        return os.path.isabs(name.partition(":")[2])
    return name in (FUSED, *SAVED_ELSEWHERE, OFFLOAD_LAYERS, LOSS_HEAD, TILES, BF16, *OPTIONS)


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is one of a plan's entry of this type."""
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    return type(value) in ((float, int) if kind is float else get_args(kind) or (kind,))


def named(technique: str) -> str:
    """Return a technique's name as a user reads it, with its bytes as a size."""
    name, _, size = technique.partition(":")
    if not size:
        return name
    if name == STATES_ON_DISK:
        return f"{name} in {size}"
    if name in SAVED_ELSEWHERE:
        return f"{name} beyond {_C.format_size(int(size))}"
    return f"{name} within {_C.format_size(int(size))}" if int(size) > 1 else f"{name} to the least"


def allocator_environment(backend: str, before: Mapping[str, str]) -> dict[str, str]:
    """Return `before` with torch's setting of expandable segments, where these are the allocator."""
    if backend != "expandable":
        return dict(before)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((name for name in names if name in before), names[0])
    options = re.sub(r"expandable_segments:\w+,?", "", before.get(name, ""))
    return {**before, name: ",".join(["expandable_segments:True", *filter(None, options.split(","))])}


def described(script: str, module: bool = False) -> tuple[str, str]:
    """Return the path of a script, or of a module by its name, without links, and the SHA-256 of its text."""
    path = (_file_of(script) if module else Path(script)).resolve()
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def _file_of(module: str) -> Path:
    """Return the file that `python -m` would run, found without importing a package that it is in."""
    places, parts, found = [os.getcwd(), *sys.path], module.split("."), None
    for count in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:count]), places)
        if found is None:
            raise ValueError(f"no file of the module {module!r} is found from this folder")
        places = list(found.submodule_search_locations or [])
    if places:  # a package
        return _file_of(f"{module}.__main__")
    assert found is not None and found.origin is not None
    return Path(found.origin)


def _same(what: str, planned: str, given: str) -> None:
    if planned != given:
        raise ValueError(_differs(what, planned, given))


def _differs(what: str, planned: str, given: str) -> str:
    return (
        f"the plan was made for another case: {what}: planned for {planned}, and this is {given}. Plan again with "
        "`memopt fit`"
    )
