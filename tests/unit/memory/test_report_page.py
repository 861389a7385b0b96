"""The report page as a file: what is packed into it, and what it says. What a browser makes of it is in
test_report_page_browser.py."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import re
import zlib
from html import unescape
from pathlib import Path

import made_recordings
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memopt
from memopt import _C
from memopt.__main__ import main
from memopt._memory.html import report_page
from memopt._memory.html.columns import EXACT, pack_columns, shorten_addresses
from memopt._memory.html.peak_words import peak_of, peak_sentences, seconds_text, share_text
from memopt._memory.html.report_page import plan_table, source_lines
from memopt._memory.recording import lower_peak, recording_file
from memopt._memory.recording.leaks import Leak
from memopt._memory.recording.recording import CATEGORIES, Mark

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
SEEDS = range(200 if os.environ.get("MEMOPT_SOAK") == "1" else 20)


def plain(markup: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", markup)).replace("\u00a0", " ")


def unpack(packed):
    """The decoding of columns.js, from the description of the format."""
    content = zlib.decompress(base64.b64decode(packed.base64))
    columns, at = {}, 0
    for name, of in packed.columns.items():
        planes = [content[at + p * of["count"] : at + (p + 1) * of["count"]] for p in range(of["planes"])]
        at += of["count"] * of["planes"]
        numbers = [sum(plane[i] << 8 * p for p, plane in enumerate(planes)) for i in range(of["count"])]
        columns[name] = (
            [of["low"] + n for n in itertools.accumulate(numbers)]
            if of["differences"]
            else [of["low"] + n for n in numbers]
        )
    assert at == len(content)
    return columns


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.lists(st.integers(-EXACT, EXACT), max_size=30) | st.lists(st.integers(-3, 300)).map(sorted),
    )
)
def test_columns_come_back_as_they_were(columns):
    packed = pack_columns({name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()})
    assert unpack(packed) == columns


@pytest.mark.parametrize("number", [EXACT + 1, -EXACT - 1, 2**63 - 1, -(2**63)])
def test_a_number_that_a_page_cannot_hold_is_refused_by_name(number):
    with pytest.raises(ValueError, match=f"column 'size' goes from .*{number}"):
        pack_columns({"size": torch.tensor([number], dtype=torch.int64)})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shortened_space_keeps_blocks_whole_apart_and_in_order(seed):
    chance = random.Random(seed)
    spread = chance.choice([10, 1000, 1 << 40])
    blocks = [
        (chance.randrange(spread), chance.choice([0, 1, 50, 4096])) for _ in range(chance.randrange(1, 40))
    ]
    mapped = shorten_addresses(torch.tensor([a for a, _ in blocks]), torch.tensor([s for _, s in blocks]))
    offsets = mapped.offsets.tolist()
    for (address, size), offset in zip(blocks, offsets, strict=True):
        assert offset >= 0 and offset + size <= mapped.size
        where = max(n for n, at in enumerate(mapped.at) if at <= offset)
        # A block without bytes may stand where the next range begins.
        assert mapped.starts[where] + offset - mapped.at[where] == address or not size
    for (one, here), (two, there) in itertools.product(zip(blocks, offsets, strict=True), repeat=2):
        distance = two[0] - one[0]
        assert (there >= here) if distance >= 0 else (there <= here)
        if 0 <= distance < one[1]:
            assert there - here == distance  # within one block nothing is cut
    touched, reach = 0, -1
    for address, size in sorted(blocks):
        touched += max(0, address + size - max(address, reach))
        reach = max(reach, address + size)
    assert touched <= mapped.size <= touched + touched // 8


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lines_bytes_are_those_of_by_line(seed):
    recording = made_recordings.anything(seed)
    lines, line = source_lines(recording)
    assert len({one.name for one in lines}) == len(lines)
    rows = recording.rows(line, [one.name for one in lines])
    assert [(row.bytes, row.blocks) for row in rows] == [
        (row.bytes, row.blocks) for row in recording.by_line()
    ]
    assert "a/x.py:1" in {one.name for one in lines}, "two files of one name are told apart"


def test_the_summary_says_how_much_when_of_what_and_whose():
    recording = made_recordings.training(3)
    peak = peak_of(recording)
    said = plain(" ".join(peak_sentences(recording, peak)))
    live = recording.live_bytes()
    assert peak.bytes == int(live.max()) and peak.reserved >= peak.bytes
    assert f"peaked at {_C.format_size(peak.bytes)}," in said and "in step 1 of 3" in said
    first = max(CATEGORIES, key=lambda name: peak.by_category[name])
    assert f"It was {peak.by_category[first] / peak.bytes:.0%} {first}".replace("%", " %") in said
    assert f"held {_C.format_size(peak.reserved)} then" in said
    assert f"At the end {_C.format_size(int(live[-1]))} were alive" in said
    recording.marks.append(Mark(recording.events - 1, "oom", "train.py:9 <asked> for 4 GiB"))
    assert "Out of memory: train.py:9 <asked> for 4 GiB." in plain(" ".join(peak_sentences(recording, peak)))


@pytest.mark.parametrize(
    ("events", "step"),
    [([], ""), ([5, 9], "in step 1 of 2"), ([3, 5], "in step 2 of 2"), ([1, 2], "after the last of 2 steps")],
)
def test_the_peaks_step_is_the_one_that_had_not_ended(events, step):
    recording = made_recordings.training(1, layers=1)
    recording.marks = [Mark(event, "step") for event in events]
    peak = peak_of(recording)._replace(event=5)
    said = plain(peak_sentences(recording, peak)[0])
    assert (step in said) if step else ("step" not in said)


def test_a_recording_of_nothing_says_so():
    recording = next(r for r in map(made_recordings.anything, range(99)) if not r.blocks)
    assert peak_sentences(recording, peak_of(recording)) == [
        "No block of memory was live during the recording."
    ]


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 9, "0 %"),
        (1, 1000, "under 1 %"),
        (999, 1000, "over 99 %"),
        (1, 1, "100 %"),
        (0, 0, "0 %"),
        (1, 3, "33 %"),
    ],
)
def test_shares_are_never_rounded_to_nothing_or_all(part, whole, text):
    assert plain(share_text(part, whole)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 µs"), (2e-6, "2 µs"), (0.00153, "1.53 ms"), (0.25, "250 ms"), (3.14159, "3.14 s")],
)
def test_times_are_shown_in_a_unit_that_fits(value, text):
    assert plain(seconds_text(value)) == text


def test_what_a_recording_says_is_text_and_never_markup():
    hostile = "</script><script>alert(1)</script><!--"
    recording = made_recordings.anything(5)
    recording.facts = {"plan": hostile, "command": [hostile], "versions": {hostile: hostile}}
    recording.device = recording.source = hostile
    recording.modules = [hostile] * len(recording.modules)
    page = report_page.html([recording, recording], title=hostile)
    assert "<script>alert" not in page and "<!--" not in page
    scripts = len(report_page._SCRIPTS)
    assert page.count("</script>") == page.count("<script") == scripts + 1 + 2


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_the_pages_data_are_the_recordings(seed):
    recording = made_recordings.anything(seed)
    page = report_page.html([recording], title="x")
    described = json.loads(re.search(r'id="described">(.*?)</script>', page, re.S)[1])["recordings"][0]
    packed = re.search(r'id="columns-0">(.*?)</script>', page, re.S)[1]
    columns = unpack(type("Packed", (), {"columns": described["columns"], "base64": packed}))
    order = recording.columns["born"].argsort(stable=True)
    for name in ("born", "died", "size", "module", "category"):
        assert columns[name] == recording.columns[name][order].tolist()
    assert columns["times"] == recording.times_us.tolist()
    assert described["peak"] == recording.peak()[1] + 1


def test_a_page_fetches_nothing():
    page = report_page.html([made_recordings.training(1)], title="x")
    own = page.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
    assert "default-src 'none'" in own
    assert not re.search(r"""(src|href)=|https?://|@import|url\([^#]""", own)


def test_write_makes_the_file_that_html_returns(tmp_path):
    recording = made_recordings.training(1)
    report_page.write([recording], tmp_path / "x.html", title="Ä title")
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == report_page.html([recording], title="Ä title")


def test_no_recordings_and_too_few_names_are_refused():
    with pytest.raises(ValueError, match="recordings is empty"):
        report_page.html([], title="x")
    with pytest.raises(ValueError, match="names has 2 entries for 1 recordings"):
        report_page.html([made_recordings.training(1)], title="x", names=["a", "b"])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for name, layers in (("before.mopt", 2), ("after.mopt", 3)):
        recording_file.save(made_recordings.training(2, layers=layers), folder / name)
    return folder


def test_a_page_is_small(files, monkeypatch):
    """All that is not the recording is far below what a mail or an issue takes."""
    monkeypatch.chdir(files)
    assert main(["report", "before.mopt", "-o", "small.html"]) == 0
    assert (files / "small.html").stat().st_size < 1_000_000


def test_the_page_of_a_difference_names_the_files(files, monkeypatch):
    monkeypatch.chdir(files)
    assert main(["diff", "before.mopt", "after.mopt", "-o", "difference.html"]) == 0
    page = (files / "difference.html").read_text()
    assert "<title>before.mopt and after.mopt</title>" in page and "<h3>after.mopt</h3>" in page


def test_the_plan_is_a_table_of_the_stages():
    stage = {"name": "<blocks.0>", "saved_bytes": 3 << 20, "output_bytes": 1 << 20, "forward_seconds": 0.0015}
    stage |= {"backward_seconds": 0.003, "runs": 2, "keeps": "its input"}
    plan = {"memory_budget": 8 << 30, "fixed_bytes": 1 << 30, "peak_bytes": 7 << 30, "seconds": 0.12}
    plan |= {
        "plain_bytes": 12 << 30,
        "plain_seconds": 0.1,
        "stages": [stage, {**stage, "name": "(rest of the model)"}],
    }
    said = plain(plan_table(plan).replace("</t", " </t"))
    assert (
        "1 stages within 8.00 GiB: 7.00 GiB and 120 ms a step, where keeping everything takes 12.0 GiB"
        in said
    )
    assert "<blocks.0> 3.00 MiB 1.00 MiB 1.5 ms 3 ms 2 its input" in said


def test_a_recording_of_a_checkpointed_model_has_its_plan(one_thread):
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
    )
    sample = torch.randn(512, 64)
    memopt.auto_checkpoint(model, sample, memory_budget="64MiB")
    with memopt.profile("cpu") as prof:
        model(sample).sum().backward()
    recording = prof.recording
    assert recording.facts["plan"] == model.plan.as_dict() == json.loads(json.dumps(model.plan.as_dict()))
    page = plain(
        report_page.html([recording], title="x").split('<section id="plan">')[1].split("</section>")[0]
    )
    assert f"{len(model.plan.stages)} stages within 64.0 MiB" in page
    for name in model.plan.stages:
        assert name in page


def test_the_page_has_the_advice_and_of_activations_the_command_that_finds_out():
    recording = made_recordings.training(3)
    recording.facts["optimizers"] = [{"kind": "AdamW", "options": []}]
    page = report_page.html([recording], title="x")
    part = page.split('id="lower"')[1].split("</section>")[0]
    told = plain(part)
    first = lower_peak.find(recording)[0]
    assert first.paste in told and f"−{_C.format_size(first.saves)}" in told
    card = _C.format_size(recording.capacity).replace(" ", "")
    assert f"python -m memopt fit --gpu {card} train.py --epochs 3" in told


def test_a_page_says_nothing_where_nothing_is_known():
    recording = made_recordings.training(3)
    recording.facts["command"] = ["notebook"]
    assert 'id="lower"' not in report_page.html([recording], title="x"), "there is no script to run"


def test_leaks_stand_on_the_page_in_the_words_of_the_text():
    recording = made_recordings.training(3)
    leak = Leak("grows", "train.py:9", "x", 5 * MIB, 9, MIB, "activations", "logged[*]", "train.py:9")
    part = (
        report_page.html([recording], title="x", leaks=[leak]).split('id="leaks"')[1].split("</section>")[0]
    )
    assert str(leak) in plain(part)
    assert 'id="leaks"' not in report_page.html([recording], title="x")


# ---- colours ---------------------------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "all colours": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
OKLAB = [
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]],
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]],
]
OKLAB[0].append([0.0883024619, 0.2817188376, 0.6299787005])
OKLAB[1].append([0.0259040371, 0.7827717662, -0.8086757660])


def linear(colour: str) -> torch.Tensor:
    value = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], dtype=torch.float64)
    return torch.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def seen(colour: str, sight: str) -> torch.Tensor:
    """In Oklab, times 100."""
    matrices = [torch.tensor(m, dtype=torch.float64) for m in (SIGHT[sight], *OKLAB)]
    return 100 * matrices[2] @ (matrices[1] @ (matrices[0] @ linear(colour)).clamp(0, 1)) ** (1 / 3)


def contrast(one: str, two: str) -> float:
    weights = torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    low, high = sorted(float(weights @ linear(colour)) for colour in (one, two))
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, str]]:
    style = (ROOT / "memopt/_memory/html/page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)
    return {
        name: dict(re.findall(r"--(\w+): (#\w{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_panel(theme):
    colours = themes()[theme]
    for name in CATEGORIES:
        assert contrast(colours[name], colours["panel"]) >= 3, name
    for name in ("ink", "quiet", "alarm", "less"):
        assert contrast(colours[name], colours["panel"]) >= 4.5, name


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_two_categories_can_be_told_apart(theme, sight):
    colours = themes()[theme]
    for one, two in itertools.combinations(CATEGORIES, 2):
        apart = float((seen(colours[one], sight) - seen(colours[two], sight)).norm())
        assert apart >= 8, (one, two, apart)
