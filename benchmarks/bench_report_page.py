"""The report page of a million events is drawn in less than 3 s after it is opened from a file.

In headless Chromium, a new tab each time, from the navigation to the last chart; beside it the page of a thousand
events, which is what a page takes to open, and little else. Processor time is that of the page's process,
all its threads. Then what a zoom to a hundredth of the million takes until it is drawn, what writing the file
takes by `memopt report`, its start included, and its size.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import chromium  # noqa: E402
import made_recordings  # noqa: E402

LIMIT_SECONDS = 3.0
ZOOM = """(async () => {
    const begun = performance.now(), middle = memopt.full[1] / 2;
    memopt.zoom([middle, middle + memopt.full[1] / 100]);
    await memopt.waiting;
    return (performance.now() - begun) / 1e3;
})()"""


def by_the_page(run: Callable[[], object], calls: int) -> float:
    """A clock: the seconds that each run returns."""
    return sum(float(run()) for _ in range(calls))  # type: ignore[arg-type]


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    if chromium.find() is None:
        raise SystemExit("bench_report_page: there is no Chromium; install it or name one in MEMOPT_CHROMIUM")
    report = harness.Report("bench_report_page", options)
    recordings = {"1,000": made_recordings.training(4), "1,000,000": made_recordings.training(4100)}
    with tempfile.TemporaryDirectory() as folder, chromium.running() as browser:
        report.note("browser", browser.call("Browser.getVersion")["product"])
        report.note("events", {name: recording.events for name, recording in recordings.items()})
        paths: dict[str, Path] = {}
        zooms: list[float] = []
        processor: dict[str, list[float]] = {f"{name} events": [] for name in recordings}
        for name, recording in recordings.items():
            paths[name] = Path(folder) / f"{recording.events}.html"
            saved = paths[name].with_suffix(".mopt")
            made_recordings.save(recording, saved)
            command = [sys.executable, "-m", "memopt", "report", str(saved), "-o", str(paths[name])]
            begun = time.perf_counter()
            subprocess.run([*command, "--title", name, "--quiet"], cwd=ROOT, check=True)
            written = time.perf_counter() - begun

        def opened(name: str) -> float:
            tab = browser.tab()
            tab.call("Performance.enable")
            tab.open(paths[name])
            metrics = {m["name"]: m["value"] for m in tab.call("Performance.getMetrics")["metrics"]}
            processor[f"{name} events"].append(metrics["ProcessTime"])
            if complaints := tab.said():
                raise RuntimeError(f"the page complains: {complaints}")
            seconds = float(tab.evaluate("performance.getEntriesByName('drawn')[0].startTime / 1e3"))
            if name == "1,000,000":
                zooms.append(float(tab.evaluate(ZOOM)))
            tab.close()
            return seconds

        done = report.compare(
            "a page, opened and drawn",
            {f"{name} events": (lambda name=name: opened(name)) for name in recordings},
            peer="1,000 events",
            calls=1,
            clock=by_the_page,
        )
        # Of the best round, since others may be disturbed.
        best = done.seconds("1,000,000 events").best
        report.record(
            "a million events drawn, the best round, and the limit",
            {"limit": LIMIT_SECONDS, "memopt": best},
            unit="s",
            peer="limit",
            goal=1.0,
        )
        least = {name: min(seconds) for name, seconds in processor.items()}
        report.record("processor time of it, the best round", least, unit="s", peer="1,000 events")
        report.record("a zoom to a hundredth of it, the best round", {"memopt": min(zooms)}, unit="s")
        report.record("the file of a million events, written in", {"memopt": written}, unit="s")
        size = paths["1,000,000"].stat().st_size
        report.record("its size", {"memopt": size / 1e6}, unit="MB")
        library = paths["1,000"].stat().st_size
        report.record("of a thousand events, which is the page itself", {"memopt": library / 1e6}, unit="MB")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
