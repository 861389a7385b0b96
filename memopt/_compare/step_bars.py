"""A comparison of steps as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt._compare.step_table import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memopt._compare.step_table import StepComparison

_MIB = 1 << 20


def draw(comparison: StepComparison) -> Figure:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plot() needs matplotlib: pip install "memopt[notebook]"') from error
    names = list(comparison.measured)
    timed = any(one.seconds for one in comparison.measured.values())
    height = 1.1 + 0.42 * len(names)
    figure = plt.figure(figsize=(9.0 if timed else 6.5, height), layout="constrained")
    # The caller's alone: pyplot would show it a second time at the end of a notebook's cell.
    plt.close(figure)
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#e4e7eb")
        axes.set_axisbelow(True)
    return figure


def _peaks(axes: Axes, comparison: StepComparison) -> None:
    rows = list(comparison.measured.values())
    left = [0.0] * len(rows)
    # A legend of what can be seen.
    least = max(one.peak for one in rows) / 100
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
