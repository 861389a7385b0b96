"""`python -m memopt report` and `diff`: recordings and snapshots as text, JSON, other files, and side by side."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import memopt
from memopt.__main__ import main
from memopt._C import format_size
from memopt._memory.recording import recording_file, summary


def profiled(size: int, more: bool = False):
    with memopt.profile("cpu") as prof:
        kept = [torch.ones(size)]
        if more:
            kept.append(torch.ones(5000))
    assert kept
    return prof


@pytest.fixture
def recordings(tmp_path):
    profiled(100_000).save(tmp_path / "a.mopt")
    profiled(200_000, more=True).save(tmp_path / "b.mopt")
    return tmp_path


def test_a_recording_is_told_as_text_and_json(recordings, capsys):
    assert main(["report", str(recordings / "a.mopt"), "--text"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("cpu: ") and "kept = [torch.ones(size)]" in text
    assert main(["report", str(recordings / "a.mopt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["peak_bytes"] == recording_file.load(recordings / "a.mopt").peak()[0]
    assert {"peak_allocated", "peak_reserved", "oom", "by_category", "by_line"} <= set(told)


def test_what_would_lower_the_peak_is_told_with_the_line_to_write(tmp_path, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    with memopt.profile("cpu") as prof:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(512, 256)).sum().backward()
            optimizer.step()
    prof.save(tmp_path / "a.mopt")
    assert main(["report", str(tmp_path / "a.mopt"), "--text"]) == 0
    advice = " ".join(capsys.readouterr().out.partition("what would lower the peak:")[2].split())
    assert main(["report", str(tmp_path / "a.mopt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["would_lower_the_peak"]
    assert "memopt.optim.AdamW(..., state_bits=8)" in {one["paste"] for one in found}
    for one in found:
        assert one["paste"] in advice and format_size(one["saves_bytes"]) in advice, advice


def test_a_recording_is_written_in_the_form_that_the_name_asks_for(recordings, capsys):
    for name in ("out.pickle", "out.trace.json", "out.json", "out.mopt"):
        assert main(["report", str(recordings / "a.mopt"), "-o", str(recordings / name)]) == 0
        assert (recordings / name).stat().st_size > 100
    assert pickle.loads((recordings / "out.pickle").read_bytes())["device_traces"]
    assert main(["report", str(recordings / "out.pickle"), "--text"]) == 0
    assert "a torch snapshot" in capsys.readouterr().out
    assert main(["report", str(recordings / "a.mopt"), "-o", str(recordings / "out.json")]) == 2
    assert "-f to write over it" in capsys.readouterr().err
    assert main(["report", "-f", str(recordings / "a.mopt"), "-o", str(recordings / "out.json")]) == 0
    assert main(["report", str(recordings / "a.mopt"), "-o", str(recordings / "out.xls")]) == 2
    assert "must end in" in capsys.readouterr().err


def test_pages_are_written_of_one_recording_and_of_two(recordings, monkeypatch):
    monkeypatch.chdir(recordings)
    assert main(["report", "a.mopt", "-q"]) == 0
    page = (recordings / "a.html").read_text()
    assert "<html" in page and "test_report_commands.py" in page
    assert main(["report", "a.mopt", "-q", "-f", "--title", "One < two"]) == 0
    assert "<title>One &lt; two</title>" in (recordings / "a.html").read_text()
    assert main(["diff", "a.mopt", "b.mopt", "-o", "both.html"]) == 0
    page = (recordings / "both.html").read_text()
    assert "a.mopt" in page and "b.mopt" in page


@pytest.mark.parametrize(
    "command", [["report"], ["diff", "a.mopt"], ["diff", "a.mopt", "--json"], ["report", "--text"]]
)
def test_no_command_writes_over_a_file_unasked(recordings, monkeypatch, capsys, command):
    monkeypatch.chdir(recordings)
    (recordings / "kept.html").write_text("mine")
    assert main([*command, "b.mopt", "-o", "kept.html"]) == 2
    assert "kept.html exists: name another file, or -f to write over it" in capsys.readouterr().err
    assert (recordings / "kept.html").read_text() == "mine"
    assert main([*command, "b.mopt", "-o", "kept.html", "-f"]) == 0
    assert (recordings / "kept.html").read_text() != "mine"


def test_a_folder_and_one_that_is_not_there_are_no_output(recordings, capsys):
    file = str(recordings / "a.mopt")
    assert main(["report", file, "-o", str(recordings)]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err
    assert main(["report", file, "-o", str(recordings / "nowhere" / "a.html")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["report", file, "--json", "-o", "/dev/null"]) == 0


def test_what_is_no_recording_is_refused_by_name(recordings, capsys):
    (recordings / "foreign.csv").write_text("1,2\n")
    for command in (["report"], ["diff", str(recordings / "a.mopt")]):
        assert main([*command, str(recordings / "foreign.csv")]) == 2
        assert "foreign.csv: it is neither a memopt recording" in capsys.readouterr().err
        assert main([*command, str(recordings / "nowhere")]) == 2
        assert "nowhere" in capsys.readouterr().err


def test_two_recordings_differ_by_what_one_has_more(recordings, capsys):
    assert main(["diff", str(recordings / "a.mopt"), str(recordings / "b.mopt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = {change["text"]: change["after"] - change["before"] for change in told["by_line"]}
    assert lines["kept = [torch.ones(size)]"] == 400_000
    assert lines["kept.append(torch.ones(5000))"] == 20_000
    assert main(["diff", str(recordings / "a.mopt"), str(recordings / "b.mopt")]) == 0
    text = capsys.readouterr().out
    assert "+391 KiB" in text and "by line:" in text
    assert main(["diff", str(recordings / "a.mopt"), str(recordings / "a.mopt")]) == 0
    assert "the same at their peaks" in capsys.readouterr().out


def test_changes_add_up_to_the_difference_of_the_peaks(recordings):
    a, b = (recording_file.load(recordings / name) for name in ("a.mopt", "b.mopt"))
    found = summary.compare(a, b)
    for changes in (found.by_category, found.by_line, found.by_module):
        assert sum(change.more for change in changes) == b.peak()[0] - a.peak()[0]
