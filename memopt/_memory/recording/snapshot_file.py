"""torch's memory snapshots (files of `torch.cuda.memory._dump_snapshot()`) as traces in memopt's plain form.

Such a file is a pickle, and a pickle is a program. This reader implements only those of pickle's instructions that make
numbers, texts, lists, tuples and dicts. A file with any other is refused, and nothing in it is ever called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

_PLAIN = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT
DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE
""".split()
_NAMES = {code[0]: name for name, code in vars(pickle).items() if name.isupper() and isinstance(code, bytes)}


class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """The one written in Python: its instructions are a table, and its memo a dict, which a file cannot make huge."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: call
        for code, call in pickle._Unpickler.dispatch.items()  # type: ignore[attr-defined]
        if _NAMES.get(code) in _PLAIN
    }

    def load_setitem(self) -> None:
        if type(self.stack[-2]) not in (str, int):
            raise pickle.UnpicklingError(f"a {type(self.stack[-2]).__name__} is the key of a dict")
        pickle._Unpickler.load_setitem(self)  # type: ignore[attr-defined]

    def load_setitems(self) -> None:
        if not {type(key) for key in self.stack[::2]} <= {str, int}:
            raise pickle.UnpicklingError("a key of a dict is not a text")
        pickle._Unpickler.load_setitems(self)  # type: ignore[attr-defined]

    def load_dict(self) -> None:
        if not {type(key) for key in self.stack[::2]} <= {str, int}:
            raise pickle.UnpicklingError("a key of a dict is not a text")
        pickle._Unpickler.load_dict(self)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


# In dispatch stand the functions, not their names. A tuple that holds another twice, and that another twice, and so on,
# would never be hashed to an end.
_PlainUnpickler.dispatch |= {
    pickle.SETITEM[0]: _PlainUnpickler.load_setitem,
    pickle.SETITEMS[0]: _PlainUnpickler.load_setitems,
    pickle.DICT[0]: _PlainUnpickler.load_dict,
}


def integer(value: Any) -> int:
    """Return a number of a snapshot. Raise TypeError for anything else.

    A nested value is never printed: it may share parts so often that its text would not end.
    """
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} where an integer is expected")
    return value


def text(value: Any) -> str:
    """A text of a snapshot; TypeError for anything else."""
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} where a text is expected")
    return value


def blocks_of(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the blocks of a snapshot's segment with their addresses, which older torch leaves out."""
    address = integer(segment["address"])
    for block in segment["blocks"]:
        yield integer(block.get("address", address)), block
        address += integer(block["size"])


def is_pickle(content: bytes) -> bool:
    """Return whether the content begins as pickles do since protocol 2; a trace in the plain form never does."""
    return content[:1] == pickle.PROTO


def load(content: bytes) -> dict[str, Any]:
    """The snapshot in a file's content. Raises ValueError for everything that is none."""
    try:
        snapshot = _PlainUnpickler(io.BytesIO(content)).load()
    except KeyError as error:  # of the table of instructions
        name = _NAMES.get(error.args[0], error.args[0])
        raise ValueError(
            f"it holds more than numbers, texts, lists and dicts (pickle's {name}), unlike any snapshot of torch's "
            "memory; none of it was executed"
        ) from None
    except Exception as error:
        raise ValueError(f"it is damaged, or not a pickle: {error or type(error).__name__}") from None
    if not (isinstance(snapshot, dict) and isinstance(snapshot.get("device_traces"), list)):
        raise ValueError(
            "it has no 'device_traces', so it is not a snapshot of torch's memory: write one with "
            "torch.cuda.memory._dump_snapshot()"
        )
    return snapshot


@dataclass
class _Lines:
    """One device's lines of a trace that is being written."""

    device: int
    first_id: int
    before: list[str] = field(default_factory=list)  # requests from before the trace begins
    lines: list[str] = field(default_factory=list)
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> id, stream
    ids: int = 0
    pools: dict[Any, int] = field(default_factory=dict)

    def block(self, to: list[str], address: int, size: int, stream: int, pool: int) -> None:
        number = self.first_id + self.ids
        self.ids += 1
        address, size, stream = integer(address), integer(size), integer(stream)
        where = f" {self.device} {pool}" if pool else f" {self.device}" if self.device else ""
        to.append(f"a {number} {size} {stream}{where}")
        self.live[address] = number, stream

    def pool(self, entry: dict[str, Any], key: str) -> int:
        """Return torch's pool of an entry as a number, 0 for the general one and for an unnamed one."""
        name = tuple(map(integer, entry.get(key) or (0, 0)))
        return 0 if not any(name) else self.pools.setdefault(name, len(self.pools) + 1)

    def free(self, address: int) -> None:
        number, stream = self.live.pop(address)
        self.lines.append(f"f {number} {stream}")

    def event(self, entry: dict[str, Any]) -> None:
        action, address = text(entry["action"]), integer(entry.get("addr", 0))
        if action == "alloc":
            if address in self.live:  # its free was not recorded: history was off then
                self.free(address)
            self.block(self.lines, address, entry["size"], entry["stream"], self.pool(entry, "pool_id"))
        elif action == "free_requested":
            if address not in self.live:  # allocated before the trace begins
                self.block(self.before, address, entry["size"], entry["stream"], self.pool(entry, "pool_id"))
            self.free(address)

    def segment(self, segment: dict[str, Any]) -> None:
        """Write blocks that are alive at the end without an allocation event: they were there before."""
        for at, block in blocks_of(segment):
            if block["state"] == "active_allocated" and at not in self.live:
                size = block.get("requested_size", block["size"])
                self.block(self.before, at, size, segment["stream"], self.pool(segment, "segment_pool_id"))


def _lines(snapshot: dict[str, Any]) -> Iterator[str]:
    ids = 0
    for device, history in enumerate(snapshot["device_traces"]):
        if not history:
            continue
        part = _Lines(device, ids)
        for entry in history:
            part.event(entry)
        for segment in snapshot.get("segments", []):
            if segment["device"] == device:
                part.segment(segment)
        ids += part.ids
        yield f"# device {device}: {part.ids} requests, {len(part.before)} of them from before the trace begins"
        yield from part.before
        yield from part.lines


def as_trace(snapshot: dict[str, Any]) -> bytes:
    """Return the requests and frees of a snapshot's history in memopt's plain form, one device after the other.

    Memory that was live before the history begins comes first, as far as it is seen to be freed or is in the snapshot's
    segments. A history has no steps, no record_stream and no waits between streams, so neither has the trace. Raises
    ValueError if there is no history, or it is not in torch's format.
    """
    try:
        written = "\n".join(_lines(snapshot))
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"its history is not in torch's format: {type(error).__name__}: {error!s:.200}"
        ) from None
    if not written:
        raise ValueError(
            "it has no history of requests: call torch.cuda.memory._record_memory_history() before memory is requested"
        )
    return written.encode() + b"\n"


def read(content: bytes) -> bytes:
    """A file's content as a trace in the plain form, whichever of the two it is."""
    return as_trace(load(content)) if is_pickle(content) else content
