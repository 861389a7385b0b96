"""%memopt live: the memory while cells run, as a bar and a curve that change in place."""

from __future__ import annotations

from collections import deque
from typing import Any

from IPython.display import display

from memopt import _C
from memopt._memory.live.device_bytes import CACHE, FREE, UNKNOWN, DeviceBytes
from memopt._memory.live.figures import Figures, FiguresThread

_INTERVAL = 0.5  # seconds
_KEPT = 300  # figures of the curve
_WIDTH, _HEIGHT = 600, 60
_LIVE, _RESERVED = "#4477aa", "#66ccee"  # as in the bar


class NotebookView:
    """A picture below the cell that makes it, until off(). Its thread lives as long as a cell runs."""

    def __init__(self, shell: Any) -> None:
        self._events = shell.events
        self._curve: deque[Figures] = deque(maxlen=_KEPT)
        self._thread: FiguresThread | None = None
        self._shown: Any = display(  # type: ignore[no-untyped-call]
            {"text/plain": "memopt: the memory while cells run"}, raw=True, display_id=True
        )
        self._begin()
        self._events.register("pre_run_cell", self._begin)
        self._events.register("post_run_cell", self._end)

    def off(self) -> None:
        self._events.unregister("pre_run_cell", self._begin)
        self._events.unregister("post_run_cell", self._end)
        self._end()

    def _begin(self, *_: Any) -> None:
        if self._thread is None:
            self._thread = FiguresThread(self._tell, _INTERVAL)

    def _end(self, *_: Any) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _tell(self, figures: Figures) -> None:
        if self._curve and self._curve[-1].device != figures.device:
            self._curve.clear()
        self._curve.append(figures)
        told = _bytes_of(figures)
        texts = {"text/plain": str(told), "text/html": told._repr_html_() + _svg(list(self._curve))}
        self._shown.update(texts, raw=True)


def _bytes_of(figures: Figures) -> DeviceBytes:
    if figures.device == "cpu":
        parts = {"this process": figures.used, "all else": max(0, figures.total - figures.used)}
        return DeviceBytes("cpu", figures.total, parts, "the kernel")
    parts = {
        "live": figures.live,
        CACHE: figures.reserved - figures.live,
        UNKNOWN: max(0, figures.used - figures.reserved),
        FREE: figures.total - max(figures.used, figures.reserved),
    }
    return DeviceBytes(figures.device, figures.total, parts, "the driver")


def _svg(curve: list[Figures]) -> str:
    """Return the figures of a device over time, those of the host's process where there is none."""
    on_host = curve[-1].device == "cpu"
    upper = [one.used if on_host else one.reserved for one in curve]
    most = max(upper) or 1
    areas = [(_LIVE, upper)] if on_host else [(_RESERVED, upper), (_LIVE, [one.live for one in curve])]
    drawn = "".join(f'<path d="{_area(values, most)}" fill="{colour}"/>' for colour, values in areas)
    said = f"at most {_C.format_size(most)}" + (
        "" if on_host else f" reserved, peak {_C.format_size(curve[-1].peak)}"
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="Memory: {said}" '
        f'style="width:100%;max-width:60em;height:4em">{drawn}</svg>'
        f"<div>the last {len(curve) * _INTERVAL:g} s of cells: {said}</div>"
    )


def _area(values: list[int], most: int) -> str:
    values = values if len(values) > 1 else 2 * values
    step = _WIDTH / (len(values) - 1)
    points = [f"{n * step:.1f},{_HEIGHT * (1 - value / most):.1f}" for n, value in enumerate(values)]
    return f"M0,{_HEIGHT} L{' '.join(points)} L{_WIDTH},{_HEIGHT}Z"


_view: NotebookView | None = None


def on(shell: Any) -> None:
    """Show the view below this cell; one that is further up ends."""
    global _view
    off()
    _view = NotebookView(shell)


def off() -> None:
    global _view
    if _view is not None:
        _view.off()
        _view = None
