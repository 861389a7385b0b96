"""A plan with which a script fits a card: techniques of the lowest tier of exactness, and in it the fastest."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memopt import _C
from memopt._estimate import advice, cards
from memopt._estimate.answer import Answer
from memopt._estimate.cards import Card
from memopt._estimate.forecast import WORKED_OUT
from memopt._estimate.prediction import Estimate, attributed, early_in_words
from memopt._estimate.runs_ahead import RunsAhead
from memopt._estimate.search import BIT_EQUAL, OTHER, TIERS, Names, Search, Tried, tier_of
from memopt._estimate.step_time import DISK_RATE, HOST_RATE, LEFT_OUT, seconds
from memopt._estimate.survey import CUDNN_WORKSPACE, NOT_MET, Survey, wanted_bytes
from memopt._run.plan import (
    BACKENDS,
    BF16,
    CHECKPOINT,
    CODED_ACTIVATIONS,
    EIGHT_BITS,
    FACTORED,
    FOUR_BITS,
    LEAST_BUDGET,
    STATES_ON_DISK,
    Plan,
    described,
    plain,
)
from memopt._runtime.table import Facts, ResultTable, room_of_a_fact, several

# What changes numbers, by the word that allows it.
ALLOWED = {
    "8bit": EIGHT_BITS,
    "4bit": FOUR_BITS,
    "factored": FACTORED,
    "bf16": BF16,
    "8bit-activations": CODED_ACTIVATIONS,
}


@dataclass
class Row:
    """A run: the techniques that it was with, its peak, the predicted seconds of a step, and what it says. 0 seconds:
    no whole step was seen. at_least: it ran out of the card's memory, and its bytes are what it asked for by then;
    unsure: it fits where cuDNN takes no large workspaces."""

    techniques: list[str]
    peak_bytes: int
    needed_bytes: int
    seconds: float
    result: str
    fits: bool
    at_least: bool = False
    unsure: bool = False


@dataclass
class Fit:
    """The plan with which a script fits a card, and the runs that led to it.

    estimate: of the script as it is. plan: None if nothing fits. rows: runs, the plan's first. lines: to paste.
    alone: techniques that are not enough alone, with the bytes that each saves; worked_out: those that did not run
    for it. failed: why the script does not run, by the techniques. lines_of_least: where nothing fits, of the peak with
    the first of the rows.
    """

    estimate: Estimate
    card: Card
    plan: Plan | None = None
    rows: list[Row] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    alone: dict[str, int] = field(default_factory=dict)
    worked_out: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    lines_of_least: list[dict[str, Any]] = field(default_factory=list)
    host_bytes: int = 0  # of the host's memory: pinned there, and made of what is stepped there
    disk_bytes: int = 0  # of optimizer states on a disk
    least: int = 0  # bytes of a card, with any of the runs
    runs: int = 0
    seconds: float = 0.0  # that the runs took

    @property
    def step_seconds(self) -> float:
        """Predicted, of a step of the script as it is; 0 where no whole step was seen."""
        return seconds(self.estimate.step, self.card.rates)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        plan = self.plan and asdict(self.plan)
        smallest = cards.smallest_with(self.least)
        return {
            "fits": self.plan is not None,
            "measured": False,
            "card": self.card.as_dict(),
            "needed_bytes": list(self.estimate.needed_bytes),
            "plan": plan,
            "tier": self.plan and self.rows[0].result,
            "margin_bytes": self.plan and self._margin(self.plan),
            "host_bytes": self.plan and self.host_bytes,
            "disk_bytes": self.plan and self.disk_bytes,
            "runs": [asdict(row) | {"evidence": "simulated"} for row in self.rows],
            "lines": self.lines,
            "not_enough_alone": self.alone,
            "worked_out_alone": self.worked_out,
            "does_not_run": self.failed,
            "before_training": self.estimate.too_large_before_training,
            "peak_lines_of_the_least": self.lines_of_least,
            "smallest_card": None if self.plan else {"bytes": self.least, "card": smallest and smallest.name},
            "largest_batch": self.estimate.largest_batch,
            "ranks": self.estimate.ranks,
            "covered": self.estimate.covered,
            "step_seconds": self.step_seconds or None,
            "assumed": _assumed(self.card, self._has_disk),
            "simulations": self.runs,
            "seconds": self.seconds,
        }

    @property
    def _has_disk(self) -> bool:
        return any(plain(name) == STATES_ON_DISK for row in self.rows for name in row.techniques)

    def _margin(self, plan: Plan) -> int:
        return self.card.usable_bytes - self.estimate.context_bytes - plan.peak_bytes

    def __str__(self) -> str:
        size, found = _C.format_size, self.estimate
        needed = found.needed_bytes[1]
        if found.verdict == "fits":
            said = "fits tightly as it is" if found.is_tight else "fits as it is"
        else:
            said = f"needs {size(needed)}" + (
                f", short by {size(needed - self.card.usable_bytes)}"
                if needed > self.card.usable_bytes
                else ""
            )
        return str(Facts(f"{found.title} on {self.card.name}: {said}", self._facts()))

    def _step(self, row: Row) -> str:
        as_it_is = self.step_seconds
        more = f", {row.seconds - as_it_is:+.2f} s" if as_it_is and row.techniques else ""
        return f"{row.seconds:.2f} s{more}" if row.seconds else "unknown"

    def _facts(self) -> list[tuple[str, str]]:
        size, plan = _C.format_size, self.plan
        said: list[tuple[str, str]] = []
        if (ranks := self.estimate.ranks) is not None:
            count, rank = ranks["count"], ranks["rank"]
            said.append(("ranks", f"{count}, of which rank {rank}, with the highest peak, is planned for"))
        table = ResultTable(
            [
                (
                    "fits" if row.fits else "unsure" if row.unsure else "does not fit",
                    ("> " if row.at_least else "") + size(row.peak_bytes),
                    self._step(row),
                    row.result,
                    " + ".join(map(plain, row.techniques)) or "as it is",
                )
                for row in self.rows
            ],
            ("simulated", "peak", "a step", "results", "plan"),
            (0, 3, 4),
        )
        said += several("runs", table.lines(indent="", width=room_of_a_fact()))
        if any(row.unsure for row in self.rows):
            workspace = size(CUDNN_WORKSPACE)
            said.append(("unsure", f"is what fits, but not where cuDNN takes workspaces of {workspace}"))
        alone = [f"{name} ({_saving(saved)})" for name, saved in self.alone.items()]
        alone += [f"{name} ({_saving(saved)}, worked out)" for name, saved in self.worked_out.items()]
        if alone:
            said.append(("not enough", f"alone: {', '.join(alone)}"))
        idle = [name for name, why in self.failed.items() if NOT_MET in why]
        if idle:
            said.append(("no use", f"{NOT_MET} {', '.join(idle)}"))
        failed: dict[str, list[str]] = {}
        for name in sorted(self.failed.keys() - {*idle}, key=lambda name: (name.count("+"), name)):
            why = textwrap.shorten(self.failed[name].splitlines()[0], _REASON, placeholder=" …")
            failed.setdefault(why, []).append(name)
        said += several(
            "fails",
            (
                f"with {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}"
                for why, names in failed.items()
            ),
        )
        if plan is None:
            card = cards.smallest_with(self.least)
            needs = f"a card of {size(self.least)}{f', as {card.name}' if card else ''}"
            if (early := self.estimate.too_large_before_training) is not None:
                said.append(
                    ("nothing", f"fits: {early_in_words(early)}. The least that a run needed is {needs}")
                )
                said += attributed("lines", early["lines"])
            else:
                said.append(("nothing", f"fits; the least that a run needed is {needs}"))
                said += attributed("lines", self.lines_of_least)
            batch = self.estimate.largest_batch
            if batch and batch["size"]:
                said.append(("batch", f"{batch['size']} instead of {batch['now']} fits ({batch['option']})"))
        else:
            said.append(
                ("left over", f"{size(self._margin(plan))} beside tensors and the context at the peak")
            )
            by = " by each rank" if self.estimate.ranks else ""
            if self.host_bytes:
                said.append(("host", f"at most {size(self.host_bytes)} of its memory is taken{by}"))
            if self.disk_bytes:
                said.append(("disk", f"{size(self.disk_bytes)} of it are taken{by}"))
            said += several("to write", self.lines)
        said.append(
            ("took", f"{self.runs} simulated run{'' if self.runs == 1 else 's'}, {self.seconds:.0f} s")
        )
        said += several("covered", self.estimate.covered)
        said += several("guesses", (f"{one['what']} at {one['where']}" for one in self.estimate.guesses))
        said += several("range", self.estimate.unknowns)
        if any(row.seconds for row in self.rows):
            said.append(("assumed", _assumed(self.card, self._has_disk)))
        return said


def _assumed(card: Card, has_disk: bool) -> str:
    rates = card.rates
    near = "" if rates.of == card.name else f", the nearest to {card.name} by memory,"
    return (
        f"a step's seconds are a roofline of the data sheet of {rates.of}{near} and not measured: "
        f"{rates.half / 1e12:g} TFLOP/s of fp16, {rates.tf32 / 1e12:g} of TF32, {rates.single / 1e12:g} of fp32, "
        f"memory of {rates.memory / 1e9:g} GB/s, {rates.link / 1e9:g} GB/s to and from the host, "
        f"whose own memory has {HOST_RATE / 1e9:g}{f', and a disk of {DISK_RATE / 1e9:g}' if has_disk else ''}; "
        f"left out are {LEFT_OUT}"
    )


def find(
    survey: Survey,
    card: Card,
    allowed: Collection[str],
    exact: bool,
    host_memory: int | None = None,
    disk: str | None = None,
) -> Fit:
    """Find a plan for the survey's script.

    Args:
        survey: The runs of the script.
        card: The card that it is to fit.
        allowed: Techniques that change numbers, and may.
        exact: Whether all bits of the results must stay.
        host_memory: Bytes that the card's host has for what is put there; None for no limit.
        disk: A directory on a disk for optimizer states; None for none.

    Raises:
        ValueError: It does not fit, and trains in processes that it starts.
        ScriptFailed: The script fails by itself, or there is nothing to tell of it.
    """
    begun = time.monotonic()
    fit = _found(survey, card, allowed, exact, host_memory, disk)
    fit.runs, fit.seconds = survey.runs, time.monotonic() - begun
    return fit


def _found(
    survey: Survey,
    card: Card,
    allowed: Collection[str],
    exact: bool,
    host_memory: int | None,
    disk: str | None,
) -> Fit:
    survey.request = replace(survey.request, timed=True)
    estimate = survey.estimate(fixes=False, advise=False, lean=True)
    survey.request = replace(survey.request, keeps=estimate.keeps, host_memory=host_memory)
    fit = Fit(estimate, card, least=estimate.needed_bytes[1])
    as_it_is = Row(
        [], estimate.allocated_bytes[1], estimate.needed_bytes[1], fit.step_seconds, TIERS[0], False
    )
    if estimate.verdict == "fits":
        fit.rows = [replace(as_it_is, fits=True)]
        fit.plan = _plan(survey, card, estimate, Names(), estimate.allocated_bytes[1], fit.step_seconds)
        return fit
    if estimate.processes is not None and not estimate.trained_bytes:
        raise ValueError(
            f"{estimate.title} trains in processes that it starts, where no plan is applied: "
            "write it so that torchrun starts them, and plan it with --nproc"
        )
    room = card.usable_bytes - estimate.context_bytes

    def attempt(names: Names) -> Tried | str:
        alone = len(names) == 1 and names <= {*search.techniques}
        first = search.forecast is not None and not alone and search.could_fit(names)
        result = survey.attempt(estimate, card, names, on_card_first=first)
        if isinstance(result, str):
            return result
        return too_much_of_host(_host_bytes(estimate, result), host_memory) or result

    def wanted(name: str) -> bool:
        tier = tier_of([name])
        return name in allowed if tier == OTHER else not exact or tier <= BIT_EQUAL

    early = estimate.too_large_before_training is not None
    with RunsAhead(attempt, survey.jobs) as runs:
        search: Search = advice.search_of(
            estimate, card, survey.request.backend, runs, wanted, disk, host_memory
        )
        if early and "expandable" in search.techniques:
            # What it needs of a card is what an allocator makes of the tensors.
            search.run(Names(["expandable"]))
        chosen = None if early else next(search.found(), None)
        if chosen is not None:
            chosen = search.with_more_room(chosen, room, native=survey.request.backend == "native")
    tried = search.tried
    if chosen is not None:
        answer = tried[chosen].answer
        assert answer is not None
        fit.plan = _plan(
            survey,
            card,
            estimate,
            _with_budgets(chosen, answer),
            answer.peak_allocated,
            seconds(answer.step, card.rates),
        )
        fit.lines = advice.in_words(chosen, answer.more["techniques"], estimate.keeps, host_memory)
        fit.host_bytes = _host_bytes(estimate, tried[chosen])
        fit.disk_bytes = answer.more.get("disk_bytes", 0)
    elif not early and survey.batch is not None and (survey.batch.size or 0) > 1:
        survey.try_batches(estimate, card, survey.batch)
    order = sorted(tried, key=lambda names: (names != chosen, not tried[names].fits, tried[names].needed))
    shown = {frozenset(map(plain, names)): names for names in reversed(order)}  # of several budgets the best
    fit.rows = [_row(names, tried[names]) for names in order if names in shown.values()][:_ROWS] or [as_it_is]
    as_is = estimate.held_bytes + estimate.context_bytes
    for name in dict.fromkeys(map(plain, search.alone)):
        budgets = [one for other, one in search.alone.items() if plain(other) == name]
        if not any(one.fits for one in budgets):
            fit.alone[name] = as_is - min(one.needed for one in budgets)
    fit.failed = {" + ".join(map(plain, sorted(names))): why for names, why in search.failed.items()}
    if (forecast := search.forecast) is not None and not early:
        for name in search.techniques:
            if name not in search.alone and (why := too_much_of_host(forecast.host([name]), host_memory)):
                fit.failed.setdefault(plain(name), why)
        without, known = forecast.needed([]), {*BACKENDS, *map(plain, search.alone), *fit.failed}
        fit.worked_out = {
            plain(name): without - needed
            for name in sorted(search.techniques)
            if plain(name) in WORKED_OUT - known and (needed := forecast.needed([name])) > card.usable_bytes
        }
    whole = [one.needed for one in tried.values() if not _ran_out(one)]
    if fit.plan is None and order and not early:  # without a limit, of which it may have run out
        seen = survey.attempt(estimate, card, order[0], record=True)
        if not isinstance(seen, str) and seen.answer is not None:
            whole.append(seen.needed)
            fit.lines_of_least = seen.answer.by_line
    fit.least = min([fit.least, *whole])
    return fit


def too_much_of_host(taken: int, host_memory: int | None) -> str:
    """Return why a plan that takes so much of the host's memory is none, "" if it may take it."""
    if host_memory is None or taken <= host_memory:
        return ""
    size = _C.format_size
    return f"it takes {size(taken)} of the host's memory, of which it may take {size(host_memory)}"


_ROWS, _REASON = 5, 160  # shown: runs, and characters of why one failed


def _host_bytes(as_it_is: Estimate, tried: Tried) -> int:
    """Return the most bytes of the host's memory that techniques have taken in a run, beside what the script pins."""
    taken = 0 if tried.answer is None else tried.answer.more.get("host_bytes", 0)
    return max(0, taken - as_it_is.host_bytes)


def _with_budgets(names: Names, answer: Answer) -> Names:
    """Return techniques with the budget of a checkpoint that was told to take the least."""
    least = answer.more["techniques"].get(LEAST_BUDGET)
    return (
        names
        if least is None
        else Names(f"{CHECKPOINT}:{least[0]}" if name.startswith(CHECKPOINT) else name for name in names)
    )


def _row(names: Names, tried: Tried) -> Row:
    assert tried.answer is not None
    return Row(
        sorted(names),
        wanted_bytes(tried.answer),
        tried.needed,
        tried.seconds,
        TIERS[tier_of(names)],
        tried.fits,
        _ran_out(tried),
        tried.unsure,
    )


def _ran_out(tried: Tried) -> bool:
    return tried.answer is not None and tried.answer.oom is not None


def _plan(survey: Survey, card: Card, found: Estimate, names: Names, peak: int, step_seconds: float) -> Plan:
    script, text = described(survey.request.argv[0], survey.request.module)
    return Plan(
        script=script,
        sha256=text,
        arguments=survey.request.argv[1:],
        torch=str(found.versions["torch"]),
        card_bytes=card.usable_bytes,
        peak_bytes=peak,
        backend=next((name for name in BACKENDS if name in names), survey.request.backend),
        techniques=sorted(names - {*BACKENDS}),
        step_seconds=step_seconds,
        trained_bytes=found.trained_bytes,
        keeps=found.keeps,
        host_memory=survey.request.host_memory,
        ranks=survey.request.ranks or 1,
    )


def _saving(saved: int) -> str:
    return f"{'-' if saved >= 0 else '+'}{_C.format_size(abs(saved))}" if saved else "nothing"
