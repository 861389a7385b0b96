"""memopt's optimizers and torch's side by side through random sequences of calls; and wrong ones, each of which the
same comparison finds."""

from __future__ import annotations

import os
import random

import optim_sequences
import pytest
import torch

import memopt.optim

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 2500 if os.environ.get("MEMOPT_SOAK") == "1" else 25


def play(first: int, count: int) -> str | None:
    return next(filter(None, (optim_sequences.difference(first + i) for i in range(count))), None)


@pytest.mark.parametrize("part", range(2))
def test_sequences_of_a_fixed_seed_stay_within_their_bounds_of_torchs(part: int):
    assert play(1_000_000 * part, COUNT) is None


@pytest.mark.parametrize("part", range(2))
def test_sequences_of_a_new_seed_stay_within_their_bounds_of_torchs(part: int):
    seed = random.Random(int(os.environ["MEMOPT_SEED"]) + part).getrandbits(40)
    print(f"MEMOPT_SEED={os.environ['MEMOPT_SEED']}: sequences from {seed}")
    assert play(seed, COUNT) is None


# ---- wrong optimizers ------------------------------------------------------------------------------------------------
class OfRoundedRate(memopt.optim.AdamW):
    """Has its rate in fp32: right for all but fp64."""

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = float(torch.tensor(group["lr"], dtype=torch.float32))
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class OneStepAhead(memopt.optim.AdamW):
    """Corrects the bias of the step after."""

    def step(self, closure=None):
        states = [
            self.state[p] for group in self.param_groups for p in group["params"] if "step" in self.state[p]
        ]
        for state in states:
            state["step"] += 1
        try:
            return super().step(closure)
        finally:
            for state in states:
                state["step"] -= 1


class ForgetsLargest(memopt.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "max_exp_avg_sq" in state:
                state["max_exp_avg_sq"].zero_()


class DampsTheFirst(memopt.optim.SGD):
    def _complete(self, p, group):
        super()._complete(p, group)
        return False


class PassesOverNan(memopt.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.nan_to_num_(0, 0, 0)
        return super().step(closure)


@pytest.mark.parametrize(
    "wrong",
    [OfRoundedRate, OneStepAhead, ForgetsLargest, DampsTheFirst, PassesOverNan],
    ids=lambda kind: kind.__name__,
)
def test_a_wrong_optimizer_is_found(wrong, monkeypatch):
    kind = "sgd" if issubclass(wrong, memopt.optim.SGD) else "adamw"
    monkeypatch.setitem(optim_sequences.PAIRS, kind, (wrong, optim_sequences.PAIRS[kind][1]))
    found = play(0, 300)
    assert found is not None
    print(found[:300])


def test_torchs_own_do_not_differ_from_themselves(monkeypatch):
    """The control: what is compared is determined by the seed."""
    for kind, (_, stock) in optim_sequences.PAIRS.items():
        monkeypatch.setitem(optim_sequences.PAIRS, kind, (stock, stock))
    assert play(0, 15) is None
