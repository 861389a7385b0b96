"""The report of memopt.deploy.export(): the file's path, what it takes, and how it was checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopt import _C
from memopt._runtime.results import Result
from memopt._runtime.table import Facts, several
from memopt.deploy._inference_memory import InferenceMemory
from memopt.deploy._output_check import Check


@dataclass(repr=False)
class Export(Result):
    """An exported model. Print it; in a notebook it is a table.

    `files`: the files written, with bytes on disk, the model first; none if no path was given. `size_bytes`: their
    total size, measured. `parameters_bytes`, `buffers_bytes`: bytes of the model's storages, each counted once.
    `checks`: the comparisons with the live model's outputs, one for each sample. `memory`: the memory of inference, in
    a separate process; None if it was not measured, and `not_measured` says why. `taken_off`: the wrappers and hooks
    that the live model has and the file lacks. `warnings`: the exporter's warnings. `program`: the exporter's result,
    if no file was requested.
    """

    _not_plain = ("program",)

    model: str
    format: str
    files: list[tuple[Path, int]]
    size_bytes: int
    parameters_bytes: int
    buffers_bytes: int
    checks: list[Check] = field(default_factory=list)
    memory: InferenceMemory | None = None
    not_measured: str = ""
    taken_off: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dynamic: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    program: Any = None

    @property
    def path(self) -> Path | None:
        """The first of the files written; None if there is none."""
        return self.files[0][0] if self.files else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of inference; None if not measured. Bytes of live tensors or, where these are not counted,
        resident bytes.
        """
        if self.memory is None:
            return None
        return self.memory.resident_bytes if self.memory.live_bytes is None else self.memory.live_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Return the table's rows, each with a name and a text."""
        where = "" if self.files else ", not saved: no path was given"
        apart = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        said = [
            (
                "file",
                f"{_C.format_size(self.size_bytes)}{apart}{where}; the model's parameters take "
                f"{_C.format_size(self.parameters_bytes)}, its buffers {_C.format_size(self.buffers_bytes)}",
            )
        ]
        if self.dynamic:
            said.append(("shapes", self.dynamic))
        said += several("outputs", map(_check, self.checks))
        if not self.checks:
            said.append(("outputs", "not compared with the live model's (verify=False)"))
        if self.memory is not None:
            said.append(("inference", _inference(self.memory)))
        elif self.not_measured:
            said.append(("inference", f"not measured: {self.not_measured}"))
        if self.taken_off:
            said.append(("without", ", ".join(self.taken_off)))
        said += several("warning", self.warnings)
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        said.append(("source", f"measured on this machine in {self.seconds:.1f} s; {versions}"))
        return said

    def __str__(self) -> str:
        return str(Facts(self._headline(), self.rows()))

    def _repr_html_(self) -> str:
        return Facts(self._headline(), self.rows()).html()

    def _headline(self) -> str:
        return f"{self.model} as {self.format}" + (f": {self.path}" if self.files else "")


def _check(one: Check) -> str:
    if one.dtype is None:
        return f"{one.sample}: none to compare"
    kind = str(one.dtype).removeprefix("torch.")
    if one.difference == 0:
        return f"{one.sample}: bit-equal to the live model's ({one.outputs} of them)"
    return (
        f"{one.sample}: within {one.difference:.1e} of the largest value of the live model's ({one.outputs} of them, "
        f"{kind}, {one.tolerance:.0e} is allowed)"
    )


def _inference(memory: InferenceMemory) -> str:
    live = (
        "this runtime does not report live tensors"
        if memory.live_bytes is None
        else f"{_C.format_size(memory.live_bytes)} of live tensors at the peak"
    )
    return (
        f"{live}; its own process grows by {_C.format_size(memory.loaded_bytes)} when it loads the file and by "
        f"{_C.format_size(memory.resident_bytes)} at the peak, besides {_C.format_size(memory.imports_bytes)} for its "
        f"imports; {memory.seconds * 1e3:.3g} ms a run, on {memory.where}"
    )
