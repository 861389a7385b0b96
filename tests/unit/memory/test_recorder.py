"""The recorder on a CPU, and its parts: blocks from events, categories from attributions, the user's own lines."""

from __future__ import annotations

import gc
import inspect
import os
import random
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import memopt
from memopt import _C
from memopt._checkpoint.stages.costs import Meter
from memopt._memory.recording import recorder
from memopt._memory.recording.recording import (
    ACTIVATIONS,
    CATEGORIES,
    INPUTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Frame,
    pair_events,
)
from memopt._memory.recording.torch_hooks import Attributions
from memopt._memory.recording.user_code import is_user_file, short_name, user_frame

SEED = int(os.environ.get("MEMOPT_SEED", "0")) or random.randrange(1 << 30)


@pytest.fixture(params=["allocator", "operations"])
def recording(request, monkeypatch):
    """Both ways of recording a CPU: by torch's allocator, and by operations where that is not as it is known."""
    running = []
    if request.param == "operations":

        def refuses(_):
            raise memopt.Error("as planned")

        monkeypatch.setattr(_C, "cpu_log_start", refuses)
    gc.collect()
    gc.disable()  # what other tests have left dies before, and nothing of it meanwhile

    def start(**options):
        running.append(recorder.start("cpu", **options))
        return running[0]

    yield start
    gc.enable()
    for each in running:
        each.stop()


class Net(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale


def train(model, optimizer, steps: int, width: int = 64):
    for _ in range(steps):
        x = torch.randn(32, width)
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- blocks from events ----------------------------------------------------------------------------------------------


def test_births_and_deaths_are_paired_as_one_by_one_they_would_be():
    random.seed(SEED)
    for _ in range(60):
        events = [(random.random() < 0.5, random.randrange(4)) for _ in range(random.randrange(40))]
        live: dict[int, int] = {}
        last: dict[int, int] = {}
        blocks = []
        for n, (birth, address) in enumerate(events):
            if address in live:
                blocks.append((live.pop(address), n))
            elif not birth:
                blocks.append((last.get(address, -1), n))
            if birth:
                live[address] = n
            last[address] = n
        blocks += [(born, len(events)) for born in live.values()]
        found = pair_events(
            torch.tensor([e[0] for e in events], dtype=torch.bool),
            torch.tensor([e[1] for e in events], dtype=torch.int64),
        )
        got = list(zip(found.born.tolist(), found.died.tolist(), strict=True))
        assert sorted(got) == sorted(blocks), f"MEMOPT_SEED={SEED}"
        assert found.born.tolist() == sorted(found.born.tolist())


def test_a_claim_gives_its_category_to_the_block_that_lived_there_then():
    random.seed(SEED)
    for _ in range(60):
        count = random.randrange(1, 30)
        born = [random.randrange(-1, 20) for _ in range(count)]
        died = [b + 1 + random.randrange(6) for b in born]
        # No two blocks live at one address at once.
        address, ends = [], {}
        for n in sorted(range(count), key=lambda n: born[n]):
            place = next(a for a in range(1, 99) if ends.get(a, -9) <= born[n])
            ends[place] = died[n]
            address.append((n, place))
        address = [place for _, place in sorted(address)]
        first = random.randrange(3)
        attributions, wanted = Attributions(), [OTHER] * count
        for position in range(first, first + 25):
            category, place = random.randrange(5), random.randrange(1, 8)
            attributions.add(position, [place], category)
            for n in range(count):
                if address[n] == place and born[n] < position - first <= died[n]:
                    wanted[n] = min(wanted[n], category)
        got = attributions.categories(*map(torch.tensor, (born, died, address)), first)
        assert got.tolist() == wanted, f"MEMOPT_SEED={SEED}"


# ---- whose line ------------------------------------------------------------------------------------------------------


def test_the_users_line_is_the_innermost_that_is_no_packages():
    torchs = Frame("/usr/lib/python3/dist-packages/torch/nn/modules/linear.py", 9, "forward")
    hugging = Frame("/opt/venv/lib/python3.12/site-packages/transformers/models/bert.py", 7, "forward")
    library = Frame(inspect.getfile(random), 7, "choice")
    generated, notebook = Frame("<string>", 1, "f"), Frame("/tmp/ipykernel_7/123.py", 3, "<module>")
    mine, outer = Frame("/home/me/train.py", 41, "loss"), Frame("/home/me/train.py", 90, "<module>")
    assert user_frame((torchs, library, generated, hugging, mine, outer)) == mine
    assert user_frame((torchs, notebook)) == notebook
    assert user_frame((torchs, hugging)) == hugging  # a program that is itself an installed package
    assert user_frame((torchs,)) is None and user_frame(()) is None
    assert not is_user_file(inspect.getfile(recorder))
    assert short_name(mine) == "train.py:41"


# ---- a CPU's recording -----------------------------------------------------------------------------------------------


def test_a_notebooks_cell_is_named_by_its_number(monkeypatch):
    from memopt._memory.recording import user_code

    monkeypatch.setattr(user_code, "cells", lambda: {"/tmp/ipykernel_7/123.py": 3})
    assert short_name(Frame("/tmp/ipykernel_7/123.py", 2, "f")) == "In[3]:2"
    assert short_name(Frame("/home/me/train.py", 41, "f")) == "train.py:41"


def test_bytes_are_those_of_the_storages_that_operations_make(recording):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = Meter()
    meter.ignore([*model.parameters(), *model.buffers()])
    with meter:
        train(model, optimizer, 3)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    running = recording()
    train(model, optimizer, 3)
    seen = running.recording()
    running.stop()
    made = seen.columns["born"] >= 0
    before = seen.columns["size"][~made].sum()
    only_made = replace(seen, columns={name: column[made] for name, column in seen.columns.items()})
    assert only_made.peak()[0] == meter.peak
    assert before >= sum(p.nbytes for p in model.parameters())


def test_each_block_is_for_what_its_holder_says(recording):
    running = recording()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 4)
    seen = running.recording()
    parameters = sum(p.nbytes for p in model.parameters())
    steps = [mark.event for mark in seen.marks if mark.kind == "step"]
    assert len(steps) == 4
    at = seen.by_category(steps[1])
    assert at["parameters"] == parameters + model.scale.nbytes
    assert at["gradients"] == parameters
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert at["optimizer"] == states
    assert at["inputs"] == 32 * 64 * 4
    assert set(seen.by_category()) == set(CATEGORIES)
    assert sum(seen.by_category().values()) == seen.peak()[0]
    made = seen.columns["category"] == ACTIVATIONS
    names = {seen.modules[n] for n in seen.columns["module"][made].tolist()}
    assert {"Net", "Net.first", "Net.second"} <= names


@pytest.mark.parametrize("within", ["a closure", "a backward pass"])
def test_a_step_and_the_passes_within_it_or_around_it_are_told_apart(recording, within):
    """LBFGS and Lightning give the step a closure; a hook may step as soon as a gradient is there."""
    running = recording()
    model, given, kept = Net(), torch.randn(32, 64), []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def passes():
        optimizer.zero_grad()
        kept.append(model(given) * 2)  # not a module's, and not let go of
        loss = kept[-1].sum()
        loss.backward()
        return loss

    if within == "a closure":
        for _ in range(2):
            optimizer.step(passes)
    else:
        model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        optimizer.register_step_post_hook(lambda *_: kept.append(torch.ones(100)))
        passes()
    seen = running.recording()
    category = dict(zip(seen.columns["address"].tolist(), seen.columns["category"].tolist(), strict=True))
    assert category[kept[0].data_ptr()] == ACTIVATIONS
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert {category[t.data_ptr()] for t in states} == {OPTIMIZER}
    if within == "a backward pass":
        assert category[kept[1].data_ptr()] == OPTIMIZER


def test_every_row_names_the_line_and_the_rows_add_up(recording):
    running = recording()
    line = inspect.currentframe().f_lineno + 1
    kept = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(3)]
    seen = running.recording()
    rows = seen.by_line(seen.events - 1)
    mine = next(row for row in rows if row.name == f"test_recorder.py:{line}")
    assert (mine.bytes, mine.blocks) == (3 << 20, 3)
    assert mine.text.startswith("kept = [torch.empty(1 << 20")
    assert sum(row.bytes for row in rows) == int(seen.live_bytes()[-1])
    assert len(kept) == 3


def test_a_failed_forward_pass_leaves_no_module_behind(recording):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("as planned")

    running = recording()
    with pytest.raises(ValueError, match="as planned"):
        Fails()(torch.ones(3))
    kept = torch.ones(1000)
    seen = running.recording()
    assert seen.modules[int(seen.columns["module"][seen.columns["size"] == kept.nbytes][-1])] == ""


def test_old_events_are_forgotten_and_the_blocks_that_live_on_are_not(recording):
    running = recording(max_events=50)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 20)
    seen = running.recording()
    assert 50 <= seen.events <= 100 and seen.facts["events_lost"] > 0
    wanted = sum(p.nbytes for p in model.parameters()) + model.scale.nbytes
    assert seen.by_category(seen.events - 1)["parameters"] == wanted
    rows = {row.category for row in seen.by_line(seen.events - 1)}
    assert {"parameters", "optimizer"} <= rows


def test_what_came_after_a_position_is_a_recording_of_its_own(recording):
    running = recording()
    kept = torch.zeros(5000)
    position = running.position("cpu")
    more = torch.zeros(7000)
    gone = torch.zeros(9000)
    del gone
    later = running.recording(since=position)
    everything = running.recording()
    assert int(later.live_bytes()[0]) == int(everything.live_bytes()[position])
    assert int(later.live_bytes()[-1]) == int(everything.live_bytes()[-1])
    born = {int(size): int(at) for size, at in zip(later.columns["size"], later.columns["born"], strict=True)}
    assert born[kept.nbytes] == -1 and born[more.nbytes] == 0 and 36000 in born


def test_memory_that_grows_in_place_counts_as_it_is(recording):
    running = recording()
    x = torch.zeros(10)
    x.resize_(100000)
    grown = running.recording()
    del x
    gone = running.recording()
    running.stop()  # so that what follows is not recorded
    assert {40, 400000} <= set(grown.columns["size"].tolist())
    assert int(grown.live_bytes()[-1] - gone.live_bytes()[-1]) == 400000


def test_only_one_recorder_runs_and_none_in_a_forked_child(recording):
    running = recording()
    assert recorder.active() is running
    with pytest.raises(RuntimeError, match="already"):
        recorder.start("cpu")
    pid = os.fork()
    if pid == 0:
        torch.zeros(10)
        os._exit(0 if recorder.active() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    running.stop()
    running.stop()
    assert recorder.active() is None


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="meta"):
        recorder.start("meta")
    with pytest.raises(ValueError, match="max_events=0"):
        recorder.start("cpu", max_events=0)
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="no CUDA device here"):
            recorder.start("cuda")
    assert recorder.active() is None


def test_stopping_leaves_torch_as_it_was():
    engine, hooks = torch.autograd._engine_run_backward, dict(nn.modules.module._global_forward_hooks)
    running = recorder.start("cpu")
    assert torch.autograd._engine_run_backward is not engine
    running.stop()
    assert torch.autograd._engine_run_backward is engine
    assert nn.modules.module._global_forward_hooks == hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.fixture
def allocator():
    running = recorder.start("cpu")
    yield running
    running.stop()


def sizes(seen) -> list[int]:
    return seen.columns["size"].tolist()


def test_other_threads_memory_is_seen_and_has_their_lines_and_modules(allocator):
    kept = []

    class Keeps(nn.Module):
        def forward(self, x):
            kept.append(torch.empty(54321, dtype=torch.uint8))
            return x

    def work():
        Keeps()(torch.ones(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    seen = allocator.recording()
    block = sizes(seen).index(54321)
    assert seen.modules[int(seen.columns["module"][block])] == "Keeps"
    names = [frame.function for frame in seen.stacks[int(seen.columns["stack"][block])]]
    assert names[0] == "forward" and "work" in names


def test_what_a_kernel_takes_to_work_in_is_seen(allocator):
    x = torch.randn(64, 64)
    position = allocator.position()
    torch.linalg.svd(x)
    seen = allocator.recording(since=position)
    gone = seen.columns["died"] < seen.events
    assert len(seen.columns["size"]) > 3 and bool(gone.any())


def test_no_operation_goes_another_way_while_a_recorder_runs(allocator):
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    x = torch.ones(3, requires_grad=True)
    model = nn.Linear(3, 3)
    gradient = torch.ones(3)
    model(x).backward(gradient)
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_memory_of_an_earlier_recording_is_there_before_a_later_one_and_dies_once():
    first = recorder.start("cpu")
    kept = torch.empty(77777, dtype=torch.uint8)
    first.stop()
    second = recorder.start("cpu")
    try:
        there = second.recording()
        assert int(there.columns["born"][sizes(there).index(77777)]) == -1
        del kept
        seen = second.recording()
        died = seen.columns["died"][seen.columns["size"] == 77777].tolist()
        assert died == [died[0]] and died[0] < seen.events
    finally:
        second.stop()


def test_memory_that_is_not_the_allocators_is_seen_once_it_is_for_something(allocator):
    shared = torch.ones(1 << 16).share_memory_()
    assert shared.untyped_storage().nbytes() == 1 << 18
    model = nn.Identity()
    model(shared)
    seen = allocator.recording()
    at = shared.data_ptr()
    mine = (seen.columns["address"] == at) & (seen.columns["died"] == seen.events)
    assert seen.columns["category"][mine].tolist() == [INPUTS]
    del shared
    gc.collect()
    seen = allocator.recording()
    assert not bool(((seen.columns["address"] == at) & (seen.columns["died"] == seen.events)).any())


def test_a_forked_child_can_record_for_itself(allocator):
    kept = torch.ones(1000)
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            own = recorder.start("cpu")
            made = torch.empty(4321, dtype=torch.uint8)
            good = made.nbytes in sizes(own.recording())
            own.stop()
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept.nbytes in sizes(allocator.recording())


def test_memory_that_outlives_the_recorder_goes_back_as_ever():
    running = recorder.start("cpu")
    kept = [torch.empty(1 << 16) for _ in range(10)]
    grows = torch.empty(10)
    running.stop()
    del kept
    grows.resize_(1 << 16).fill_(1)
    assert float(grows.sum()) == 1 << 16


@pytest.mark.parametrize("way", ["function", "in place"])
def test_torch_compile_makes_the_same_graphs_under_a_recorder(way):
    from torch._dynamo.testing import CompileCounterWithBackend

    counts = []
    for recorded in (False, True):
        torch._dynamo.reset()
        model, counter = Net(), CompileCounterWithBackend("eager")
        running = recorder.start("cpu") if recorded else None
        try:
            if way == "in place":
                model.compile(backend=counter, fullgraph=True)
            call = model if way == "in place" else torch.compile(model, backend=counter, fullgraph=True)
            for _ in range(3):
                call(torch.ones(2, 64)).sum().backward()
        finally:
            if running is not None:
                running.stop()
        counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]


def test_what_the_module_made_itself_is_no_input(recording):
    running = recording()
    inner, outer = nn.Linear(64, 64), nn.Linear(64, 64)
    given = torch.randn(16, 64)
    made = inner(given)
    outer(made.detach())
    seen = running.recording()
    category = {
        int(a): int(c)
        for a, c, d in zip(*(seen.columns[n] for n in ("address", "category", "died")), strict=True)
        if d == seen.events
    }
    assert category[given.data_ptr()] == INPUTS and category[made.data_ptr()] == ACTIVATIONS
    assert category[inner.weight.data_ptr()] == PARAMETERS
    assert OPTIMIZER not in category.values()


class Wrapped(torch.Tensor):
    """As torchao's and DTensor are: no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner, self.mesh = inner, "no tensor"

    def __tensor_flatten__(self):
        return ["inner", "mesh"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(one.inner if isinstance(one, Wrapped) else one for one in args), **(kwargs or {}))


def test_a_wrappers_memory_is_what_it_wraps(recording):
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", Wrapped(torch.ones(1 << 18)))

        def forward(self, x):
            return x * self.weight.inner

    running = recording()
    model = Wrapping()
    model(torch.ones(1))
    assert running.recording().by_category()["parameters"] == 1 << 20
