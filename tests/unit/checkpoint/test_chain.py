"""memopt.chain: what it takes, says and refuses. That schedules are good, test_chain_oracle.py asks."""

from __future__ import annotations

import itertools
import pickle
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import memopt
from benchmarks import chain_families
from memopt.chain import Chain, InfeasibleBudget, Option, Schedule, Stage, Table, solve
from tests.reference import chain_oracle

ROOT = Path(__file__).resolve().parents[3]


def three() -> Chain:
    """Stage 1 is dear to make again and saves little; its input is large and cheap."""
    return Chain(
        [Stage(10, 8, 1.0, 2.0), Stage(4, 2, 8.0, 16.0, input_grad_bytes=0), Stage(6, 1, 2.0, 4.0)], 3
    )


def long(n: int, seed: int = 1) -> Chain:
    return chain_families.plain(random.Random(seed), n)


# ---- solving -------------------------------------------------------------------------------------------------------


def test_with_enough_memory_everything_is_kept():
    chain = three()
    schedule = solve(chain, 1000)
    assert schedule.ops == (("fall", 0), ("fall", 1), ("fall", 2), ("bwd", 2), ("bwd", 1), ("bwd", 0))
    assert schedule.seconds == chain.plain_seconds == 33
    assert schedule.ops == chain.keep_all().ops and schedule.peak_bytes == chain.keep_all().peak_bytes


def test_an_input_is_dropped_and_made_again_late():
    """The step past the persistent optimum: what stage 1 saved stays, its input goes."""
    chain, budget = three(), 18
    persistent, better = (solve(chain, budget, level=level) for level in ("persistent", "default"))
    assert ("drop_input", 1) in better.ops and better.ops.count(("fall", 1)) == 1
    assert better.seconds == 34 < persistent.seconds
    assert chain_oracle.exhaustive(chain_oracle.Sizes(chain), budget) == 34


def test_a_budget_is_bytes_or_text():
    assert solve(three(), "1KiB").memory_budget == 1024
    for wrong, kind in (("lots", ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match=r"memory_budget: .*lots|memory_budget: .*-1|memory_budget: .*1\.5"):
            solve(three(), wrong)  # type: ignore[arg-type]


def test_an_infeasible_budget_says_the_least_feasible_one():
    for level in ("persistent", "default", "full"):
        with pytest.raises(InfeasibleBudget, match="least feasible is 1[0-9] ") as caught:
            solve(three(), 5, level=level)
        least = caught.value.least_budget
        assert solve(three(), least, level=level).peak_bytes == least
        with pytest.raises(InfeasibleBudget):
            solve(three(), least - 1, level=level)
        assert pickle.loads(pickle.dumps(caught.value)).least_budget == least
    assert issubclass(InfeasibleBudget, ValueError)


def test_one_table_answers_every_smaller_budget():
    chain = long(12)
    table = Table(chain, 60)
    curve = table.curve()
    assert curve[0][0] == table.least_budget
    for (budget, seconds), (more, fewer) in itertools.pairwise(curve):
        assert budget < more and seconds > fewer
    for budget, seconds in curve:
        assert table.schedule(budget).seconds == pytest.approx(seconds) == solve(chain, budget).seconds
        assert table.schedule(budget).curve() == tuple(p for p in curve if p[0] <= budget)
    with pytest.raises(ValueError, match="exceeds the table's, 60"):
        table.schedule(61)
    with pytest.raises(InfeasibleBudget):
        table.schedule(table.least_budget - 1)
    assert Table(chain, 3).curve() == []


def test_levels_and_slots_are_checked():
    with pytest.raises(ValueError, match="level='best' is not one of persistent, default, full"):
        solve(three(), 100, level="best")
    for slots in (0, -5, 10**7):
        with pytest.raises(ValueError, match="slots="):
            solve(three(), 100, slots)


def test_one_slot_finds_a_schedule_wherever_there_is_one():
    chain = chain_families.in_units(three(), 1_000_003)
    for budget in (10**9, 14 * 1_000_003):
        assert solve(chain, budget, slots=1).peak_bytes <= budget


def test_a_single_stage_and_one_without_bytes():
    assert solve(Chain([Stage(1, 1, 1.0, 1.0)], 4), 100).ops == (("fall", 0), ("bwd", 0))
    assert solve(Chain([Stage(0, 0, 0.0, 0.0)] * 3, 0), 0).peak_bytes == 0


def test_the_last_forward_before_its_backward_may_stop_early():
    stages = [Stage(10, 1, 5.0, 5.0, remake_seconds=2.0), Stage(10, 1, 5.0, 5.0)]
    schedule = solve(Chain(stages, 1), 15)
    assert schedule.ops == (("fck", 0), ("fall", 1), ("bwd", 1), ("fall", 0), ("bwd", 0))
    assert schedule.seconds == 5 + 5 + 5 + 2 + 5


# ---- options -------------------------------------------------------------------------------------------------------


def test_an_offload_takes_its_bandwidths_time_and_room():
    stage = Stage(10, 2, 1.0, 2.0, 3, 4, remake_seconds=0.5).with_offload(8, 4.0, back=2.0)
    assert stage.options == (Option("offload", 2, 2.0, 4.0, 11, 12, 2.0),)
    with pytest.raises(ValueError, match="at most saved_bytes - output_bytes = 8"):
        stage.with_offload(9, 4.0, name="more")
    with pytest.raises(ValueError, match="bandwidth=0"):
        stage.with_offload(1, 0, name="none")


def test_a_selective_option_makes_its_part_again_in_the_backward():
    stage = Stage(10, 2, 1.0, 2.0, 3, 4, remake_seconds=0.5).with_selective(6, 0.25)
    assert stage.options == (Option("selective", 4, 1.0, 2.25, 3, 10, 0.5),)


def test_the_use_of_an_option_is_named_in_the_operations():
    stages = [
        Stage(10, 1, 4.0, 4.0).with_selective(8, 1.0, name="norms").with_offload(8, 1.0),
        Stage(3, 1, 1.0, 1.0),
    ]
    chain = Chain(stages, 1)
    schedule = solve(chain, 13)
    assert schedule.ops == (("fall", 0, "norms"), ("fall", 1), ("bwd", 1), ("bwd", 0, "norms"))
    assert chain_oracle.replay(chain, schedule.ops) == (schedule.seconds, schedule.peak_bytes) == (11, 12)
    assert solve(chain, 100).ops[0] == ("fall", 0)


def test_options_need_names_of_their_own():
    stage = Stage(10, 2, 1.0, 2.0).with_selective(1, 0.1)
    with pytest.raises(ValueError, match="'selective', 'selective'"):
        stage.with_selective(2, 0.1)
    with pytest.raises(ValueError, match="name"):
        stage.with_selective(2, 0.1, name="")


# ---- chains that make no sense -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Stage(1, 2, 1.0, 1.0), "stage 1, option 0: saved_bytes 1 is less than output_bytes 2"),
        (Stage(4, 2, -1.0, 1.0), "stage 1, option 0: forward_seconds -1"),
        (Stage(4, 2, 1.0, float("nan")), "backward_seconds nan"),
        (Stage(4, 2, 1.0, 1.0, remake_seconds=float("inf")), "remake_seconds inf"),
        (Stage(-4, 2, 1.0, 1.0), "stage 1: saved_bytes: -4"),
        (Stage(4, 2, 1.0, 1.0, input_grad_bytes=-1), "stage 1: input_grad_bytes: -1"),
        (Stage(4, 2, 1.0, 1.0, put_input_seconds=-1.0), "stage 1: put_input_seconds -1"),
        (
            Stage(4, 2, 1.0, 1.0, put_input_seconds=0.0, get_input_seconds=float("inf")),
            "get_input_seconds inf",
        ),
        (Stage(2**62, 2, 1.0, 1.0), r"2\*\*60"),
        (Stage(4, 2, 1.0, 1.0, options=(Option("x", 1, 1.0, 1.0),)), "stage 1, option 1: saved_bytes 1"),
    ],
)
def test_a_chain_is_refused_by_stage(stage: Stage, words: str):
    with pytest.raises(ValueError, match=words):
        Chain([Stage(1, 1, 1.0, 1.0), stage], 1)


def test_a_chain_needs_stages_and_sizes():
    with pytest.raises(ValueError, match="1 to 4096 stages, not 0"):
        Chain([], 1)
    with pytest.raises(ValueError, match="input_bytes: -1"):
        Chain([Stage(1, 1, 1.0, 1.0)], -1)
    with pytest.raises(TypeError, match=r"stage 0: saved_bytes: 1\.5"):
        Chain([Stage(1.5, 1, 1.0, 1.0)], 1)  # type: ignore[arg-type]


def test_what_fills_the_machine_is_refused():
    with pytest.raises(ValueError, match="fewer slots"):
        solve(Chain([Stage(3, 2, 1.0, 1.0)] * 4000, 1), 10**12, slots=10**6, level="full")


# ---- schedules -----------------------------------------------------------------------------------------------------


def test_a_schedule_by_hand_is_replayed():
    schedule = Schedule(
        three(), [("fck", 0), ("fall", 1), ("fall", 2), ("bwd", 2), ("bwd", 1), ("fall", 0), ("bwd", 0)]
    )
    assert (schedule.seconds, schedule.peak_bytes) == (34, 21)
    assert [m.after_bytes for m in schedule.moments] == [9, 13, 19, 14, 0, 10, 3]
    assert chain_oracle.replay(three(), schedule.ops) == (34, 21)
    schedule.validate()
    schedule.validate(21)
    with pytest.raises(ValueError, match="peak of 21 bytes at operation 3, bwd 2: memory_budget is 20"):
        schedule.validate(20)
    with pytest.raises(ValueError, match="not made by solve"):
        schedule.curve()


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([("fnone", 1)], "operation 0, fnone 1, cannot be done: the input of the stage does not exist"),
        ([("fall", 0)], "ends before bwd 2"),
        ([("fold", 0)], "is not an operation"),
        ([("fall", 9)], "there is no such stage"),
        ([("fall", 9, "x")], "operation 0, fall 9"),
        ([("fall", 0, "x")], "operation 0, fall 0: there is no option 'x'"),
        ([("fck", 0, "x")], "only fall and bwd have options"),
    ],
)
def test_what_cannot_be_done_is_refused_by_operation(ops: list, words: str):
    with pytest.raises(ValueError, match=words):
        Schedule(three(), ops)


def test_a_table_has_a_line_an_operation_and_marks_the_peak():
    schedule = solve(three(), 18)
    lines = str(schedule).splitlines()
    assert len(lines) == len(schedule.ops) + 2
    (peak,) = (line for line in lines if line.endswith("peak"))
    assert peak.split()[:2] == [str(x) for x in schedule.ops[lines.index(peak) - 1]]
    assert "34.000000 s (+3.0% on a plain step), peak 1" in lines[-1] and lines[-1] in repr(schedule)


def test_a_picture_shows_what_is_kept_when():
    stages = [Stage(10, 1, 5.0, 5.0, name="first"), Stage(10, 1, 5.0, 5.0)]
    picture = solve(Chain(stages, 1), 13).picture().splitlines()
    assert picture[1:3] == [" first c  FB", "     1  FB  "]
    assert picture[0].startswith("memory ") and len(picture[0]) == len("memory ") + 5 and "█" in picture[0]


def test_a_picture_shows_what_is_off_the_device_when():
    stages = [
        Stage(3, 1, 1, 1),
        Stage(3, 1, 1, 1, put_input_seconds=0.5, get_input_seconds=0.25),
        Stage(3, 1, 1, 1),
    ]
    ops = [("fck", 0), ("fck", 1), ("put_input", 1), ("fall", 2), ("bwd", 2), ("get_input", 1), ("fall", 1)]
    schedule = Schedule(Chain(stages, 1), [*ops, ("bwd", 1), ("fall", 0), ("bwd", 0)])
    assert schedule.picture().splitlines()[2] == "     1  c<  >FB  "
    assert schedule.seconds == 6 + 2 + 0.75


def test_a_picture_is_no_wider_than_asked():
    schedule = solve(long(40), 60)
    assert len(schedule.ops) > 60
    for line in schedule.picture(width=60).splitlines()[:-1]:
        assert len(line) == len("memory ") + 60
    assert all(row.count("B") == 1 for row in schedule.picture(1000).splitlines()[1:-1])


# ---- manners -------------------------------------------------------------------------------------------------------


def test_it_needs_no_torch():
    code = "import memopt, sys; memopt.chain.solve; print(*{'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_other_threads_run_while_it_solves():
    chain = long(40)
    for _ in range(20):
        turns = 0
        solving = threading.Thread(target=lambda: solve(chain, 100, level="full"))
        solving.start()
        while solving.is_alive():
            turns += 1
        if turns > 1000:
            return
    pytest.fail(f"{turns} turns of a loop while a chain was solved")


def test_it_can_be_interrupted():
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    chain, solved = long(130), 0
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Stop):
            while True:
                solve(chain, 400, level="full")
                solved += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert solved == 0


def test_nothing_is_left_behind():
    from memopt import _C

    chain = long(8)
    before = _C.host_blocks()
    for budget in (10, 30, 60) * 20:
        try:
            solve(chain, budget).curve()
        except InfeasibleBudget:
            continue
    with pytest.raises(TypeError):
        _C.ChainTable(chain._native[0], 1, 1, 10, 10, 0, key=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="level 3"):
        _C.ChainTable(*chain._native, 10, 10, 3)
    with pytest.raises(OverflowError):
        _C.ChainTable(*chain._native, 10, 10, 1).schedule(2**70)
    assert _C.host_blocks() == before


def test_it_is_public():
    assert "chain" in memopt.__all__ and memopt.chain.solve is solve
