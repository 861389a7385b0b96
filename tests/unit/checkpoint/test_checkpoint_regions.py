"""memopt.checkpoint: what torch.utils.checkpoint.checkpoint promises of results, of what runs when, and of what is
around."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt import checkpoint

SOAK = os.environ.get("MEMOPT_SOAK") == "1"
MODES = pytest.mark.parametrize("use_reentrant", [False, True])


class Counted:
    """A function that counts its calls, and those of them that came to their end."""

    def __init__(self, function):
        self.function, self.calls, self.ended = function, 0, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        result = self.function(*args, **kwargs)
        self.ended += 1
        return result


def gradients(run, parameters):
    torch.manual_seed(7)
    for p in parameters:
        p.grad = None
    run().backward()
    return [p.grad for p in parameters]


def assert_same(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.fixture
def x():
    return torch.randn(4, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def block():
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 8),
        torch.nn.LayerNorm(8),
    )


# ---- results ---------------------------------------------------------------------------------------------------------


@MODES
def test_gradients_are_those_of_the_plain_run_dropout_included(x, block, use_reentrant):
    parameters = [x, *block.parameters()]
    plain = gradients(lambda: block(x).sum(), parameters)
    assert_same(gradients(lambda: checkpoint(block, x, use_reentrant=use_reentrant).sum(), parameters), plain)


@MODES
def test_arguments_and_results_may_be_anything(x, use_reentrant):
    seen = []

    def function(a, number, words, none, nested):
        seen.append((number, words, none))
        return a * number, words, none, (nested["b"].detach() + 1) * 2

    out, words, none, other = (
        checkpoint(function, x, 3, ["w"], None, {"b": x}, use_reentrant=use_reentrant)
        if use_reentrant is False
        else (
            *checkpoint(lambda a: function(a, 3, ["w"], None, {"b": x})[:1], x, use_reentrant=True),
            ["w"],
            None,
            x,
        )
    )
    out.sum().backward()
    assert (
        torch.equal(x.grad, torch.full_like(x, 3)) and words == ["w"] and none is None and other is not None
    )
    assert set(map(str, seen)) == {str((3, ["w"], None))} and len(seen) == (2 if use_reentrant else 1)


def test_keyword_arguments_reach_the_function_both_times(x):
    seen = []

    def function(a, *, scale, flag="default"):
        seen.append((scale, flag))
        return (a * scale).exp()

    checkpoint(function, x, use_reentrant=False, scale=2.0).sum().backward()
    assert seen == [(2.0, "default")] * 2


def test_tensors_in_containers_and_closures_get_gradients(x):
    w = torch.randn(8, requires_grad=True)
    parameters = [x, w]
    plain = gradients(lambda: (x * w).sin().sum(), parameters)
    assert_same(
        gradients(
            lambda: checkpoint(lambda d: (d["x"][0] * w).sin(), {"x": [x]}, use_reentrant=False).sum(),
            parameters,
        ),
        plain,
    )


def random_program(rng, depth):
    """A function of one tensor, regions within regions at random; with_regions=False is the plain one."""
    steps = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(
            ["sin", "mul", "dropout", "detached", "inplace", "two", *(["region"] * 3 if depth else [])]
        )
        if kind == "region":
            steps.append((kind, random_program(rng, depth - 1), rng.random() < 0.7, rng.random() < 0.8))
        else:
            steps.append((kind, rng.uniform(0.5, 1.5), None, None))

    def run(t, with_regions):
        for kind, what, early_stop, check in steps:
            if kind == "region" and with_regions:
                t = checkpoint(
                    what, t, True, use_reentrant=False, early_stop=early_stop,
                    determinism_check="default" if check else "none",
                )  # fmt: skip
            elif kind == "region":
                t = what(t, False)
            elif kind == "sin":
                t = t.sin()
            elif kind == "mul":
                t = t * what * t.tanh()
            elif kind == "dropout":
                t = torch.nn.functional.dropout(t, 0.2)
            elif kind == "detached":
                t = t + t.detach().cos()
            elif kind == "inplace":
                t = (t * 1.0).add_(what).clamp_(max=2.0).exp_()
            else:
                a, b = t.split(t.shape[0] // 2)
                t = torch.cat([a * b.sigmoid(), b * what])
        return t

    return run


@pytest.mark.parametrize("number", range(400 if SOAK else 40))
def test_random_programs_of_nested_regions_have_the_plain_gradients(number):
    seed = int(os.environ["MEMOPT_SEED"]) + number
    print(f"seed {seed}")
    rng = random.Random(seed)
    program = random_program(rng, 3)
    x = torch.randn(4, 6, requires_grad=True, generator=torch.Generator().manual_seed(seed))
    outside = rng.random() < 0.5

    def run(with_regions):
        torch.manual_seed(seed)
        x.grad = None
        y = (
            checkpoint(program, x, True, use_reentrant=False)
            if with_regions and outside
            else program(x, with_regions)
        )
        if y.requires_grad:
            retain = number % 3 == 0
            y.sum().backward(retain_graph=retain)
            if retain:
                y.square().sum().backward()
        return y.detach(), x.grad, torch.get_rng_state()

    plain, remade = run(False), run(True)
    assert_same(remade, plain)


# ---- what runs, and how often ----------------------------------------------------------------------------------------


def test_a_region_runs_once_more_for_each_backward_pass(x):
    function = Counted(lambda a: a.sin().exp())
    y = checkpoint(function, x, use_reentrant=False).sum()
    assert function.calls == 1
    y.backward(retain_graph=True)
    assert function.calls == 2
    y.backward()
    assert function.calls == 3
    assert torch.allclose(x.grad, 2 * (x.sin().exp() * x.cos()).detach())


def test_it_stops_when_all_that_is_needed_is_made(x):
    early = Counted(lambda a: a.sin().sum())
    late = Counted(lambda a: a.sin().sum())
    checkpoint(early, x, use_reentrant=False).backward()
    checkpoint(late, x, use_reentrant=False, early_stop=False).backward()
    assert (early.calls, early.ended, late.calls, late.ended) == (2, 1, 2, 2)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_setting_of_early_stop_is_that_of_the_forward_pass_and_wins(x, enabled):
    function = Counted(lambda a: a.sin().sum())
    with memopt.set_checkpoint_early_stop(enabled):
        y = checkpoint(function, x, use_reentrant=False, early_stop=not enabled)
    with memopt.set_checkpoint_early_stop(not enabled):
        y.backward()
    assert function.ended == (1 if enabled else 2)
    assert memopt.set_checkpoint_early_stop is torchs.set_checkpoint_early_stop


def test_nothing_is_made_again_where_nothing_is_needed(x):
    function = Counted(lambda a: a + 1)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert function.calls == 1 and torch.equal(x.grad, torch.ones_like(x))


def test_without_grad_mode_it_is_a_call(x):
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(1)
        yield

    made = []

    def context_fn():
        made.append(1)
        return context(), context()

    for mode in (torch.no_grad, torch.inference_mode):
        function = Counted(lambda a: a.sin())
        with mode():
            y = checkpoint(function, x, use_reentrant=False, context_fn=context_fn)
        assert function.calls == 1 and not y.requires_grad and not entered
    assert len(made) == 2


def test_regions_in_regions_run_as_often_as_there_are_regions_around(x):
    inner, middle = Counted(lambda a: a.sin().exp()), None

    def with_inner(a):
        return checkpoint(inner, a.cos(), use_reentrant=False).tanh()

    middle = Counted(with_inner)
    outer = Counted(lambda a: checkpoint(middle, a.sigmoid(), use_reentrant=False).square())
    y = checkpoint(outer, x, use_reentrant=False).sum()
    y.backward()
    plain = torch.autograd.grad(x.sigmoid().cos().sin().exp().tanh().square().sum(), x)[0]
    assert torch.equal(x.grad, plain)
    assert (outer.calls, middle.calls, inner.calls) == (2, 3, 4)


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_backward_pass_within_the_region_works(x, early_stop):
    def function(a, retain):
        y = a.sin()
        z = y.exp()
        (g,) = torch.autograd.grad(z.sum(), a, retain_graph=retain)
        return a.cos() * g, z if retain else a

    for retain in (False, True):
        plain = torch.autograd.grad(sum(t.sum() for t in function(x, retain)), x)[0]
        out = checkpoint(function, x, retain, use_reentrant=False, early_stop=early_stop)
        assert torch.equal(torch.autograd.grad(sum(t.sum() for t in out), x)[0], plain)


def test_double_backward_and_grad_work(x):
    def function(a):
        return a.sin() * a.exp()

    def second(f):
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    assert torch.equal(second(lambda a: checkpoint(function, a, use_reentrant=False)), second(function))


def test_a_saved_tensor_can_be_looked_at_outside_of_a_backward_pass_as_often_as_one_likes(x):
    function = Counted(lambda a: a.sin().exp())
    y = checkpoint(function, x, use_reentrant=False)
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_result, x.sin().exp())
    assert function.calls == 4


def test_a_group_of_backward_passes_shares_one_run():
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    function = Counted(lambda s, t: (s.sin().exp(), t.cos().exp()))
    one, other = checkpoint(function, a, b, use_reentrant=False)
    with torchs.GraphExecGroup():
        one.sum().backward()
        other.sum().backward()
    assert function.calls == 2
    assert torch.allclose(a.grad, (a.sin().exp() * a.cos()).detach())
    one, other = checkpoint(function, a, b, use_reentrant=False)
    with torchs.GraphExecGroup():
        one.sum().backward(retain_graph=True)
        with pytest.raises(torchs.CheckpointError, match="two backward calls that overlap"):
            one.sum().backward()


def test_threads_have_regions_of_their_own():
    results, failures = {}, []

    def work(number):
        try:
            x = torch.full((5,), float(number), requires_grad=True)
            for _ in range(20):
                x.grad = None
                inner = lambda a: checkpoint(torch.exp, a.sin(), use_reentrant=False)  # noqa: E731
                checkpoint(inner, x, use_reentrant=False).sum().backward()
            results[number] = x.grad
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for number, grad in results.items():
        x = torch.full((5,), float(number))
        assert torch.equal(grad, x.sin().exp() * x.cos())


# ---- what is around --------------------------------------------------------------------------------------------------


@MODES
def test_random_numbers_are_drawn_again_and_the_stream_goes_on_as_it_would(x, use_reentrant):
    drawn = []

    def function(a):
        drawn.append(torch.rand(3))
        return a.sin() * drawn[-1].sum()

    torch.manual_seed(3)
    y = checkpoint(function, x, use_reentrant=use_reentrant).sum()
    torch.rand(5)
    before = torch.get_rng_state()
    y.backward()
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(torch.get_rng_state(), before)


def test_random_states_are_left_alone_if_that_is_asked_for(x):
    drawn = []

    def function(a):
        drawn.append(torch.rand(3))
        return a.sin() * 1.0

    y = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, early_stop=False).sum()
    before = torch.get_rng_state()
    y.backward()
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(torch.get_rng_state(), before)


@MODES
@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast_is_as_it_was(x, block, use_reentrant, around_backward):
    seen = []

    def function(a):
        out = block(a)
        seen.append((out.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return out.float()

    parameters = [x, *block.parameters()]

    def run(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call()
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.float16) if around_backward else contextlib.nullcontext():
            return y.sum()

    plain = gradients(lambda: run(lambda: function(x)), parameters)
    seen.clear()
    remade = gradients(lambda: run(lambda: checkpoint(function, x, use_reentrant=use_reentrant, **(
        {} if use_reentrant else {"early_stop": False}))), parameters)  # fmt: skip
    assert_same(remade, plain)
    assert len(seen) == 2 and seen[0] == seen[1]
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_was_off_is_off_again(x):
    seen = []

    def function(a):
        seen.append(torch.is_autocast_enabled("cpu"))
        return (a @ a.t()).exp()

    y = checkpoint(function, x, use_reentrant=False).sum()
    with torch.autocast("cpu"):
        y.backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_the_default_device_is_as_it_was(x):
    made = []

    def function(a):
        made.append(torch.empty(1).device.type)
        return a.sin().sum()

    with torch.device("meta"):
        y = checkpoint(function, x, use_reentrant=False)
    y.backward()
    assert made == ["meta", "meta"] and torch.empty(1).device.type == "cpu"


def test_contexts_are_around_each_run_and_only_there(x):
    log = []

    class Noting(TorchDispatchMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.append((self.name, func.overloadpacket.__name__))
            return func(*args, **(kwargs or {}))

    y = checkpoint(
        lambda a: a.sin().exp(), x, use_reentrant=False, context_fn=lambda: (Noting("first"), Noting("again"))
    )
    y.sum().backward()
    names = [entry for entry in log if entry[1] != "detach"]
    assert names == [("first", "sin"), ("first", "exp"), ("again", "sin"), ("again", "exp")]


def test_hooks_of_the_user_see_the_regions_inputs_and_nothing_of_its_inside(x):
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(lambda a: (a.sin().exp() * a).sum(1), x, use_reentrant=False)
    assert packed == [x.shape]
    y.sum().backward()


def test_hooks_that_are_forbidden_are_forbidden_here(x):
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        checkpoint(torch.sin, x, use_reentrant=False)


def test_tensors_of_a_subclass_are_compared_by_their_own_account():
    class Tagged(torch.Tensor):
        @staticmethod
        def __new__(cls, data):
            return torch.Tensor._make_subclass(cls, data, data.requires_grad)

    x = Tagged(torch.randn(4, requires_grad=True))
    y = checkpoint(lambda a: a.sin().exp(), x, use_reentrant=False)
    y.sum().backward()
    assert torch.allclose(
        x.grad.as_subclass(torch.Tensor), (x.sin().exp() * x.cos()).detach().as_subclass(torch.Tensor)
    )


def test_sparse_tensors_are_compared_too():
    dense = torch.randn(4, 3, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    checkpoint(lambda d: torch.sparse.mm(sparse * 2.0, d).sin(), dense, use_reentrant=False).sum().backward()
    assert torch.allclose(dense.grad, (2 * (2 * dense).cos()).detach())


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_it_decorates_functions_and_methods(x):
    class Model(torch.nn.Module):
        calls = 0

        @checkpoint(use_reentrant=False)
        def forward(self, a):
            """Of a."""
            Model.calls += 1
            return a.sin().sum()

    model = Model()
    model(x).backward()
    assert Model.calls == 2 and torch.equal(x.grad, x.cos()) and Model.forward.__doc__ == "Of a."
    with pytest.raises(ValueError, match="Unexpected keyword arguments: other"):
        checkpoint(other=1)


def test_the_mode_should_be_said(x):
    with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly"):
        y = checkpoint(torch.sin, x)
    assert "CheckpointFunction" in type(y.grad_fn).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, x, use_reentrant=False)
        checkpoint(torch.sin, x, use_reentrant=True)


def test_what_a_mode_does_not_take_is_refused(x):
    with pytest.raises(ValueError, match="^Unexpected keyword arguments: scale$"):
        checkpoint(torch.sin, x, use_reentrant=True, scale=1)
    with pytest.raises(ValueError, match="is only supported when use_reentrant=False"):
        checkpoint(torch.sin, x, use_reentrant=True, debug=True)
    with pytest.raises(
        ValueError, match=r"determinism_check should be one of \['default', 'none'\], but got other"
    ):
        checkpoint(torch.sin, x, use_reentrant=False, determinism_check="other")
    with pytest.raises(ValueError, match="^debug=True is incompatible with non-default context_fn$"):
        checkpoint(torch.sin, x, use_reentrant=False, debug=True, context_fn=lambda: (None, None))


def test_a_chain_is_cut_into_segments_of_which_the_last_is_kept(x):
    functions = [Counted(torch.sin) for _ in range(7)]
    chain = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(4)])
    memopt.checkpoint_sequential(functions, 3, x, use_reentrant=False).sum().backward()
    assert [f.calls for f in functions] == [2, 2, 2, 2, 1, 1, 1]
    plain = gradients(lambda: chain(x).sum(), [x])
    assert_same(
        gradients(lambda: memopt.checkpoint_sequential(chain, 2, x, use_reentrant=True).sum(), [x]), plain
    )
    with pytest.warns(
        UserWarning, match="checkpoint_sequential: the use_reentrant parameter should be passed"
    ):
        memopt.checkpoint_sequential(chain, 2, x)
    with pytest.raises(ValueError, match="^Unexpected keyword arguments: other$"):
        memopt.checkpoint_sequential(chain, 2, x, use_reentrant=False, other=1)
    for segments in (0, 8):
        with pytest.raises(ZeroDivisionError if segments == 0 else ValueError):
            memopt.checkpoint_sequential(chain, segments, x, use_reentrant=False)


# ---- normalisation ---------------------------------------------------------------------------------------------------


@MODES
def test_a_batch_counts_once_in_running_statistics_if_that_is_asked_for(use_reentrant):
    def statistics(options):
        torch.manual_seed(4)
        norm = torch.nn.BatchNorm1d(8)
        inner = torch.nn.BatchNorm1d(8, momentum=None)
        both = lambda a: norm(checkpoint(lambda b: inner(b.sin()), a, use_reentrant=False)).exp()  # noqa: E731
        x = torch.randn(6, 8, requires_grad=True)
        x.data[0, 0] = float("inf")
        run = (
            both if options is None else lambda a: checkpoint(both, a, use_reentrant=use_reentrant, **options)
        )
        run(x.nan_to_num(0.0, 2.0)).sum().backward()
        return [*norm.buffers(), *inner.buffers()], x.grad, list(norm.named_buffers())

    once, x_grad, _ = statistics({"batch_norm_once": True})
    twice, x_grad_twice, _ = statistics({})
    assert once[2] == 1 and once[5] == 1 and twice[2] == 2 and twice[5] > 1
    assert torch.equal(x_grad, x_grad_twice)
    with torch.no_grad():
        torch.manual_seed(4)
        norm, inner = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8, momentum=None)
        x = torch.randn(6, 8)
        x[0, 0] = 2.0
        norm(inner(x.sin()))
    assert_same(once, [*norm.buffers(), *inner.buffers()])


def test_statistics_of_evaluation_and_the_buffers_themselves_are_not_touched(x):
    norm = torch.nn.BatchNorm1d(8)
    kept = dict(norm.named_buffers())
    versions = {name: buffer._version for name, buffer in kept.items()}
    norm.eval()
    checkpoint(lambda a: norm(a).exp(), x, use_reentrant=False, batch_norm_once=True).sum().backward()
    assert all(buffer._version == versions[name] for name, buffer in norm.named_buffers())
    norm.train()
    checkpoint(lambda a: norm(a).exp(), x, use_reentrant=False, batch_norm_once=True).sum().backward()
    assert all(buffer is kept[name] for name, buffer in norm.named_buffers())
