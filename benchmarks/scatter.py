"""Points in panels side by side, as an SVG file: no library that draws is needed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 380, 300, 48, 30, 34
COLORS = ("#555555", "#d1672b", "#2b7bba", "#7a4fa3", "#1b8a4b")


@dataclass(frozen=True)
class Series:
    label: str
    points: list[tuple[float, float]]
    line: bool = False  # joined, in the order of x


@dataclass(frozen=True)
class Panel:
    """Both axes begin at nought."""

    title: str
    series: list[Series]


def ticks(most: float) -> list[float]:
    """Four to eight round numbers from 0 to `most`."""
    step = 10.0 ** len(str(int(most)))
    while most / step < 4:
        step /= 2 if str(step).lstrip("0.").startswith(("1", "2")) else 2.5
    return [n * step for n in range(int(most / step) + 1)]


def panel(drawn: Panel, x0: float) -> list[str]:
    points = [point for series in drawn.series for point in series.points]
    most_x, most_y = (1.08 * max((p[axis] for p in points), default=1.0) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            x0 + LEFT + x / most_x * (WIDTH - LEFT - 12),
            TOP + (1 - y / most_y) * (HEIGHT - TOP - BOTTOM),
        )

    (left, bottom), (right, _) = place(0, 0), place(most_x, 0)
    out = [
        f'<text x="{x0 + LEFT}" y="18" font-weight="bold">{escape(drawn.title)}</text>',
        f'<path d="M{left:.1f} {TOP}V{bottom:.1f}H{right:.1f}" fill="none" stroke="#333"/>',
    ]
    for x in ticks(most_x):
        out.append(f'<text x="{place(x, 0)[0]:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{x:g}</text>')
    for y in ticks(most_y):
        out.append(f'<text x="{left - 5:.1f}" y="{place(0, y)[1] + 4:.1f}" text-anchor="end">{y:g}</text>')
    for color, series in zip(COLORS, drawn.series, strict=False):
        placed = [place(*point) for point in sorted(series.points)]
        if series.line and placed:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            out.append(f'<path d="M{path}" fill="none" stroke="{color}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in placed]
    return out


def svg(panels: list[Panel]) -> str:
    """The legend, of the first panel's series, is below."""
    width, height = WIDTH * len(panels), HEIGHT + 24
    lines = [line for n, drawn in enumerate(panels) for line in panel(drawn, n * WIDTH)]
    x = float(LEFT)
    for color, series in zip(COLORS, panels[0].series, strict=False):
        lines.append(f'<circle cx="{x:.0f}" cy="{HEIGHT + 10}" r="3.5" fill="{color}"/>')
        lines.append(f'<text x="{x + 8:.0f}" y="{HEIGHT + 14}">{escape(series.label)}</text>')
        x += 26 + 6.3 * len(series.label)
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, int(x))}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
