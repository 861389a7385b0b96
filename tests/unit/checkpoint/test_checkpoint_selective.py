"""memopt.create_selective_checkpoint_contexts: which operations run again, what is refused, and hooks around."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt import checkpoint

aten = torch.ops.aten
Policy = torchs.CheckpointPolicy


class Operations(TorchDispatchMode):
    """Names of what runs, but for detach."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not aten.detach.default:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def run(policy, function, *args, **options):
    """(gradients, the names of what ran again). Modes below ours see what ours let through."""
    contexts = functools.partial(memopt.create_selective_checkpoint_contexts, policy, **options)
    leaves = [a for a in args if isinstance(a, torch.Tensor)]
    below = Operations()

    def counted():
        first, again = contexts()

        class Again:
            def __enter__(self):
                below.__enter__()
                again.__enter__()

            def __exit__(self, *raised):
                again.__exit__(*raised)
                below.__exit__(*raised)

        return first, Again()

    out = checkpoint(function, *args, use_reentrant=False, context_fn=counted)
    return torch.autograd.grad(out.sum(), leaves), below.names


@pytest.fixture
def tensors():
    torch.manual_seed(5)
    return [torch.randn(4, 4, requires_grad=True) for _ in range(2)]


def function(x, y):
    return torch.sigmoid(torch.mm(torch.mm(x, y).sin(), y)) * y


def same(gradients, tensors):
    return all(map(torch.equal, gradients, torch.autograd.grad(function(*tensors).sum(), tensors)))


def named(*operations):
    return lambda ctx, op, *args, **kwargs: op in operations


def always(policy):
    return lambda ctx, op, *args, **kwargs: policy


@pytest.mark.parametrize("policy", [[aten.mm.default], named(aten.mm.default)], ids=["list", "bool"])
def test_what_is_kept_does_not_run_again(tensors, policy):
    gradients, again = run(policy, function, *tensors)
    assert same(gradients, tensors) and again == ["sin", "sigmoid"]


def test_policies_of_each_kind(tensors):
    for policy in (Policy.MUST_SAVE, Policy.PREFER_SAVE):
        gradients, again = run(always(policy), function, *tensors)
        assert same(gradients, tensors) and again == []
    for policy in (Policy.MUST_RECOMPUTE, Policy.PREFER_RECOMPUTE):
        gradients, again = run(always(policy), function, *tensors)
        assert same(gradients, tensors) and again == ["mm", "sin", "mm", "sigmoid"]


@pytest.mark.skipif(not hasattr(Policy, "MUST_CPU_OFFLOAD"), reason="this torch has no policies of offload")
def test_what_is_offloaded_does_not_run_again_either(tensors):
    for policy in (Policy.MUST_CPU_OFFLOAD, Policy.PREFER_CPU_OFFLOAD):
        gradients, again = run(always(policy), function, *tensors)
        assert same(gradients, tensors) and again == []


def test_the_policy_is_asked_in_the_first_run_alone_and_shown_the_result(tensors):
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append((ctx.is_recompute, op, ctx.op_output.shape, len(args)))
        return op is aten.mm.default and len(seen) == 1

    gradients, again = run(policy, function, *tensors)
    assert same(gradients, tensors) and again == ["sin", "mm", "sigmoid"]
    assert [(r, o) for r, o, *_ in seen] == [
        (False, o)
        for o in (aten.mm.default, aten.sin.default, aten.mm.default, aten.sigmoid.default, aten.mul.Tensor)
    ]


def test_results_of_several_tensors_and_random_ones(tensors):
    x, y = tensors

    def several(a, b):
        u, s, v = torch.linalg.svd(torch.nn.functional.dropout(a @ b, 0.5))
        return s * (u.sum() + v.cos().sum())

    torch.manual_seed(6)
    expected = torch.autograd.grad(several(x, y).sum(), tensors)
    for keep in ([aten._linalg_svd.default], []):
        torch.manual_seed(6)
        gradients, _ = run(keep, several, x, y)
        assert all(map(torch.equal, gradients, expected))


def test_views_and_changes_in_place(tensors):
    def in_place(a, b):
        c = torch.mm(a, b)
        return (c.view(-1).sin().exp_().view(4, 4) * b.t()).cos()

    expected = torch.autograd.grad(in_place(*tensors).sum(), tensors)
    for keep in ([aten.mm.default], [aten.t.default]):
        assert all(map(torch.equal, run(keep, in_place, *tensors)[0], expected))


def test_a_kept_tensor_that_was_changed_is_an_error_unless_that_is_allowed(tensors):
    def changes(a, b):
        return torch.mm(a, b).add_(1).sin()

    with pytest.raises(
        RuntimeError, match="^Tensor cached during selective activation checkpoint has been mutated$"
    ):
        run([aten.mm.default], changes, *tensors)
    run([aten.mm.default], changes, *tensors, allow_cache_entry_mutation=True)


def test_a_region_is_good_for_one_backward_pass(tensors):
    contexts = functools.partial(memopt.create_selective_checkpoint_contexts, [aten.mm.default])
    y = checkpoint(function, *tensors, use_reentrant=False, context_fn=contexts).sum()
    y.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match="^Trying to backward an extra time. You are only allowed to backward once"
    ):
        y.backward()


def test_operations_that_were_not_there_are_named(tensors):
    x, y = tensors
    for second, words in (
        (lambda a, b: a.tan().mm(b).sin(), "aten.tan.default encountered during backward but not found"),
        (lambda a, b: a.mm(b).mm(b).sin(), "aten.mm.default invocation index 1 encountered during backward"),
    ):
        runs = [lambda a, b: a.mm(b).sin().sin().sin(), second]
        with pytest.raises(RuntimeError, match=words):
            run([aten.mm.default], lambda a, b, runs=runs: runs.pop(0)(a, b), x, y)


def test_what_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="Please update the OpOverloadPacket to a specific OpOverload"):
        memopt.create_selective_checkpoint_contexts([aten.mm])
    with pytest.raises(
        ValueError, match="Expected op in `op_list` to be an OpOverload but got: 1 of type <class 'int'>"
    ):
        memopt.create_selective_checkpoint_contexts([1])
    with pytest.raises(TypeError, match="policy_fn_or_list must be either a function or a list of ops"):
        memopt.create_selective_checkpoint_contexts(1)


def test_they_are_of_torchs_types(tensors):
    first, again = memopt.create_selective_checkpoint_contexts([])
    assert isinstance(first, torchs._CachingTorchDispatchMode) and isinstance(
        again, torchs._CachedTorchDispatchMode
    )


@pytest.mark.parametrize("respect", [None, False, True])
def test_the_users_hooks_get_what_is_kept_if_that_is_asked_for(tensors, respect):
    packed = []

    def pack(t):
        packed.append(t)
        return t.clone()

    def inner(a, b):
        return checkpoint(
            function, a, b, use_reentrant=False, respect_saved_tensors_hooks=respect,
            context_fn=functools.partial(memopt.create_selective_checkpoint_contexts, [aten.mm.default]),
        )  # fmt: skip

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        y = inner(*tensors)
    assert len(packed) == (4 if respect else 2)  # the inputs, and what mm gave
    assert same(torch.autograd.grad(y.sum(), tensors), tensors)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        y = checkpoint(lambda a, b: inner(a, b), *tensors, use_reentrant=False)
    assert len(packed) == (8 if respect else 4)
    assert same(torch.autograd.grad(y.sum(), tensors), tensors)


def test_torchs_own_contexts_work_in_memopts_regions_and_the_other_way_round(tensors):
    for call, contexts in (
        (checkpoint, torchs.create_selective_checkpoint_contexts),
        (torchs.checkpoint, memopt.create_selective_checkpoint_contexts),
    ):
        context_fn = functools.partial(contexts, [aten.mm.default])
        y = call(function, *tensors, use_reentrant=False, context_fn=context_fn)
        assert same(torch.autograd.grad(y.sum(), tensors), tensors)
