"""The benchmark of memopt.chain: that it runs, and that the ways it compares with are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_solver
from memopt.chain import Chain, Stage
from tests.reference import chain_oracle


@pytest.mark.sampled("whole benchmarks")
def test_it_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A short chain instead of 100 and 200 stages: nothing is asked of the times."""
    monkeypatch.setattr(bench_solver, "SECONDS", {12: 60.0})
    monkeypatch.setattr("sys.argv", ["bench_solver.py", "--quick", "-o", str(tmp_path / "result.json")])
    bench_solver.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert [set(c["calls"]) for c in result["comparisons"]] == [
        {"persistent", "default", "default, 4 options", "default, inputs put away"}
    ]
    figures = {figure["case"]: figure for figure in result["figures"]}
    assert len([case for case in figures if case.endswith("seconds of a step")]) == 9
    missed = [figure for case, figure in figures.items() if "misses the optimum" in case]
    assert len(missed) == 2 and all(figure["goal_met"] for figure in missed)
    assert {"default: losses on the rest", "full: losses on the rest"} <= set(result["notes"])


def test_no_way_of_torchs_is_faster_in_the_same_budget():
    result = [figure for figure in _ways() if "memopt" in figure.values]
    assert result
    for figure in result:
        assert figure.values["memopt, inputs put away"] <= figure.values["memopt"] * (1 + 1e-5)
        assert figure.values["memopt"] <= figure.values["persistent"] * (1 + 1e-5)
        assert figure.values["persistent"] <= figure.values["checkpoint_sequential, best"] * (1 + 1e-5)


def _ways():
    from benchmarks import harness

    report = harness.Report("bench_solver", harness.parser("").parse_args(["--quick"]))
    bench_solver.ways(report)
    return report.entries


def test_sequential_is_torchs_checkpoint_sequential():
    """Seven modules in three segments: two, two, and three that are kept."""
    chain = Chain([Stage(2, 1, 1.0, 2.0)] * 7, 1)
    schedule = bench_solver.sequential(chain, 3)
    assert schedule.seconds == 7 * 3 + 4
    assert [op for op in schedule.ops if op[0] == "fck"] == [("fck", 0), ("fck", 2)]
    assert chain_oracle.replay(chain, schedule.ops) == (schedule.seconds, schedule.peak_bytes)
    assert bench_solver.sequential(chain, 1).ops == chain.keep_all().ops
