"""memopt's GradScaler and torch's side by side through random sequences of calls; and wrong scalers, each of which
the same comparison finds."""

from __future__ import annotations

import os
import random

import amp_sequences
import pytest
import torch

from memopt.amp import GradScaler

pytestmark = pytest.mark.usefixtures("one_thread")
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


def play(make, first: int, count: int) -> str | None:
    return next(filter(None, (amp_sequences.difference(make, first + i) for i in range(count))), None)


@pytest.mark.parametrize("part", range(4))
def test_sequences_of_a_fixed_seed_give_what_torch_gives(part: int):
    count = 1250 if SOAK else 38
    assert play(GradScaler, 1_000_000 * part, count) is None


@pytest.mark.parametrize("part", range(4))
def test_sequences_of_a_new_seed_give_what_torch_gives(part: int):
    seed = random.Random(int(os.environ["MEMOPT_SEED"]) + part).getrandbits(40)
    print(f"MEMOPT_SEED={os.environ['MEMOPT_SEED']}: sequences from {seed}")
    assert play(GradScaler, seed, 1250 if SOAK else 38) is None


# ---- wrong scalers ---------------------------------------------------------------------------------------------------


class FusedDoubleUnscale(GradScaler):
    """Tells a fused optimizer the scale although its gradients were unscaled before."""

    def step(self, optimizer, *args, **kwargs):
        state = getattr(self, "_per_optimizer_states", {}).get(id(optimizer), {})
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused and state.get("stage") is torch.amp.grad_scaler.OptState.UNSCALED:
            optimizer.grad_scale = self._scale
        return super().step(optimizer, *args, **kwargs)


class OverlooksNan(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        infinite = any(bool((g._values() if g.is_sparse else g).isinf().any()) for g in grads)
        founds = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for found in founds.values():
            found.fill_(float(infinite))
        return founds


class LooksAfterTheMultiply(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        founds = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad = any(not bool((g._values() if g.is_sparse else g).isfinite().all()) for g in grads)
        for found in founds.values():
            found.fill_(float(bad))
        return founds


class StepsOnInf(GradScaler):
    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


class DividesByTheScale(GradScaler):
    """Right to the last bit but one."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        founds = super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.is_sparse and inv_scale != 1:
                    p.grad.div_((1 / inv_scale.double()).float())
        return founds


class GrowsOneStepLate(GradScaler):
    def _update_by(self, founds):
        self._growth_interval += 1
        super()._update_by(founds)
        self._growth_interval -= 1


class ForgetsToResetTheTracker(GradScaler):
    def _update_by(self, founds):
        before = self._growth_tracker.clone()
        super()._update_by(founds)
        if any(bool(found) for found in founds):
            self._growth_tracker.copy_(before)


class GrowsPastFp32(GradScaler):
    def _update_by(self, founds):
        before = self._scale.clone()
        super()._update_by(founds)
        if self._growth_tracker == 0 and not any(bool(found) for found in founds):
            self._scale.copy_(before * self._growth_factor)


class HearsOnlyTheFirstOptimizer(GradScaler):
    def _update_by(self, founds):
        super()._update_by(founds[:1])


class KeepsItsStages(GradScaler):
    def update(self, new_scale=None):
        states = {key: {**state} for key, state in getattr(self, "_per_optimizer_states", {}).items()}
        super().update(new_scale)
        for key, state in states.items():
            self._per_optimizer_states[key]["stage"] = state["stage"]


class CoalescesWhatIsSparse(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class AllowsFp16(GradScaler):
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class UnscalesWhereItOnlyLooks(GradScaler):
    def _check_inf_per_device(self, optimizer):
        founds = super()._check_inf_per_device(optimizer)
        self._unscale_grads_(optimizer, self._inverse(), torch.zeros(()), True)
        return founds


class ForgetsItsScaleWhenPickled(GradScaler):
    def __getstate__(self):
        return {**super().__getstate__(), **({"_init_scale": 65536.0} if self._enabled else {})}


WRONG = [scaler for scaler in GradScaler.__subclasses__() if scaler.__module__ == __name__]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda scaler: scaler.__name__)
def test_a_wrong_scaler_is_found(wrong: type[GradScaler]):
    found = play(wrong, 0, 400)
    assert found is not None
    print(found[:300])


def test_torchs_own_does_not_differ_from_itself():
    """The control: what is compared is determined by the seed."""
    assert play(torch.amp.GradScaler, 0, 20) is None
