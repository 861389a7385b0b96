"""Nothing of a checkpointed region outlives its graph, and an exception at any point leaves everything as it was."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch._C import _autograd
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt import _C, checkpoint
from memopt._checkpoint.drop_in import engine


class Storages(TorchDispatchMode):
    """Memory of results that is alive, that of some tensors left out."""

    def __init__(self, *known):
        super().__init__()
        self.live, self.made = {}, 0
        self.known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in self.known:
                    self.made += 1
                    key = storage._cdata
                    self.live[key] = weakref.ref(storage, lambda _, key=key: self.live.pop(key, None))
        return out


class State:
    """The state that a region must leave as it found it."""

    def __init__(self):
        top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
        self.hooks = top(False) if top else None
        self.grad = torch.is_grad_enabled()
        self.autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        self.random = torch.get_rng_state().numpy().tobytes()
        self.modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()

    def __eq__(self, other):
        return vars(self) == vars(other)


def nested(x):
    return checkpoint(
        lambda a: checkpoint(lambda b: b.sin().exp(), a.cos(), use_reentrant=False) * a,
        x,
        use_reentrant=False,
    )


def selective(x):
    def contexts():
        return memopt.create_selective_checkpoint_contexts([torch.ops.aten.exp.default])

    return checkpoint(lambda a: a.sin().exp().cos(), x, use_reentrant=False, context_fn=contexts)


REGIONS = {
    "nested": nested,
    "selective": selective,
    "reentrant": lambda x: checkpoint(lambda a: a.sin().exp(), x, use_reentrant=True),
    "plain": lambda x: checkpoint(lambda a: a.sin().exp(), x, use_reentrant=False, batch_norm_once=True),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("backward", [False, True])
def test_memory_goes_with_the_graph_without_the_collectors_help(name, backward):
    x = torch.randn(4, requires_grad=True)
    run = REGIONS[name]
    with Storages(x):  # what torch keeps of its first use of each
        run(x)
    gc.collect()
    gc.disable()
    try:
        with Storages(x) as storages:
            y = run(x).sum()
            if backward:
                y.backward()
            del y
        x.grad = None
        assert storages.made > 2 and not storages.live
    finally:
        gc.enable()


@pytest.mark.parametrize("name", REGIONS)
def test_steps_leave_no_objects(name):
    x = torch.randn(4, requires_grad=True)

    def steps(count):
        for _ in range(count):
            REGIONS[name](x).sum().backward()
            x.grad = None

    steps(20)
    # The interpreter's and torch's own tables grow, less and less; what leaks, leaks every step.
    grown = []
    for _ in range(8):
        gc.collect()
        blocks, engines = sys.getallocatedblocks(), _C.host_blocks()
        steps(100)
        gc.collect()
        assert _C.host_blocks() == engines
        grown.append(sys.getallocatedblocks() - blocks)
        if grown[-1] < 100:
            return
    pytest.fail(f"blocks left by 100 steps: {grown}")


def test_a_part_of_a_backward_pass_keeps_what_the_rest_needs_and_no_more():
    x, z = (torch.randn(4, requires_grad=True) for _ in range(2))
    with Storages(x):
        checkpoint(torch.sin, x, use_reentrant=False)
    with Storages(x, z) as storages:
        one, other = checkpoint(lambda a, b: (a.sin().exp(), b.cos().exp()), x, z, use_reentrant=False)
        before = len(storages.live)
        one.sum().backward()
        del one
        assert 0 < len(storages.live) - before <= 4  # x.grad, and what was made for the other
        other.sum().backward()
        del other
    x.grad = z.grad = None
    assert not storages.live


@pytest.mark.parametrize("once", [False, True])
def test_a_second_run_that_failed_or_was_for_a_look_leaves_nothing_with_the_graph(once):
    runs = []

    def function(a):
        runs.append(1)
        b = a.sin().exp()
        if len(runs) % 2 == 0 and not once:
            raise ConnectionError("planted")
        return b.cos()

    x = torch.randn(4, requires_grad=True)
    with Storages(x) as storages:
        y = checkpoint(function, x, use_reentrant=False).sum()
        before = len(storages.live)
        for _ in range(3):
            if once:
                assert y.grad_fn.next_functions[0][0]._saved_self is not None
            else:
                runs[:] = [1]
                with pytest.raises(ConnectionError):
                    y.backward(retain_graph=True)
            gc.collect()
            assert len(storages.live) == before
    assert len(runs) > 1


@pytest.mark.parametrize("name", REGIONS)
def test_an_exception_in_any_operation_leaves_everything_as_it_was(name):
    """The N-th operation of forward and backward fails, for each N."""

    class Fails(TorchDispatchMode):
        def __init__(self, after):
            super().__init__()
            self.after = after

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.after -= 1
            if self.after < 0:
                raise ConnectionError("planted")
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, requires_grad=True)
    REGIONS[name](x).sum().backward()
    expected, x.grad = x.grad, None
    state, failures = State(), 0
    for after in range(200):
        storages = Storages(x)
        try:
            with storages, Fails(after):
                REGIONS[name](x).sum().backward()
            break
        except ConnectionError:
            failures += 1
        assert State() == state
        x.grad = None
        if storages.live:  # by a cycle through the exception's frames
            gc.collect()
        assert not storages.live
    assert failures > 5 and after < 199
    assert torch.equal(x.grad, expected)


def engine_with(failing_after, **others):
    """The engine, whose N-th call of torch fails."""
    left = [failing_after]

    def failing(function):
        def call(*args):
            left[0] -= 1
            if left[0] == -1:
                raise ConnectionError("planted")
            return function(*args)

        return call

    names = {}
    original = _C.CheckpointEngine

    class Recorder:
        def __call__(self, **given):
            names.update(given)
            return original(**given)

    engine._C, real = type("_C", (), {"CheckpointEngine": Recorder()}), engine._C
    try:
        engine._make()
    finally:
        engine._C = real
    keep = {"stop", "error", "saved_input", "pop_hooks", "set_grad_enabled"}
    return original(
        **{n: v if n in keep or v is None else failing(v) for n, v in (names | others).items()}
    ), left


def test_a_failure_of_any_of_torchs_functions_leaves_everything_as_it_was():
    x = torch.randn(4, requires_grad=True)
    state, after = State(), 0
    generators = (torch.default_generator,)
    while True:
        own, left = engine_with(after)
        try:
            y = own.run(lambda a: a.sin().exp(), (x,), None, generators, "cpu", True, True, None)
            y.sum().backward()
            y = None
        except ConnectionError:
            y = None
            assert State() == state, after
            x.grad = None
        if left[0] >= 0:
            break
        after += 1
    assert after > 15
    assert torch.equal(x.grad, (x.sin().exp() * x.cos()).detach())


def test_no_host_memory_for_the_bookkeeping_is_a_memory_error():
    blocks = _C.host_blocks()
    y = checkpoint(lambda a: a.sin().exp(), torch.randn(4, requires_grad=True), use_reentrant=False)
    assert _C.host_blocks() > blocks
    del y
    assert _C.host_blocks() == blocks


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("run", ()),
        ("run", (len, [1], None, None, None, True, True, None)),
        ("run", (len, (1,), 5, None, None, True, True, None)),
        ("run", (len, (1,), None, 5, None, True, True, None)),
        ("run", (len, (1,), None, None, None, True, True, (1,))),
        ("surroundings", (5, None)),
        ("surroundings", ((object(),), None)),
    ],
)
def test_the_engine_refuses_what_it_does_not_take(method, arguments):
    with pytest.raises((TypeError, AttributeError)):
        getattr(engine.ENGINE, method)(*arguments)


def test_an_engine_needs_all_its_names():
    with pytest.raises(TypeError, match="CheckpointEngine needs push_hooks"):
        _C.CheckpointEngine(other=1)
    with pytest.raises(TypeError, match="takes keyword arguments only"):
        _C.CheckpointEngine(1)


def test_hooks_of_regions_are_known_and_take_only_what_is_theirs():
    pushed = []

    def push(pack, unpack):
        pushed.append((pack, unpack))
        _autograd._push_saved_tensors_default_hooks(pack, unpack)

    own = engine_with(10**9, push_hooks=push)[0]
    own.run(torch.sin, (torch.randn(4, requires_grad=True),), None, None, None, True, True, None)
    ((pack, unpack),) = pushed
    assert own.is_hook(pack) and not own.is_hook(unpack) and not own.is_hook(len) and not own.is_hook(None)
    with pytest.raises(TypeError, match="expected what the pack hook returned"):
        unpack(None)
