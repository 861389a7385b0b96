"""memopt demo: what it runs, measures and says; the exit status where a budget is not kept or a loss is off."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the demo trains torch models")

from memopt import _C  # noqa: E402
from memopt.__main__ import main  # noqa: E402
from memopt._demo import results, tasks, trainings  # noqa: E402
from memopt._demo.results import DemoResult  # noqa: E402
from memopt._demo.trainings import ProgressBars  # noqa: E402
from memopt._memory.recording import recording_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(
    tasks.get_task("gpt"), batch_size=4, shape=(("length", 64), ("dim", 32), ("layers", 4), ("heads", 2))
)
TINY = replace(TINY, learning_rate=1e-2)
SIZE = trainings.Size([(TINY, 8)], None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def result(folder: Path) -> DemoResult:
    """Both trainings, in processes of their own."""
    return trainings.run(SIZE, folder, ProgressBars())


def test_both_trainings_run_and_all_is_as_it_must_be(result: DemoResult) -> None:
    (task,) = result.tasks
    assert result.wrong() == [] and task.kept
    assert task.budget == task.plain["peak"] // 2 and 0 < task.within["peak"] <= task.budget
    assert len(task.plain["losses"]) == len(task.within["losses"]) == 8
    assert task.plain["losses"][0] == task.within["losses"][0]  # nothing has stepped yet
    assert sum(task.plain["by_category"].values()) == task.plain["peak"]


def test_activations_are_most_of_the_plain_step_and_the_text_is_no_part_of_it(result: DemoResult) -> None:
    parts = result.tasks[0].plain["by_category"]
    assert parts["activations"] >= 0.6 * result.tasks[0].plain["peak"]
    assert parts["other"] < 100_000 < len(tasks.standard_library_text()["train"])


def test_the_recordings_are_of_the_last_steps_and_hold_the_same_peak(
    result: DemoResult, folder: Path
) -> None:
    recording = recording_file.load(results.recording_of(folder, "gpt", "within"))
    assert [mark.kind for mark in recording.marks] == ["step"] * 3
    assert recording.peak()[0] == result.tasks[0].within["peak"]
    assert recording.facts["plan"]["peak_bytes"] == result.tasks[0].within["plan"]["peak_bytes"]


def test_the_pool_is_given_exactly_the_recorded_requests(result: DemoResult, folder: Path) -> None:
    recording = recording_file.load(results.recording_of(folder, "gpt", "plain"))
    replayed = trainings.replay(recording)
    assert replayed["live"] == recording.peak()[0] <= min(replayed["smallest_device"], replayed["held"])
    assert result.replays["gpt plain"] == replayed
    lines = trainings.trace_of(recording).decode().splitlines()
    assert lines.count("s") == 3
    assert sum(line.startswith("a") for line in lines) == int((recording.columns["size"] > 0).sum())


def test_the_screen_has_every_figure_and_what_to_type_next(result: DemoResult) -> None:
    shown = results.text(result, "page.html")
    assert "every budget kept" in shown and "FAILED" not in shown
    assert "page.html" in shown and "python -m memopt estimate" in shown
    assert f"{result.tasks[0].within['loss']:.4f}" in shown
    assert max(map(len, shown.splitlines())) < 125


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"peak": 10**12}, "was not kept"),
        ({"loss": 100.0}, "the loss is off"),
        ({"loss": float("nan")}, "the loss is off"),
        ({"infeasible": "no way"}, "no schedule"),
    ],
)
def test_what_is_wrong_is_named(result: DemoResult, planted: dict[str, object], words: str) -> None:
    task = result.tasks[0]
    wrong = DemoResult([replace(task, within={**task.within, **planted})], torch=result.torch)
    (said,) = wrong.wrong()
    assert words in said
    assert "FAILED CHECKS" in results.text(wrong, None)


def test_a_training_that_does_not_learn_and_a_simulated_gpu_that_differs_are_named(
    result: DemoResult,
) -> None:
    task = result.tasks[0]
    lazy = replace(task, plain={**task.plain, "loss": task.plain["losses"][0]})
    assert any("did not learn" in line for line in DemoResult([lazy]).wrong())
    device = {"difference": 0.1, "plain": "CUDA out of memory"}
    assert any("differs from the CPU's" in line for line in DemoResult([task], simulated=device).wrong())
    device = {"difference": 0.0, "plain": ""}
    assert any("fits, but it must not" in line for line in DemoResult([task], simulated=device).wrong())
    assert DemoResult().wrong() == ["nothing was trained"]


def test_the_command_writes_the_page_and_its_status_is_the_answer(
    result: DemoResult,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = result

    def run(size: object, into: Path, *_: object) -> DemoResult:
        for recording in folder.glob("*.mopt"):
            (into / recording.name).write_bytes(recording.read_bytes())
        return found

    monkeypatch.setattr(trainings, "run", run)
    monkeypatch.chdir(tmp_path)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["demo", "--quick"]) == 0
        page = (tmp_path / "memopt-demo.html").read_text()
        assert "within the budget" in page and "Failed checks" not in page
        shown = unescape(re.sub(r"<[^>]+>", "\n", page)).replace("\u00a0", " ")
        task = result.tasks[0]
        share = f"{task.within['peak'] / task.plain['peak']:.0%}".replace("%", " %")
        assert f"The same training in {share} of the memory" in shown
        for figure in (task.plain["peak"], task.within["peak"]):
            assert _C.format_size(figure) in shown
        labels = re.findall(r'role="img"[^>]* aria-label="([^"]*)"', page)
        assert sum(label.startswith("Peak memory of") for label in labels) == 2
        assert sum(label.startswith("Loss over 8 steps: plain from") for label in labels) == 1
        capsys.readouterr()
        assert main(["demo", "--json", "--no-page"]) == 0
        assert json.loads(capsys.readouterr().out)["tasks"][0]["kept"] is True
        found = DemoResult([replace(task, within={**task.within, "peak": task.budget + 1})])
        assert main(["demo", "--no-page"]) == 1
        assert main(["demo", "--page", "memopt-demo.html"]) == 2  # a named file is not written over
    finally:
        signal.signal(signal.SIGTERM, terminate)


def test_without_scikit_learn_the_cnn_is_left_out_and_that_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings.importlib.util, "find_spec", lambda name: None)
    found = trainings.run(trainings.Size([(tasks.get_task("cnn"), 1)], None), folder, ProgressBars())
    assert "pip install scikit-learn" in found.notes[0] and found.tasks == []


def test_a_process_that_fails_is_an_error_with_what_it_said(folder: Path) -> None:
    impossible = replace(TINY, shape=(("no_such_size", 1),))
    with pytest.raises(trainings.DemoFailed, match="no_such_size"):
        trainings.run(trainings.Size([(impossible, 1)], None), folder, ProgressBars())


def test_ctrl_c_ends_it_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "memopt", "demo", "--quick"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background deaf to interrupts, and so the suite.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (started := children.read_text().split()) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted" in said and "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert list(tmp_path.iterdir()) == []
