"""memopt.checkpoint on CUDA tensors, on the simulated device: random states and autocast of the device, and results
kept on the host."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.utils.checkpoint as torchs

import memopt
from memopt import checkpoint, sim
from memopt._checkpoint.drop_in.engine import devices_of
from memopt._checkpoint.drop_in.selective import HostCopy
from memopt._checkpoint.stages.costs import Meter
from memopt.chain import InfeasibleBudget
from tests.helpers import split_models

SIM = {"memory": "1GiB", "devices": 2}
MODES = pytest.mark.parametrize("use_reentrant", [False, True])
MIB = 1 << 20
aten = torch.ops.aten


def states() -> list[list[int]]:
    return [torch.cuda.get_rng_state(i).tolist() for i in range(2)] + [torch.get_rng_state().tolist()]


@MODES
def test_the_devices_random_states_are_those_of_the_first_run_and_go_on_as_they_would(use_reentrant):
    x = torch.ones(64, device="cuda:1", requires_grad=True)
    seen = []

    def function(a):
        seen.append((torch.cuda.get_rng_state(1).tolist(), torch.get_rng_state().tolist()))
        torch.rand(7)
        return torch.nn.functional.dropout(a * 2, 0.5).sin()

    torch.manual_seed(1)
    y = checkpoint(function, x, use_reentrant=use_reentrant).sum()
    torch.rand(3, device="cuda:1"), torch.rand(3)
    before = states()
    y.backward()
    assert seen[0] == seen[1] and states() == before
    assert before[1] != seen[0][0]


def test_a_device_that_has_no_argument_is_left_alone():
    x = torch.ones(8, device="cuda:0", requires_grad=True)
    seen = []

    def function(a):
        seen.append(torch.cuda.get_rng_state(1).tolist())
        torch.rand(2, device="cuda:1")
        return a.sin() * 1.0

    checkpoint(function, x, use_reentrant=False, early_stop=False).sum().backward()
    assert seen[0] != seen[1]  # as torch: only the devices of arguments are restored


def test_devices_are_found_as_torch_finds_them():
    cpu, one, other = torch.ones(1), torch.ones(1, device="cuda:0"), torch.ones(1, device="cuda:1")
    generators = (torch.default_generator, *torch.cuda.default_generators)
    for args, expected in (
        ((cpu,), ()),
        ((1, "a", None, [cpu]), ()),
        ((one,), (0,)),
        ((cpu, {"a": [other]}), (1,)),
        ((other, (one, other)), (1, 0)),
        ((object(), cpu), ()),
        ((torch.ones(1, device="meta"), one), (0,)),
    ):
        leaves = torch.utils._pytree.tree_leaves(args)
        kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"cpu"}
        mixed = pytest.warns(UserWarning, match="at least two types of devices")
        with mixed if len(kinds) > 1 else contextlib.nullcontext():
            found = devices_of(args)
        assert found.autocast == "cuda" and found.uninitialized is None
        assert [
            g is e
            for g, e in zip(
                found.generators, [generators[0], *(generators[1 + i] for i in expected)], strict=True
            )
        ]


@MODES
def test_autocast_of_the_device_and_of_the_cpu_are_as_they_were(use_reentrant):
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    seen = []

    def function(a):
        seen.append(
            [
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cuda"),
                torch.is_autocast_enabled("cpu"),
                (a @ a).dtype,
            ]
        )
        return (a @ a).sin()

    for cpu in (False, True):
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cpu", enabled=cpu):
            y = checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert seen[0] == seen[1] == [True, torch.bfloat16, cpu, torch.bfloat16]
        seen.clear()
        assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


@MODES
def test_gradients_are_those_of_the_plain_run(use_reentrant):
    with sim.Compute():
        torch.manual_seed(2)
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).cuda()
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        parameters = [x, *net.parameters()]
        plain = [g.cpu() for g in torch.autograd.grad(net(x).sum(), parameters)]
        checkpoint(net, x, use_reentrant=use_reentrant).sum().backward()
        for p, expected in zip(parameters, plain, strict=True):
            assert torch.equal(p.grad.cpu(), expected)


def test_differences_name_the_device():
    x = torch.ones(8, device="cuda:1", requires_grad=True)
    runs = [lambda a: a.sin().cos(), lambda a: a.to("cuda:0").sin().cos()]
    with pytest.raises(torchs.CheckpointError) as caught:
        checkpoint(lambda a: runs.pop(0)(a), x, use_reentrant=False).sum().backward()
    text = str(caught.value)
    assert (
        "'device': device(type='cuda', index=1)}\nrecomputed" in text
        and "device(type='cuda', index=0)" in text
    )


# ---- results on the host ---------------------------------------------------------------------------------------------

needs_policies = pytest.mark.skipif(
    not hasattr(torchs.CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no policies of offload"
)


def contexts_of(policy, *operations):
    def choose(ctx, op, *args, **kwargs):
        return policy if op in operations else torchs.CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(memopt.create_selective_checkpoint_contexts, choose)


def chain(x, w):
    for _ in range(8):
        x = torch.mm(x, w).sin()
    return x


@needs_policies
def test_what_is_offloaded_is_not_on_the_device_between_forward_and_backward():
    w = torch.ones(512, 512, device="cuda", requires_grad=True)
    x = torch.ones(512, 512, device="cuda", requires_grad=True)
    held = {}
    for name in ("MUST_SAVE", "MUST_CPU_OFFLOAD", "MUST_RECOMPUTE"):
        contexts = contexts_of(torchs.CheckpointPolicy[name], aten.mm.default)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = checkpoint(chain, x, w, use_reentrant=False, context_fn=contexts)
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # what is freed behind an event goes at the next request
        held[name] = (torch.cuda.memory_allocated() - before) / MIB
        y.sum().backward()
        del y
        x.grad = w.grad = None
    assert held["MUST_SAVE"] >= 8 and held["MUST_CPU_OFFLOAD"] <= held["MUST_RECOMPUTE"] + 1 < 3


@needs_policies
@pytest.mark.parametrize("lazy", [False, True])
def test_what_was_offloaded_comes_back_as_it_was(lazy):
    """Also where the device does nothing until something waits for it, and what was kept is overwritten afterwards."""
    sim.lazy(lazy)
    with sim.Compute():
        torch.manual_seed(3)
        w, x = (torch.randn(16, 16).cuda().requires_grad_() for _ in range(2))
        plain = [g.cpu() for g in torch.autograd.grad(chain(x, w).sum(), [x, w])]
        contexts = contexts_of(torchs.CheckpointPolicy.MUST_CPU_OFFLOAD, aten.mm.default)
        y = checkpoint(chain, x, w, use_reentrant=False, context_fn=contexts)
        got = [g.cpu() for g in torch.autograd.grad(y.sum(), [x, w])]
    assert all(map(torch.equal, got, plain))


@pytest.fixture(params=[1, 2])
def written(request):
    """A tensor whose value is still on its way, on the current stream of a device that does nothing unasked. Another
    one each time: pinned memory is used again."""
    sim.lazy(True)
    source = torch.arange(1000).add_(request.param * 10_000).pin_memory()
    tensor = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    tensor.copy_(source, non_blocking=True)
    return source, tensor


def test_a_copy_to_the_host_comes_before_what_overwrites_the_tensor(written):
    source, tensor = written
    kept, others = HostCopy.of(tensor), torch.full((1000,), -1).pin_memory()
    kept.transfer.settle()
    tensor.copy_(others, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # of the other stream only what this one waits for
    assert torch.equal(tensor.cpu(), others)
    torch.cuda.synchronize()
    assert torch.equal(kept.transfer._room.memory.view(torch.int64), source)


def test_a_copy_from_the_host_comes_after_the_one_to_it(written):
    source, tensor = written
    back = HostCopy.of(tensor).back()
    torch.cuda.current_stream().synchronize()
    assert torch.equal(back.cpu(), source)


def test_only_plain_tensors_of_the_device_are_copied():
    assert HostCopy.of(torch.ones(3)) is None
    assert HostCopy.of(torch.nn.Parameter(torch.ones(3, device="cuda"))) is None
    whole = torch.arange(24).view(4, 6)
    on_device = whole.cuda()
    for part in (
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[:, 2:5],
        lambda t: t[1, 3],
        lambda t: t[:, ::2].t(),
    ):
        with sim.Compute():
            back = HostCopy.of(part(on_device)).back()
        assert torch.equal(back.cpu(), part(whole))
        assert back.stride() == torch.empty_like(part(whole)).stride()
    assert HostCopy.of(on_device[:0]) is None


def gradients_of(run, modules, seed):
    for parameter in modules.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    with sim.Compute():
        run().square().mean().backward()
    return [parameter.grad.cpu() for parameter in modules.parameters()]


def test_within_a_budget_on_the_device():
    """Random states, autocast and the budget's bytes are the device's: blocks in parts, and functions in a row."""
    torch.manual_seed(0)
    model, sample = split_models.make("timm", 2, rows=48, length=16)
    model, sample = model.cuda(), {name: value.cuda() for name, value in sample.items()}
    attention = torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    )  # which has a twin on the CPU
    with attention, torch.autocast("cuda", torch.bfloat16):
        expected = gradients_of(lambda: model(**sample), model, 1)
        with pytest.raises(InfeasibleBudget) as error:
            with sim.Compute():
                memopt.auto_checkpoint(model, sample, memory_budget=1)
        with sim.Compute():
            memopt.auto_checkpoint(model, sample, memory_budget=error.value.least_budget)
        assert sum("(" in name for name in model.plan.stages) == 4
        assert not model.plan.keeps_all
        assert all(map(torch.equal, gradients_of(lambda: model(**sample), model, 1), expected))
    layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16), torch.nn.Dropout(0.3)]
    functions = torch.nn.Sequential(*layers, *layers[1:2], torch.nn.Linear(16, 16)).cuda()
    x = torch.randn(64, 16, device="cuda")
    expected = gradients_of(lambda: functions(x), functions, 2)
    functions.zero_grad()
    with pytest.raises(InfeasibleBudget) as error:
        memopt.checkpoint_sequential(functions, None, x, memory_budget=1)
    least = error.value.least_budget
    run = functools.partial(memopt.checkpoint_sequential, functions, None, x, memory_budget=least)
    assert all(map(torch.equal, gradients_of(run, functions, 2), expected))


def test_garbage_that_is_collected_within_an_operation_is_not_counted_as_the_operations():
    def makes_garbage() -> None:
        cycle: list[object] = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)

    def collects() -> torch.Tensor:
        gc.collect()
        return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def works() -> torch.Tensor:
        torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
        return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    for operation, most in ((collects, 1), (works, 2)):
        makes_garbage()
        meter = Meter(torch.device("cuda"))
        out = meter.__torch_dispatch__(operation, ())
        assert (meter.live, meter.peak) == (out.nbytes, most << 20)
