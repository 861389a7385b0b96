"""Report of a technique: bytes in memory and on disk, before and after, and the effect on accuracy."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt import _C
from memopt._runtime.results import Result
from memopt._runtime.state_snapshot import Modes
from memopt._runtime.storages import storage_bytes

Evaluate: TypeAlias = Callable[[Any], float] | None


@dataclass(frozen=True)
class Bytes(Result):
    """The bytes of a model.

    `memory_bytes`: bytes of the storages of parameters and buffers, each counted once. `disk_bytes`: bytes of the file
    that torch.save(model.state_dict(), file) writes, None if the model cannot be saved.
    """

    memory_bytes: int
    disk_bytes: int | None


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The changes made, and the bytes that they saved. Print it.

    Attributes:
        technique: The name of the technique.
        before: Bytes before it.
        after: Bytes after it.
        changed: Names of the layers or tensors that were changed.
        skipped: The reasons why layers were not changed, by name.
        notes: Further remarks.
        accuracy_before: The result of `evaluate` before the change, None without `evaluate`.
        accuracy_after: The result of `evaluate` after the change.
    """

    technique: str
    before: Bytes
    after: Bytes
    changed: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory saved; negative if the model takes more than before."""
        return self.before.memory_bytes - self.after.memory_bytes

    @property
    def saved_on_disk_bytes(self) -> int | None:
        """Bytes saved on disk; negative if the file takes more than before."""
        if self.before.disk_bytes is None or self.after.disk_bytes is None:
            return None
        return self.before.disk_bytes - self.after.disk_bytes

    @property
    def accuracy_change(self) -> float | None:
        """The accuracy after minus the accuracy before; None if either was not measured."""
        if self.accuracy_before is None or self.accuracy_after is None:
            return None
        return self.accuracy_after - self.accuracy_before

    def __str__(self) -> str:
        lines = [f"{self.technique}: {shortened(self.changed) or 'nothing changed'}"]
        lines.append(_line("memory", self.before.memory_bytes, self.after.memory_bytes))
        if self.before.disk_bytes is not None and self.after.disk_bytes is not None:
            lines.append(_line("on disk", self.before.disk_bytes, self.after.disk_bytes))
        if self.accuracy_change is not None:
            lines.append(
                f"  accuracy {self.accuracy_before:.6g} -> {self.accuracy_after:.6g} ({self.accuracy_change:+.3g})"
            )
        for why in dict.fromkeys(self.skipped.values()):
            alike = [name for name, reason in self.skipped.items() if reason == why]
            names = alike[0] if len(alike) == 1 else shortened(alike)
            lines.append(f"  {names} unchanged: {why}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def shortened(names: Iterable[str]) -> str:
    """Return the first names and the number of names; empty if there are none."""
    first = [*names]
    more = ", …" if len(first) > 4 else ""
    return f"{', '.join(first[:4])}{more} ({len(first)})" if first else ""


def _line(what: str, before: int, after: int) -> str:
    share = f" ({(before - after) / before:.1%})" if before else ""
    return (
        f"  {what} {_C.format_size(before)} -> {_C.format_size(after)}, saved {signed(before - after)}{share}"
    )


def signed(nbytes: int) -> str:
    """Format bytes with a sign if they are negative."""
    return f"-{_C.format_size(-nbytes)}" if nbytes < 0 else str(_C.format_size(nbytes))


def measure(model: nn.Module, notes: list[str] | None = None) -> Bytes:
    """Measure a model's present bytes. If it cannot be saved, the reason is added to the notes."""
    return bytes_of(standing(model), model.state_dict, notes)


def bytes_of(
    tensors: Iterable[torch.Tensor], state: Callable[[], Any], notes: list[str] | None = None
) -> Bytes:
    """Return the bytes of tensors, and of the file that torch.save() makes of a state."""
    memory = storage_bytes(tensors)
    try:
        return Bytes(memory, disk_bytes(state()))
    except Exception as error:  # whatever the state's own classes raise: saving is not what was asked for
        if notes is not None:
            notes.append(
                f"bytes on disk are not known, because torch.save() fails: {type(error).__name__}: {error}"
            )
        return Bytes(memory, None)


def check_evaluate(evaluate: Any) -> None:
    if evaluate is not None and not callable(evaluate):
        raise TypeError(
            f"evaluate={evaluate!r}: expected a function that takes the model and returns a number"
        )


def score(model: nn.Module, evaluate: Evaluate) -> float | None:
    """Return the result of `evaluate` for the model in eval mode, without gradients."""
    if evaluate is None:
        return None
    modes = Modes(model)
    try:
        model.eval()
        with torch.no_grad():
            value = evaluate(model)
    finally:
        modes.restore()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"evaluate(model) returned {type(value).__name__}, not a number") from error


# ---- bytes on disk ---------------------------------------------------------------------------------------------------


def standing(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


class _Counter(io.RawIOBase):
    """A file that keeps nothing but its length."""

    def __init__(self) -> None:
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        self.nbytes += size
        return size


def disk_bytes(state: object) -> int:
    """The length of the file that torch.save(state, file) makes, byte for byte: it is written in full, to nowhere.

    Given a path instead of an open file, torch.save() names its records after the file, a few bytes a tensor more or
    less.
    """
    counter = _Counter()
    with _without_checksums():
        torch.save(state, counter)
    return counter.nbytes


_lock = threading.Lock()


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Leave out checksums: they are most of the time that it takes to write a model, and nobody will read these.

    A file that another thread writes meanwhile has none either, and is read all the same.
    """
    with _lock:
        wanted = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(wanted)
