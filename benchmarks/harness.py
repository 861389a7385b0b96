"""Interleaved ratios: peer and memopt timed by turns in one process, and compared round by round.

A shared machine drifts: another process starts, the clock falls, the cache is cold. Timing all of A and then
all of B reports that drift as a difference. Here each round times every contender once, the order rotating
from round to round, and the figure is the *ratio within a round*, whose two sides saw nearly the same
machine:

    ratio = peer's seconds / contender's seconds        2.0 is twice as fast as the peer

reported as median, smallest and largest over the rounds. A difference counts only when every round agrees on
its sign; else the verdict is "within the noise", and when the ratios spread wider than the effect, that is
said beside it.

    options = harness.parser(__doc__).parse_args() report = harness.Report("bench_scaler", options)
    report.compare("unscale, 140 tensors", {"torch": stock, "memopt": ours}, peer="torch", goal=1.5)
    report.record("optimizer state", {"torch": 8.0, "memopt": 2.03}, unit="bytes/parameter", peer="torch",
    goal=3.9) sys.exit(report.finish())

`finish` prints the table, writes `benchmarks/results/<name>.json`, and returns 1 when a goal was missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

try:
    from benchmarks import environment
    from benchmarks.comparison import Comparison, Figure, Round
    from benchmarks.round_log import RoundLog
except ModuleNotFoundError:  # started as a script: this folder is on the path, its parent is not
    import environment
    from comparison import Comparison, Figure, Round
    from round_log import RoundLog

RESULTS = Path(__file__).resolve().parent / "results"

MIN_SAMPLE_SECONDS = 0.02
"""A sample repeats a short contender for at least this long: far above the clock's resolution, and several
scheduler ticks."""


@dataclass(frozen=True)
class Contender:
    """A function that is timed. `before` runs untimed before each sample: it restores what `run` uses up."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None


# ---- clocks ---------------------------------------------------------------------------------------


def wall_clock(run: Callable[[], object], calls: int) -> float:
    """Host seconds of `calls` calls."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - start) * 1e-9


def cuda_clock(run: Callable[[], object], calls: int) -> float:
    """Device seconds of `calls` calls: between two events of the current stream, the device idle before the
    first.

    Work on other streams counts only as far as the current stream waits for it.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


Clock = Callable[[Callable[[], object], int], float]


# ---- measuring ------------------------------------------------------------------------------------


def calls_per_sample(contender: Contender, clock: Clock, min_seconds: float = MIN_SAMPLE_SECONDS) -> int:
    """The number of calls that fill a sample: 1 for a contender that has to be reset, else doubled until `min_seconds`
    are reached."""
    if contender.before is not None:
        return 1
    calls = 1
    while clock(contender.run, calls) < min_seconds and calls < 1 << 24:
        calls *= 2
    return calls


def compare(
    contenders: Mapping[str, Callable[[], object] | Contender],
    *,
    peer: str | None = None,
    case: str = "",
    rounds: int = 7,
    warmup: int = 1,
    calls: int | None = None,
    clock: str | Clock = "wall",
    goal: float | dict[str, float] | None = None,
    moved: dict[str, float] | None = None,
    resume: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Times every contender once a round, order rotating, and returns the comparison with `peer` (the first
    by default).

    `warmup` untimed turns come first, then each contender's number of calls a sample is found (or is `calls`
    for all); times are divided by it. Garbage is collected before each sample and not during it. `clock` is
    "wall", "cuda" or a function (run, calls) -> seconds. `goal` is the least median ratio that the claim
    needs, of all contenders or, by name, of some. `moved` says of contenders how many bytes a call of them reads
    and writes, for bytes a second.

    `resume` names a file to which each round is written when it is finished: the same call finds the finished
    rounds there and runs the rest only. A file of another comparison, commit or torch is refused.
    """
    if rounds < 5:
        raise ValueError(
            f"rounds={rounds}: fewer than 5 rounds say nothing about their spread; use --quick for 5"
        )
    if len(contenders) < 2:
        raise ValueError(f"compare needs a peer and a contender, got {sorted(contenders)}")
    if peer is None:
        peer = next(iter(contenders))
    if peer not in contenders:
        raise ValueError(f"peer {peer!r} is not among the contenders {sorted(contenders)}")
    for name in (*(goal if isinstance(goal, dict) else ()), *(moved or ())):
        if name not in contenders:
            raise ValueError(f"goal or moved: {name!r} is not among the contenders {sorted(contenders)}")
    entries = {name: c if isinstance(c, Contender) else Contender(c) for name, c in contenders.items()}
    timer = {"wall": wall_clock, "cuda": cuda_clock}[clock] if isinstance(clock, str) else clock
    clock_name = clock if isinstance(clock, str) else getattr(clock, "__name__", "custom")
    result = Comparison(
        case, peer, clock_name, {}, load_before=os.getloadavg()[0], goal=goal, moved=moved or {}
    )

    log = RoundLog(resume, case, list(entries), peer, clock_name) if resume else None
    if log and log.rounds:
        result.calls, result.rounds = log.calls, log.rounds[:rounds]
        result.load_before = log.load_before
    if len(result.rounds) == rounds:
        return result

    for entry in entries.values():
        for _ in range(warmup):
            if entry.before:
                entry.before()
            timer(entry.run, 1)
    if not result.calls:
        result.calls = {name: calls or calls_per_sample(entry, timer) for name, entry in entries.items()}
        if log:
            log.start(result.calls, result.load_before)

    names = list(entries)
    collecting, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # what stood before (all of torch's modules) need not be walked again before every sample
    gc.disable()
    try:
        for number in range(len(result.rounds), rounds):
            first = number % len(names)
            order = names[first:] + names[:first]
            seconds = {}
            for name in order:
                gc.collect()
                if entries[name].before:
                    entries[name].before()
                seconds[name] = timer(entries[name].run, result.calls[name]) / result.calls[name]
                if seconds[name] <= 0:
                    raise RuntimeError(
                        f"{case}: {name} took {seconds[name]} s by the {clock_name} clock: nothing was timed"
                    )
            turn = Round(order, seconds, os.getloadavg()[0])
            result.rounds.append(turn)
            if log:
                log.append(turn)
            if progress:
                progress(f"{case}: round {number + 1} of {rounds}")
    finally:
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()
    return result


# ---- reports and the command line -----------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has; add your own to it. Only the first paragraph of `description` is
    shown."""
    summary = (description or "").strip().partition("\n\n")[0]
    options = argparse.ArgumentParser(description=summary)
    options.add_argument("--rounds", type=int, default=None, help="rounds of each comparison (7; at least 5)")
    options.add_argument("--quick", action="store_true", help="5 rounds, small sizes; results are not kept")
    options.add_argument("--cuda", action="store_true", help="run on the GPU and time by its events")
    options.add_argument(
        "--resume", action="store_true", help="keep finished rounds on disk and go on from them"
    )
    options.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options.add_argument(
        "-o", "--output", type=Path, help="write the JSON there instead of benchmarks/results"
    )
    return options


class Report:
    """The comparisons and figures of one benchmark, its environment, its table and its JSON file."""

    def __init__(self, name: str, options: argparse.Namespace, *, claim: str = "") -> None:
        self.name, self.claim, self.options = name, claim, options
        self.entries: list[Comparison | Figure] = []
        self.notes: dict[str, object] = {}
        if options.cuda:
            import torch

            if not torch.cuda.is_available():
                message = f"torch {torch.__version__} sees no GPU here; leave --cuda out to run on the CPU"
                raise SystemExit(f"{name}: {message}")

    @property
    def device(self) -> str:
        return "cuda" if self.options.cuda else "cpu"

    @property
    def rounds(self) -> int:
        return self.options.rounds or (5 if self.options.quick else 7)

    def compare(
        self,
        case: str,
        contenders: Mapping[str, Callable[[], object] | Contender],
        *,
        peer: str | None = None,
        goal: float | dict[str, float] | None = None,
        moved: dict[str, float] | None = None,
        warmup: int = 1,
        calls: int | None = None,
        clock: str | Clock | None = None,
    ) -> Comparison:
        """`compare` by this report's options; the entry is kept and, on a terminal, printed at once."""
        resume = None
        if self.options.resume:
            label = "".join(c if c.isalnum() else "_" for c in case)
            resume = RESULTS / "rounds" / f"{self.name}.{label}.jsonl"
        result = compare(
            contenders,
            peer=peer,
            case=case,
            rounds=self.rounds,
            warmup=warmup,
            calls=calls,
            clock=clock or ("cuda" if self.options.cuda else "wall"),
            goal=goal,
            moved=moved,
            resume=resume,
            progress=self._progress if sys.stderr.isatty() else None,
        )
        self.entries.append(result)
        return result

    def record(
        self,
        case: str,
        values: dict[str, float],
        *,
        unit: str,
        peer: str | None = None,
        goal: float | None = None,
    ) -> Figure:
        """A figure that is not a time: values by contender, in `unit`."""
        figure = Figure(case, values, unit, peer or next(iter(values)), goal)
        self.entries.append(figure)
        return figure

    def record_share(self, found: Comparison, name: str, bound: str, *, goal: float | None = None) -> Figure:
        """A contender's bandwidth as a share of that of `bound`: the ratio is the share of its bytes a second that
        is reached, the median of the rounds."""
        share = statistics.median(found.shares(name, bound))
        case = f"bytes a second of {bound}: {found.case}"
        return self.record(case, {bound: 1.0, name: 1 / share}, unit="time a byte", peer=bound, goal=goal)

    def note(self, key: str, value: object) -> None:
        """Anything else the result should carry: a task's metadata, a seed, a size. Must go into JSON."""
        self.notes[key] = value

    def _progress(self, line: str) -> None:
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "claim": self.claim,
            "quick": self.options.quick,
            "environment": environment.describe(cuda=self.options.cuda),
            "notes": self.notes,
            "comparisons": [entry.as_dict() for entry in self.entries if isinstance(entry, Comparison)],
            "figures": [entry.as_dict() for entry in self.entries if isinstance(entry, Figure)],
        }

    def __str__(self) -> str:
        here = environment.describe(cuda=self.options.cuda)
        commit = here["commit"]
        where = [here.get("device") or here["cpu"], f"{here['cores']} cores", here["python"]]
        where += [f"torch {here['torch']}"] if here["torch"] else []
        where += (
            [f"commit {commit['hash'][:10]}{' + changes' if commit['dirty'] else ''}"]
            if commit["hash"]
            else []
        )
        where += ["SIMULATED DEVICE"] if here["simulated"] else []
        return "\n\n".join(
            [f"{self.name}   {self.claim}\n{', '.join(map(str, where))}", *map(str, self.entries)]
        )

    def finish(self) -> int:
        """Prints, saves, and returns the exit status: 1 when a goal was missed. Quick runs are kept only by
        `-o`."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        result = self.as_dict()
        print(json.dumps(result, indent=1) if self.options.json else str(self))
        target = self.options.output or (
            None if self.options.quick else RESULTS / f"{self.name}{self._suffix()}.json"
        )
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(result, indent=1) + "\n")
        for log in (
            (RESULTS / "rounds").glob(f"{self.name}.*.jsonl") if target and self.options.resume else ()
        ):
            log.unlink()
        return 1 if any(entry.goal_met() is False for entry in self.entries) else 0

    def _suffix(self) -> str:
        """Figures of a GPU, of a simulated device and of the CPU are different claims: one file each."""
        return "" if not self.options.cuda else ".sim" if environment.simulated() else ".cuda"
