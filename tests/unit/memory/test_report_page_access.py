"""Pages for all who read them: by keys alone, by a screen reader, in the dark, on a narrow window, on paper."""

from __future__ import annotations

import json

import accessibility
import chromium
import made_recordings
import pytest

from memopt._demo import page as demo_page
from memopt._demo.results import DemoResult, TaskResult
from memopt._memory.html import report_page
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.lower_peak import Suggestion
from memopt._memory.recording.recording import CATEGORIES, Recording

MIB = 1 << 20
STAGE = {"name": "blocks.0.attention", "saved_bytes": 3 * MIB, "output_bytes": MIB, "forward_seconds": 0.0015}
STAGE |= {"backward_seconds": 0.003, "runs": 2, "keeps": "its input"}
PLAN = {"memory_budget": 8 * MIB, "fixed_bytes": MIB, "peak_bytes": 7 * MIB, "seconds": 0.12}
PLAN |= {
    "plain_bytes": 12 * MIB,
    "plain_seconds": 0.1,
    "stages": [STAGE, {**STAGE, "name": "(rest of the model)"}],
}


@pytest.fixture(scope="module")
def browser():
    yield from chromium.for_tests()


def trained(peak: int, losses: list[float]) -> dict:
    parts = dict.fromkeys(CATEGORIES, peak // 8) | {"activations": peak - 5 * (peak // 8)}
    return {
        "peak": peak,
        "by_category": parts,
        "losses": losses,
        "loss": losses[-1],
        "seconds": 0.2,
        "predicted": peak,
    }


def one() -> str:
    recording = made_recordings.training(12, layers=14)
    recording.facts |= {"optimizers": [{"kind": "AdamW", "options": []}], "plan": PLAN, "retries": 2}
    leak = Leak(
        "grows",
        "train.py:38",
        "logged.append(loss)",
        5 * MIB,
        9,
        MIB // 2,
        "activations",
        "logged[*]",
        "train.py:38",
    )
    return report_page.html([recording], title="A run", leaks=[leak])


def two() -> str:
    recordings = [made_recordings.training(4, layers=4), made_recordings.training(6, layers=5, oom=True)]
    recordings[1].facts["plan"] = "2 stages\n  blocks.0  keeps its input  " + "and more " * 30
    return report_page.html(recordings, title="before and after", names=["before.mopt", "after.mopt"])


def failed() -> str:
    """What an out-of-memory error leaves: one moment, its text, and changes with which it would fit."""
    full = made_recordings.training(2)
    recording = full.since(full.peak()[1])
    columns = {name: column[recording.columns["born"] < 0] for name, column in recording.columns.items()}
    columns["died"] = columns["died"] * 0
    live = Recording(
        "cuda:0", "what was live", columns, recording.times_us[:0], recording.stacks, recording.modules
    )
    text = "memopt: CUDA out of memory at train.py:9\n  Held by     " + " | ".join(
        ["history[*] 40.0 MiB (train.py:9)"] * 9
    )
    first = report_page.section("What happened", report_page.folding_lines(text))
    fits = [
        Suggestion(
            "memopt.optim.AdamW(…, state_bits=8) + " * 3 + "more",
            63 * MIB,
            cost="other results: states of 8 bits",
        )
    ]
    return report_page.html([live], title="CUDA out of memory", first=first, suggestions=fits)


def demo() -> str:
    task = TaskResult(
        "gpt",
        "a character GPT, 9 steps",
        52 * MIB,
        trained(104 * MIB, [4.0, 3.2, 2.9]),
        trained(50 * MIB, [4.0, 3.3, 2.8]),
    )
    task.within["plan"] = {"seconds": 1.2, "plain_seconds": 1.0}
    return demo_page.html(
        DemoResult([task], "the CPU"), [made_recordings.training(2), made_recordings.training(2, layers=3)]
    )


PAGES = {"one": one, "two": two, "failed": failed, "demo": demo}


@pytest.fixture(scope="module", params=PAGES)
def opened(request, browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(PAGES[request.param](), encoding="utf-8")
    tab = browser.tab()
    tab.open(path)
    yield tab
    tab.close()


def look(tab, width: int, dark: bool) -> None:
    scheme = "dark" if dark else "light"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    tab.resize(width, 900)
    tab.evaluate("memopt.redraw()")
    tab.wait("!memopt.waiting && memopt.charts.every((chart) => chart.width === chart.place.clientWidth)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 600])
def test_a_page_is_for_all_who_read_it(opened, width, dark):
    look(opened, width, dark)
    assert opened.said() == []
    assert accessibility.complaints(opened) == []
    for by in ("module", "line", "category") if width == 600 and not dark else ():
        opened.evaluate(f"document.querySelector('[data-do=by-{by}]').click(), memopt.redraw()")
        assert accessibility.complaints(opened) == [], by


PLANTED = {
    "low": "document.querySelector('h2').style.color = '#999'",
    "jumps": "document.querySelector('main > section:not([hidden])').insertAdjacentHTML('beforeend', '<h5>x</h5>')",
    "tables": "document.querySelector('#by-line tbody th').removeAttribute('scope')",
    "pictures": "document.querySelector('.chart').setAttribute('aria-label', 'a chart')",
    "cut": "document.querySelector('#by-module .row').removeAttribute('title'), "
    "document.querySelector('#by-module .row').style.width = '20px'",
    "outside": "document.querySelector('.plot text').setAttribute('x', -50)",
    "overlaps": "document.querySelector('.summary').style.position = 'absolute'",
    "wide": "document.querySelector('.source').style.width = '2000px'",
    "names": "document.querySelector('[data-do=peak]').textContent = ''",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_each_check_finds_what_is_planted(browser, tmp_path, kind):
    (tmp_path / "page.html").write_text(one(), encoding="utf-8")
    tab = browser.tab()
    tab.open(tmp_path / "page.html")
    tab.evaluate(f"void ({PLANTED[kind]})")
    assert {complaint.partition(":")[0] for complaint in accessibility.complaints(tab)} == {kind}
    tab.close()


# ---- by keys alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run():
    return made_recordings.training(12, layers=14)


@pytest.fixture
def tab(browser, run, tmp_path):
    report_page.write([run], tmp_path / "page.html", title="A run")
    tab = browser.tab()
    tab.open(tmp_path / "page.html")
    yield tab
    tab.close()


FOCUS = "document.activeElement"


def reach(tab, selector: str) -> int:
    """Press Tab until an element is focused; return how often. Each stop on the way is seen: it has an outline."""
    for presses in range(1, 40):
        tab.key("Tab")
        assert tab.evaluate(f"getComputedStyle({FOCUS}).outlineStyle") == "solid"
        if tab.evaluate(f"{FOCUS}.matches({selector!r})"):
            return presses
    raise AssertionError(f"{selector} cannot be reached by Tab")


def moment(tab) -> int:
    return tab.evaluate("memopt.moment(memopt.recordings[0])")


def alive(tab, group: str = "line") -> int:
    """Return the sum that the table of what was live has at the moment."""
    return int(tab.evaluate(f"document.querySelector('#by-{group} tfoot [data-bytes]').dataset.bytes"))


def test_keys_move_the_moment_and_what_was_live_follows(tab, run):
    live, peak = run.live_bytes().tolist(), run.peak()[1] + 1
    assert reach(tab, "#timeline-0") < 12
    steps = [mark.event + 1 for mark in run.marks]
    for keys, where in [
        (["End"], run.events),
        (["Home"], 0),
        (["PageDown", "PageDown"], steps[1]),
        (["PageUp"], steps[0]),
        (["p"], peak),
        (["ArrowRight", "ArrowLeft"], peak),
    ]:
        for key in keys:
            tab.key(key)
        assert moment(tab) == where, keys
        assert alive(tab) == alive(tab, "module") == live[where]
        slider = next(node for node in accessibility.nodes(tab) if node["role"] == "slider")
        assert slider["value"] == where
    tab.key("ArrowRight")
    assert 0 < moment(tab) - peak < run.events / 100
    told = tab.evaluate("document.querySelector('#timeline-0').getAttribute('aria-valuetext')")
    assert report_page.size_text(live[moment(tab)]) in told and "step 1" in told
    assert (
        told.removesuffix(":") and tab.evaluate("document.querySelector('#timeline-0 .tip').hidden") is False
    )
    tab.key("Escape")
    assert tab.evaluate("document.querySelector('#timeline-0 .tip').hidden") is True


def test_keys_zoom_where_the_moment_is_and_moving_on_keeps_it_in_view(tab, run):
    reach(tab, "#timeline-0")
    for key in "p++++":
        tab.key(key)
    tab.wait("memopt.range !== null && !memopt.waiting")
    low, high = tab.evaluate("memopt.range")
    at = tab.evaluate("memopt.axes.get(memopt.recordings[0]).positions[memopt.recordings[0].peak]")
    assert low <= at <= high and (high - low) / tab.evaluate("memopt.full[1]") == pytest.approx(1 / 16)
    tab.key("End")
    tab.wait("!memopt.waiting")
    assert tab.evaluate("memopt.range[1]") == pytest.approx(tab.evaluate("memopt.full[1]"), rel=0.01)
    tab.key("0")
    tab.wait("memopt.range === null && !memopt.waiting")


def test_keys_go_through_the_blocks_of_the_map(tab, run):
    reach(tab, "#map-0")
    live = run.live_at(run.peak()[1])
    order = live[run.columns["address"][live].argsort()].tolist()
    tab.key("ArrowUp")
    told = tab.evaluate("document.querySelector('#map-0').getAttribute('aria-valuetext')")
    assert hex(int(run.columns["address"][order[0]])) in told
    tab.key("ArrowUp")
    told = tab.evaluate("document.querySelector('#map-0 .tip').innerText")
    assert hex(int(run.columns["address"][order[1]])) in told


@pytest.mark.parametrize("group", ["line", "module"])
def test_keys_reach_a_row_and_its_own_memory_is_drawn(tab, run, group):
    reach(tab, f"#by-{group} button.row")
    names = tab.evaluate(
        f"Array.from(document.querySelectorAll('#by-{group} button.row'), (one) => one.dataset.row)"
    )
    tab.key("ArrowDown")
    assert tab.evaluate(f"{FOCUS}.dataset.row") == names[1]
    tab.key("End")
    assert tab.evaluate(f"{FOCUS}.dataset.row") == names[-1]
    tab.key("Home")
    assert tab.evaluate("document.querySelectorAll('#timeline-0 .followed').length") == 0
    tab.key("Enter")
    assert tab.evaluate(f"{FOCUS}.getAttribute('aria-pressed')") == "true"
    assert tab.evaluate("document.querySelectorAll('#timeline-0 .followed').length") == 2
    assert f"{names[0]} alone" in tab.evaluate("document.getElementById('legend').textContent")
    own = tab.evaluate(f"Array.from(memopt.recordings[0].liveOf({group!r}, {names[0]!r}))")
    rows = run.by_line() if group == "line" else run.by_module()
    assert max(own) >= own[run.peak()[1] + 1] == rows[0].bytes
    tab.key("Enter")
    assert tab.evaluate("document.querySelectorAll('#timeline-0 .followed').length") == 0


def test_colours_by_module_are_of_activations_and_add_up_to_them(tab, run):
    reach(tab, "[data-do=by-module]")
    tab.key("Enter")
    tab.wait("!memopt.waiting && memopt.colouredBy === 'module'")
    names, live = tab.evaluate(
        "[memopt.colouring.series.map((part) => part.name), "
        "memopt.colouring.live(memopt.recordings[0]).map((bytes) => bytes[memopt.recordings[0].peak])]"
    )
    parts = dict(zip(names, live, strict=True))
    assert names[0] == "not activations" and "blocks.*" in names and sum(live) == run.peak()[0]
    assert sum(live[1:]) == run.by_category()["activations"]
    drawn = tab.evaluate("document.querySelectorAll('#timeline-0 .part').length")
    assert drawn == len(parts)


@pytest.mark.parametrize("by", ["category", "module", "line"])
@pytest.mark.parametrize("seed", range(3))
def test_every_block_has_a_part_and_the_parts_add_up_at_every_moment(tab, seed, by):
    recordings = [made_recordings.anything(seed), made_recordings.anything(seed + 20)]
    for number, recording in enumerate(recordings):
        part = report_page._Part(recording, "x")
        columns = f"unpackColumns(described.columns, await inflate({json.dumps(part.base64)}))"
        tab.evaluate(
            f"(async () => {{ const described = {json.dumps(part.described)}; window.made ??= []; "
            f"made[{number}] = new Recording(described, {columns}); }})()"
        )
    tab.evaluate(f"window.colouring = new Colouring(made, {by!r}), null")
    for number, recording in enumerate(recordings):
        sums = "colouring.live(one).reduce((sum, bytes) => sum + bytes[m], 0)"
        found = tab.evaluate(f"((one) => Array.from(one.total, (_, m) => {sums}))(made[{number}])")
        assert found == recording.live_bytes().tolist()


REDS = """Array.from(document.querySelectorAll("main *"), (one) => one.checkVisibility() ? getComputedStyle(one) : {})
    .flatMap(({ color, backgroundColor, fill, stroke }) => [color, backgroundColor, fill, stroke]).filter((colour) => {
        const [r, g, b, a] = (colour?.match(/[\\d.]+/g) ?? [0, 0, 0]).map(Number);
        return a !== 0 && r > 150 && g < 0.45 * r && b < 0.45 * r; }).length"""


def test_red_is_for_trouble_only(browser, tab, tmp_path):
    """Not for a category, a capacity or what is more: for out of memory, retries and leaks."""
    for by in ("category", "module", "line"):
        tab.evaluate(f"document.querySelector('[data-do=by-{by}]').click(), memopt.redraw()")
        assert tab.evaluate(REDS) == 0, by
    for page, trouble in ((one(), ("#leaks", ".oom")), (two(), (".oom", ".plot text.failed"))):
        (tmp_path / "trouble.html").write_text(page, encoding="utf-8")
        other = browser.tab()
        other.open(tmp_path / "trouble.html")
        for selector in trouble:
            kind = "fill" if "text" in selector else "color"
            shown = other.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{kind}")
            assert shown == "rgb(176, 0, 32)", selector
        other.close()


def test_on_paper_there_are_charts_and_no_buttons(tab):
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.resize(700, 900)
    tab.evaluate("memopt.redraw()")
    tab.wait("!memopt.waiting")
    assert (
        tab.evaluate("Array.from(document.querySelectorAll('.buttons'), (one) => one.checkVisibility())")
        == [False] * 2
    )
    assert tab.box("#timeline-0 .plot")[2] > 500
    assert tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--panel')") == "#ffffff"
    assert tab.evaluate("document.documentElement.scrollWidth") <= 700
