"""The result of memopt.fit(): a plan for a model's training step, and what was priced beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memopt import _C
from memopt._estimate.search import TIERS, Names, tier_of
from memopt._fit.optimizers import counterpart_of
from memopt._fit.training_step import TrainingStep
from memopt._run.plan import (
    BF16,
    CHECKPOINT,
    CODED_ACTIVATIONS,
    FUSED,
    LOSS_HEAD,
    MICRO_BATCHES,
    OFFLOAD_LAYERS,
    TILES,
    in_code,
    of_optimizers,
    options_of,
)
from memopt._runtime.results import Result
from memopt._runtime.table import Facts, Html, ResultTable, paragraphs, seconds_text, several
from memopt.chain import InfeasibleBudget
from memopt.optim._one_pass import OnePass

if TYPE_CHECKING:
    from memopt._checkpoint.shape_plans import ShapePlan
    from memopt._fit.applied import AppliedFit

_COLOURS = {"parameters": "#334f9f", "optimizer": "#29a58f", "the rest": "#cf432a"}
_ASSUMED = (
    "seconds are of an optimizer's step with its passes: of stages measured on this machine, of a copy of the optimizer"
    ", and of copies between device and host, or a disk, at measured rates, as if none was hidden"
)


@dataclass(frozen=True)
class Row:
    """A combination of levers.

    Attributes:
        levers: Their names; none for the step as it is.
        tier: What it does to the results.
        fits: Whether it fits the budget.
        predicted_bytes: The peak as it was worked out.
        tested_bytes: The most that trial steps took; 0 if none were taken.
        seconds: Of an optimizer's step with its passes, as they were worked out.
        tested_seconds: The same with the passes of trial steps; 0 if none were taken.
        saved_bytes: Bytes below the peak of the step as it is.
        parts: Bytes of parameters, and of the optimizer's states on the device.
        host_bytes: Of the host's memory: pinned there, and made of what is stepped there.
        fails: Why these are more than host_memory; "" if they are not.
    """

    levers: tuple[str, ...]
    tier: str
    fits: bool
    predicted_bytes: int
    tested_bytes: int
    seconds: float
    saved_bytes: int
    parts: Mapping[str, int]
    tested_seconds: float = 0.0
    host_bytes: int = 0
    fails: str = ""

    @property
    def peak_bytes(self) -> int:
        """Return the peak of trial steps, or else as it was worked out."""
        return self.tested_bytes or self.predicted_bytes

    @property
    def evidence(self) -> str:
        return "tested by steps" if self.tested_bytes else "worked out"

    def __str__(self) -> str:
        return " + ".join(self.levers) or "as it is"


@dataclass(frozen=True)
class Lever:
    """A part of a plan. saved_bytes: of the peak, by it alone. tier: what it does to the results."""

    name: str
    tier: str
    saved_bytes: int
    does: str


@dataclass(frozen=True, repr=False)
class Fit(Result):
    """The plan that memopt.fit() found for a training step; print it.

    It holds the model, the optimizer and the sample.

    Attributes:
        memory_budget: Bytes.
        rows: What was priced: the plan first, if there is one.
        refused: Levers that were not in question, with the reason.
        least_budget: The least that would do, where nothing fits; 0 otherwise.
        recomputed: How many stages run again or are offloaded, and of how many.
        planned: The schedule of the stages that was tested; None where there is none.
        micro_batch_size: The most samples of a micro-batch; None for the whole batch.
    """

    step: TrainingStep
    memory_budget: int
    names: Names | None
    rows: list[Row]
    refused: dict[str, str]
    least_budget: int
    recomputed: tuple[int, int]
    chain_budget: int
    chain_host_memory: int | None
    to: str | None
    micro_batch_size: int | None
    planned: ShapePlan | None

    @property
    def fits(self) -> bool:
        """True if there is a plan, which may have no lever."""
        return self.names is not None

    @property
    def tier(self) -> str | None:
        """The plan's results beside the plain ones: "free", "bit-equal", "equal to rounding" or "other numbers"."""
        return self.rows[0].tier if self.fits else None

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of the device's tensors in a step by the plan, by its trial steps, or else as worked out."""
        return self.rows[0].peak_bytes if self.fits else None

    @property
    def host_bytes(self) -> int | None:
        """The most bytes of the host's memory that the plan's levers take, as worked out."""
        return self.rows[0].host_bytes if self.fits else None

    @property
    def seconds(self) -> float | None:
        """Of an optimizer's step with its passes, by the plan: by its trial steps, or else as worked out."""
        return self.rows[0].tested_seconds or self.rows[0].seconds if self.fits else None

    @property
    def alternatives(self) -> list[Row]:
        """Other combinations that were priced; one of no levers is the step as it is."""
        return self.rows[1:] if self.fits else self.rows

    @property
    def levers(self) -> list[Lever]:
        """The plan's parts."""
        alone = {row.levers[0]: row.saved_bytes for row in self.rows if len(row.levers) == 1}
        return [
            Lever(name, self._tier(name), alone.get(name, 0), self._does(name))
            for name in sorted(self.names or (), key=lambda name: (tier_of([name]), name))
        ]

    def _tier(self, name: str) -> str:
        assert self.tier is not None
        return self.tier if name.startswith(MICRO_BATCHES) else TIERS[tier_of([name])]

    def _does(self, name: str) -> str:
        if name == CHECKPOINT:
            some, of = self.recomputed
            return f"{some} of {of} stages run again{' or are offloaded' if self.to else ''}"
        if name == CODED_ACTIVATIONS:
            some, of = self.recomputed
            return f"{some} of {of} stages are kept in 8 bits or run again"
        if name == FUSED or of_optimizers([name]):
            return f"memopt.optim.{counterpart_of(self.step.optimizer).__name__}"
        if name.startswith(MICRO_BATCHES):
            return f"at most {self.micro_batch_size} of {self.step.samples} samples at a time"
        return {
            LOSS_HEAD: "logits in chunks",
            TILES: "MLPs some rows at a time",
            BF16: "autocast of the model and the loss",
            OFFLOAD_LAYERS: "parameters on the host, copied layer by layer",
        }[name]

    def apply(self) -> AppliedFit:
        """Apply the plan to the model and the optimizer.

        Returns:
            A handle: step with its `.optimizer`, run its `.backward(*batch)`; `.remove()` undoes it, and so does the
            end of a `with` block.

        Raises:
            memopt.chain.InfeasibleBudget: There is no plan; the message names the least budget that would do, in
                memory_budget's bytes. Or layers are offloaded, whose stages are planned now, and the model takes more
                than it did. Nothing has changed.
            ValueError: The model runs by a plan already, or modules of it were replaced since. Nothing has changed.
            OSError: The plan's disk has no room for the optimizer's states, or is gone. Nothing has changed.
        """
        if not self.fits:
            raise InfeasibleBudget(f"memopt.fit: {self._nothing()}", self.least_budget)
        from memopt._fit.applied import AppliedFit  # which needs this class

        return AppliedFit(self)

    def code(self) -> str:
        """Return the lines that do what apply() does, for names as fit() had them: model, optimizer, sample, loss."""
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        names, step = self.names or Names(), self.step
        lines = []
        if LOSS_HEAD in names:
            lines.append("memopt.nn.fuse_loss_head(model)")
        if TILES in names:
            lines.append("memopt.nn.tile_mlps(model)")
        if OFFLOAD_LAYERS in names:
            lines.append("memopt.offload_layers(model)")
            lines.append("optimizer.load_state_dict(optimizer.state_dict())  # its states go to the host")
        if FUSED in names or of_optimizers(names):
            kind = counterpart_of(step.optimizer).__name__
            options = options_of(names)
            given = f", {in_code(options)}" if options else ""
            groups = "optimizer.param_groups"
            if isinstance(step.optimizer, OnePass):
                groups = f"[group | {options!r} for group in optimizer.param_groups]"
            lines.append("states = optimizer.state_dict()")
            lines.append(f"optimizer = memopt.optim.{kind}({groups}{given})")
            lines.append("optimizer.load_state_dict(states)")
        cast = f"with torch.autocast({step.device.type!r}, torch.bfloat16):" if BF16 in names else ""
        if names & {CHECKPOINT, CODED_ACTIVATIONS}:
            *inputs, call = self._checkpoint_lines()
            lines += [*inputs, *([cast, f"    {call}"] if cast else [call])]
        if self.micro_batch_size is not None:
            how = "" if step.reduction == "mean" else f", reduction={_word(step.reduction)}"
            lines.append(f"def compute_loss({self._signature()}):")
            computed = f"    return {self._loss_of_batch()}"
            lines += [f"    {cast}", f"    {computed}"] if cast else [computed]
            star = "*" if isinstance(step.sample, (tuple, list)) else ""
            lines += [
                "# in each step, instead of the loss's .backward():",
                f"memopt.backward(compute_loss, {star}sample, model=model, "
                f"micro_batch_size={self.micro_batch_size}{how})",
            ]
        elif cast:
            lines += ["# in each step, around the model's call and the loss:", f"# {cast}"]
        return lines

    def _checkpoint_lines(self) -> list[str]:
        step, size = self.step, self.micro_batch_size
        several = isinstance(step.sample, (tuple, list))
        lines = ["inputs = sample"]
        if step.loss is not None:
            lines = [f"inputs, *rest = {'sample' if several else '[sample]'}"]
        if size is not None:
            lines = [f"part = {_cut(step.sample, size)}", *(line.replace("sample", "part") for line in lines)]
        loss = f"out{step.loss_of_output}" if step.loss is None else "loss(out, *rest)"
        if step.batches > 1 and step.reduction == "mean":
            loss += f" / {step.batches}"
        arguments = [
            "model",
            "inputs",
            f"memory_budget={self.chain_budget}",
            "optimizer=optimizer",
            f"loss=lambda out: {loss}",
            "keeps_output=False",
        ]
        if self.accumulates:
            arguments.append("accumulate=True")
        if self.to is not None:
            arguments.append(f"to={self.to!r}")
        if self.to == "cpu" and self.chain_host_memory is not None:
            arguments.append(f"host_memory={self.chain_host_memory}")
        return [*lines, f"memopt.auto_checkpoint({', '.join(arguments)})"]

    @property
    def accumulates(self) -> bool:
        """True if gradients of an earlier batch or micro-batch are there when a pass begins."""
        return self.step.batches > 1 or self.micro_batch_size is not None

    def _signature(self) -> str:
        return "inputs, *rest" if self.step.loss is not None else "*inputs"

    def _loss_of_batch(self) -> str:
        step = self.step
        if step.loss is not None:
            first = step.batch[0]
            stars = "**" if isinstance(first, Mapping) else "*" if isinstance(first, (tuple, list)) else ""
            value = f"loss(model({stars}inputs), *rest)"
        else:
            whole = "**inputs[0]" if isinstance(step.batch[0], Mapping) else "*inputs"
            value = f"model({whole}){step.loss_of_output}"
        return f"{value} / {step.batches}" if step.batches > 1 and step.reduction == "mean" else value

    # ---- reading -----------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values; sizes are bytes."""
        rows = [{**asdict(row), "peak_bytes": row.peak_bytes, "evidence": row.evidence} for row in self.rows]
        return {
            "fits": self.fits,
            "memory_budget": self.memory_budget,
            "tier": self.tier,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
            "levers": [asdict(lever) for lever in self.levers],
            "micro_batch_size": self.micro_batch_size,
            "rows": rows,
            "refused": self.refused,
            "least_budget": self.least_budget,
            "lines": self._lines(),
            "assumed": _ASSUMED,
        }

    def __str__(self) -> str:
        return str(Facts(self._headline(), self._facts()))

    def _repr_html_(self) -> str:
        """Return static HTML: no script, and no style except that of its cells."""
        most = max([self.memory_budget, *(row.peak_bytes for row in self.rows)])
        bars = [(*cells, self._bar(row, most)) for cells, row in zip(self._cells(), self.rows, strict=True)]
        table = ResultTable(
            bars, (*_HEADS, f"of which; the line: {_C.format_size(self.memory_budget)}"), _LEFT
        )
        legend = " &nbsp; ".join(
            f"<span style='display:inline-block;width:10px;height:10px;background:{colour}'></span> {name}"
            for name, colour in _COLOURS.items()
        )
        return (
            paragraphs([self._headline()])
            + table.html()
            + paragraphs([Html(legend)])
            + Facts("", self._facts(table=False)).html()
        )

    def _bar(self, row: Row, most: int) -> Html:
        parts = dict(row.parts)
        parts["the rest"] = max(0, row.peak_bytes - sum(parts.values()))
        spans = "".join(
            f"<div title='{name} {_C.format_size(size)}' "
            f"style='background:{_COLOURS[name]};width:{240 * size / most:.1f}px'></div>"
            for name, size in parts.items()
            if size
        )
        line = f"left:{240 * self.memory_budget / most:.1f}px"
        return Html(
            f"<div style='position:relative;display:flex;width:242px;height:14px'>{spans}"
            f"<div style='position:absolute;{line};height:14px;border-left:2px solid #111'></div></div>"
        )

    def _headline(self) -> str:
        size, plain = _C.format_size, next(row for row in self.rows if not row.levers)
        takes = (
            f"{type(self.step.model).__name__} takes {size(plain.peak_bytes)} of {size(self.memory_budget)}"
        )
        if not self.fits:
            return f"{takes}: nothing fits"
        if not self.names:
            return f"{takes}: it fits as it is"
        return f"{takes}: it fits with {size(self.rows[0].peak_bytes)}, {self.tier}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{'fits' if row.fits else 'fails' if row.fails else 'does not fit'}, {row.evidence}",
                _C.format_size(row.peak_bytes),
                seconds_text(row.tested_seconds or row.seconds) if row.fits else "",
                row.tier,
                str(row),
            )
            for row in self.rows
        ]

    def _facts(self, table: bool = True) -> list[tuple[str, str]]:
        facts: list[tuple[str, str]] = []
        if table:
            facts += several("plans", ResultTable(self._cells(), _HEADS, _LEFT).lines(indent=""))
        if self.peak_bytes is not None:
            left = self.memory_budget - self.peak_bytes
            facts.append(("left over", _C.format_size(left)))
            if self.host_bytes:
                facts.append(("host", f"at most {_C.format_size(self.host_bytes)} of its memory is taken"))
            facts += several("with", (f"{lever.name}: {lever.does}" for lever in self.levers))
            facts += several("to write", self._lines())
        else:
            facts.append(("nothing", self._nothing()))
        facts += several("fails", (f"with {row}: {row.fails}" for row in self.rows if row.fails))
        facts += several("not tried", (f"{name}: {reason}" for name, reason in self.refused.items()))
        facts.append(("seconds", _ASSUMED))
        return facts

    def _nothing(self) -> str:
        size = _C.format_size
        return (
            f"no plan is within memory_budget, {size(self.memory_budget)}: raise it to {self.least_budget} bytes "
            f"({size(self.least_budget)}), {'raise host_memory, ' if any(row.fails for row in self.rows) else ''}"
            "allow more, or use a smaller batch"
        )


_HEADS = ("budget", "peak", "seconds", "results", "plan")
_LEFT = (0, 3, 4)


def _word(reduction: object) -> str:
    return repr(reduction) if isinstance(reduction, str) else getattr(reduction, "__name__", "reduction")


def _cut(sample: Any, size: int) -> str:
    """Return the expression for the first samples of a batch."""
    if isinstance(sample, Mapping):
        return f"{{name: part[:{size}] for name, part in sample.items()}}"
    if isinstance(sample, (tuple, list)):
        return f"[part[:{size}] for part in sample]"
    return f"sample[:{size}]"
