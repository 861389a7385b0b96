"""memopt.find_batch_size beside accelerate's find_executable_batch_size, on one step: batch found, work lost, time.

The simulated device, with every operation computed; two AdamW steps of a small network make a try, of both. Each
finder starts where it is told to, too high by far or by little, or too low, in a process of its own. The true maximum
is looked for besides, size by size from what was found on, each from an empty cache.

Work lost are samples that were computed for nothing. Of accelerate's those of the tries that failed: its last try is
the training itself. Of memopt's all, for it undoes every try. What accelerate's leave changed is said beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness  # noqa: E402

ACCELERATE, MEMOPT, NEAR = "accelerate", "memopt", "memopt, within 2 %"
# So large that torch's segments of 20 MiB are small beside it: on 64 MiB what fits depends on what was tried before.
CASES = {"near": ("512MiB", 49152), "far": ("512MiB", 131072), "low": ("512MiB", 8192)}


def one(finder: str, memory: str, start: int) -> dict[str, Any]:
    """In this process, which has no other device."""
    from memopt import sim

    sim.activate(memory=memory, context="4MiB")
    import torch
    from torch import nn

    import memopt

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tried: list[list[int]] = []  # a size, and whether it went through

    def step(n: int) -> None:
        x = torch.randn(n, 64, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(batch_size: int) -> int:
        tried.append([batch_size, 0])
        for _ in range(2):
            step(batch_size)
        tried[-1][1] = 1
        return batch_size

    def values() -> list[torch.Tensor]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [t.detach().cpu().clone() for t in (*model.parameters(), *states)]

    def fits(n: int) -> bool:
        torch.cuda.empty_cache()
        try:
            train(n)
        except torch.OutOfMemoryError:
            return False
        return True

    with sim.Compute():
        before, random = values(), torch.get_rng_state()
        begun = time.perf_counter()
        if finder == ACCELERATE:
            from accelerate.utils import find_executable_batch_size

            found = find_executable_batch_size(train, starting_batch_size=start)()
            lost = sum(size for size, went in tried if not went)
        else:
            within = 0.02 if finder == NEAR else 0.0
            answer = memopt.find_batch_size(
                step, start, model=model, optimizer=optimizer, headroom=0, within=within
            )
            found, lost = answer.batch_size, answer.samples
            tried = [[trial.batch_size, int(trial.fits)] for trial in answer.tried]
        seconds = time.perf_counter() - begun
        after = values()
        same = len(after) == len(before) and all(map(torch.equal, after, before))
        same = same and torch.equal(random, torch.get_rng_state())
        answer = {"found": found, "lost": lost, "seconds": seconds, "tried": tried.copy(), "as_it_was": same}
    if finder == MEMOPT:  # without numbers: only what is allocated counts
        highest = found
        while highest < found + 64 and fits(highest + 1):
            highest += 1
        answer["true"] = highest if fits(found) else next(n for n in range(found - 1, 0, -1) if fits(n))
    return answer


def in_a_process(finder: str, memory: str, start: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", finder, memory, str(start)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{finder} on {memory}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--one", nargs=3, help="what a process of the script is started with")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], options.one[1], int(options.one[2]))))
        return 0
    try:
        import importlib.metadata

        peer = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "accelerate is not there: `python tests/environments.py libraries`, and run this in that environment"
        ) from None
    report = harness.Report("bench_find_batch_size", options)
    report.note("accelerate", peer)
    rows = []
    for name, (memory, start) in list(CASES.items())[: 1 if options.quick else None]:
        case = f"{name}: {memory}, starting at {start}"
        report._progress(case)
        # By turns, so that what else the machine does meets both.
        runs: dict[str, list[dict[str, Any]]] = {ACCELERATE: [], MEMOPT: [], NEAR: []}
        for _ in range(1 if options.quick else 3):
            for finder, done in runs.items():
                done.append(in_a_process(finder, memory, start))
        theirs, ours, near = (done[0] for done in runs.values())
        for finder, done in runs.items():
            if any((run["found"], run["tried"]) != (done[0]["found"], done[0]["tried"]) for run in done):
                raise SystemExit(f"{case}: {finder} found different sizes in equal runs")
        seconds = {finder: min(run["seconds"] for run in done) for finder, done in runs.items()}
        rows.append({"case": case, ACCELERATE: theirs, MEMOPT: ours, NEAR: near, "seconds": seconds})
        # A ratio is the first over the other: the reciprocal of a size, so that a larger batch is more than 1.
        report.record(
            f"time a sample if steps take the same, {case}",
            {ACCELERATE: 1 / theirs["found"], MEMOPT: 1 / ours["found"]},
            unit="steps a sample",
            goal=1.0,
        )
        report.record(
            f"short of the true maximum by, and one, {case}",
            {"allowed": 2.0, MEMOPT: abs(ours["true"] - ours["found"]) + 1.0},
            unit="samples",
            goal=1.0,
        )
        report.record(
            f"state is bit for bit as it was, {case}",
            {"wanted": 1.0, MEMOPT: 1.0 if ours["as_it_was"] else 2.0},
            unit="1 if so",
            goal=1.0,
        )
        report.record(
            f"samples computed for nothing, {case}",
            {ACCELERATE: max(theirs["lost"], 1), MEMOPT: ours["lost"], NEAR: near["lost"]},
            unit="samples",
        )
        report.record(f"time, the best of its runs, {case}", seconds, unit="s")
    report.note("rows", rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
