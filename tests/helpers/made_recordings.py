"""Recordings that nobody recorded: of a training run as it might have been, of any length, and of anything at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from memopt._memory.recording import recording_file
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Frame,
    Mark,
    Recording,
)

MIB = 1 << 20


class _Space:
    """First fit over addresses."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.taken: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        at = self.start
        for n, (begin, end) in enumerate(self.taken):
            if begin - at >= size:
                self.taken.insert(n, (at, at + size))
                return at
            at = end
        self.taken.append((at, at + size))
        return at

    def give(self, address: int) -> None:
        self.taken = [range_ for range_ in self.taken if range_[0] != address]


def training(steps: int, *, layers: int = 12, width: int = 1, oom: bool = False) -> Recording:
    """Steps of a model with `layers` equal layers: forward, backward, update. Each is 8 events a layer or so; the
    optimizer's state comes with the first. Written once and repeated, so that a million events take a second."""
    small, large = _Space(0x7F00_0000_0000), _Space(0x7F40_0000_0000)
    rows: list[list[int]] = []  # born, died, address, size, stack, module, category

    def space(size: int) -> _Space:
        return small if size < MIB else large

    def block(born: int, size: int, line: int, module: int, category: int) -> list[int]:
        row = [born, -2, space(size).take(size), size, line, module, category]
        rows.append(row)
        return row

    event = 0

    def make(size: int, line: int, module: int, category: int) -> list[int]:
        nonlocal event
        event += 1
        return block(event - 1, size, line, module, category)

    def end(row: list[int]) -> None:
        nonlocal event
        row[1] = event
        space(row[3]).give(row[2])
        event += 1

    parameters = [(2 + 3 * (k % 3)) * width * MIB // 2 for k in range(layers)]
    for k, size in enumerate(parameters):
        block(-1, size, 1, k + 1, PARAMETERS)
        block(-1, 4096 * width, 1, k + 1, PARAMETERS)
    for size in parameters:
        block(-1, 2 * size, 2, 0, OPTIMIZER)
    lasting = len(rows)
    batch = make(3 * width * MIB // 2, 3, 0, INPUTS)
    saved = []
    for k in range(layers):
        for part in range(3):
            saved.append(make((6 + 5 * part + k % 4) * width * MIB // 4, 4 + part, k + 1, ACTIVATIONS))
            end(make((2 + part) * width * MIB // 8 + 512 * k, 4 + part, k + 1, OTHER))
    gradients = []
    for k in reversed(range(layers)):
        for _ in range(3):
            passing = make((4 + k % 3) * width * MIB // 3, 8, k + 1, ACTIVATIONS)
            end(saved.pop())
            end(passing)
        gradients.append(make(parameters[k], 8, k + 1, GRADIENTS))
    end(batch)
    workspace = make(5 * width * MIB // 3, 9, 0, OTHER)
    end(workspace)
    for row in gradients:
        end(row)
    period = event

    table = torch.tensor(rows, dtype=torch.int64)
    first, one = table[:lasting], table[lasting:]
    shift = torch.arange(steps).repeat_interleave(len(one))[:, None] * period
    every = one.repeat(steps, 1)
    every[:, :2] += shift
    events = steps * period
    cut = events - period // 2 if oom else events
    first = first.clone()
    first[:, 1] = cut
    every = every[every[:, 0] < cut]
    every[:, 1].clamp_(max=cut)
    table = torch.cat((first, every))
    born, died, address, size, stack, module, category = table.t().contiguous()
    columns = {
        "born": born,
        "died": died,
        "address": address,
        "size": size,
        "stream": torch.zeros_like(size),
        "stack": stack,
        "module": module,
        "category": category,
    }
    pause = torch.tensor([40, 15, 22, 9, 31], dtype=torch.int64)
    stacks = [(), *map(_stack, range(60, 69))]
    marks = [Mark(k * period - 1, "step") for k in range(1, steps + 1) if k * period <= cut]
    if oom:
        marks.append(Mark(cut - 1, "oom", "train.py:27 asked for 512 MiB"))
    recording = Recording(
        "cuda:0",
        "made up",
        columns,
        pause.repeat(cut // 5 + 1)[:cut].cumsum(0),
        stacks,
        ["", *(f"blocks.{k}" for k in range(layers))],
        marks,
        facts={"command": ["train.py", "--epochs", "3"], "versions": {"torch": "2.13.0", "python": "3.11"}},
    )
    live = recording.live_bytes()
    held = ((live.cummax(0).values * 17 // 16 + 2 * MIB - 1) // (2 * MIB)) * (2 * MIB)
    grows = (held.diff(prepend=held[:1] - 1) > 0).nonzero().flatten()
    recording.reserved_events, recording.reserved_bytes = grows - 1, held[grows]
    recording.capacity = int(held[-1]) * 3 // 2
    return recording


def _stack(line: int) -> tuple[Frame, ...]:
    """A line of this file, called from within torch: it is somebody's, and has a text."""
    library = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"
    return (Frame(library, 125, "forward"), Frame(__file__, line, "training"))


def anything(seed: int, events: int | None = None) -> Recording:
    """Blocks and lives without sense: before the beginning, to the end, of no bytes, none at all."""
    chance = random.Random(seed)
    if events is None:
        events = chance.choice([0, 1, 2, 7, 400])
    blocks = chance.choice([0, 1, 3, 50, 300])
    rows = []
    for _ in range(blocks):
        born = chance.choice([-1, chance.randrange(-1, events + 1) if events else -1])
        born = min(born, events - 1)
        died = chance.choice([events, chance.randint(born + 1, events)])
        size = chance.choice([0, 1, 512, chance.randrange(1 << 12), chance.randrange(1 << 40)])
        address = chance.choice([0, 1 << 20, 1 << 46]) + chance.randrange(1 << chance.randrange(1, 41))
        rows.append([born, died, address, size, 0, chance.randrange(4), chance.randrange(3)])
        rows[-1].append(chance.randrange(len(CATEGORIES)))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 8).t().contiguous()
    names = ("born", "died", "address", "size", "stream", "stack", "module", "category")
    held = sorted(chance.sample(range(-1, events), chance.randrange(min(events + 1, 9))))
    return Recording(
        "cpu",
        "made up",
        dict(zip(names, table, strict=True)),
        torch.tensor([chance.randrange(1000) for _ in range(events)], dtype=torch.int64).cumsum(0),
        [(), (Frame("a/x.py", 1, "f"),), (Frame("b/x.py", 1, "f"),), (Frame("</script><b>", 3, "<i>"),)],
        ["", "</script>", "<!-- a & b"],
        [
            Mark(chance.randrange(-1, events) if events else -1, chance.choice(["step", "oom"]), "<script>")
            for _ in range(3)
        ],
        torch.tensor(held, dtype=torch.int64),
        torch.tensor([chance.randrange(1 << 41) for _ in held], dtype=torch.int64),
        chance.choice([None, 1 << 40]),
    )


def made(blocks: int = 5, device: str = "cuda:0") -> Recording:
    generator = torch.Generator().manual_seed(blocks)
    events = 2 * blocks
    born = torch.randint(-1, blocks or 1, (blocks,), generator=generator)
    columns = {
        "born": born,
        "died": born + 1 + torch.randint(0, blocks or 1, (blocks,), generator=generator),
        "address": torch.randint(0, 1 << 40, (blocks,), generator=generator),
        "size": torch.randint(0, 1 << 30, (blocks,), generator=generator),
        "stream": torch.zeros(blocks, dtype=torch.int64),
        "stack": torch.randint(0, 3, (blocks,), generator=generator),
        "module": torch.randint(0, 2, (blocks,), generator=generator),
        "category": torch.randint(0, 6, (blocks,), generator=generator),
    }
    line, outer = Frame("/home/é/train.py", 41, "loss"), Frame("/home/é/train.py", 90, "<module>")
    return Recording(
        device=device,
        source="a test",
        columns=columns,
        times_us=torch.arange(events) + (1 << 50),
        stacks=[(), (line, outer), (outer,)],
        modules=["", "Net.first"],
        marks=[Mark(-1, "step", ""), Mark(events - 1, "oom", "requested 7 bytes")],
        reserved_events=torch.tensor([-1, 3]),
        reserved_bytes=torch.tensor([0, 1 << 31]),
        capacity=1 << 34,
        facts={"command": ["train.py"], "versions": {"torch": "x"}},
    )


def save(recording: Recording, path: Path) -> None:
    """As memopt.profile() writes a .mopt file."""
    recording_file.save([recording], path)


def figures(peak: int, line: str = "a.py:3", **more) -> dict:
    rows = [{"name": line, "bytes": peak, "blocks": 1, "category": "activations", "text": "x = f(y)"}]
    return {
        "device": "cuda:0", "peak_bytes": peak, "peak_reserved": 2 * peak, "oom": None, "steps": 3, "peak_step": 2,
        "by_category": {"activations": peak}, "by_line": rows, "by_module": [],
    } | more  # fmt: skip


def rank(folder: Path, number: int, count: int, **told) -> None:
    one = {
        "rank": number,
        "ranks": count,
        "job": "7",
        "host": f"node{number % 2}",
        "pid": 5,
        "state": "ended",
    }
    one |= {"status": 0, "ended": "ended with 0", "seconds": 2.0, "program": "train.py", "host_peak": 1 << 20}
    (folder / f"rank{number}.json").write_text(json.dumps(one | told))
