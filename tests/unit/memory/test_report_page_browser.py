"""The report page in a browser: opened from a file, with no network, and looked at."""

from __future__ import annotations

import http.server
import json
import os
import random
import threading

import chromium
import made_recordings
import pytest
import torch

from memopt import _C
from memopt._memory.html import report_page
from memopt._memory.html.columns import shorten_addresses
from memopt._memory.html.report_page import source_lines
from memopt._memory.recording.recording import CATEGORIES

SEEDS = range(60 if os.environ.get("MEMOPT_SOAK") == "1" else 5)


@pytest.fixture(scope="module")
def browser():
    yield from chromium.for_tests()


@pytest.fixture(scope="module")
def run():
    recording = made_recordings.training(40, layers=6)
    assert recording.events > 4000
    return recording


@pytest.fixture(scope="module")
def page(browser, run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "a page.html"
    report_page.write([run], path, title="A <run>")
    tab = browser.tab()
    tab.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="window.shifts = []; new PerformanceObserver((list) => window.shifts.push(...list.getEntries()"
        ".map((entry) => entry.value))).observe({ type: 'layout-shift', buffered: true });",
    )
    tab.open(path)
    yield tab
    tab.close()


@pytest.fixture(autouse=True)
def _as_opened(request):
    """Each test finds the page as it opens: the peak's contents, everything in view, no y axis turned."""
    yield
    if "page" in request.fixturenames:
        request.getfixturevalue("page").evaluate(
            "memopt.chosen.clear(), memopt.drawContents(), memopt.zoom(null)"
        )


def settle(tab):
    """Until what was asked for is drawn, in the window and the colours as they are."""
    tab.wait(
        "!memopt.waiting && memopt.charts.every((chart) => chart.width === chart.place.clientWidth) && "
        "memopt.colours.panel === getComputedStyle(document.documentElement).getPropertyValue('--panel').trim()"
    )


def drawn(tab, chart):
    """x and y of the upper edge of each part of a timeline, by name, from the bottom up."""
    areas = tab.evaluate(f"memopt.charts[{chart}].areas.map((area) => [area.name, area.x, area.y])")
    return {name: (x, y) for name, x, y in areas}


def table(tab, group):
    """[[name, bytes of each recording ...]] as it stands on the page, the sums last."""
    return tab.evaluate(
        f"Array.from(document.querySelectorAll('#by-{group} tbody tr, #by-{group} tfoot tr'), (row) => "
        "[row.dataset.name, ...Array.from(row.querySelectorAll('[data-bytes]'), (cell) => +cell.dataset.bytes)])"
    )


def expected(recording, group, event):
    lines, line = source_lines(recording)
    if group == "line":
        return recording.rows(line, [one.name for one in lines], event)
    return recording.by_module(event)


def test_it_opens_without_a_network_and_without_a_complaint(page):
    assert page.evaluate("document.title") == "A <run>"
    assert page.evaluate("document.getElementById('trouble').hidden") is True
    assert page.said() == []
    assert {url.split(":")[0] for url in page.requested()} == {"file"}


def test_pages_have_no_network_here(browser, tmp_path):
    """navigator.onLine would not tell: Chromium 150 has it true until it is asked for again."""
    path = tmp_path / "plain.html"
    path.write_text("<html data-drawn=yes>")
    asked = threading.Event()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.set()
            self.send_error(404)

        def log_message(self, *_):
            """Nothing on the screen."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            tab = browser.tab()
            tab.open(path)
            fetched = f"fetch('http://127.0.0.1:{server.server_port}', {{mode: 'no-cors'}})"
            assert tab.evaluate(f"{fetched}.then(() => 'reached', () => 'refused')") == "refused"
            tab.close()
        finally:
            server.shutdown()
    assert not asked.is_set()


def test_nothing_moves_while_it_is_drawn(page):
    assert sum(page.evaluate("window.shifts")) < 0.01


@pytest.mark.parametrize("group", ["line", "module"])
def test_the_tables_are_the_peaks_contents(page, run, group):
    rows = expected(run, group, None)
    found = table(page, group)
    assert [row[1] for row in found[:-1]] == [row.bytes for row in rows]
    assert sorted(found[:-1]) == sorted([row.name, row.bytes] for row in rows)
    assert found[-1][1] == run.peak()[0]
    if group == "line":
        texts = page.evaluate(
            "Array.from(document.querySelectorAll('#by-line .source'), (e) => e.textContent)"
        )
        assert sorted(texts) == sorted(row.text for row in run.by_line() if row.text)


def test_a_click_on_a_column_sorts_by_it_and_another_one_turns_it(page):
    names = "Array.from(document.querySelectorAll('#by-module tbody tr'), (row) => row.dataset.name)"
    by_bytes = page.evaluate(names)
    for order in (sorted(by_bytes), sorted(by_bytes, reverse=True)):
        page.evaluate("document.querySelector('#by-module [data-by=name]').click()")
        assert page.evaluate(names) == order
    sort = page.evaluate("document.querySelector('#by-module th[aria-sort]').getAttribute('aria-sort')")
    assert sort == "descending"
    page.evaluate("document.querySelector('#by-module [data-by=\"0\"]').click()")
    assert page.evaluate(names) == by_bytes


def test_the_timeline_has_the_peak_and_every_moment_as_it_was(page, run):
    lines = drawn(page, 0)
    peak, _ = run.peak()
    tops = lines["other"][1]  # the last that is stacked: all together
    assert max(tops) == peak
    assert len(tops) < run.events, "it is a choice of the events"
    # Each moment that is drawn is a true one: total and parts are those after one event.
    live = {c: run.live_bytes(i) for i, c in enumerate(CATEGORIES)}
    total = run.live_bytes()
    times = page.evaluate("Array.from(memopt.axes.get(memopt.recordings[0]).positions)")
    where = {}
    for moment, time in enumerate(times):
        where.setdefault(time, []).append(moment)
    order = list(lines)
    for i in range(0, len(tops) - 1, 37):
        moments = where[lines["other"][0][i]]
        parts = [lines[name][1][i] - (lines[order[n - 1]][1][i] if n else 0) for n, name in enumerate(order)]
        assert any(
            int(total[m]) == sum(parts) and [int(live[name][m]) for name in order] == parts for m in moments
        )


def test_dragging_over_a_part_brings_out_detail_that_was_not_drawn(page, run):
    before = drawn(page, 0)["other"]
    left, top, width, height = page.box("#timeline-0 .area")
    page.drag(left + width * 0.40, top + height / 2, left + width * 0.44, top + height / 2)
    page.wait("memopt.range !== null")
    settle(page)
    shown = page.evaluate("memopt.range")
    full = page.evaluate("memopt.full[1]")
    assert shown and 0.03 < (shown[1] - shown[0]) / full < 0.05
    after = drawn(page, 0)["other"]
    inside = [x for x in before[0] if shown[0] < x < shown[1]]
    finer = [x for x in after[0] if shown[0] < x < shown[1]]
    assert set(inside) <= set(finer) and len(finer) > 1.5 * len(inside)
    everything = page.evaluate(
        f"Array.from(memopt.axes.get(memopt.recordings[0]).positions).filter((x) => x > {shown[0]} && x < {shown[1]})"
    )
    assert finer == everything, "near enough, every event is drawn"
    assert page.evaluate("memopt.charts[1].range()") == shown, "the map goes along"
    page.evaluate("document.querySelector('[data-do=all]').click()")
    settle(page)
    assert page.evaluate("memopt.range") is None and drawn(page, 0)["other"] == before


def test_dragging_upwards_on_the_map_shows_fewer_addresses(page):
    left, top, width, height = page.box("#map-0 .area")
    page.drag(left + width * 0.2, top + height * 0.3, left + width * 0.6, top + height * 0.8)
    page.wait("memopt.range !== null && memopt.charts[1].view.values !== undefined")
    settle(page)
    low, high = page.evaluate("memopt.charts[1].values()")
    most = page.evaluate("memopt.mostPlaces")
    assert 0.15 < low / most < 0.25 and 0.65 < high / most < 0.75


def test_a_click_on_a_moment_shows_what_lived_then(page, run):
    left, top, width, height = page.box("#timeline-0 .area")
    page.click(left + width * 0.613, top + height / 2)
    settle(page)
    moment = page.evaluate("memopt.moment(memopt.recordings[0])")
    share = page.evaluate(f"memopt.axes.get(memopt.recordings[0]).positions[{moment}] / memopt.full[1]")
    assert abs(share - 0.613) < 0.01 and moment - 1 != run.peak()[1]
    for group in ("line", "module"):
        rows = expected(run, group, moment - 1)
        assert sorted(table(page, group)[:-1]) == sorted([row.name, row.bytes] for row in rows)
    assert table(page, "line")[-1][1] == int(run.live_bytes()[moment])
    page.evaluate("document.querySelector('[data-do=end]').click()")
    settle(page)
    assert table(page, "line")[-1][1] == int(run.live_bytes()[-1])
    page.evaluate("document.querySelector('[data-do=peak]').click()")
    settle(page)
    assert table(page, "line")[-1][1] == run.peak()[0]


def test_the_tip_tells_the_block_under_the_pointer(page, run):
    left, top, width, height = page.box("#map-0 .area")
    block = int(((run.columns["born"] < 0) * run.columns["size"]).argmax())  # there all the time
    place = int(shorten_addresses(run.columns["address"], run.columns["size"]).offsets[block])
    size = int(run.columns["size"][block])
    share = (place + size / 2) / page.evaluate("memopt.mostPlaces")
    page.mouse("mouseMoved", left + width / 2, top + height * (1 - share))
    said = page.evaluate("document.querySelector('#map-0 .tip').innerText").replace("\u00a0", " ")
    assert f"{_C.format_size(size)} of {CATEGORIES[int(run.columns['category'][block])]}" in said
    assert hex(int(run.columns["address"][block])) in said
    assert "from before the recording, alive at the end" in said
    page.mouse("mouseMoved", 2, 2)
    assert page.evaluate("document.querySelector('#map-0 .tip').hidden") is True


def test_events_can_be_the_axis(page, run):
    page.evaluate("document.querySelector('[data-do=events]').click()")
    settle(page)
    assert page.evaluate("memopt.full") == [0, run.events + 1]
    assert max(drawn(page, 0)["other"][0]) == run.events + 1
    page.evaluate("document.querySelector('[data-do=time]').click()")
    settle(page)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_picture_has_the_categories_in_their_colours(page, run, dark):
    """Of the screenshot, within the axes: each category has as many pixels as it had byte seconds, roughly."""
    page.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
    )
    page.evaluate("memopt.zoom([0, memopt.full[1] / 10])")
    settle(page)
    colours = page.evaluate("memopt.colours")
    most = page.evaluate("memopt.mostBytes")
    assert (int(colours["panel"][1:3], 16) < 128) == dark
    shown = page.evaluate("memopt.range")
    times = torch.tensor(page.evaluate("Array.from(memopt.axes.get(memopt.recordings[0]).positions)"))
    stays = times.clamp(max=shown[1]).diff(append=torch.tensor([shown[1]])).clamp(min=0).double()
    for chart in ("timeline", "map"):
        box = page.box(f"#{chart}-0 .area")
        counted = page.colours(page.screenshot(whole=False), box)
        area = sum(counted.values())
        assert area > 100_000
        high = most if chart == "timeline" else page.evaluate("memopt.mostPlaces")
        for i, name in enumerate(CATEGORIES):
            bytes_ = run.live_bytes(i).double()
            true = float((bytes_ * stays).sum()) / (shown[1] - shown[0]) / high
            here = counted.get(colours[name], 0) / area
            if true > 0.03:
                assert 0.6 * true < here < 1.1 * true, (chart, name)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    settle(page)


@pytest.mark.parametrize("width", [400, 1200])
def test_it_fits_the_window(page, width):
    page.resize(width, 900)
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert abs(page.box("#timeline-0 .plot")[2] - page.box("#timeline-0")[2]) < 2
    if width < 500:
        assert page.box("#timeline-0")[2] > 300
    page.resize(1200, 900)
    settle(page)


# ---- two beside each other -------------------------------------------------------------------------------------------


def test_two_recordings_have_the_same_scales_and_their_differences(browser, tmp_path):
    one, two = made_recordings.training(4, layers=4), made_recordings.training(6, layers=5, oom=True)
    two.facts["plan"] = "the plan's text"
    report_page.write([one, two], tmp_path / "two.html", title="two", names=["before", "after"])
    tab = browser.tab(dark=True)
    tab.open(tmp_path / "two.html")
    assert tab.said() == []
    for axis in ("range", "values"):
        for kind in (0, 1):
            ranges = tab.evaluate(f"[0, 2].map((i) => memopt.charts[i + {kind}].{axis}())")
            assert ranges[0] == ranges[1]
    boxes = [tab.box(f"#timeline-{i}") for i in (0, 1, 0)][1:]
    assert boxes[0][1] == boxes[1][1] and boxes[1][0] + boxes[1][2] <= boxes[0][0]
    for group in ("line", "module"):
        each = [{row.name: row.bytes for row in expected(r, group, None)} for r in (one, two)]
        found = table(tab, group)
        assert {row[0]: row[1:] for row in found[:-1]} == {
            name: [rows.get(name, 0) for rows in each] for name in each[0] | each[1]
        }
        changes = [abs(b - a) for _, a, b in found[:-1]]
        assert changes == sorted(changes, reverse=True) and changes[0] > 0
    more = two.peak()[0] - one.peak()[0]
    said = tab.evaluate("document.getElementById('summary').innerText").replace("\u00a0", " ")
    assert f"after peaks {_C.format_size(more)} higher" in said and "Out of memory" in said
    assert tab.evaluate("document.querySelector('#plan p').textContent") == "the plan's text"
    tab.evaluate("document.querySelector('[data-do=oom]').click()")
    settle(tab)
    assert table(tab, "line")[-1][2] == int(two.live_bytes()[-1])
    tab.close()


# ---- the page's arithmetic against the recording's -------------------------------------------------------------------


def load(page, recording):
    """As the page has it, in `window.tested` and, by events, `window.axis`."""
    part = report_page._Part(recording, "x")
    page.evaluate(
        f"(async () => {{ const d = {json.dumps(part.described)}; window.tested = new Recording(d, "
        f"unpackColumns(d.columns, await inflate({json.dumps(part.base64)}))); "
        "window.axis = new Axis(tested, false, 1); })()"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_any_recording_is_the_same_in_the_page(page, seed):
    recording = made_recordings.anything(seed)
    load(page, recording)
    assert page.evaluate("Array.from(tested.total)") == recording.live_bytes().tolist()
    for i in range(len(CATEGORIES)):
        live = recording.live_bytes(i).tolist()
        assert page.evaluate(f"Array.from(tested.live[{i}]).slice(0, {len(live)})") == live
    for moment in {0, recording.events // 2, recording.events}:
        for group in ("line", "module"):
            found = page.evaluate(
                f"Array.from(tested.contents({moment}, '{group}'), ([name, row]) => [name, row.bytes, row.blocks])"
            )
            rows = expected(recording, group, moment - 1)
            assert sorted(found) == sorted([row.name, row.bytes, row.blocks] for row in rows)
        held = [
            b
            for e, b in zip(
                recording.reserved_events.tolist(), recording.reserved_bytes.tolist(), strict=True
            )
            if e < moment
        ]
        assert page.evaluate(f"tested.reservedAt({moment})") == (held[-1] if held else None)


def test_time_is_the_axis_unless_most_of_it_is_a_wait(page):
    recording = made_recordings.training(3)
    load(page, recording)
    assert page.evaluate("memopt.isSpread(tested)") is True
    recording.times_us[5:] += 10 * int(recording.times_us[-1])
    load(page, recording)
    assert page.evaluate("memopt.isSpread(tested)") is False


@pytest.mark.parametrize("seed", SEEDS)
def test_each_pixel_column_has_its_most_and_its_least(page, seed):
    recording = made_recordings.anything(seed, events=500)
    load(page, recording)
    chance = random.Random(seed)
    begin = chance.uniform(0, recording.events / 2)
    end = chance.uniform(begin + 100, recording.events) + 1
    columns = chance.choice([1, 5, 40])
    chosen = page.evaluate(f"chosenMoments(tested, axis, {begin}, {end}, {columns})")
    live = recording.live_bytes().tolist()
    assert chosen == sorted(set(chosen)) and chosen[0] == int(begin)
    within: dict[int, list[int]] = {}
    for moment in range(int(begin) + 1, min(int(end), recording.events) + 1):
        within.setdefault(int((moment - begin) / ((end - begin) / columns)), []).append(moment)
    drawn_bytes = [(m, live[m]) for m in chosen]
    for moments in within.values():
        here = [b for m, b in drawn_bytes if m in moments]
        assert max(here) == max(live[m] for m in moments) and min(here) == min(live[m] for m in moments)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_pixel_of_the_map_has_the_blocks_shares(page, seed):
    recording = made_recordings.anything(seed)
    load(page, recording)
    chance = random.Random(seed)
    events, places = recording.events + 1, max(1, page.evaluate("tested.places"))
    begin, low = (
        chance.choice([0, chance.uniform(0, events * 0.7)]),
        chance.choice([0, places * chance.random()]),
    )
    end, high = (
        begin + (events - begin) * chance.choice([1, 0.4]),
        low + (places - low) * chance.choice([1, 0.3]),
    )
    width, height = chance.choice([(1, 1), (7, 5), (16, 3)])
    view = f"[{begin}, {end}], [{low}, {high}], {width}, {height}"
    found = page.evaluate(f"coverage(tested, axis, {view}).map((s) => s && Array.from(s))")
    order = recording.columns["born"].argsort(stable=True)
    place = page.evaluate("Array.from(tested.place)")
    columns = {name: recording.columns[name][order].tolist() for name in ("born", "died", "size", "category")}
    true = [[0.0] * width * height for _ in CATEGORIES]
    for born, died, size, category, bottom in zip(*columns.values(), place, strict=True):
        for row in range(height):
            y = [low + (high - low) * k / height for k in (row, row + 1)]
            part = max(0.0, min(y[1], bottom + size) - max(y[0], bottom)) / (y[1] - y[0])
            for column in range(width if part else 0):
                x = [begin + (end - begin) * k / width for k in (column, column + 1)]
                until = died + 1 if died < recording.events else recording.events + 1
                share = max(0.0, min(x[1], until) - max(x[0], born + 1)) / (x[1] - x[0])
                true[category][row * width + column] += part * share
    for category, share in enumerate(found):
        for row in range(height):
            for column in range(width):
                here = share[row * (width + 1) + column] if share else 0.0
                assert here == pytest.approx(
                    true[category][row * width + column], abs=1e-3 * (1 + len(place) / 9)
                )


def test_sizes_are_written_as_python_writes_them(page):
    chance = random.Random(7)
    sizes = [
        0,
        1,
        1023,
        1024,
        (1 << 20) - 1,
        *(chance.randrange(1 << chance.randrange(1, 53)) for _ in range(300)),
    ]
    assert page.evaluate(f"{sizes}.map((n) => formatSize(n).replace('\\u00a0', ' '))") == [
        _C.format_size(n) for n in sizes
    ]
