"""The allocator's own cost as the work grows: requests of random sizes beside 10,000 to 100,000 live blocks.

Each trace draws sizes from 2^9 to 2^24 bytes, evenly by their logarithm; once enough blocks are live, one of them is
freed for each that is made. `python -m memopt replay` runs a trace twice on its model device, whose calls take next to
no time: with the default slack, where granules from elsewhere close holes, and with so much slack that nothing moves.

    an operation   a request or a free where nothing moves
    a move         what the first run takes beyond the second, for each granule that it moves
    99 % of the requests   take at most that, in the first run

Both modes of a GPU are measured: granules at two addresses, and at one (double_map off), where more has to be moved.
The time of an operation grows by the cache misses of more blocks alone.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parents[1]
LIVE = (10_000, 30_000, 100_000)
OPERATIONS = 1_000_000
STEP = 20_000  # operations
OPERATION_NS, MOVE_NS, REQUEST_NS = 1_000, 20_000, 50_000
NO_MOVES = 1_000  # slack, in thousandths of the live peak
MODES = {"two addresses": [], "one address": ["--no-double-map"]}


def write_trace(path: Path, live: int, operations: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    blocks: list[int] = []
    with path.open("w") as out:
        made = 0
        for done in range(operations):
            if len(blocks) < live or (len(blocks) == live and draw.random() < 0.5):
                out.write(f"a {made} {int(2 ** draw.uniform(9, 24))} 0\n")
                blocks.append(made)
                made += 1
            else:
                at = draw.randrange(len(blocks))
                blocks[at], blocks[-1] = blocks[-1], blocks[at]
                out.write(f"f {blocks.pop()} 0\n")
            if done % STEP == STEP - 1:
                out.write("s\n")


def replay(path: Path, *options: str) -> dict[str, float]:
    command = [sys.executable, "-m", "memopt", "replay", "--json", *options, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def within(report: harness.Report, case: str, limit: int, nanoseconds: float) -> None:
    report.record(case, {"limit": limit, "memopt": nanoseconds}, unit="ns", peer="limit", goal=1.0)


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_alloc_growth", options)
    operations = OPERATIONS // 5 if options.quick else OPERATIONS
    with tempfile.TemporaryDirectory() as folder:
        for live in LIVE:
            path = Path(folder) / f"{live}.txt"
            write_trace(path, live, operations)
            for mode, arguments in MODES.items():
                moving, still = [], []
                for _ in range(report.rounds):
                    moving.append(replay(path, *arguments))
                    still.append(replay(path, "--slack", str(NO_MOVES), *arguments))
                best = min(run["ns_per_op"] for run in still)
                name = f"{live:,} live blocks, {mode}"
                within(report, f"an operation, {name}", OPERATION_NS, best)
                beyond = min(run["ns_per_op"] for run in moving) - best
                moved = moving[0]["granules_moved"]
                if moved:
                    per_move = max(0.0, beyond) * moving[0]["operations"] / moved
                    within(report, f"a move, {name}", MOVE_NS, per_move)
                fastest = min(moving, key=lambda run: run["request_ns_p99"])
                within(report, f"99 % of the requests, {name}", REQUEST_NS, fastest["request_ns_p99"])
                report.note(
                    name,
                    {
                        "request, 50 %, 99 %, longest, ns": [
                            fastest[f"request_ns_{which}"] for which in ("p50", "p99", "max")
                        ],
                        "held over live peak": moving[0]["peak_reserved"] / moving[0]["live_peak"],
                        "granules moved": moved,
                        "requests that moved some": moving[0]["stitches"],
                    },
                )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
