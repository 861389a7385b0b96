"""One step of a script: operations and bytes of its operators, beside sums by hand."""

from __future__ import annotations

import pytest
from estimation_children import estimate

from memopt._estimate import cards
from memopt._estimate.forecast import Forecast
from memopt._estimate.search import _SURE
from memopt._estimate.step_time import HOST, Segment, seconds

SIM = None
ROWS, WIDTH, LAYERS = 64, 256, 4
SCRIPT = f"""\
import sys
import torch, memopt.optim
from torch.utils.checkpoint import checkpoint

words = sys.argv[1:]
rows = {ROWS} * (2 if "twice" in words else 1)
weights = [torch.zeros({WIDTH}, {WIDTH}, device="cuda", requires_grad=True) for _ in range({LAYERS})]
ours = dict(offload_states=True) if "offload" in words else dict(state_bits=8) if "codes" in words else dict()
if "host" in words:  # what memopt.offload_layers has its optimizer step
    weights.append(torch.zeros({WIDTH}, {WIDTH}, requires_grad=True))
    weights[-1].grad = torch.zeros({WIDTH}, {WIDTH})
optimizer = (memopt.optim if "memopt" in words else torch.optim).AdamW(weights, lr=1e-3, **ours)

def forward(x):
    for weight in weights[:{LAYERS}]:
        x = torch.relu(x @ weight)
    return x

for step in range(9):
    x = torch.empty(rows, {WIDTH}, device="cuda")
    y = checkpoint(forward, x, use_reentrant=False) if "checkpoint" in words else forward(x)
    y.backward(torch.empty_like(y))
    optimizer.step()
    for weight in weights[:{LAYERS}]:
        weight.grad = None
"""
KEEPING = """\
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

words = sys.argv[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=False)
        part = {"hidden": hidden[:4].tanh()} if "part" in words else {}
        return {"logits": self.head(hidden)} | part

model, outputs = Model().cuda(), []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
classes = torch.zeros(16, dtype=torch.int64, device="cuda")
for step in range(18):
    x = torch.ones(16, 8, device="cuda")
    if "view" in words:
        rows = model(x)["logits"][:8]
        loss = F.cross_entropy(rows, classes[:8])
    elif "part" in words:
        out = model(x)
        loss = F.cross_entropy(out["logits"], classes) + out["hidden"].sum()
        if "name" not in words:
            del out
    elif "name" in words:
        out = model(x)
        loss = F.cross_entropy(out["logits"], classes)
    else:
        loss = F.cross_entropy(model(x)["logits"], classes)
    if "in a list" in words and step == 2:
        outputs.append(model(x)["logits"])
        loss = loss + outputs[0].sum()
    if "late" in words:
        optimizer.zero_grad()
    loss.backward()
    if "accumulate" in words and step % 2 == 0:
        continue
    optimizer.step()
    if "late" not in words:
        optimizer.zero_grad(set_to_none="zeros" not in words)
"""
PRODUCT = 2 * ROWS * WIDTH * WIDTH
X, W = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH  # bytes


def step_of(folder, *words, **request):
    found = estimate(folder, SCRIPT, *words, steps=3, timed=True, **request)
    assert found["exit_status"] == 0, found["complained"]
    return [Segment(**one) for one in found["step"]]


def sums(segment, kind=None):
    chosen = [one for one in segment.operators if one[1] or kind is None]
    return sum(one[1] for one in chosen), sum(one[2] for one in chosen)


def test_a_chain_of_products_counts_as_by_hand(tmp_path):
    forward, backward, step = step_of(tmp_path)
    assert [one[0] for one in forward.operators] == ["fp32"] * 2 * LAYERS
    assert sums(forward) == (LAYERS * PRODUCT, LAYERS * ((X + W + X) + 2 * X))
    # Of each layer the gradients of its weight and, but for the first, of its input; and relu's.
    products = 2 * LAYERS - 1
    assert sums(backward) == (products * PRODUCT, LAYERS * ((X + W + X) + 3 * X) + (LAYERS - 1) * (X + W + X))
    assert not sums(step)[0] and sums(step)[1] > 28 * LAYERS * WIDTH * WIDTH  # torch's takes several passes


def test_the_count_is_of_one_step_and_changes_no_bytes(tmp_path):
    first = step_of(tmp_path)
    assert step_of(tmp_path, shorten="none") == first
    timed = estimate(tmp_path, SCRIPT, steps=3, timed=True)
    plain = estimate(tmp_path, SCRIPT, steps=3)
    assert plain["step"] is None
    assert all(timed[name] == plain[name] for name in ("peak_allocated", "peak_reserved", "steps", "guesses"))


def test_a_checkpoint_adds_the_forward_pass(tmp_path):
    plain, kept = step_of(tmp_path), step_of(tmp_path, "checkpoint")
    assert sums(kept[0]) == sums(plain[0])
    assert sums(kept[1]) == tuple(a + b for a, b in zip(sums(plain[0]), sums(plain[1]), strict=True))


def test_memopts_step_counts_its_bytes_and_offloaded_states_their_copies(tmp_path):
    elements = LAYERS * WIDTH * WIDTH
    ours = step_of(tmp_path, "memopt")[2]
    assert ours.kernel_bytes == 28 * elements and not ours.side_to_device
    codes = step_of(tmp_path, "memopt", "codes")[2]
    assert codes.kernel_bytes == 16 * elements
    away = step_of(tmp_path, "memopt", "offload")
    assert away[2].side_to_device == away[2].side_to_host == 8 * elements
    rates = cards.card("rtx3060").rates
    assert seconds(away, rates) > seconds(step_of(tmp_path, "memopt"), rates)


def test_a_step_on_the_host_counts_its_bytes(tmp_path):
    """memopt's is one pass over parameter, gradient and two moments; torch's takes several."""
    ours = step_of(tmp_path, "memopt", "host")[2]
    assert abs(ours.host_bytes - 28 * WIDTH * WIDTH) <= 16  # and the count of steps
    torchs = step_of(tmp_path, "host")[2]
    assert not torchs.host_bytes
    passed = sum(size for kind, _, size in torchs.operators if kind == HOST)
    assert 28 * WIDTH * WIDTH < passed < 120 * WIDTH * WIDTH


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), []),
        (("accumulate",), ["gradients"]),
        (("zeros",), ["gradients"]),
        (("late",), ["gradients"]),  # dropped between the forward pass and the backward pass
        (("name",), ["output"]),
        (("view",), ["output"]),
        (("part",), []),  # tanh's graph has its result
        (("part", "name"), ["output"]),
        (("accumulate", "in a list"), ["gradients", "output"]),
    ],
)
def test_what_a_script_keeps_is_seen(tmp_path, words, kept):
    assert estimate(tmp_path, KEEPING, *words, steps=3, timed=True)["keeps"] == kept


def test_nothing_looks_at_what_a_script_keeps_in_a_run_that_is_not_asked(tmp_path):
    assert estimate(tmp_path, KEEPING, steps=3)["keeps"] is None


def test_twice_the_batch_is_not_faster(tmp_path):
    rates = cards.card("rtx3060").rates
    once, twice = step_of(tmp_path), step_of(tmp_path, "twice")
    assert sums(twice[0])[0] == 2 * sums(once[0])[0]
    assert seconds(twice, rates) >= seconds(once, rates)


def test_what_is_worked_out_of_the_run_is_what_the_runs_take(tmp_path):
    """Of the script's own moments, as far as a search counts on it; turns of a small model are a few percent."""
    plain = estimate(tmp_path, SCRIPT, steps=3, timed=True, record=True)
    step = [Segment(**one) for one in plain["step"]]
    forecast = Forecast(plain["moments"], step, cards.card("t4").rates, 0, 1.0)
    assert forecast.least([]) == plain["peak_allocated"]
    several = (
        "fused",
        "eight bits",
        "four bits",
        "offload states",
        "states on disk:/no/such",
        "offload gradients",
    )
    for name in several:
        found = estimate(tmp_path, SCRIPT, steps=3, techniques=[name])
        assert _SURE <= found["peak_allocated"] / forecast.least([name]) <= 1.06, name
