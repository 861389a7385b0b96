"""Plots of comparisons: models as circles in a plane, steps as bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from memopt._compare.step_table import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memopt._compare.model_table import ModelComparison
    from memopt._compare.step_table import StepComparison

_MIB = 1 << 20
_BEATEN, _FRONT = "#9aa3ab", "#334f9f"
_SCALES: dict[str, tuple[str, Callable[[float], float]]] = {
    "peak": ("peak of tensors, MiB", lambda v: v / _MIB),
    "bytes": ("parameters and buffers, MiB", lambda v: v / _MIB),
    "time": ("a step, ms", lambda v: v * 1e3),
    "flops": ("FLOPs of a step, G", lambda v: v / 1e9),
    "parameters": ("parameters, M", lambda v: v / 1e6),
    "score": ("score", lambda v: -v),
}


def scatter(comparison: ModelComparison, x: str, y: str) -> Figure:
    for key in (x, y):
        if key not in _SCALES:
            raise ValueError(f"plot: {key!r} is not a figure: use one of {', '.join(map(repr, _SCALES))}")
    figure = _figure(7.0, 4.2)
    axes = figure.subplots()
    (x_label, across), (y_label, up) = _SCALES[x], _SCALES[y]
    front = comparison.pareto(x, y)
    most = max((row.parameters or 0 for row in comparison.rows.values()), default=0) or 1
    for row in comparison:
        place = row.value(x), row.value(y)
        if place[0] is None or place[1] is None:
            continue
        axes.scatter(
            [across(place[0])],
            [up(place[1])],
            s=30 + 370 * (row.parameters or 0) / most,
            color=_FRONT if row.name in front else _BEATEN,
            alpha=0.75,
            linewidths=0,
        )
        axes.annotate(row.name, (across(place[0]), up(place[1])), xytext=(6, 6), textcoords="offset points")
    line = [(row.value(x), row.value(y)) for row in (comparison.rows[name] for name in front)]
    axes.plot(
        [across(a or 0.0) for a, _ in line],
        [up(b or 0.0) for _, b in line],
        color=_FRONT,
        linewidth=1,
        zorder=0,
    )
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.margins(0.15)
    _style(axes, grid="both")
    return figure


def step_bars(comparison: StepComparison) -> Figure:
    names = list(comparison.measured)
    timed = any(one.seconds for one in comparison.measured.values())
    figure = _figure(9.0 if timed else 6.5, 1.1 + 0.42 * len(names))
    panels = figure.subplots(
        1, 2 if timed else 1, sharey=True, squeeze=False, width_ratios=[2, 1][: 1 + timed]
    )[0]
    _peaks(panels[0], comparison)
    if timed:
        _times(panels[1], comparison)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.legend(
        loc="outside upper left",
        ncols=6,
        frameon=False,
        fontsize="small",
        handlelength=1.0,
        columnspacing=1.2,
    )
    for axes in panels:
        _style(axes, grid="x")
    return figure


def _peaks(axes: Axes, comparison: StepComparison) -> None:
    rows = list(comparison.measured.values())
    left = [0.0] * len(rows)
    # A legend of what can be seen.
    least = max(one.peak_bytes for one in rows) / 100
    for category, colour in COLOURS.items():
        sizes = [0.0 if one.failed else one.by_category[category] / _MIB for one in rows]
        if any(sizes):
            label = category if any(one.by_category[category] > least for one in rows) else None
            axes.barh(range(len(rows)), sizes, 0.6, left, color=colour, label=label)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for n, one in enumerate(rows):
        if one.failed:
            axes.text(0, n, " out of memory", va="center", color="#b00020")
    axes.set_xlabel("MiB live at the peak")


def _times(axes: Axes, comparison: StepComparison) -> None:
    for n, one in enumerate(comparison.measured.values()):
        if one.step_seconds is None or one.quartiles is None:
            continue
        low, high = one.quartiles
        median = one.step_seconds * 1e3
        around = [[max(median - low * 1e3, 0)], [max(high * 1e3 - median, 0)]]
        axes.barh([n], [median], 0.6, color="#aab2bd", xerr=around, ecolor="#171b21", capsize=3)
    axes.set_xlabel("ms a step")


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure that only the caller holds: pyplot would show it a second time at the end of a notebook's
    cell."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plot() needs matplotlib: pip install "memopt[notebook]"') from error
    figure = plt.figure(figsize=(width, height), layout="constrained")
    plt.close(figure)
    return figure


def _style(axes: Axes, grid: Literal["both", "x"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e4e7eb")
    axes.set_axisbelow(True)
