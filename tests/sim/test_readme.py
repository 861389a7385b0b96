"""README's ten lines: the script before and after them trains alike, and the script after them in less memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import torch

import memopt
from benchmarks import tasks
from memopt import sim

SIM = {"memory": "1GiB"}
BUDGET = "34MiB"  # 16 of them are cuBLAS's workspaces
README = Path(__file__).resolve().parents[2] / "README.md"


def scripts() -> tuple[str, str]:
    """The diff in README, before and after."""
    text = README.read_text()
    assert text.count("```diff\n") == 1
    lines = text.split("```diff\n")[1].split("```")[0].splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert before != after
    return before, after


def trained(script: str) -> tuple[float, int]:
    """The loss after a few steps of README's loop on gpt-small, and the peak of the bytes asked for."""
    task = replace(tasks.get("gpt", "small"), batch_size=4)
    torch.manual_seed(0)
    with sim.Compute():
        model = task.build_model("cuda")
        loader = list(task.batches(3))
        torch.cuda.reset_peak_memory_stats()  # the loop counts, not what measures it
        names = {"model": model, "loader": loader}
        try:
            exec(compile(script.replace("8GiB", BUDGET), "README.md", "exec"), names)
            with torch.no_grad():
                loss = task.loss(model, tuple(part.cuda() for part in loader[-1])).item()
        finally:
            memopt.disable()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    del names, model
    gc.collect()
    return loss, peak


def test_the_ten_lines_train_alike_in_less_memory() -> None:
    before, after = scripts()
    assert len(after.splitlines()) <= len(before.splitlines()) + 4
    loss, peak = trained(before)
    loss_after, peak_after = trained(after)
    assert abs(loss_after - loss) < 0.02 * loss
    beside = 16 << 10  # labels and the scaler's numbers, of which the model's sample says nothing
    assert peak_after <= (34 << 20) + beside < 0.8 * peak
