"""Offload inside a schedule, to a disk: whatever stages keep elsewhere, the plain run's gradients, bit for bit, and the
bytes that the schedule says."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import resource
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_auto_checkpoint import live_peak, make, step
from test_chain_runner import (
    Detour,
    Fails,
    Ops,
    Residual,
    backward_of,
    batch,
    next_step_is_sound,
    plain,
    same,
    stages,
)
from torch import nn

import memopt
from memopt import _C
from memopt._checkpoint import checked_plan, shape_plans
from memopt._checkpoint.drop_in import sequential
from memopt._checkpoint.plan import with_copies
from memopt._checkpoint.runner import ChainRunner
from memopt._checkpoint.stages.costs import Meter, bytes_of
from memopt._offload import schedule_sets
from memopt._offload.schedule_sets import ScheduleOffload
from memopt.chain import Chain, InfeasibleBudget, Schedule, Stage

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = int(os.environ["MEMOPT_SEED"])
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(autouse=True)
def nothing_in_the_directory(tmp_path: Path) -> Iterator[None]:
    yield
    assert os.listdir(tmp_path) == []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each storage that was written to a disk."""
    sizes: list[int] = []
    transfer = ScheduleOffload.transfer

    def noted(self: ScheduleOffload, flat: torch.Tensor) -> object:
        begun = transfer(self, flat)
        sizes.append(flat.nbytes)
        return begun

    monkeypatch.setattr(ScheduleOffload, "transfer", noted)
    return sizes


def offload(path: Path, sets: dict[int, int] | None = None) -> ScheduleOffload:
    return ScheduleOffload(str(path), sets, least_bytes=1)


def in_use(where: ScheduleOffload) -> int:
    return 0 if where._space is None else where._space._ring.held()[0]


def with_offload(choose: random.Random, ops: Ops, count: int) -> list[tuple]:
    """Some stages offload what they save, and some of these copies get more time."""
    away = {k for k in range(count) if choose.random() < 0.6}
    out: list[tuple] = [
        (op, k, "offload") if op in ("fall", "bwd") and k in away else (op, k) for op, k in ops
    ]
    for k in away:
        first = max(n for n, op in enumerate(out) if op[:2] == ("fall", k))
        end = out.index(("bwd", k, "offload"))
        if choose.random() < 0.5:
            out.insert(choose.randint(first + 1, end), ("fetch", k))
            end += 1
        if choose.random() < 0.5:
            out.insert(choose.randint(first + 1, end), ("sent", k))
    return out


def with_inputs_put(choose: random.Random, ops: list[tuple], count: int) -> list[tuple]:
    """Some inputs are put away once their stage has run, now or a little later, and come back for its next run."""
    out = list(ops)
    for k in range(1, count):
        runs = [n for n, op in enumerate(out) if op[1] == k and op[0] in ("fck", "fall")]
        if not runs or choose.random() < 0.3:
            continue
        first = choose.choice(runs)
        end = next(
            n for n in range(first + 1, len(out)) if out[n][1] == k and out[n][0] not in ("sent", "fetch")
        )
        out.insert(end, ("get_input", k))
        if choose.random() < 0.5:
            out.insert(choose.randint(first + 1, end), ("fetch_input", k))
        out.insert(choose.randint(first + 1, end), ("put_input", k))
    return out


def everything(count: int) -> list[tuple]:
    """All stages offload, and nothing runs again. The loss comes between: what is wanted at once would stay."""
    forward = [("fall", k, "offload") for k in range(count)]
    return [*forward, ("fall", count), ("bwd", count), *(("bwd", *op[1:]) for op in reversed(forward))]


def test_every_schedule_gives_the_plain_runs_bits(tmp_path: Path, written: list[int]) -> None:
    choose = random.Random(SEED)
    for n in range(1000 if SOAK else 40):
        count = choose.randint(1, 7)
        modules = stages(choose, count)
        copies = copy.deepcopy(modules)
        ops = with_offload(choose, backward_of(choose, 0, count), count)
        if n % 2:
            ops = with_inputs_put(choose, ops, count)
        runner = ChainRunner(copies, ops, offload=offload(tmp_path))
        x, y = batch(seed=n), batch(seed=n)
        for way in range(3):
            for leaf in (x, y):
                leaf.grad = None
            torch.manual_seed(n)
            out = plain(modules, x)
            torch.manual_seed(n)
            again = runner(y)
            if way == 2:  # twice through the graph
                out.sum().backward(retain_graph=True)
                again.sum().backward(retain_graph=True)
            out.square().sum().backward()
            again.square().sum().backward()
            assert torch.equal(out, again), ops
            assert torch.equal(x.grad, y.grad), ops
            same(modules, copies)
    assert written


@pytest.mark.parametrize("half", [0, 1])
def test_live_bytes_are_never_more_than_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: int
) -> None:
    """Of any schedule with any of its stages' options, on measured chains."""
    choose = random.Random(SEED + half if SOAK else half)
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: schedule_sets.Bandwidth(1e12, 1e12))

    def some_schedule(chain: Chain, *_: object) -> tuple[Schedule, int]:
        names = [[option.name for option in stage.options] for stage in chain.stages]
        if first:
            away = ["offload" if "offload" in of_stage else None for of_stage in names]
            ops: Ops = [op[:2] for op in everything(len(names) - 1)]
        else:
            away = [choose.choice([None, *of_stage, *of_stage]) for of_stage in names]
            ops = backward_of(choose, 0, len(names) - 1)
        return Schedule(
            chain, [(op, k, away[k]) if op in ("fall", "bwd") and away[k] else (op, k) for op, k in ops]
        ), 0

    monkeypatch.setattr(checked_plan, "fastest", some_schedule)
    offloaded = overlapped = 0
    kinds = ("vision", "perceptron", "language", "convolutions")
    for kind in kinds if SOAK else kinds[2 * half : 2 * half + 2]:
        model, sample, loss = make(kind)
        unchanged = copy.deepcopy(model)
        for n in range(40 if SOAK else 2):
            first = n == 0  # of each kind: everything goes
            memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss, to=tmp_path)
            text = f"{kind}: {model.plan.operations}"
            for module in (model, unchanged):
                module.zero_grad()
            for _ in range(2):  # outputs that a stage saves are known the second time
                for module in (model, unchanged):
                    module.load_state_dict(copy.deepcopy(unchanged.state_dict()))
                torch.manual_seed(3)
                expected = step(unchanged, sample, loss)
                torch.manual_seed(3)
                assert torch.equal(step(model, sample, loss), expected), text
            for p, q in zip(model.parameters(), unchanged.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), text
            assert live_peak(model, sample, loss) <= model.plan.peak_bytes, text
            offloaded += len(model.plan.offloaded)
            overlapped += sum(op in ("sent", "fetch") for op, *_ in model.plan.operations)
    assert offloaded
    assert overlapped


class Thrice(nn.Module):
    """Saves three tensors of its own, one of them twice and as a view, and its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.sin() * y[:, :1]
        return z.tanh()


def test_what_goes_is_what_the_stage_alone_holds_and_each_storage_once(
    tmp_path: Path, written: list[int]
) -> None:
    """exp saves its result y, as do sin and the product, the latter as a view too; the product also sin(y). tanh saves
    its result, the output, and that stays."""
    unit = batch().nbytes
    modules = [Thrice(), nn.Linear(6, 6), Thrice()]
    runner = ChainRunner(modules, everything(3), offload=offload(tmp_path))
    for n in range(3):
        written.clear()
        runner(batch()).sum().backward()
        # The linear layer saves its input and its weight. Outputs are known only once the stage has run.
        assert written == [unit] * (6 if n == 0 else 4), n


def test_live_bytes_between_forward_and_backward_are_without_what_went(tmp_path: Path) -> None:
    from memopt._checkpoint.stages.costs import Meter

    held = {}
    x = batch(64, 6)
    for name, ops in (("kept", [op[:2] for op in everything(4)]), ("offloaded", everything(4))):
        runner = ChainRunner([Thrice() for _ in range(4)], ops, offload=offload(tmp_path))
        meter = Meter()
        meter.ignore([x])
        with meter:
            out = runner(x)
            held[name] = meter.live // x.nbytes
            out.sum().backward()
            x.grad = None
            del out
        assert meter.live == 0
    assert held == {"kept": 12, "offloaded": 4}


def test_the_file_is_made_once_and_grows_only_for_passes_that_overlap(tmp_path: Path) -> None:
    where = offload(tmp_path)
    runner = ChainRunner([Thrice() for _ in range(3)], everything(3), offload=where)
    runner(batch()).sum().backward()
    space = where._space
    peak = space._ring.held()[1]
    assert peak >= 3 * 2 * 4096
    for _ in range(5):
        runner(batch()).sum().backward()
        assert space._ring.held()[:2] == (0, peak)
    for _ in range(3):
        results = [runner(batch(seed=n)) for n in range(2)]
        for out in results:
            out.sum().backward()
    del results, out
    assert where._space is space
    held, most, _ = space._ring.held()
    assert held == 0
    assert peak < most <= 2 * peak


def boundaries(count: int) -> list[tuple]:
    """Each stage but the first has its input away between its first run and the second."""
    ops: list[tuple] = []
    for k in range(count):
        ops += [("fck", k), *[("put_input", k)] * (k > 0)]
    ops += [("fall", count), ("bwd", count)]
    for k in reversed(range(count)):
        ops += [*[("get_input", k)] * (k > 0), ("fall", k), ("bwd", k)]
    return ops


def test_of_inputs_that_are_away_there_are_two_at_once(tmp_path: Path, written: list[int]) -> None:
    class Told(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            live.append(meter.live // x.nbytes)
            return x.sin()

    x, seen = batch(64, 6), {}
    kept = [op for op in boundaries(6) if not op[0].endswith("_input")]
    for name, ops in (("kept", kept), ("away", boundaries(6))):
        runner = ChainRunner([Told() for _ in range(6)], ops, offload=offload(tmp_path))
        live: list[int] = []
        meter = Meter()
        meter.ignore([x])
        with meter:
            out = runner(x).sum()
            out.backward()
            x.grad = None
        seen[name] = live
    # Behind the forward pass, of stage 5 on: its input, and the gradient of its output beside it.
    assert seen["kept"] == [0, 1, 2, 3, 4, 5, 5, 5, 4, 3, 2, 1]
    assert seen["away"] == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 1]
    assert written == [x.nbytes] * 5


def test_an_input_that_was_changed_in_place_is_refused_or_as_it_was(tmp_path: Path) -> None:
    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x * 2
            with torch.no_grad():
                x.add_(1)
            return out

    runner = ChainRunner([nn.Tanh(), Changes(), nn.Tanh()], boundaries(3), offload=offload(tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        runner(batch()).sum().backward()
    # After it is put away it is another's.
    x, y = batch(), batch()
    runner = ChainRunner([nn.Tanh(), Thrice(), nn.Tanh()], boundaries(3), offload=offload(tmp_path))
    given = runner.run(0, x)
    out = runner.run(1, given)
    with torch.no_grad():
        given.zero_()
    runner.run(2, out).sum().backward()
    plain([nn.Tanh(), Thrice(), nn.Tanh()], y).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("used_again", [False, True])
def test_what_changes_in_place_after_it_was_saved_is_as_it_is_without_offload(
    tmp_path: Path, used_again: bool
) -> None:
    """Hooks that keep a saved tensor see it change; so does what is offloaded, until the stage has run."""

    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.sin()
            with torch.no_grad():
                y.mul_(2)
            return z + y.sin() if used_again else z * 2

    results = []
    for ops in (everything(2), [op[:2] for op in everything(2)]):
        x = batch()
        ChainRunner([Changes(), Detour()], ops, offload=offload(tmp_path))(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_an_output_that_is_none_the_next_time_goes_like_the_rest(tmp_path: Path, written: list[int]) -> None:
    class Turns(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = x.exp()
            return y if self.calls % 2 else y + 1

    runner = ChainRunner([Turns()], everything(1), offload=offload(tmp_path))
    for n in range(4):
        written.clear()
        x, y = batch(seed=n), batch(seed=n)
        runner(x).sum().backward()
        y.exp().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert len(written) == 1


def test_what_lives_elsewhere_stays(tmp_path: Path) -> None:
    """A stage that keeps what it made: gone from nowhere, it is not brought back beside itself."""

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x.exp()
            return self.kept.sin()

    module = Keeps()
    x = batch()
    out = ChainRunner([module], everything(1), offload=offload(tmp_path))(x)
    saved = out.grad_fn._saved_self  # the sine's
    assert saved.untyped_storage()._cdata == module.kept.untyped_storage()._cdata
    out.sum().backward()
    y = batch()
    y.exp().sin().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_set_whose_time_to_go_was_passed_over_goes_with_its_stages_backward(tmp_path: Path) -> None:
    """Stage 2, after which stage 1's set would be let go, is left out of a pass."""

    class Told(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            self.there = weakref.ref(y.untyped_storage())
            return y.sin()

    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            y.register_hook(lambda _: living.append(modules[1].there() is not None))  # within its backward
            return y.sin()

    living: list[bool] = []
    modules = [First(), Told(), nn.Tanh(), nn.Linear(6, 6)]
    ops = everything(4)
    ops.insert(3, ("sent", 1))
    runner = ChainRunner(modules, ops, offload=offload(tmp_path))
    out = runner.run(3, runner.run(1, runner.run(0, batch())))
    assert modules[1].there() is not None
    out.sum().backward()
    assert living == [False]


def test_a_run_right_before_its_backward_ends_early_whatever_copies_are_made_between(tmp_path: Path) -> None:
    class Ends(nn.Module):
        ended = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            self.ended += 1
            return y + 1

    module = Ends()
    ops: list[tuple] = [("fall", 0, "offload"), ("fck", 1), ("fall", 2), ("bwd", 2), ("fall", 1)]
    ops += [("sent", 0), ("fetch", 0), ("bwd", 1), ("bwd", 0, "offload")]
    x, y = batch(), batch()
    ChainRunner([Thrice(), module], ops, offload=offload(tmp_path))(x).sum().backward()
    assert module.ended == 1
    plain([Thrice(), Ends()], y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_gradients_taken_within_a_stage(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp().sin()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y * grad

    again: list[tuple] = [
        *everything(2)[:4],
        ("drop_saved", 1),
        ("fall", 1, "offload"),
        ("sent", 1),
        *everything(2)[4:],
    ]
    for ops in (everything(2), again):
        x, y = batch(), batch()
        plain([Inner(), Inner()], x).sum().backward()
        ChainRunner([Inner(), Inner()], ops, offload=offload(tmp_path))(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("inputs", [False, True])
def test_an_exception_in_any_stage_or_at_any_write_or_read_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: bool
) -> None:
    calls = {"left": -1}
    disk = _C.Disk

    def count() -> None:
        if calls["left"] == 0:
            calls["left"] = -1
            raise OSError(errno.ENOSPC, f"{tmp_path}: planted")
        calls["left"] -= 1

    class Job:
        def __init__(self, job: _C.DiskJob) -> None:
            self.job = job

        def finish(self) -> None:
            count()
            self.job.finish()

    class Failing:
        def __init__(self, directory: str) -> None:
            count()
            self.disk = disk(directory)

        def write(self, flat: torch.Tensor, at: int) -> Job:
            count()
            return Job(self.disk.write(flat, at))

        def read(self, flat: torch.Tensor, written: Job) -> Job:
            count()
            return Job(self.disk.read(flat, written.job))

    monkeypatch.setattr(_C, "Disk", Failing)
    happened = {OSError: 0, ArithmeticError: 0}
    plans = [("disk", at, 0) for at in range(45)]
    plans += [("stage", at, stage) for at in range(2) for stage in range(3)]
    ops: list[tuple] = [
        *everything(3)[:5],
        ("drop_saved", 2),
        ("fall", 2, "offload"),
        ("sent", 2),
        *everything(3)[5:],
    ]
    if inputs:
        ops = boundaries(3)
        plans = plans[:10] + plans[45:]
    for kind, at, stage in plans:
        modules: list[nn.Module] = [Residual(6), Thrice(), Thrice()]
        if kind == "stage":
            modules[stage] = Fails(modules[stage], at)
        else:
            calls["left"] = at
        where = offload(tmp_path)
        runner = ChainRunner(modules, ops, offload=where)
        alive = []
        x = batch(requires_grad=False)
        try:
            for k in range(3):
                x = runner.run(k, x)
                alive.append(weakref.ref(x.untyped_storage()))
            x.sum().backward()
        except (OSError, ArithmeticError) as error:
            happened[type(error)] += 1
            if kind == "disk":
                assert error.errno == errno.ENOSPC
                assert str(tmp_path) in str(error)
                assert "larger memory_budget" in str(error)
        del x
        assert [ref for ref in alive if ref() is not None] == []
        assert in_use(where) == 0
        # and the next step is sound
        calls["left"] = -1
        if kind == "stage":
            modules[stage].left = -1
        next_step_is_sound(runner, modules)
    assert happened[OSError] > (6 if inputs else 30)
    assert happened[ArithmeticError] >= 3


def test_a_full_disk_is_told_with_the_remedies_and_the_next_step_has_another_file(tmp_path: Path) -> None:
    """Full: a limit on the size of files, which any user may set."""
    runner = ChainRunner([Thrice() for _ in range(2)], everything(2), offload=offload(tmp_path))
    child = os.fork()
    if not child:
        try:
            signal.alarm(500)  # a hang
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            try:
                runner(batch(1 << 17)).sum().backward()
            except OSError as error:
                text = str(error)
                assert "ulimit -f" in text and "larger memory_budget" in text and str(tmp_path) in text
                runner(batch()).sum().backward()
                os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_has_files_of_its_own(tmp_path: Path) -> None:
    """Both have a pass under way at the same time."""
    modules = [Thrice() for _ in range(2)]
    where = offload(tmp_path)
    runner = ChainRunner(modules, everything(2), offload=where)
    runner(batch()).sum().backward()
    before = where._space
    go_on, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(500)  # a hang
            os.read(go_on, 1)
            runner(batch(seed=9))
            os._exit(0 if where._space is not before else 1)
        finally:
            os._exit(2)
    x, y = batch(), batch()
    out = runner(x)
    os.write(tell, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    out.sum().backward()
    plain(modules, y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    for end in (go_on, tell):
        os.close(end)


def test_a_runner_is_copied_and_pickled_without_what_it_keeps(tmp_path: Path) -> None:
    runner = ChainRunner([nn.Tanh(), Thrice()], everything(2), offload=offload(tmp_path, {1: 4096}))
    runner(batch()).sum().backward()
    for other in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        kept = other.offload
        assert (kept.to, kept.sets, kept.least_bytes, kept._space) == (str(tmp_path), {1: 4096}, 1, None)
        other(batch()).sum().backward()
        assert kept._space is not runner.offload._space


@pytest.mark.parametrize(
    ("op", "where", "text"),
    [
        (("fall", 0, "saving"), True, "no option but 'offload' of fall and bwd"),
        (("fck", 0, "offload"), True, "no option but 'offload' of fall and bwd"),
        (("fall", 0, "offload"), False, "give it where to offload to"),
    ],
)
def test_options_that_are_none_of_the_runners(tmp_path: Path, op: tuple, where: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ChainRunner([nn.Tanh()], [op, ("bwd", 0)], offload=offload(tmp_path) if where else None)


def test_inputs_need_a_place_too() -> None:
    with pytest.raises(ValueError, match="give it where to offload to"):
        ChainRunner([nn.Tanh(), nn.Tanh()], boundaries(2))


# ---- when copies are made --------------------------------------------------------------------------------------------


def test_copies_get_more_time_where_the_budget_leaves_room() -> None:
    def stage(name: str) -> Stage:
        return Stage(10, 2, 1.0, 1.0, name=name).with_offload(6, 1.0)

    chain = Chain([stage("a"), stage("b"), Stage(1, 1, 1.0, 1.0)], 2)
    ops = [("fall", 0, "offload"), ("fall", 1, "offload"), ("fall", 2)]
    schedule = Schedule(chain, [*ops, ("bwd", 2), ("bwd", 1, "offload"), ("bwd", 0, "offload")])
    during = [moment.during_bytes for moment in schedule.moments]
    sets = [6, 6, 0]
    tight, peak = with_copies(schedule, during, sets, max(during))
    assert peak == max(during)
    # The peak is the second stage's: only what comes after it has time.
    assert [op for op in tight if op[0] in ("sent", "fetch")] == [("sent", 1), ("fetch", 1)]
    loose, peak = with_copies(schedule, during, sets, 100)
    assert [op[:2] for op in loose] == [
        ("fall", 0),
        ("fall", 1),
        ("sent", 0),
        ("fall", 2),
        ("sent", 1),
        ("fetch", 1),
        ("bwd", 2),
        ("fetch", 0),
        ("bwd", 1),
        ("bwd", 0),
    ]
    assert max(during) < peak <= max(during) + 6


def test_an_inputs_copies_get_more_time_where_the_budget_leaves_room() -> None:
    stages = [Stage(9, 2, 1.0, 1.0), *(Stage(9, 2, 1.0, 1.0, put_input_seconds=0.1) for _ in range(2))]
    chain = Chain([*stages, Stage(1, 1, 1.0, 1.0)], 2)
    schedule = Schedule(chain, boundaries(3))
    during = [moment.during_bytes for moment in schedule.moments]
    tight, peak = with_copies(schedule, during, [0] * 4, 0)
    assert (tight, peak) == (boundaries(3), max(during))
    loose, peak = with_copies(schedule, during, [0] * 4, 100)
    forward = [("fck", 0), ("fck", 1), ("fck", 2), ("put_input", 1), ("fall", 3), ("put_input", 2)]
    assert loose[:6] == forward
    assert loose[6:] == [
        ("fetch_input", 2),
        ("bwd", 3),
        ("get_input", 2),
        ("fall", 2),
        ("fetch_input", 1),
        ("bwd", 2),
        ("get_input", 1),
        ("fall", 1),
        ("bwd", 1),
        ("fall", 0),
        ("bwd", 0),
    ]
    assert peak == max(during) + 2


# ---- auto_checkpoint -------------------------------------------------------------------------------------------------


def test_a_fast_disk_is_used_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: schedule_sets.Bandwidth(1e13, 1e13))
    model, sample, loss = make("vision")
    unchanged = copy.deepcopy(model)
    peak = live_peak(unchanged, sample, loss)
    memopt.auto_checkpoint(model, sample, memory_budget=peak * 2 // 3, loss=loss, to=tmp_path)
    written.clear()  # by the steps that tried the plan
    plan = model.plan
    assert plan.offloaded
    assert plan.seconds < 1.01 * plan.plain_seconds
    assert live_peak(model, sample, loss) <= plan.peak_bytes <= peak * 2 // 3
    sizes = [plan.measured_bytes[k].movable for k in plan.offloaded]
    assert sum(written) == sum(sizes)
    text = str(plan)
    assert (
        f"of what {len(plan.offloaded)} stages save is offloaded to {tmp_path}, at 9.09 TiB a second" in text
    )
    assert text.count("all, offloaded") == len(plan.offloaded)
    for module in (model, unchanged):
        module.zero_grad()
        torch.manual_seed(0)
        step(module, sample, loss)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), unchanged.parameters(), strict=True)
    )
    written.clear()
    with torch.no_grad():
        model(sample)
    assert not written


def test_with_little_memory_inputs_go_instead_of_being_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_plans, "bandwidth", lambda *_: schedule_sets.Bandwidth(1e13, 1e13))
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(64) for _ in range(12)))
    sample, unchanged = torch.randn(2048, 64), copy.deepcopy(model)
    with pytest.raises(InfeasibleBudget) as error:
        memopt.auto_checkpoint(model, sample, memory_budget=1)
    budget = int(error.value.least_budget * 1.05)
    memopt.auto_checkpoint(model, sample, memory_budget=budget)
    again = model.plan.schedule.seconds / model.plan.chain.plain_seconds
    memopt.auto_checkpoint(model, sample, memory_budget=budget, to=tmp_path)
    plan = model.plan
    assert plan.inputs_offloaded
    assert plan.schedule.seconds / plan.chain.plain_seconds < again - 0.1
    count = len(plan.inputs_offloaded)
    assert f"{_C.format_size(count * sample.nbytes)} of {count} stages' inputs is offloaded to" in str(plan)
    assert str(plan).count("its input, offloaded") == len(plan.inputs_offloaded - plan.offloaded)
    for _ in range(2):
        assert live_peak(model, sample, torch.sum) <= plan.peak_bytes <= budget
    for module in (model, unchanged):
        module.zero_grad()
        step(module, sample, torch.sum)
    same(model, unchanged)
    plan_of_a_copy = pickle.loads(pickle.dumps(plan))
    assert plan_of_a_copy.inputs_offloaded == plan.inputs_offloaded


def test_the_speed_of_a_disk_is_measured_once(tmp_path: Path, written: list[int]) -> None:
    first = schedule_sets.bandwidth(str(tmp_path), torch.device("cpu"))
    assert min(first.out, first.back) > 0
    assert schedule_sets.bandwidth(str(tmp_path), torch.device("cpu")) is first
    assert written == [schedule_sets.NBYTES] * schedule_sets.TRIALS
    assert first.forward(2.0, int(first.out)) == 2.0  # beside the computation
    assert first.backward(2.0, int(3 * first.back)) == pytest.approx(3.0)


def test_where_nothing_can_be_offloaded_to_is_said_before_anything_changes(tmp_path: Path) -> None:
    model, sample, loss = make("perceptron")
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss)
    plan = model.plan
    with pytest.raises(ValueError, match="would gain nothing; give .8bit., or the path of a directory"):
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss, to="cpu")
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=r"there is no such directory") as error:
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss, to=missing)
    assert error.value.filename == str(missing)
    assert model.plan is plan
    with pytest.raises(ValueError, match="tensors on meta cannot be offloaded"):
        schedule_sets.destination(tmp_path, torch.device("meta"))


def test_the_earlier_name_of_the_place_works_with_a_warning(tmp_path: Path) -> None:
    model, sample, loss = make("perceptron")
    with pytest.warns(DeprecationWarning, match="to="):
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss, offload=tmp_path)
    assert model.plan.offload == str(tmp_path)


# ---- checkpoint_sequential -------------------------------------------------------------------------------------------


def test_a_sequence_of_functions_offloads_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    monkeypatch.setattr(sequential, "bandwidth", lambda *_: schedule_sets.Bandwidth(1e13, 1e13))
    torch.manual_seed(3)
    functions = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    copied, x = copy.deepcopy(functions), torch.randn(512, 64)
    with pytest.raises(InfeasibleBudget) as error:
        memopt.checkpoint_sequential(functions, None, x, memory_budget=1)
    budget = int(error.value.least_budget * 1.2)
    for _ in range(2):
        written.clear()
        out = memopt.checkpoint_sequential(functions, None, x, memory_budget=budget, to=tmp_path)
        out.square().sum().backward()
        assert written
        expected = copied(x)
        expected.square().sum().backward()
        assert torch.equal(out, expected)
        same(functions, copied)
    meter = Meter()
    standing = [*functions.parameters(), x]
    functions.zero_grad()
    meter.ignore(standing)
    with meter:
        memopt.checkpoint_sequential(functions, None, x, memory_budget=budget, to=tmp_path).sum().backward()
    assert bytes_of(standing) + meter.peak <= budget


def test_a_place_without_a_budget_or_that_is_none_is_refused(tmp_path: Path) -> None:
    functions, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with pytest.raises(ValueError, match="give memory_budget as well"):
        memopt.checkpoint_sequential(functions, 2, x, use_reentrant=False, to=tmp_path)
    with pytest.raises(ValueError, match='to="cpu" is for a model on a CUDA device'):
        memopt.checkpoint_sequential(functions, None, x, memory_budget="1GiB", to="cpu")
    with pytest.raises(OSError, match="nowhere"):
        memopt.checkpoint_sequential(functions, None, x, memory_budget="1GiB", to=tmp_path / "nowhere")
