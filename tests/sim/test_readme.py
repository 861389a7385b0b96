"""The changes to a script that README and its how-to show: before and after them it trains alike, after them in less
memory."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memopt
from benchmarks import tasks
from memopt import sim

SIM = {"memory": "1GiB"}
ROOT = Path(__file__).resolve().parents[2]
BESIDE = 16 << 10  # bytes: labels and the scaler's numbers, of which the model's sample says nothing


def scripts(page: Path) -> tuple[str, str]:
    """The diff on a page, before and after."""
    text = page.read_text()
    assert text.count("```diff\n") == 1
    lines = text.split("```diff\n")[1].split("```")[0].splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert before != after
    return before, after


def _loss(task: tasks.Task, model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return task.loss(model, batch)


def trained(script: str, budget: str) -> tuple[float, int]:
    """The loss after a few steps of the loop on gpt-small, and the peak of the bytes asked for."""
    task = replace(tasks.get("gpt", "small"), batch_size=4)
    torch.manual_seed(0)
    with sim.Compute():
        model = task.build_model("cuda")
        batches = list(task.batches(3))
        on_card = [tuple(part.cuda() for part in batch) for batch in batches]
        loader = on_card if ".cuda(" not in script else batches
        torch.cuda.reset_peak_memory_stats()  # the loop counts, not what measures it
        names = {
            "torch": torch,
            "model": model,
            "loader": loader,
            "x": on_card[0][0],
            "loss_of": functools.partial(_loss, task, model),
        }
        try:
            exec(compile(script.replace("8GiB", budget), "page.md", "exec"), names)
            with torch.no_grad():
                loss = task.loss(model, on_card[-1]).item()
        finally:
            memopt.disable()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    del names, model
    gc.collect()
    return loss, peak


@pytest.mark.sampled("programs of the documentation")
@pytest.mark.parametrize(
    ("page", "budget"),  # 16 MiB of it are cuBLAS's workspaces
    [("README.md", 37), ("docs/how_to/training_script.md", 34)],
)
def test_the_script_trains_alike_in_less_memory(page: str, budget: int) -> None:
    before, after = scripts(ROOT / page)
    assert len(after.splitlines()) <= len(before.splitlines()) + 4
    loss, peak = trained(before, f"{budget}MiB")
    loss_after, peak_after = trained(after, f"{budget}MiB")
    assert abs(loss_after - loss) < 0.02 * loss
    assert peak_after <= (budget << 20) + BESIDE < 0.8 * peak
