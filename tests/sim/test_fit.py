"""`python -m memopt fit` and then `run --fit --sim`: a GPT as it is on a card that it does not fit alone, with the bits
that it has without a plan where these are promised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memopt._C import parse_size
from memopt._estimate.step_time import DISK_RATE

SIM = None
pytestmark = pytest.mark.sampled(1)
ROOT = Path(__file__).resolve().parents[2]
GPT = """\
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WORDS, WIDTH, LENGTH = 512, 128, 128

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        return self.head(self.blocks(self.embedding(words)))

model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
others = [torch.optim.SGD([nn.Parameter(torch.zeros(4, device="cuda"))], lr=1e-3)] if "two" in sys.argv else []
for words in torch.randint(WORDS, (4, 32, LENGTH + 1)):
    words = words.cuda()
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    {clip}
    for one in (optimizer, *others):
        one.step()
        one.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    print(f"loss {{loss.item()!r}}", flush=True)
"""
PEAK, CONTEXT = 262, 450  # MiB, of tensors


def memopt(folder, *arguments, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "memopt", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,  # a hang; a busy host may take minutes
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("kind", ["one", "two"])
def test_the_plan_trains_with_the_bits_of_the_script(tmp_path, kind):
    """On 60 % of its peak, and in the same process as a second optimizer, of a parameter without gradients."""
    (tmp_path / "train.py").write_text(GPT.format(clip="pass"))
    card = f"{PEAK * 6 // 10 + CONTEXT}MiB"
    call = ("train.py", kind)
    found = json.loads(memopt(tmp_path, "fit", "--json", "--exact", "--gpu", card, *call).stdout)
    assert found["tier"] == "bit-equal" and found["margin_bytes"] > 0
    assert found["needed_bytes"][0] > (PEAK + CONTEXT) << 20
    plain = memopt(tmp_path, "run", "-q", "--no-record", "--sim", "24GiB", *call)
    run = ("run", "--no-record", "--fit", "train.fit.json", "--sim")
    planned = memopt(tmp_path, *run, card, *call)
    assert planned.stdout == plain.stdout and planned.stdout.count("loss") == 4
    assert "a step's seconds are not compared" in planned.stderr
    assert "nothing in the script took" not in planned.stderr
    said = re.findall(r"peak (.+) allocated, planned (.+)", planned.stderr)[0]
    peak, foreseen = map(parse_size, said)
    assert peak == pytest.approx(foreseen, rel=0.05) and peak <= PEAK * 6 // 10 << 20
    memopt(tmp_path, "run", "-q", "--no-record", "--sim", card, *call, status=1)
    plan = json.loads((tmp_path / "train.fit.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps(plan | {"torch": "2.9.1"}))
    old = memopt(
        tmp_path, *("old.json" if word == "train.fit.json" else word for word in run), card, *call, status=2
    )
    assert "torch: planned for 2.9.1" in old.stderr and not old.stdout
    assert "a smaller card" in memopt(tmp_path, *run, "600MiB", *call, status=2).stderr


LAYERS = """\
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

class Layers(nn.Module):
    \"\"\"Calls no module: it has no stages.\"\"\"

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(16))

    def forward(self, x):
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x

model = Layers().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(16384, 64).cuda()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()!r}", flush=True)
"""


def test_activations_in_8_bits_are_planned_where_nothing_else_fits_and_only_if_allowed(tmp_path):
    (tmp_path / "train.py").write_text(LAYERS)
    call = ("--host-memory", "1MiB", "train.py")
    as_is = json.loads(memopt(tmp_path, "fit", "--json", "--gpu", "8GiB", "train.py").stdout)
    card = f"{CONTEXT + ((as_is['runs'][0]['peak_bytes'] >> 20) * 6 // 10)}MiB"
    refused = json.loads(memopt(tmp_path, "fit", "-f", "--json", "--gpu", card, *call, status=1).stdout)
    assert not any("activations in 8 bits" in run["techniques"] for run in refused["runs"])
    fit = ("fit", "-f", "--json", "--gpu", card, "--allow", "8bit-activations")
    found = json.loads(memopt(tmp_path, *fit, *call).stdout)
    assert [name.partition(":")[0] for name in found["plan"]["techniques"]] == ["activations in 8 bits"]
    assert found["tier"] == "other numbers" and 'to="8bit"' in found["lines"][0]
    assert found["runs"][0]["seconds"] > as_is["runs"][0]["seconds"] > 0
    plain = memopt(tmp_path, "run", "-q", "--no-record", "--sim", "24GiB", "train.py")
    run = ("run", "--no-record", "--fit", "train.fit.json", "--sim", card, "train.py")
    planned = memopt(tmp_path, *run)
    losses = [[float(one) for one in re.findall(r"loss (\S+)", done.stdout)] for done in (plain, planned)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 4


def test_a_schedule_recomputes_where_the_host_has_no_room_for_what_it_would_offload(tmp_path):
    block = "nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))"
    (tmp_path / "train.py").write_text(
        LAYERS.replace("Layers().cuda()", f"nn.Sequential(*({block} for _ in range(8))).cuda()")
    )
    as_is = json.loads(memopt(tmp_path, "fit", "--json", "--gpu", "8GiB", "train.py").stdout)
    card = f"{CONTEXT + ((as_is['runs'][0]['peak_bytes'] >> 20) * 6 // 10)}MiB"
    call = ("fit", "-f", "--json", "--gpu", card, "--exact", "--host-memory", "64MiB", "train.py")
    found = json.loads(memopt(tmp_path, *call).stdout)
    assert (
        "of the host's memory, of which it may take 64.0 MiB" in found["does_not_run"]["offload activations"]
    )
    assert "checkpoint" in [name.partition(":")[0] for name in found["plan"]["techniques"]]
    assert found["host_bytes"] <= 64 << 20 and 'to="cpu", host_memory="64MiB")' in found["lines"][0]
    plain = memopt(tmp_path, "run", "-q", "--no-record", "--sim", "24GiB", "train.py")
    planned = memopt(tmp_path, "run", "--no-record", "--fit", "train.fit.json", "--sim", card, "train.py")
    losses = [re.findall(r"loss (\S+)", done.stdout) for done in (plain, planned)]
    assert losses[0] == losses[1] and len({*losses[0]}) == 4


def test_a_script_without_a_step_has_nothing_to_plan(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nkept = torch.ones(1 << 20, device='cuda')\n")
    assert "without a training step" in memopt(tmp_path, "fit", "--gpu", "1GiB", "train.py", status=2).stderr
    (tmp_path / "train.py").write_text("import torch\n")
    assert "any memory on the card" in memopt(tmp_path, "fit", "--gpu", "1GiB", "train.py", status=2).stderr
    assert not (tmp_path / "train.fit.json").exists()


def test_a_script_that_trains_in_processes_of_its_own_is_refused(tmp_path):
    begin, train = GPT.format(clip="pass").split("model = GPT()")
    lines = f"model = GPT(){train}".splitlines(keepends=True)
    main = "def main(number):\n" + "".join(f"    {line}" for line in lines)
    main += "\nif __name__ == '__main__':\n    torch.multiprocessing.spawn(main, nprocs=1)\n"
    (tmp_path / "train.py").write_text(begin + main)
    card = f"{PEAK * 6 // 10 + CONTEXT}MiB"
    refused = memopt(tmp_path, "fit", "--gpu", card, "train.py", status=2)
    assert "trains in processes that it starts" in refused.stderr and "--nproc" in refused.stderr
    assert not (tmp_path / "train.fit.json").exists()


def test_what_a_script_does_not_allow_is_not_planned(tmp_path):
    """It clips gradients, which steps in the backward pass have used up."""
    (tmp_path / "train.py").write_text(GPT.format(clip="nn.utils.clip_grad_norm_(model.parameters(), 1.0)"))
    card = f"{PEAK // 10 + CONTEXT}MiB"  # nothing is enough
    found = json.loads(memopt(tmp_path, "fit", "--json", "--gpu", card, "train.py", status=1).stdout)
    assert "step_in_backward=True has stepped already" in found["does_not_run"]["step in backward"]
    assert found["plan"] is None and found["smallest_card"]["bytes"] > PEAK // 10 + CONTEXT


WIDE = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = model(torch.ones(4, 2048, device="cuda")).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), flush=True)
"""


def test_states_go_to_a_disk_where_the_host_has_no_room_for_them(tmp_path):
    """Parameters and gradients are of 256 MiB each and states of 512, which pass through 256 of the host's memory."""
    (tmp_path / "train.py").write_text(WIDE)
    scratch = tmp_path / "scratch:1"
    scratch.mkdir()
    card = f"{700 + CONTEXT}MiB"
    call = ("fit", "-f", "--json", "--gpu", card, "--host-memory", "300MiB", "train.py")
    without = json.loads(memopt(tmp_path, *call, status=1).stdout)
    assert "512 MiB of the host's memory" in without["does_not_run"]["offload states"]
    found = json.loads(memopt(tmp_path, *call[:-1], "--disk", scratch, "train.py").stdout)
    assert found["plan"]["techniques"] == [f"states on disk:{scratch}"]
    assert 256 << 20 <= found["host_bytes"] <= 300 << 20 and 512 << 20 <= found["disk_bytes"] <= 520 << 20
    assert found["runs"][0]["seconds"] - found["step_seconds"] == pytest.approx(
        (1 << 30) / DISK_RATE, rel=0.1
    )
    plain = memopt(tmp_path, "run", "-q", "--no-record", "--sim", "24GiB", "train.py")
    planned = memopt(tmp_path, "run", "--no-record", "--fit", "train.fit.json", "--sim", card, "train.py")
    losses = [[float(line) for line in one.stdout.splitlines()] for one in (plain, planned)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3 and len({*losses[0]}) == 3
    peak, foreseen = map(parse_size, re.findall(r"peak (.+) allocated, planned (.+)", planned.stderr)[0])
    assert peak == pytest.approx(foreseen, rel=0.05)
    assert not [*scratch.iterdir()]
    scratch.rmdir()
    gone = memopt(tmp_path, "run", "--fit", "train.fit.json", "--sim", card, "train.py", status=2)
    assert f"keeps optimizer states in {scratch} (No such file" in gone.stderr and not gone.stdout
