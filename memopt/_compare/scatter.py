"""A comparison of models as circles in a plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memopt._compare.model_table import ModelComparison

_BEATEN, _FRONT = "#9aa3ab", "#334f9f"
_SCALES: dict[str, tuple[str, Callable[[float], float]]] = {
    "peak": ("peak of tensors, MiB", lambda v: v / (1 << 20)),
    "bytes": ("parameters and buffers, MiB", lambda v: v / (1 << 20)),
    "time": ("a step, ms", lambda v: v * 1e3),
    "flops": ("FLOPs of a step, G", lambda v: v / 1e9),
    "parameters": ("parameters, M", lambda v: v / 1e6),
    "score": ("score", lambda v: -v),
}


def draw(comparison: ModelComparison, x: str, y: str) -> Figure:
    for key in (x, y):
        if key not in _SCALES:
            raise ValueError(f"plot: {key!r} is no figure: take one of {', '.join(map(repr, _SCALES))}")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plot() needs matplotlib: pip install "memopt[notebook]"') from error
    figure = plt.figure(figsize=(7.0, 4.2), layout="constrained")
    plt.close(
        figure
    )  # the caller's alone: pyplot would show it a second time at the end of a notebook's cell
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
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7eb")
    axes.set_axisbelow(True)
    return figure
