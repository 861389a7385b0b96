"""The benchmarks of scaler and optimizers: that they run, that what they time is the same work on both sides, and that
what they compare with is what it is called. Small sizes: the times mean nothing, and no goal is asked of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benchmarks time torch")

from benchmarks import bench_optim, bench_scaler, convergence_8bit, parameter_sets, tasks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(64, 64), (64,), (), (300,)]


def result_of(script: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "-o", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr  # 1: a goal was missed
    return json.loads(output.read_text())


def timed(result: dict[str, Any]) -> dict[str, set[str]]:
    """The contenders of each case, all of whose times are positive."""
    assert all(s > 0 for c in result["comparisons"] for turn in c["rounds"] for s in turn["seconds"].values())
    return {c["case"]: set(c["calls"]) for c in result["comparisons"]}


@pytest.mark.sampled("whole benchmarks")
def test_bench_scaler_times_all_its_cases(tmp_path: Path) -> None:
    result = result_of("bench_scaler.py", tmp_path, "--threads", "1")
    cases = timed(result)
    whole = [case for case in cases if case.startswith("unscale and clip")]
    assert len(whole) == 3 and len([case for case in cases if case.startswith("foreach_unscale_")]) == 3
    assert len([case for case in cases if case.startswith("clip_grad_norm_")]) == 4 and len(cases) == 10
    for case, contenders in cases.items():
        assert {"torch", "memopt"} <= contenders <= {"torch", "memopt", "memopt, torch's calls", "bound"}, (
            case
        )
    (first,) = (c for c in result["comparisons"] if c["case"] == whole[0])
    n = parameter_sets.count(parameter_sets.QUICK_SETS["gpt"])
    assert first["goal"] == {"memopt": 3.3} and first["moved"]["torch"] == 20 * n
    assert first["moved"]["memopt"] == 12 * n and 10 * n < first["moved"]["bound"] <= 12 * n


@pytest.mark.sampled("whole benchmarks")
def test_bench_optim_times_all_its_cases_and_avx2_in_a_process_of_its_own(tmp_path: Path) -> None:
    result = result_of("bench_optim.py", tmp_path, "--threads", "1")
    cases = timed(result)
    assert len([case for case in cases if case.startswith("unscale, clip and AdamW")]) == 3
    assert len([case for case in cases if case.startswith("unscale, clip and SGD")]) == 3
    alone = [case.split(", ")[1] for case in cases if case.startswith("AdamW's step alone")]
    best = result["notes"]["instruction set"]
    assert alone == ([best, "avx2"] if best == "avx512" else [best])
    adamw = [c for c in result["comparisons"] if c["case"].startswith("AdamW's step alone")]
    goals = {c["case"].split(",")[1]: c["goal"] for c in adamw}
    for isa, goal in goals.items():
        limit = bench_optim.GOAL_8BIT.get(isa.strip())
        assert goal == (None if limit is None else {"memopt, 8-bit states": limit})
    eight, four, factored = (f for f in result["figures"] if f["case"].startswith("goal: bytes of state"))
    assert 2.0 < eight["values"]["memopt, 8-bit states"] < 2.1 and eight["goal_met"]
    assert 1.0 < four["values"]["memopt, 4-bit states"] < 1.06 and four["goal_met"]
    for kind in ("SGD", "Muon"):
        (case,) = (c for c in cases if c.startswith(f"{kind}'s step alone"))
        assert cases[case] == {"torch", "memopt", "memopt, 8-bit momentum"}
        (held,) = (f for f in result["figures"] if f["case"].startswith(f"goal: bytes of {kind}'s momentum"))
        assert 1 + 4 / 256 <= held["values"]["memopt, 8-bit momentum"] < 1.02 and held["goal_met"]
    # The vectors are a larger part of these small matrices.
    assert 0.5 < factored["values"]["memopt, 4-bit states, factored"] < 0.6
    times = [f for f in result["figures"] if f["case"].startswith("goal: time of AdamW's step alone")]
    assert [f["case"].split(", ")[1] for f in times if "factored" not in f["case"]] == alone
    assert len(times) == 2 * len(alone)
    assert all(f["values"]["memopt, 8-bit states"] == 1 for f in times)


def test_steps_leave_gradients_as_they_were() -> None:
    """So that a step may be repeated as often as its time needs."""
    for kind, arguments in (("AdamW", bench_optim.ADAMW), ("SGD", bench_optim.SGD)):
        for package in (torch.optim, bench_optim.memopt.optim):
            step = bench_optim.Pieces(
                SHAPES, "cpu", lambda p, k=kind, m=package, a=arguments: getattr(m, k)(p, **a)
            )
            before = [g.clone() for g in parameter_sets.grads(step.parameters)]
            for _ in range(50):
                step()
            parameter_sets.assert_equal_work("gradients", before, parameter_sets.grads(step.parameters), 0.02)


def test_all_ways_of_a_step_do_the_same() -> None:
    memopt = bench_optim.memopt

    def ours() -> bench_optim.Pieces:
        return bench_optim.Pieces(
            SHAPES, "cpu", memopt.optim.AdamW, memopt.amp.GradScaler, memopt.amp.clip_grad_norm_
        )

    torchs, drop_in, one_call = bench_optim.Pieces(SHAPES, "cpu", torch.optim.AdamW), ours(), ours()
    for step in [torchs, drop_in, bench_optim.OneCall(one_call)] * 5:
        step()
    parameter_sets.assert_equal_work("calls", torchs.parameters, drop_in.parameters, 1e-5)
    parameter_sets.assert_equal_work("one call", torchs.parameters, one_call.parameters, 1e-5)
    with torch.no_grad():
        one_call.parameters[0][0, 0] += 0.1
    with pytest.raises(AssertionError, match="planted: results differ by 0"):
        parameter_sets.assert_equal_work("planted", torchs.parameters, one_call.parameters)


@pytest.mark.parametrize("clips", [True, False])
def test_clipping_clips_at_each_call_or_never(clips: bool) -> None:
    norms: list[float] = []

    def clip(parameters: list[Any], max_norm: float) -> Any:
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)) / max_norm)

    contender = bench_scaler.Clipping(clip, SHAPES, "cpu", torch.float32, clips)
    for _ in range(20):
        contender()
    assert all(norm > 1.001 for norm in norms) if clips else all(norm < 0.5 for norm in norms)


def test_a_bound_moves_the_bytes_it_says_and_changes_nothing() -> None:
    large, small = torch.randn(1 << 16), torch.randn(8)
    kept = large.clone()
    bound = parameter_sets.Bound([large, small], [large, small])
    assert bound.bytes == 3 * large.nbytes
    bound()
    assert torch.equal(large, kept)
    with pytest.raises(ValueError, match="nothing here is bound by memory"):
        parameter_sets.Bound([small])


def test_the_sets_are_what_they_are_called() -> None:
    gpt, many, tiny = (parameter_sets.SETS[name] for name in ("gpt", "many", "tiny"))
    assert parameter_sets.describe(gpt) == "98.4M parameters in 148 tensors"
    assert (len(many), parameter_sets.count(many)) == (5000, 50_000_000)
    assert (len(tiny), parameter_sets.count(tiny)) == (1000, 4000)


# ---- convergence -----------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_the_published_one(signed: bool) -> None:
    values = convergence_8bit.dynamic_map(signed)
    assert len(values) == 256 and bool((values[1:] > values[:-1]).all())
    assert 0.0 in values and values[-1] == 1.0
    # Known values: the neighbours of 1 and of 0, and of the smallest negative.
    step = 0.9 / (64 if signed else 128)
    assert values[-2].item() == pytest.approx(1 - step / 2)
    assert values[values > 0].min().item() == pytest.approx(0.55e-6 if signed else 0.325e-6)
    assert values[0].item() == pytest.approx(-(1 - step / 2) if signed else 0.0)


def test_codes_are_the_nearest_values_of_their_block() -> None:
    codebook = convergence_8bit.dynamic_map(True)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    coded = convergence_8bit.Coded(len(values), codebook)
    coded.codes, coded.scales = coded.encode(values)
    decoded = coded.decode()
    for begin in range(0, 1000, 256):
        block = values[begin : begin + 256]
        nearest = (block[:, None] / block.abs().max() - codebook).abs().min(1).values
        found = (decoded[begin : begin + 256] - block).abs() / block.abs().max()
        assert torch.allclose(found, nearest, atol=1e-6)
    assert not coded.encode(torch.zeros(1000))[1].any()


def test_the_peers_step_is_adamw_where_nothing_is_coded() -> None:
    theirs, ours = (parameter_sets.make([(50, 20)], "cpu") for _ in range(2))
    optimizers = [torch.optim.AdamW(theirs, lr=1e-2), convergence_8bit.DynamicMapAdamW(ours, lr=1e-2)]
    for _ in range(10):
        for optimizer in optimizers:
            optimizer.step()
    parameter_sets.assert_equal_work("AdamW", theirs, ours, 1e-6)


def test_finished_trainings_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def train(task: tasks.Task, name: str, steps: int, device: str) -> dict[str, float]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((name, task.seed))
        return {"held-out loss": float(len(trained))}

    def run(steps: int = 5) -> list[dict[str, float]]:
        trainings = convergence_8bit.Trainings(path, tasks.get("gpt", "small"), steps, "cpu")
        return [trainings.result(name, seed) for seed in range(2) for name in ("a", "b")]

    path = tmp_path / "rounds" / "trainings.jsonl"
    monkeypatch.setattr(convergence_8bit, "train", train)
    with pytest.raises(KeyboardInterrupt):
        run()
    with path.open("a") as file:
        file.write('{"states": "b", "se')  # cut off while it was written
    trained.pop(0)
    assert [result["held-out loss"] for result in run()] == [1.0, 2.0, 3.0, 3.0]
    assert trained == [("b", 0), ("a", 1), ("b", 1)]
    assert len(run()) == 4 and len(trained) == 3
    with pytest.raises(ValueError, match=r"trainings.jsonl holds rounds of another run \(other steps\)"):
        run(steps=6)


@pytest.mark.sampled("whole benchmarks")
def test_convergence_trains_each_kind_for_each_seed(tmp_path: Path) -> None:
    result = result_of("convergence_8bit.py", tmp_path, "--steps", "6", "--seeds", "2", "--threads", "1")
    assert result["notes"]["steps"] == 6 and set(result["notes"]["runs"]) == set(convergence_8bit.OPTIMIZERS)
    for runs in result["notes"]["runs"].values():
        assert len(runs) == 2 and len({run["held-out loss"] for run in runs}) == 2
        assert all(0 < run["held-out loss"] < 1.2 * math.log(98) for run in runs)
    goals = [f for f in result["figures"] if f["case"].startswith("goal")]
    assert [goal["goal"] for goal in goals] == [1.0] * 5
