"""`memopt estimate` of scripts that live on others' libraries: torch.compile with Triton, the Trainer of transformers,
bitsandbytes, FSDP2 on a group that is pretended. The long form alone: their packages are 300 MB."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap

import pytest
from environment_python import ROOT, python_of

MIB = 1 << 20
pytestmark = pytest.mark.skipif(os.environ.get("MEMOPT_SOAK") != "1", reason="the long form")

COMPILED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
run = COMPILE(model)
for _ in range(3):
    loss = run(torch.randn(4096, 512).cuda()).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.randint(0, 5000, (128,))
        return dict(input_ids=x, labels=x, attention_mask=torch.ones(128, dtype=torch.long))

if __name__ == "__main__":
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000))
    arguments = TrainingArguments(
        output_dir="trained", per_device_train_batch_size=8, max_steps=4, logging_steps=1, bf16=True, report_to=[],
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, dataloader_num_workers=2,
        gradient_checkpointing=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Data(), eval_dataset=Data()).train()
"""

EIGHT_BITS = """
import bitsandbytes as bnb
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda()
before = torch.cuda.memory_allocated()
optimizer = bnb.optim.Adam8bit(model.parameters())
for _ in range(2):
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("states", torch.cuda.memory_allocated() - before)
layer = bnb.nn.Linear4bit(1024, 1024, compute_dtype=torch.bfloat16).cuda()
print("codes", layer.weight.nbytes)
layer(torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16))
"""

SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
with torch.device("meta"):
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(8)]
    )
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(512, 2048, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def estimated(tmp_path):
    def run(source: str) -> tuple[dict, str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        done = subprocess.run(
            [
                python_of("libraries"),
                "-m",
                "memopt",
                "estimate",
                "--quick",
                "--json",
                "--gpu",
                "24GiB",
                "train.py",
            ],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"], "what it writes is not kept"
        return json.loads(done.stdout), done.stderr

    return run


def test_compiled_code_takes_less_than_the_same_eager(estimated):
    eager, _ = estimated(COMPILED.replace("COMPILE", ""))
    compiled, _ = estimated(COMPILED.replace("COMPILE", "torch.compile"))
    assert compiled["steps"] == eager["steps"] == 3
    assert compiled["allocated_bytes"][0] < 0.85 * eager["allocated_bytes"][0]
    lines = [line["name"] for line in compiled["by_line"]]
    assert all(name.startswith("train.py:") for name in lines if name), lines


def test_a_trainer_trains_evaluates_and_saves(estimated):
    found, said = estimated(TRAINER)
    assert found["steps"] == 4 and found["oom"] is None and "eval_loss" in said
    weights = 4 * sum((5000 * 256, 1024 * 256, 4 * (12 * 256 * 256 + 13 * 256), 2 * 256))
    assert found["by_category"]["parameters"] == pytest.approx(weights, rel=0.01)
    assert found["by_category"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)


def test_states_and_weights_of_8_and_4_bits_are_that_small(estimated):
    _, said = estimated(EIGHT_BITS)
    sizes = {
        line.split()[0]: int(line.split()[1])
        for line in said.splitlines()
        if line[:6] in ("states", "codes ")
    }
    weights = 8 * (2048 * 2048 + 2048)
    assert 2 * weights <= sizes["states"] < 2.6 * weights and sizes["codes"] == 1024 * 1024 // 2


def test_a_shard_of_two_ranks_is_half_of_the_states(estimated):
    two, _ = estimated(SHARDED.replace("WORLD", "2"))
    eight, _ = estimated(SHARDED.replace("WORLD", "8"))
    weights = 4 * 8 * (2 * 2048 * 8192 + 8192 + 2048)
    sizes = [found["by_category"]["optimizer"] for found in (two, eight)]
    assert sizes[0] >= 2 * weights / 2, "with what a step makes meanwhile: there the peak of two is"
    assert sizes[1] == pytest.approx(2 * weights / 8, rel=0.01)
    assert eight["allocated_bytes"][0] < 0.5 * two["allocated_bytes"][0]
