"""Text of an estimate for a terminal, and its table for a notebook."""

from __future__ import annotations

import os
from typing import Any

from memopt import _C
from memopt._estimate import processes
from memopt._estimate.prediction import FAKE, Advice, Backend, Estimate
from memopt._memory.recording.category_split import in_words
from memopt._runtime.table import Code, Facts

_ROWS = 5  # of lines and modules
_SHOWN = {"native": "native", "expandable": "expandable_segments", "pool": "memopt's pool"}
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0))


def text(found: Estimate) -> str:
    return str(Facts(_headline(found), rows(found)))


def html(found: Estimate) -> str:
    return Facts(_headline(found), rows(found)).html()


def span(low: int, high: int) -> str:
    """Return "1.50 GiB", or "1.50 - 1.75 GiB" for a range."""
    first, last = _C.format_size(low), _C.format_size(high)
    if first == last:
        return last
    return f"{first.split()[0]} - {last}" if first.split()[1] == last.split()[1] else f"{first} - {last}"


def _headline(found: Estimate) -> str:
    low, high = found.needed
    if found.card is None:
        return f"{found.title}: {span(low, high)} of a card, all counted"
    verdict = found.verdict if found.verdict == "fits" else found.verdict.upper()
    usable = _C.format_size(found.card.usable)
    return f"{found.title} on {found.card.name}: {span(low, high)} of {usable} usable: {verdict}"


def _ranks(ranks: dict[str, Any]) -> str:
    """Describe the ranks, of which this estimate is the one with the highest peak."""
    peaks: dict[int, int] = ranks["peaks"]
    how = {"ddp": ", replicated", "fsdp": ", sharded by fully_shard", "tp": ", layers split"}
    this = f"this is rank {ranks['rank']} of {ranks['count']}{how.get(ranks['spread'] or '', '')}"
    if len(peaks) < 2:
        return this
    each = ", ".join(f"{rank}: {_C.format_size(peak)}" for rank, peak in peaks.items())
    return f"{this}; allocated at the peaks: {each}"


def rows(found: Estimate) -> list[tuple[str, str]]:
    """Return the table's rows, a name and a text each."""
    said: list[tuple[str, str]] = []
    if found.oom:
        said.append(("ends", _ends(found.oom)))
    elif found.retries:
        said.append(
            (
                "tight",
                f"the allocator had to free its cache {found.retries} times: slow, and nearly out of memory",
            )
        )
    said.append(
        (
            "peak",
            f"{span(*found.allocated)} allocated, {span(*found.reserved)} reserved, "
            f"{_C.format_size(found.context)} context",
        )
    )
    if found.ranks:
        said.append(("ranks", _ranks(found.ranks)))
    if found.by_category:
        said.append(("", f"= {parts(found.by_category)}"))
    said += [("lines" if n == 0 else "", _row(row)) for n, row in enumerate(found.by_line[:_ROWS])]
    named = [row for row in found.by_module if row.get("name")]
    said += [("modules" if n == 0 else "", _row(row)) for n, row in enumerate(named[:_ROWS])]
    if found.processes:
        said.append(("processes", processes.in_words(found.processes)))
    said += [("covered" if n == 0 else "", line) for n, line in enumerate(found.covered)]
    if found.backends:
        said.append(("allocators", " | ".join(map(_backend, found.backends))))
    if found.largest_batch:
        said.append(("batch", _batch(found.largest_batch)))
    if found.smallest_card:
        said.append(("smallest", _smallest(found.smallest_card)))
    said += [("would fit" if n == 0 else "", _advice(one)) for n, one in enumerate(found.advice)]
    said += [("range" if n == 0 else "", one) for n, one in enumerate(found.unknowns)]
    said += [("guesses" if n == 0 else "", _guess(one)) for n, one in enumerate(found.guesses)]
    said += [("not in it" if n == 0 else "", str(one)) for n, one in enumerate(found.unmodelled)]
    if found.error:
        said.append(("error", found.error))
    said.append(("source", _source(found)))
    return said


def parts(by_category: dict[str, int]) -> str:
    """Return "12.1 activations + 4.6 optimizer + 2.3 parameters GiB": one unit, so that they can be added up."""
    shift, unit = next(((s, u) for u, s in _UNITS if sum(by_category.values()) >> s), (0, "bytes"))
    shown = [
        (size / (1 << shift), name) for name, size in sorted(by_category.items(), key=lambda i: -i[1]) if size
    ]
    digits = 2 if shift else 0
    seen = [f"{size:.{digits}f} {name}" for size, name in shown if size >= 0.005]
    return f"{' + '.join(seen)} {unit}"


def _ends(oom: dict[str, Any]) -> str:
    if oom.get("together"):
        return f"the peaks of {oom['together']} processes on cuda:{oom['device']} are more than the card together"
    where = (
        f"{_near(oom['file'])}:{oom.get('line', '?')}"
        if oom.get("file")
        else "a line that is not the script's"
    )
    line = f" ({oom['text']})" if oom.get("text") else ""
    asked = f", asked {_C.format_size(oom['asked'])}" if oom.get("asked") else ""
    had = f" with {_C.format_size(oom['allocated'])} allocated" if oom.get("allocated") else ""
    when = ", after training, without gradients (an evaluation, or sampling)" if oom.get("evaluates") else ""
    return f"CUDA out of memory at {where}{line}{when}{asked}{had}"


def _near(path: str) -> str:
    """Return the path relative to the working directory if that is shorter."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or len(relative) > len(path) else relative


def _row(row: dict[str, Any]) -> str:
    source = f"  {row['text'].strip()}" if row.get("text") else ""
    name = row.get("name") or "(no line of yours)"
    purpose = in_words(row["by_category"]) if row.get("by_category") else row.get("category", "")
    return Code(f" {_C.format_size(row['bytes']):>9}  {name}  {purpose}{source}")


def _backend(backend: Backend) -> str:
    verdict = {True: ", fits", False: ", does not fit", None: ""}[backend.completes]
    return f"{_SHOWN[backend.name]} {_C.format_size(backend.reserved)}{verdict}"


def _batch(found: dict[str, Any]) -> str:
    size, card, option = found["size"], found["card"], found["option"]
    if not size:
        return f"not even 1 fits on {card} ({option})"
    if not found["bounded"]:
        return f"{size} fits on {card}, and more take no more: the data are used up ({option})"
    if not found["exact"]:
        return f"{size} fits on {card}; --max-batch searches the largest ({option})"
    return f"the largest on {card} is {size}; {size + 1} is out of memory ({option})"


def _smallest(found: dict[str, Any]) -> str:
    card = f", as {found['card']}" if found["card"] else ": larger than any card in the table"
    within = _C.format_size(found["within"])
    return f"{_C.format_size(found['bytes'])} of usable memory suffice (to within {within}){card}"


def _advice(one: Advice) -> str:
    changes = f"; {one.changes}" if one.changes else ""
    return f"{one.what}: peak {_C.format_size(one.peak)}{changes}"


def _guess(one: dict[str, Any]) -> str:
    where = f" at {_near(one['where'])}" if one.get("where") else ""
    return f"{one.get('what', '?')}{where}, {one.get('count', 1)} times"


def _source(found: Estimate) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items() if value)
    steps = f"{found.steps} steps of the optimizer" if found.steps != 1 else "1 step of the optimizer"
    if found.method == FAKE:
        return f"fake tensors, not measured; the weaker way: no allocator and no CUDA code has run; {steps}; {versions}"
    capability = found.simulated.get("compute_capability") or (
        found.card.compute_capability if found.card else "8.0"
    )
    return f"simulated, not measured: compute capability {capability}; {steps}; {versions}"
