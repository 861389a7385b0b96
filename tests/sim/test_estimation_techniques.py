"""Techniques that an estimate tries on a script: each takes what the script takes that has it written in."""

from __future__ import annotations

import pytest
from estimation_children import estimate

from memopt._estimate.cards import card
from memopt._estimate.step_time import Segment, seconds

MIB = 1 << 20
pytestmark = pytest.mark.sampled(4)
SCRIPT = """\
import torch, memopt, memopt.nn, memopt.optim
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(*[Block() for _ in range(8)]).to("cuda", torch.{dtype})
{before}
optimizer = {optimizer}(model.parameters(), lr=1e-3{options})
for step in range(3):
    x = torch.ones({rows}, 256, device="cuda", dtype=torch.{dtype})
    {planned}
    {around}
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated())
"""
PLAIN = {
    "before": "",
    "optimizer": "torch.optim.AdamW",
    "options": "",
    "planned": "",
    "around": "if True:",
    "dtype": "float32",
    "rows": 2048,
}
CHECKPOINT = """if not step:
        memopt.auto_checkpoint(
            model, x, memory_budget=132 << 20, optimizer=optimizer, accumulate=True, to="cpu"
        )
        torch.cuda.reset_peak_memory_stats()  # which leaves out the plan's trial steps"""


def run(tmp_path, *techniques, **written):
    script = SCRIPT.format(**PLAIN | written)
    found = estimate(
        tmp_path, script, techniques=list(techniques), rates_of="rtx3090"
    )  # no clock of this machine
    assert found["exit_status"] == 0 and found["oom"] is None, found["complained"]
    return found


def peak(tmp_path, *techniques, **written):
    found = run(tmp_path, *techniques, **written)
    return found["peak_allocated"], found["techniques"]


def printed_peak(tmp_path, **written):
    return int(run(tmp_path, **written)["printed"].split()[-1])


@pytest.mark.parametrize(
    ("technique", "met", "rows", "written"),
    [
        ("fused", "AdamW", 128, {"options": ", fused=True"}),
        ("eight bits", "AdamW", 128, {"optimizer": "memopt.optim.AdamW", "options": ", state_bits=8"}),
        ("four bits", "AdamW", 128, {"optimizer": "memopt.optim.AdamW", "options": ", state_bits=4"}),
        (
            "offload gradients",
            "AdamW",
            128,
            {"optimizer": "memopt.optim.AdamW", "options": ", offload_gradients=True"},
        ),
        (
            "offload states",
            "AdamW",
            128,
            {"optimizer": "memopt.optim.AdamW", "options": ", offload_states=True"},
        ),
        (
            "states on disk:/no:such",
            "AdamW",
            128,
            {"optimizer": "memopt.optim.AdamW", "options": ", offload_states='/no:such'"},
        ),
        (
            "step in backward",
            "AdamW",
            128,
            {"optimizer": "memopt.optim.AdamW", "options": ", step_in_backward=True"},
        ),
        ("factored", "AdamW", 128, {"optimizer": "memopt.optim.AdamW", "options": ", factored=True"}),
        ("bf16", "Sequential", 2048, {"around": "with torch.autocast('cuda', torch.bfloat16):"}),
        ("offload activations", "Sequential", 2048, {"around": "with memopt.offload_activations():"}),
        (
            f"offload activations:{60 * MIB}",
            "Sequential",
            2048,
            {"around": "with memopt.offload_activations(keep='60MiB'):"},
        ),
        (
            "activations in 8 bits",
            "Sequential",
            2048,
            {"around": "with memopt.offload_activations(to='8bit'):"},
        ),
        ("tiles", "Sequential", 2048, {"before": "memopt.nn.tile_mlps(model)"}),
        ("offload layers", "Sequential", 2048, {"before": "memopt.offload_layers(model)"}),
        (f"checkpoint:{132 * MIB}", "Sequential", 2048, {"planned": CHECKPOINT}),
    ],
)
def test_a_technique_takes_what_it_takes_in_the_script(tmp_path, technique, met, rows, written):
    as_is, nothing = peak(tmp_path, rows=rows)
    tried, applied = peak(tmp_path, technique, rows=rows)
    by_hand = printed_peak(tmp_path, rows=rows, **written)
    assert applied == {technique.partition(":")[0]: [met]} and nothing == {}
    # The loss stands within the block that is written by hand.
    assert tried == pytest.approx(by_hand, rel=0.03) and tried < as_is


def test_activations_that_are_kept_are_added_to_the_peak(tmp_path):
    peaks = [
        peak(tmp_path, f"offload activations:{keep * MIB}", rows=2048)[0] // MIB for keep in (20, 40, 60)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(20, abs=8) and peaks[2] - peaks[1] == pytest.approx(20, abs=8)


def test_coding_takes_time_and_what_is_kept_is_added_to_the_peak(tmp_path):
    coded, rates = "activations in 8 bits", card("rtx3090").rates
    as_is, less, more = (
        estimate(tmp_path, SCRIPT.format(**PLAIN), techniques=names, steps=3, timed=True)
        for names in ([], [coded], [f"{coded}:{40 * MIB}"])
    )
    times = [seconds([Segment(**one) for one in found["step"]], rates) for found in (as_is, more, less)]
    assert 0 < times[0] < times[1] < times[2]
    on_host = [one for segment in less["step"] for one in segment["operators"] if one[0] == "host"]
    assert not any(size > MIB for _, _, size in on_host)  # of codes nothing is known there
    grown = (more["peak_allocated"] - less["peak_allocated"]) // MIB
    assert 25 <= grown <= 45


def test_layers_and_a_plan_take_less_than_either_alone(tmp_path):
    """With that budget no plan fits without the visits, and the layers alone take 120 MiB."""
    tried, applied = peak(tmp_path, "offload layers", f"checkpoint:{70 * MIB}", rows=2048)
    assert applied == {"offload layers": ["Sequential"], "checkpoint": ["Sequential"]}
    assert tried <= 70 * MIB


def test_layers_on_the_host_are_run_in_tiles_too(tmp_path):
    alone, _ = peak(tmp_path, "offload layers", rows=2048)
    tried, applied = peak(tmp_path, "offload layers", "tiles", rows=2048)
    assert applied == {"offload layers": ["Sequential"], "tiles": ["Sequential"]}
    assert tried < 0.7 * alone


def test_states_of_bf16_parameters_save_what_they_take(tmp_path):
    """Two states of 2 bytes become two of 1 and their scales: half as much is saved as of fp32."""
    weights = 8 * (2 * 256 * 1024 + 1024 + 256)
    saved = {}
    for dtype in ("float32", "bfloat16"):
        options = {"dtype": dtype, "options": ", fused=True"}
        saved[dtype] = peak(tmp_path, **options)[0] - peak(tmp_path, "eight bits", **options)[0]
    assert saved["float32"] == pytest.approx(weights * (8 - 2 * (1 + 4 / 256)), rel=0.05)
    assert saved["bfloat16"] == pytest.approx(weights * (4 - 2 * (1 + 4 / 256)), rel=0.05)


def test_a_budget_too_small_for_a_plan_becomes_the_least(tmp_path):
    tried, applied = peak(tmp_path, f"checkpoint:{MIB}", rows=2048)
    (least,) = map(int, applied["least budget"])
    assert applied["checkpoint"] == ["Sequential"] and MIB < tried <= least < peak(tmp_path, rows=2048)[0]


def test_a_script_under_autocast_is_left_its_own_dtype(tmp_path):
    assert peak(tmp_path, "bf16", around="with torch.autocast('cuda', torch.float16):")[1] == {}


def test_a_model_without_a_chain_is_left_as_it_is(tmp_path):
    """A student's plan stands beside a hint of one layer, which was the end of it."""
    hint = "hint = nn.Linear(256, 256).cuda()"
    around = "if (hinted := hint(x)) is not None:"
    budget = f"checkpoint:{132 * MIB}"
    found = run(tmp_path, budget, rows=2048, before=hint, around=around)
    assert found["techniques"] == {"checkpoint": ["Sequential"]}
    assert found["peak_allocated"] < 0.8 * peak(tmp_path, rows=2048, before=hint, around=around)[0]
    alone = run(tmp_path, budget, before="model = nn.Linear(256, 256).cuda()")
    assert alone["techniques"] == {} and "Linear calls none of its modules" in alone["refused"]["checkpoint"]


def test_what_lives_before_training_is_told_with_its_line(tmp_path):
    """80 MiB of a dataset, of which half is dropped before the optimizer is made."""
    before = "data = torch.ones(20 << 20, device='cuda')\ndata = data[: 10 << 20].clone()"
    early = estimate(tmp_path, SCRIPT.format(**PLAIN | {"before": before}), timed=True, record=True)[
        "before_training"
    ]
    assert early["lines"][0]["name"].endswith("train.py:13") and early["lines"][0]["bytes"] == 80 * MIB
    assert early["bytes"] == pytest.approx((80 + 40 + 16) * MIB, rel=0.01)


def test_what_meets_nothing_is_told(tmp_path):
    assert peak(tmp_path, "eight bits", "fused", optimizer="torch.optim.Adadelta")[1] == {}


HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

body, head = nn.Linear(128, 128).cuda(), nn.Linear(128, 16000).cuda()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-3)
texts = torch.zeros(16, 512, dtype=torch.long, device="cuda")
for step in range(3):
    with torch.autocast("cuda", torch.bfloat16, enabled={half}):
        rows = body(torch.ones(16, 512, 128, device="cuda"))
        {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOSSES = {
    "module": "loss = nn.CrossEntropyLoss()(head(rows).view(-1, 16000), texts.view(-1))",
    "shifted": "logits = head(rows).float(); n = logits.shape[-1]; loss = F.cross_entropy("
    "logits[..., :-1, :].contiguous().view(-1, n), texts[:, 1:].reshape(-1), ignore_index=7); del logits",
    "smoothed": "loss = F.cross_entropy(head(rows).flatten(0, 1), texts.flatten(), label_smoothing=0.1)",
}
BY_HAND = "import memopt; loss = memopt.nn.linear_cross_entropy(rows{cut}, head.weight, texts{cut}, head.bias{more})"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("how", "cut", "more"),
    [
        ("module", "", ""),
        ("shifted", "[:, :-1]", ", ignore_index=7"),
        ("smoothed", "", ", label_smoothing=0.1"),
    ],
)
def test_a_head_and_its_loss_take_what_they_take_by_chunks(tmp_path, how, cut, more, half):
    def peak(loss, *techniques):
        found = estimate(tmp_path, HEAD.format(loss=loss, half=half), techniques=list(techniques))
        assert found["exit_status"] == 0, found["complained"]
        return found["peak_allocated"], found["techniques"]

    as_is, _ = peak(LOSSES[how])
    tried, applied = peak(LOSSES[how], "loss head")
    by_hand, _ = peak(BY_HAND.format(cut=cut, more=more))
    assert applied == {"loss head": ["cross_entropy"]}
    assert tried == by_hand and tried < 0.7 * as_is


def test_a_head_in_chunks_goes_with_a_checkpoint_and_an_evaluation(tmp_path):
    """The head, whose logits are deferred, is no stage; a layer four times as wide as its input is no head."""
    script = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)
        )
        self.head = nn.Linear(256, 16000)

    def forward(self, x, texts):
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), texts)

model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, texts = torch.ones(4096, 256, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
for step in range(3):
    model(x, texts).backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    model(x, texts)
"""
    peaks = {}
    for names in ((), ("loss head",), ("checkpoint:1", "loss head")):
        found = estimate(tmp_path, script, techniques=list(names), steps=3)
        assert found["exit_status"] == 0, found["complained"]
        peaks[names] = found["peak_allocated"]
    plain, head, both = peaks.values()
    assert plain - head > 300 * MIB  # of three copies of the logits, less the activations of the blocks
    assert head - both > 100 * MIB


def test_logits_that_are_used_otherwise_are_made(tmp_path):
    """For an accuracy, say: then nothing is gained, and nothing said."""
    for loss in ("logits = head(rows); loss = logits.logsumexp(-1).mean()",):
        peaks = [
            estimate(tmp_path, HEAD.format(loss=loss, half=False), techniques=names)
            for names in ([], ["loss head"])
        ]
        assert peaks[1]["techniques"] == {} and peaks[1]["exit_status"] == 0, peaks[1]["complained"]
        assert peaks[1]["peak_allocated"] == peaks[0]["peak_allocated"]


ACTOR_AND_CRITICS = """\
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()

actor, critics = mlp(), [mlp() for _ in range(5)]
optimizer = torch.optim.Adam(actor.parameters())
for step in range(3):
    acts = actor(torch.ones(16384, 8, device="cuda"))
    loss = sum(critic(acts).mean() for critic in critics)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for critic in critics:  # no backward pass follows
        held = critic(torch.ones(16384, 8, device="cuda")).sum()
        del held
"""


def test_what_one_model_saved_leaves_while_the_next_one_runs(tmp_path):
    def peak_with(*techniques):
        found = estimate(tmp_path, ACTOR_AND_CRITICS, techniques=list(techniques), rates_of="rtx3090")
        assert found["exit_status"] == 0 and found["oom"] is None, found["complained"]
        return found["peak_allocated"]

    layer = 16384 * 256 * 4  # bytes that one ReLU saves: of each model two, as many as stay of one pass
    assert peak_with("offload activations") <= peak_with() - 3 * layer
