"""The benchmark harness, on clocks that are made up, so that every figure has one right answer."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import environment, harness
from benchmarks.comparison import Comparison, Figure, Round, duration

ROOT = Path(__file__).resolve().parents[2]


class FakeMachine:
    """A clock on which a contender takes the seconds it says, times how slow the machine is just then."""

    def __init__(self, drift: Callable[[int], float] = lambda turn: 1.0) -> None:
        self.drift, self.turn = drift, 0
        self.timed: list[str] = []

    def contender(self, name: str, seconds: float) -> Callable[[], object]:
        return lambda: (name, seconds)

    def __call__(self, run: Callable[[], object], calls: int) -> float:
        name, seconds = run()
        self.timed.append(name)
        self.turn += 1
        return seconds * calls * self.drift(self.turn)


def compare(machine: FakeMachine, times: dict[str, float], **options) -> Comparison:
    contenders = {name: machine.contender(name, seconds) for name, seconds in times.items()}
    return harness.compare(contenders, clock=machine, **{"calls": 1, "warmup": 0, **options})


def rounds_of(peer: list[float], ours: list[float], goal: float | None = None) -> Comparison:
    turns = [Round(["peer", "ours"], {"peer": a, "ours": b}, 0.0) for a, b in zip(peer, ours, strict=True)]
    return Comparison("case", "peer", "wall", {"peer": 1, "ours": 1}, turns, goal=goal)


def test_contenders_take_turns_and_the_order_rotates() -> None:
    machine = FakeMachine()
    result = compare(machine, {"a": 1.0, "b": 2.0, "c": 3.0}, rounds=6)
    assert machine.timed == list("abcbcacab") * 2
    assert [turn.order[0] for turn in result.rounds] == list("abcabc")


def test_ratio_is_peer_over_contender() -> None:
    result = compare(FakeMachine(), {"peer": 3.0, "ours": 1.5}, rounds=5)
    assert result.ratios("ours") == [2.0] * 5 and result.verdict("ours") == "faster"
    result = compare(FakeMachine(), {"ours": 1.5, "peer": 3.0}, rounds=5, peer="ours")
    assert result.ratios("peer") == [0.5] * 5 and result.verdict("peer") == "slower"


def test_a_machine_that_gets_slower_does_not_change_the_verdict() -> None:
    """Ten times slower by the end: blocks of A then B would say 2x or more for equal contenders."""
    machine = FakeMachine(lambda turn: 1.26 ** (turn // 2))
    result = compare(machine, {"peer": 1.0, "ours": 1.0}, rounds=10)
    assert result.seconds("peer").worst > 5 * result.seconds("peer").best
    assert "within the noise" in result.verdict("ours")
    assert min(result.ratios("ours")) < 1 < max(result.ratios("ours"))


def test_drift_does_not_hide_an_effect_larger_than_itself() -> None:
    machine = FakeMachine(lambda turn: 1.05**turn)
    result = compare(machine, {"peer": 2.0, "ours": 1.0}, rounds=9)
    assert result.verdict("ours") == "faster"
    assert 1.8 < statistics.median(result.ratios("ours")) < 2.2


def test_noise_without_effect_is_called_noise() -> None:
    seed = int(os.environ.get("MEMOPT_SEED", random.randrange(2**32)))
    print(f"MEMOPT_SEED={seed}")
    generator = random.Random(seed)
    peer, ours = ([1 + generator.random() for _ in range(40)] for _ in range(2))
    assert "within the noise" in rounds_of(peer, ours).verdict("ours")


def test_an_effect_smaller_than_its_spread_is_marked_uncertain() -> None:
    assert "size uncertain" in rounds_of([1.1, 1.2, 1.9, 1.3, 1.2], [1.0] * 5).verdict("ours")
    assert rounds_of([2.0, 2.1, 2.2, 2.0, 2.1], [1.0] * 5).verdict("ours") == "faster"


def test_one_round_that_disagrees_is_within_the_noise() -> None:
    assert "within the noise" in rounds_of([1.2, 1.2, 1.2, 1.2, 0.99], [1.0] * 5).verdict("ours")


def test_summary_of_known_rounds() -> None:
    result = rounds_of([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 1.0, 2.0, 2.0, 2.0])
    summary = result.as_dict()["summary"]
    assert summary["ours"]["ratio"] == {"median": 4.0, "min": 2.0, "max": 5.0}
    assert summary["peer"]["seconds"] == {"best": 2.0, "median": 6.0, "worst": 10.0, "spread": 8 / 6}
    assert summary["peer"]["verdict"] is None


def test_a_goal_is_judged_by_the_median_ratio() -> None:
    slow = [1.0] * 5
    assert rounds_of([1.4, 1.5, 1.6, 1.6, 1.4], slow, goal=1.5).goal_met() is True
    assert rounds_of([1.4, 1.4, 1.6, 1.6, 1.4], slow, goal=1.5).goal_met() is False
    assert rounds_of([1.4] * 5, slow).goal_met() is None


def test_a_goal_by_name_asks_nothing_of_the_others() -> None:
    contenders = {"peer": 3.0, "ours": 1.5, "a bound": 6.0}
    reached = compare(FakeMachine(), contenders, goal={"ours": 2.0})
    missed = compare(FakeMachine(), contenders, goal={"ours": 2.1})
    assert reached.goal_met() is True and "goal of ours 2.00: reached" in str(reached)
    assert missed.goal_met() is False and "goal of ours 2.10: MISSED" in str(missed)
    assert compare(FakeMachine(), contenders, goal=2.0).goal_met() is False


def test_bytes_a_second_and_their_share_of_a_bound() -> None:
    contenders = {"peer": 3.0, "ours": 2.0, "copy": 1.0}
    result = compare(FakeMachine(), contenders, rounds=5, moved={"ours": 12e9, "copy": 8e9})
    assert result.rates("ours") == [6e9] * 5 and result.shares("ours", "copy") == [0.75] * 5
    assert result.as_dict()["summary"]["ours"]["bytes_per_second"] == 6e9
    assert "bytes_per_second" not in result.as_dict()["summary"]["peer"]
    table = str(result).splitlines()
    assert "GB/s" in table[1] and "     6.0   1.50" in table[3]
    assert "GB/s" not in str(rounds_of([1.0], [1.0]))


def test_a_comparison_of_another_process_is_read_again() -> None:
    sent = compare(FakeMachine(), {"peer": 3.0, "ours": 2.0}, moved={"ours": 12e9}, goal={"ours": 1.4})
    assert Comparison.from_dict(json.loads(json.dumps(sent.as_dict()))) == sent


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    result = compare(FakeMachine(), {"fast": 1e-6, "slow": 1.0}, rounds=5, calls=None)
    assert result.calls == {"fast": 32768, "slow": 1}
    assert result.seconds("fast").median == pytest.approx(1e-6)


def test_a_contender_that_is_reset_runs_once_a_sample_behind_its_reset() -> None:
    events: list[str] = []
    spent = harness.Contender(lambda: events.append("run"), before=lambda: events.append("before"))
    harness.compare({"a": spent, "b": spent}, rounds=5)
    assert events == ["before", "run"] * (2 * (1 + 5))


def test_garbage_is_not_collected_inside_a_sample_and_collecting_is_restored() -> None:
    states: list[bool] = []
    contender = harness.Contender(lambda: states.append(gc.isenabled()), before=lambda: None)
    harness.compare({"a": contender, "b": contender}, rounds=5, warmup=0)
    assert not any(states) and gc.isenabled()

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.compare({"a": harness.Contender(fails, lambda: None), "b": contender}, rounds=5, warmup=0)
    assert gc.isenabled()


def test_the_wall_clock_measures_what_sleeps() -> None:
    import time

    result = harness.compare(
        {"long": lambda: time.sleep(0.03), "short": lambda: time.sleep(0.01)}, rounds=5, calls=1
    )
    assert 0.01 <= result.seconds("short").best < result.seconds("long").best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 4}, "rounds=4: fewer than 5"),
        ({"rounds": 5, "peer": "c"}, "peer 'c' is not among"),
        ({"rounds": 5, "goal": {"c": 1.5}}, "goal or moved: 'c' is not among"),
        ({"rounds": 5, "moved": {"c": 8}}, "goal or moved: 'c' is not among"),
    ],
)
def test_bad_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(FakeMachine(), {"a": 1.0, "b": 1.0}, **options)
    with pytest.raises(ValueError, match="needs a peer and a contender"):
        compare(FakeMachine(), {"a": 1.0})


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing was timed"):
        harness.compare({"a": int, "b": int}, clock=lambda run, calls: 0.0, calls=1)


# ---- soak runs --------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def interrupted(machine: FakeMachine, times: dict[str, float], log: Path, after: int, rounds: int) -> None:
    """The comparison of `times`, killed when `after` samples have been taken."""

    def clock(run: Callable[[], object], calls: int) -> float:
        if len(machine.timed) == after:
            raise Killed
        return machine(run, calls)

    contenders = {name: machine.contender(name, seconds) for name, seconds in times.items()}
    clock.__name__ = "FakeMachine"
    harness.compare(contenders, clock=clock, calls=1, warmup=0, rounds=rounds, resume=log)


def test_a_killed_soak_run_goes_on_with_the_round_it_was_in(tmp_path: Path) -> None:
    log, times = tmp_path / "soak" / "rounds.jsonl", {"a": 1.0, "b": 2.0}
    with pytest.raises(Killed):
        interrupted(FakeMachine(), times, log, after=7, rounds=6)
    rest = FakeMachine()
    contenders = {name: rest.contender(name, seconds) for name, seconds in times.items()}

    def clock(run: Callable[[], object], calls: int) -> float:
        return rest(run, calls)

    clock.__name__ = "FakeMachine"
    result = harness.compare(contenders, clock=clock, calls=1, warmup=0, rounds=6, resume=log)
    assert len(result.rounds) == 6 and rest.timed == list("baabba")
    again = harness.compare(contenders, clock=clock, calls=1, warmup=0, rounds=6, resume=log)
    assert again.as_dict() == result.as_dict() and len(rest.timed) == 6


def test_a_torn_last_line_is_dropped_and_its_round_run_again(tmp_path: Path) -> None:
    log = tmp_path / "rounds.jsonl"
    whole = compare(machine := FakeMachine(), {"a": 1.0, "b": 2.0}, rounds=5, resume=log)
    text = log.read_text()
    log.write_text(text[:-20])
    result = compare(machine, {"a": 1.0, "b": 2.0}, rounds=5, resume=log)
    assert len(result.rounds) == 5 and len(machine.timed) == 12
    assert result.rounds[:4] == whole.rounds[:4]
    assert len(log.read_text().splitlines()) == 6


def test_more_rounds_are_added_to_a_finished_run(tmp_path: Path) -> None:
    log = tmp_path / "rounds.jsonl"
    compare(FakeMachine(), {"a": 1.0, "b": 2.0}, rounds=5, resume=log)
    machine = FakeMachine()
    assert len(compare(machine, {"a": 1.0, "b": 2.0}, rounds=8, resume=log).rounds) == 8
    assert len(machine.timed) == 6


def test_rounds_of_another_comparison_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "rounds.jsonl"
    compare(FakeMachine(), {"a": 1.0, "b": 2.0}, rounds=5, resume=log)
    with pytest.raises(ValueError, match=r"rounds.jsonl holds rounds of another run \(other contenders\)"):
        compare(FakeMachine(), {"a": 1.0, "c": 2.0}, rounds=5, resume=log)
    with pytest.raises(ValueError, match=r"other case, peer"):
        compare(FakeMachine(), {"a": 1.0, "b": 2.0}, rounds=5, resume=log, case="x", peer="b")


# ---- reports ----------------------------------------------------------------------------------------


def report_of(tmp_path: Path, *arguments: str) -> harness.Report:
    options = harness.parser("A test.\n\nMore.").parse_args(["-o", str(tmp_path / "r.json"), *arguments])
    return harness.Report("bench_test", options, claim="ours is faster")


def test_a_report_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, machine = report_of(tmp_path, "--rounds", "5"), FakeMachine()
    contenders = {"torch": machine.contender("torch", 2e-3), "memopt": machine.contender("memopt", 1e-3)}
    report.compare("step", contenders, goal=1.5, clock=machine, calls=1)
    report.record("state", {"torch": 8.0, "memopt": 2.0}, unit="bytes/parameter", goal=3.9)
    report.note("task", {"name": "gpt-small"})
    assert report.finish() == 0
    table = capsys.readouterr().out
    assert "2.00 (2.00 … 2.00)  faster" in table and "1 ms" in table and "bytes/parameter" in table
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["claim"] == "ours is faster" and saved["notes"]["task"]["name"] == "gpt-small"
    (comparison,), (figure,) = saved["comparisons"], saved["figures"]
    assert comparison["summary"]["memopt"]["ratio"]["median"] == pytest.approx(2.0)
    assert [len(turn["seconds"]) for turn in comparison["rounds"]] == [2] * 5
    assert figure["ratio"]["memopt"] == 4.0 and figure["goal_met"] is True


def test_the_share_of_a_bound_is_kept_to_its_goal(tmp_path: Path) -> None:
    for least, status in ((0.75, 0), (0.76, 1)):
        report, machine = report_of(tmp_path), FakeMachine()
        contenders = {"copy": machine.contender("copy", 1.0), "ours": machine.contender("ours", 2.0)}
        found = report.compare("step", contenders, clock=machine, calls=1, moved={"copy": 8e9, "ours": 12e9})
        share = report.record_share(found, "ours", "copy", goal=least)
        assert share.ratio("ours") == pytest.approx(0.75) and report.finish() == status


def test_a_missed_goal_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path)
    report.record("state", {"torch": 8.0, "memopt": 7.0}, unit="bytes", goal=2.0)
    assert report.finish() == 1
    assert "MISSED" in capsys.readouterr().out


def test_json_goes_to_standard_output_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, "--json")
    report.record("state", {"torch": 8.0, "memopt": 0.0}, unit="bytes")
    report.finish()
    printed = json.loads(capsys.readouterr().out)
    assert printed["figures"][0]["ratio"]["memopt"] is None
    assert printed == json.loads((tmp_path / "r.json").read_text())


def test_quick_results_do_not_replace_kept_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    for arguments, kept in ((["--quick"], []), ([], ["bench_test.json"])):
        report = harness.Report("bench_test", harness.parser("").parse_args(arguments))
        assert report.rounds == (5 if arguments else 7)
        report.record("state", {"torch": 8.0, "memopt": 2.0}, unit="bytes")
        report.finish()
        assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_resume_by_option_keeps_rounds_until_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    report = harness.Report("bench_test", harness.parser("").parse_args(["--resume", "--rounds", "5"]))
    report.compare(
        "big: step", {"a": FakeMachine.__init__, "b": FakeMachine.__init__}, clock=lambda r, c: 1.0
    )
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["bench_test.big__step.jsonl"]
    report.finish()
    assert not list((tmp_path / "rounds").iterdir()) and (tmp_path / "bench_test.json").exists()


def test_cuda_without_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="--cuda asks torch for a GPU")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match=r"bench_test: torch .* sees no GPU here"):
        report_of(tmp_path, "--cuda")


def test_figures_and_durations_read_well() -> None:
    assert [duration(s) for s in (2.5, 0.0123, 4.56e-6, 7.0e-8)] == ["2.5 s", "12.3 ms", "4.56 µs", "70 ns"]
    assert Figure("c", {"a": 1.0, "b": 0.0}, "bytes", "a").ratio("b") == math.inf


# ---- the environment --------------------------------------------------------------------------------


def test_environment_says_machine_versions_and_commit_and_goes_into_json() -> None:
    here = json.loads(json.dumps(environment.describe()))
    assert here["cores"] >= 1 and here["cpu"] and here["python"].startswith("CPython 3.")
    assert here["simulated"] is False and here["date"].endswith("+00:00")
    assert set(here["commit"]) == {"hash", "dirty"}


def test_environment_tells_nothing_about_who_and_where() -> None:
    import socket

    text = json.dumps(environment.describe())
    assert socket.gethostname() not in text and str(Path.home()) not in text and str(ROOT) not in text


def test_the_harness_does_not_import_torch() -> None:
    code = "import sys; from benchmarks import harness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("module", ["harness", "tasks"])
def test_benchmark_modules_import_from_their_own_folder(module: str) -> None:
    """`python benchmarks/bench_x.py` has that folder on its path, not its parent."""
    if module == "tasks":
        pytest.importorskip("torch", reason="the tasks are torch models")
    folder = ROOT / "benchmarks"
    assert subprocess.run([sys.executable, "-c", f"import {module}"], cwd=folder).returncode == 0
