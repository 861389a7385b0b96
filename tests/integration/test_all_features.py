"""All of memopt at once in ordinary programs: under DDP, under `memopt run`, in the trainers of others. On the
simulated device: tests/sim/test_all_features.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="it trains torch models")

from tests.isolated.all_features_rank import STEPS, TASK  # noqa: E402
from tests.tooling.environment_python import run_there  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests/isolated/all_features_rank.py")
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
NEAR = 1e-5  # of a loss: sums of two ranks, and memopt's AdamW, round otherwise than torch's in one process


def plain() -> list[float]:
    """One process, the whole batch, torch's own pieces."""
    model = TASK.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TASK.learning_rate)
    losses = []
    for batch in TASK.batches(STEPS):
        loss = TASK.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def started(*command: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(process: subprocess.Popen[str]) -> list[float]:
    out, said = process.communicate(timeout=600)
    assert process.returncode == 0, out + said
    found: list[float] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.sampled("several processes")
def test_two_ranks_by_ddp_one_of_them_under_memopt_run_train_as_plain_torch_does(tmp_path: Path) -> None:
    file = str(tmp_path / "meeting")
    ranks = [
        started(SCRIPT, "0", "2", file, folder=tmp_path),
        started("-m", "memopt", "run", SCRIPT, "1", "2", file, folder=tmp_path),
    ]
    first, second = map(losses_of, ranks)
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(plain(), rel=NEAR)
    assert len(list(tmp_path.glob("memopt-all_features_rank.*.mopt"))) == 1  # what memopt run leaves


TRAINERS = """
import json, sys, tempfile
from memopt import sim
sim.activate(memory="1GiB")
import torch
import memopt

torch.set_num_threads(1)
memopt.enable(backend="pool")  # the one line


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(8, 64), torch.nn.Linear(64, 4)

    def forward(self, x=None, labels=None):
        logits = self.b(torch.relu(self.a(x)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


data = [
    {"x": torch.randn(8, generator=torch.Generator().manual_seed(i)), "labels": torch.tensor(i % 4)}
    for i in range(32)
]


def transformers(on_cpu):
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=5, per_device_train_batch_size=8, report_to=[], logging_steps=1,
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, use_cpu=on_cpu,
        )
        trainer = Trainer(Net(), arguments, train_dataset=data)
        trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def lightning(on_cpu):
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = Net(), []

        def training_step(self, batch, number):
            loss = self.net(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    module = Module()
    pytorch_lightning.Trainer(
        max_steps=5, accelerator="cpu" if on_cpu else "cuda", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    return module.losses


train = {"transformers": transformers, "lightning": lightning}[sys.argv[1]]
with sim.Compute():
    on_device = train(False)
allocations = memopt.cuda.memory_stats()["allocations"]
print(json.dumps([on_device, train(True), allocations, torch.cuda.memory.get_allocator_backend()]))
"""


@pytest.mark.skipif(not SOAK, reason="a long form: MEMOPT_SOAK=1")
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_trainer_of_others_runs_on_memopts_allocator_by_one_line(library: str) -> None:
    on_device, on_cpu, allocations, backend = json.loads(
        run_there("libraries", TRAINERS, library).splitlines()[-1]
    )
    assert len(on_device) == 5 and on_device == pytest.approx(on_cpu, rel=NEAR)
    assert backend == "pluggable" and allocations > 50
