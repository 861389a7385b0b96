"""auto_checkpoint on models whose parameters visit the device layer by layer (offload_layers), on the simulated device:
results are the plain model's, and the peak is within the budget."""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import sim
from memopt._checkpoint.stages.costs import workspace_bytes
from memopt._offload.carriers import ToDevice
from memopt.chain import InfeasibleBudget
from tests.helpers import visiting_models
from tests.helpers.offloaded_models import Transformer
from tests.helpers.visiting_models import Llama

SIM = {"memory": "1GiB"}
pytestmark = pytest.mark.sampled(3)
SOAK = os.environ.get("MEMOPT_SOAK") == "1"
SEED = int(os.environ.get("MEMOPT_SEED") or random.randrange(1 << 30))


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    print(f"MEMOPT_SEED={SEED}")
    torch.set_num_threads(1)
    with sim.Compute():
        yield


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def most_in(function: Callable[[], Any]) -> int:
    workspace_bytes(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated()


def steps(model: nn.Module, batches: list[torch.Tensor], accumulated: int = 1, seed: int = 3) -> list[Any]:
    """Steps of AdamW: the losses, the gradients of each, the parameters and buffers, the random state."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    told: list[Any] = []
    for n, batch in enumerate(batches):
        loss = loss_of(model(batch))
        loss.backward()
        told.append(loss.detach().cpu())
        if n % accumulated == accumulated - 1:
            told += [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    told += [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
    return [*told, torch.cuda.get_rng_state(), torch.get_rng_state()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), n


def least_of(model: nn.Module, sample: torch.Tensor, **options: Any) -> int:
    with pytest.raises(InfeasibleBudget, match="raise memory_budget to") as raised:
        memopt.auto_checkpoint(model, sample, memory_budget=1, **{"loss": loss_of, **options})
    return raised.value.least_budget


LARGE = {
    "gpt": lambda: (Transformer(6, 64, 100, 16), torch.randint(100, (24, 16))),
    "llama": lambda: (Llama(6, 64, 100, 16), torch.randint(100, (24, 16))),
}


def peak_of_step(model: nn.Module, sample: torch.Tensor) -> int:
    def run() -> None:
        loss_of(model(sample)).backward()
        model.zero_grad()

    run()
    return most_in(run)


@pytest.mark.parametrize("kind", LARGE)
def test_blocks_train_as_in_the_plain_model_within_budgets_down_to_far_below_each_lever_alone(
    kind: str,
) -> None:
    torch.manual_seed(0)
    model, sample = LARGE[kind]()
    model, sample = model.cuda(), sample.cuda()
    batches = [sample, sample[:9]] * 2
    expected = steps(copy.deepcopy(model), batches, 2)
    peaks = {"plain": peak_of_step(model, sample)}
    peaks["auto_checkpoint"] = least_of(model, sample)
    handle = memopt.offload_layers(model)
    peaks["offload_layers"] = peak_of_step(model, sample)
    peaks["both"] = least = least_of(model, sample)
    assert not hasattr(model, "plan")
    workspaces = most_in(lambda: peak_of_step(nn.Linear(8, 8).cuda(), torch.ones(8, 8, device="cuda")))
    print(kind, {name: round((peak - workspaces) / 2**20, 2) for name, peak in peaks.items()}, "MiB")
    alone = min(peaks["auto_checkpoint"], peaks["offload_layers"])
    assert peaks["both"] - workspaces < 0.6 * (alone - workspaces)
    state = copy.deepcopy(model.state_dict())
    for share in (0.0, 0.3, 1.0) if SOAK else (0.0, 1.0):
        budget = int(least + share * (peaks["plain"] - least))
        memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss_of)
        assert model.plan.keeps_all == (share == 1.0)
        most = most_in(lambda: assert_same(steps(model, batches, 2), expected))
        assert most <= budget and model.plan.check().within
        model.load_state_dict(state)
    memopt.undo_checkpoint(model)
    handle.remove()
    assert_same(steps(model, batches, 2), expected)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", visiting_models.KINDS)
def test_any_model_budget_and_order_of_calls(kind: str, number: int) -> None:
    chance = random.Random(f"{SEED} {kind} {number}")
    torch.manual_seed(chance.randrange(1 << 30))
    model, batch_of, most_rows = visiting_models.small(kind, chance)
    sample = batch_of(most_rows).cuda()
    model = model.cuda()
    rows = [most_rows if chance.random() < 0.5 else chance.randint(2, most_rows) for _ in range(4)]
    batches = [sample[:count] for count in rows]
    accumulated = chance.choice((1, 2))
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    expected = steps(copy.deepcopy(model), batches, accumulated)
    plain = peak_of_step(copy.deepcopy(model), sample)
    options: dict[str, Any] = {"loss": loss_of}
    if chance.random() < 0.3:
        options["to"] = "cpu"
    if chance.random() < 0.3:  # before the offload: refused, with the remedy
        memopt.auto_checkpoint(model, sample, memory_budget=2 * plain, **options)
        with pytest.raises(ValueError, match="undo_checkpoint"):
            memopt.offload_layers(model)
        memopt.undo_checkpoint(model)
    handle = memopt.offload_layers(model, memory_budget=chance.choice((None, plain)))
    if chance.random() < 0.3:
        peak_of_step(model, sample)
        model.load_state_dict(state)
    least = least_of(model, sample, accumulate=accumulated > 1, **options)
    for share in (0.0, chance.random()):
        budget = int(least + share * max(0, plain - least))
        memopt.auto_checkpoint(
            model, sample, memory_budget=budget, accumulate=accumulated > 1, strict=True, **options
        )
        with torch.no_grad():
            model.eval()(sample)
            model.train()
        most = most_in(lambda: assert_same(steps(model, batches, accumulated), expected))
        assert most <= budget, (kind, share, most - budget, str(model.plan))
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="undo_checkpoint"):
        handle.remove()
    memopt.undo_checkpoint(model)
    if chance.random() < 0.5:
        assert_same(steps(model, batches, accumulated), expected)
        model.load_state_dict(state)
    handle.remove()
    assert all(module.__dict__.keys().isdisjoint({"_call_impl", "forward"}) for module in model.modules())
    assert_same(steps(model, batches, accumulated), expected)


# ---- what is measured ------------------------------------------------------------------------------------------------


def layers_of(count: int = 6, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(visiting_models.Light(width) for _ in range(count)))


def test_a_stages_bytes_have_its_visit_in_each_direction() -> None:
    model, sample = layers_of().cuda(), torch.randn(32, 64, device="cuda")
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss_of)
    at_home = model.plan
    memopt.undo_checkpoint(model)
    visit = sum(-(-p.nbytes // 512) * 512 for p in model[0].parameters())
    memopt.offload_layers(model)
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss_of)
    assert at_home.stages == model.plan.stages and len(at_home.stages) == 6
    for plain, visiting in list(zip(at_home.measured_bytes, model.plan.measured_bytes, strict=True))[1:6]:
        assert (visiting.saved, visiting.output) == (plain.saved, plain.output)
        assert visiting.forward_overhead == plain.forward_overhead + visit
        assert visiting.run_overhead == plain.run_overhead + visit
        assert plain.parameter_grad == visit and visiting.parameter_grad == 0
        # The weight is there beside a gradient between two operations, and has gone when its own is made.
        assert visiting.backward_overhead >= model[0].linear.weight.nbytes + plain.output
        assert visiting.backward_overhead > plain.backward_overhead
    assert model.plan.fixed_bytes <= at_home.fixed_bytes - 6 * visit


def test_a_plan_foretells_the_peak_of_its_steps_to_a_part_of_a_visit() -> None:
    model, sample = layers_of(8, 256).cuda(), torch.randn(256, 256, device="cuda")
    memopt.offload_layers(model)
    visit = sum(p.nbytes for p in model[0].parameters())
    plain = peak_of_step(model, sample)
    least = least_of(model, sample)
    for share in (0.0, 0.3, 0.6):
        budget = int(least + share * (plain - least))
        memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss_of)
        check = model.plan.check()
        print(share, check.predicted_bytes - check.trial_bytes, visit)
        assert abs(check.predicted_bytes - check.trial_bytes) < visit / 2


def test_what_spares_a_costly_visit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ToDevice.fetch

    def slowly(self: ToDevice, hosts: Any) -> Any:
        time.sleep(sum(host.nbytes for host in hosts) / 1e8)
        return own(self, hosts)

    monkeypatch.setattr(ToDevice, "fetch", slowly)
    width, rows = 32, 1024
    heavy = {1, 3, 6}
    model = nn.Sequential(
        *(
            visiting_models.Heavy(width, 16 * rows) if k in heavy else visiting_models.Light(width)
            for k in range(8)
        )
    ).cuda()
    sample = torch.randn(16 * rows, width, device="cuda")
    memopt.offload_layers(model)
    memopt.auto_checkpoint(model, sample, memory_budget="1GiB", loss=loss_of)
    sizes, plain = model.plan.measured_bytes, model.plan.plain_bytes
    memopt.auto_checkpoint(
        model, sample, memory_budget=plain - 2 * sizes[1].saved_beside_output, loss=loss_of
    )
    runs = model.plan.as_dict()["stages"]
    assert not model.plan.keeps_all
    assert all(stage["runs"] == 1 for k, stage in enumerate(runs) if k in heavy), str(model.plan)


# ---- with what else there is ---------------------------------------------------------------------------------------


def twins(
    model: nn.Module, sample: torch.Tensor, share: float = 0.3, **options: Any
) -> tuple[nn.Module, Any]:
    """The plain model, and its twin is made one that visits by a plan -> (plain, handle)."""
    plain = copy.deepcopy(model)
    peak = peak_of_step(copy.deepcopy(model), sample)
    handle = memopt.offload_layers(model)
    least = least_of(model, sample, **options)
    budget = int(least + share * max(0, peak - least))
    memopt.auto_checkpoint(model, sample, memory_budget=budget, **{"loss": loss_of, **options})
    return plain, handle


def test_regions_in_blocks_hooks_and_autocast() -> None:
    torch.manual_seed(0)
    model, sample = (
        nn.Sequential(*(visiting_models.Regions(32) for _ in range(5))).cuda(),
        torch.randn(64, 32).cuda(),
    )
    seen: list[str] = []
    model[2].register_forward_pre_hook(lambda module, _: seen.append(module.first.weight.device.type))
    plain, _ = twins(model, sample, 0.0)
    assert not model.plan.keeps_all
    assert_same(steps(model, [sample] * 3), steps(plain, [sample] * 3))
    assert set(seen) == {"cuda"}
    with torch.autocast("cuda", torch.bfloat16):
        assert_same(steps(model, [sample] * 2), steps(plain, [sample] * 2))


def normed(width: int) -> nn.Module:
    """Hooks make its weight, from two parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(width, width)), nn.GELU())


STACKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layers of several stages": (lambda: layers_of(3, 32), ""),
    "stages of several layers": (lambda: visiting_models.Parts(32), "inner"),
    "with regions": (lambda: visiting_models.Parts(32, checkpointed=True), "inner"),
    "weights made by hooks": (lambda: normed(32), ""),
}


@pytest.mark.parametrize("kind", STACKS)
def test_layers_that_are_not_the_stages(kind: str, tmp_path: Path) -> None:
    block, inner = STACKS[kind]
    sample = torch.randn(300, 32).cuda()
    plain, model = (nn.Sequential(*(block() for _ in range(4))).cuda() for _ in range(2))
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    plain.load_state_dict(state)
    expected = steps(plain, [sample] * 2)
    del plain
    memopt.offload_layers(model, layers=[one.get_submodule(inner) for one in model])
    assert_same(steps(model, [sample] * 2), expected)
    for options in ({}, {"to": str(tmp_path)}):
        model.load_state_dict(state)
        budget = least_of(model, sample, **options)
        memopt.auto_checkpoint(model, sample, memory_budget=budget, loss=loss_of, **options)
        assert most_in(lambda: assert_same(steps(model, [sample] * 2), expected)) <= budget


def test_other_batches_are_planned_in_the_midst_of_a_step() -> None:
    torch.manual_seed(0)
    model, words = Transformer(4, 32, 50, 12).cuda(), torch.randint(50, (30, 12), device="cuda")
    batches = [words[:6], words[:9], words[:5], words[:9]]
    plain, _ = twins(model, words[:6], 0.5)
    expected = steps(plain, batches)
    del plain
    plan, budget = model.plan, model.plan.memory_budget
    assert most_in(lambda: assert_same(steps(model, batches), expected)) <= budget
    assert model.plan is not plan and model.plan.memory_budget == budget


def test_a_plan_that_fails_leaves_the_old_one_and_a_graph_outlives_its_plan() -> None:
    torch.manual_seed(0)
    model, sample = layers_of().cuda(), torch.randn(256, 64, device="cuda")
    plain, handle = twins(model, sample, 0.0)
    memopt.undo_checkpoint(model)
    least_of(model, sample)
    assert not hasattr(model, "plan")
    before = handle.bytes_in
    loss_of(model(sample)).backward()  # some layers' parameters wait for the backward pass
    assert handle.bytes_in - before < 2 * handle.plan.bytes_offloaded
    model.zero_grad()
    memopt.auto_checkpoint(model, sample, memory_budget=least_of(model, sample), loss=loss_of)
    plan = model.plan
    least_of(model, sample)
    assert model.plan is plan and not plan.keeps_all
    assert_same(steps(model, [sample] * 2), steps(plain, [sample] * 2))
    value = loss_of(model(sample))
    memopt.undo_checkpoint(model)
    with pytest.raises(RuntimeError, match="still pending"):
        handle.remove()
    value.backward()
    del value
    assert_same(
        [p.grad.cpu() for p in model.parameters()],
        list(torch.autograd.grad(loss_of(plain(sample)), list(plain.parameters()))),
    )
    handle.remove()


def test_a_copy_is_plain() -> None:
    torch.manual_seed(0)
    model, sample = layers_of().cuda(), torch.randn(256, 64, device="cuda")
    plain, _ = twins(model, sample, 0.0)
    model(sample)
    with pytest.warns(UserWarning, match="the model is a copy"):
        assert_same(steps(copy.deepcopy(model), [sample.cpu()])[:-2], steps(plain.cpu(), [sample.cpu()])[:-2])
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
