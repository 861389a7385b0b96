"""memopt.profile(): what it prints and gives away, and that planted culprits are named with their lines."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz

import memopt
from memopt._memory.recording import leaks, recorder, recording_file
from memopt._memory.recording.category_split import in_words

WIDTH = 64


@pytest.fixture(autouse=True)
def nothing_left():
    """Clear what other tests have left, which is none of these tests' leaks."""
    gc.collect()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def here() -> int:
    """The caller's line."""
    return inspect.currentframe().f_back.f_lineno


def named(line: int) -> str:
    return f"test_profile.py:{line}"


def trained(after_step, model=None, steps: int = 6, rows: int = 32):
    """A profile of some steps; after_step(n, x, loss) does what the program does besides."""
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memopt.profile("cpu") as prof:
        for n in range(steps):
            x = torch.randn(rows, WIDTH)
            trained.input_line = here() - 1
            loss = (model(x) ** 2).mean()
            trained.loss_line = here() - 1
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(n, x, loss)
    return prof


def test_a_loop_that_keeps_nothing_leaks_nothing():
    assert trained(lambda *_: None).leaks() == []


def test_a_kept_loss_is_named_with_its_line_and_holder():
    losses = []
    prof = trained(lambda n, x, loss: losses.append(loss))
    line = here() - 1
    (leak,) = prof.leaks()
    assert (leak.kind, leak.line, leak.per_step) == ("grows", named(trained.loss_line), 4)
    assert leak.text == "loss = (model(x) ** 2).mean()"
    assert leak.holder == "losses[*]" and leak.bound == named(line) and leak.graph > 5
    assert "use .item() or .detach()" in " ".join(str(prof).split()) and losses


def test_a_sum_of_losses_is_named_by_the_graph_it_holds():
    state = {"sum": torch.zeros(())}

    def add(n, x, loss):
        state["sum"] = state["sum"] + loss

    line = inspect.getsourcelines(add)[1] + 1
    prof = trained(add)
    found = [leak for leak in prof.leaks() if leak.line == named(line)]
    assert [leak.kind for leak in found] == ["graph"] and found[0].graph > 4 * 6
    assert found[0].holder == "state['sum']" and "use .item() or .detach()" in str(found[0])


def test_a_growing_list_is_named_with_its_line_and_what_a_step_adds():
    kept = []
    prof = trained(lambda n, x, loss: kept.append(x * 2))
    line = here() - 1
    (leak,) = prof.leaks()
    assert (leak.kind, leak.line, leak.per_step) == ("grows", named(line), 32 * WIDTH * 4)
    assert leak.holder == "kept[*]" and leak.graph == 0
    assert str(leak).startswith(f"+8.00 KiB/step from {named(line)}, held by `kept[*]`") and kept


def test_a_hooks_closure_is_named_by_the_line_that_made_what_it_keeps():
    def watch(module):
        outputs = []
        module.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    model = Net()
    watch(model.first)
    prof = trained(lambda *_: None, model)
    line = inspect.getsourcelines(Net.forward)[1] + 1
    grows = [leak for leak in prof.leaks() if leak.kind == "grows"]
    assert [(leak.line, leak.per_step) for leak in grows] == [(named(line), 32 * 4 * WIDTH * 4)]
    assert grows[0].holder.endswith("outputs[*]") and grows[0].graph > 1


def test_a_batch_kept_for_the_next_step_is_named_with_its_line():
    class Data:
        last = None

    data = Data()

    def keep(n, x, loss):
        data.last = x

    prof = trained(keep)
    kept = [leak for leak in prof.leaks() if leak.kind == "kept"]
    assert [(leak.line, leak.bytes) for leak in kept] == [(named(trained.input_line), 32 * WIDTH * 4)]
    assert "kept from an earlier step" in str(kept[0])


def test_a_cache_of_batches_grows():
    cache = {}
    prof = trained(lambda n, x, loss: cache.__setitem__(n, x))
    (leak,) = prof.leaks()
    assert (leak.kind, leak.line, leak.category) == ("grows", named(trained.input_line), "inputs")
    assert leak.holder == "cache[*]"


def test_steps_can_be_told_where_there_is_no_optimizer():
    kept = []
    with memopt.profile("cpu") as prof:
        for _ in range(5):
            kept.append(torch.ones(1000))
            prof.step()
    assert [(leak.line, leak.per_step) for leak in prof.leaks()] == [(named(here() - 2), 4000)]


def test_what_it_prints_names_the_peak_by_category_line_and_module():
    prof = trained(lambda *_: None, rows=4096)
    text = str(prof)
    assert "memopt profile of cpu:" in text and "6 optimizer steps" in text
    for words in ("parameters +", "by line:", "by module:", "loss.backward()", "Net  activations"):
        assert words in text, text
    assert max(map(len, text.splitlines())) < 160
    shown = prof._repr_html_()
    assert "<table>" in shown and "loss.backward()" in shown and "<script" not in shown
    assert sum(row.bytes for row in prof.by_line()) == prof.peak == sum(prof.by_category().values())
    assert prof.by_line(top=2) == prof.by_line()[:2] and prof.by_module()[0].bytes > 0


def test_a_line_of_several_categories_has_them_all():
    """`loss.backward()` makes gradients and what they pass through."""
    prof = trained(lambda *_: None, rows=256)
    event = prof.recording.peak()[1]
    for row in prof.recording.by_line(event):
        assert sum(row.by_category.values()) == row.bytes
    (row,) = [row for row in prof.by_line() if "loss.backward()" in row.text]
    assert len(row.by_category) > 1
    for shown in (str(prof), prof._repr_html_()):
        assert in_words(row.by_category) in shown


def test_categories_are_in_one_unit_and_a_hundredth_is_left_out():
    assert (
        in_words({"activations": 64 << 20, "optimizer": 40 << 20}) == "activations 64.0 + optimizer 40.0 MiB"
    )
    assert in_words({"activations": 1000, "optimizer": 5}) == "activations"
    assert in_words({}) == ""


def test_many_small_kept_tensors_are_one_line():
    ages = [()] * 3

    def keep(n, x, loss):
        """Made behind the step, so of the next one: what is kept is a step older."""
        ages.pop(0)
        first = torch.ones(8)
        second = torch.ones(9)
        third = torch.ones(10)
        ages.append((first, second, third))

    prof = trained(keep, rows=1024)
    kept = [leak for leak in prof.leaks() if leak.kind == "kept"]
    assert len(kept) >= 3 and all(leak.bytes < prof.peak / 100 for leak in kept)
    said = [line for line in str(prof).splitlines() if "kept from an earlier step" in line]
    assert len(said) == 1 and f"{len(kept)} lines" in said[0]
    large = replace(kept[0], bytes=prof.peak)
    assert leaks.in_words([large, kept[0]], prof.peak) == [str(large), str(kept[0])]
    assert leaks.in_words([large, *kept], prof.peak)[0] == str(large)


def test_an_exception_within_keeps_what_was_seen_and_is_raised():
    with pytest.raises(ZeroDivisionError):
        with memopt.profile("cpu") as prof:
            kept = torch.ones(3000)
            raise ZeroDivisionError
    assert kept.nbytes in prof.recording.columns["size"].tolist()
    assert recorder.active() is None


def test_one_within_another_sees_its_own_part_and_leaves_the_other_running():
    with memopt.profile("cpu") as outer:
        first = torch.ones(1000)
        with memopt.profile("cpu") as inner:
            second = torch.ones(2000)
        third = torch.ones(3000)
    born = [int(n) for n in inner.recording.columns["size"][inner.recording.columns["born"] >= 0]]
    assert second.nbytes in born and first.nbytes not in born and third.nbytes not in born
    assert third.nbytes in outer.recording.columns["size"].tolist()


def test_a_profile_in_which_nothing_happened_says_so_and_one_that_never_began_too():
    with memopt.profile("cpu") as prof:
        pass
    assert "memopt profile of cpu" in str(prof) and prof.leaks() == []
    never = memopt.profile("cpu")
    assert repr(never) == "<memopt.profile>"
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        never.by_line()
    with pytest.raises(ValueError, match="nothing to save"):
        never.save("x.mopt")


def test_it_is_saved_in_the_form_that_the_name_asks_for(tmp_path):
    losses = []
    prof = trained(lambda n, x, loss: losses.append(loss))
    prof.save(tmp_path / "a.mopt")
    assert recording_file.load(tmp_path / "a.mopt").by_category() == prof.by_category()
    prof.save(tmp_path / "a.json")
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["peak_allocated"] == prof.peak and told["by_category"] == prof.by_category()
    assert told["leaks"][0]["holder"] == "losses[*]" and told["oom"] is None
    prof.save(tmp_path / "a.trace.json")
    events = json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == prof.peak
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step"] * 6
    with pytest.raises(ValueError, match=r"must end in \.html"):
        prof.save(tmp_path / "a.txt")


def test_a_snapshot_opens_in_torchs_viewer_and_tells_the_same(tmp_path):
    prof = trained(lambda *_: None)
    prof.save(tmp_path / "a.pickle")
    content = (tmp_path / "a.pickle").read_bytes()
    assert content[:2] == b"\x80\x04"  # protocol 4
    snapshot = pickle.loads(content)
    assert "loss.backward()" in viz.trace_plot(snapshot) or viz.trace_plot(snapshot)
    assert viz.segsum(snapshot) and viz.trace(snapshot)
    again = recording_file.load(tmp_path / "a.pickle")
    assert again.peak()[0] == prof.peak
    live = prof.recording.live_bytes()
    assert int(again.live_bytes()[-1]) == int(live[-1]) and int(again.live_bytes().max()) == int(live.max())
    assert {row.name for row in again.by_line()} >= {named(trained.loss_line + 2)}


def test_a_million_events_are_shown_by_fewer_points_that_keep_the_peak():
    from memopt._memory.recording.exports import highest

    torch.manual_seed(3)
    values = torch.randint(0, 1 << 40, (1_000_003,))
    chosen = highest(values, 1000)
    assert len(chosen) <= 1001 and values[chosen].max() == values.max() and chosen[-1] == len(values) - 1
    assert torch.equal(chosen, chosen.sort().values)
