"""Errors of a checkpointed region whose second run differs from its first: torch's exceptions and words, then memopt's
line."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint as torchs

from memopt import checkpoint


class Changing:
    """Takes another branch the second time."""

    def __init__(self, first, again):
        self.runs = [first, again]

    def __call__(self, x):
        return self.runs.pop(0)(x)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return torch.relu(x[: 4 if self.runs == 1 else 3])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Identity(), Mlp()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.fixture
def x():
    return torch.randn(4, 3, requires_grad=True)


def both(function, x, **options):
    """The text of torch's error and of ours, for the same region."""
    texts = []
    for call in (torchs.checkpoint, checkpoint):
        with pytest.raises(torchs.CheckpointError) as caught:
            call(function(), x, use_reentrant=False, **options).sum().backward()
        texts.append(str(caught.value))
    theirs, ours = texts
    assert ours.startswith(theirs + "\nmemopt: "), ours
    return ours[len(theirs) + len("\nmemopt: ") :]


def test_fewer_tensors(x):
    line = both(lambda: Changing(lambda a: a.sin().exp(), lambda a: a * 2), x)
    assert line == "Changing() saved 2 tensors at first, and 0 when run again"


def test_more_tensors(x):
    line = both(lambda: Changing(lambda a: a.sin(), lambda a: a.sin().exp()), x, early_stop=False)
    assert line.startswith("Changing() saved 1 tensors; the next one is saved in")
    assert "`a.sin().exp()`" in line and __file__ in line


@pytest.mark.parametrize(
    "again",
    [lambda a: a[:2].sin(), lambda a: a.double().sin(), lambda a: a.to("meta").sin()],
    ids=["shape", "dtype", "device"],
)
def test_another_form(x, again):
    line = both(lambda: Changing(lambda a: a.sin().cos(), lambda a: again(a).cos()), x)
    assert line.count("position ") == 2 and "position 0 is saved in Changing() by `a" in line


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64])
def test_types_are_named_as_torch_names_them(x, dtype):
    both(lambda: Changing(lambda a: (a.to(dtype) * a.to(dtype)).abs(), lambda a: (a * a).abs()), x)


def test_the_module_and_the_operation_are_named(x):
    with pytest.raises(torchs.CheckpointError) as caught:
        checkpoint(Block(), x, use_reentrant=False).sum().backward()
    line = str(caught.value).splitlines()[-1]
    assert line.startswith("memopt: position 0 is saved in the module Mlp (Block.parts.1) by `torch.relu(")
    assert line.endswith(f"{__file__}:{Mlp.forward.__code__.co_firstlineno + 2}")


def test_other_forms_pass_where_nothing_is_checked(x):
    function = Changing(lambda a: a.sin().sum(), lambda a: a.double().sin().sum())
    checkpoint(function, x, use_reentrant=False, determinism_check="none").backward()


def test_what_is_no_longer_needed_need_not_be_equal(x):
    def run(a, size):
        a[:size].sin()  # its graph dies at once
        return a.cos()

    function = Changing(lambda a: run(a, 3), lambda a: run(a, 2))
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, -x.sin())


def test_a_tensor_is_unpacked_once_for_each_backward_pass(x):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            (a,) = ctx.saved_tensors
            return grad * a.cos()

    line = both(lambda: Twice.apply, x)
    assert line == "the tensor was saved in Function.apply()"


def test_an_input_that_was_changed_in_place_is_noticed(x):
    a = x * 1
    y = checkpoint(torch.sin, a, use_reentrant=False)
    a.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_traces_of_both_runs_are_shown_when_debugging(x):
    for switch in (False, True):
        function = Changing(lambda a: a.sin().cos(), lambda a: a[:2].sin().cos())
        with torchs.set_checkpoint_debug_enabled(True if switch else None):
            y = checkpoint(function, x, use_reentrant=False, debug=not switch)
        with pytest.raises(
            torchs.CheckpointError, match="Operations executed during the original forward"
        ) as caught:
            y.sum().backward()
        assert "aten.slice" in str(caught.value) or "aten.sin" in str(caught.value)
        assert isinstance(caught.value.__cause__, torchs.CheckpointError)
        assert "memopt: position 0" in str(caught.value.__cause__)


def test_a_context_that_swallows_an_exception_is_refused(x):
    class Swallows:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            return True

    def fails(a):
        raise KeyError("a")

    with pytest.raises(
        RuntimeError, match="context_fn suppressed an exception raised during the checkpointed forward"
    ):
        checkpoint(fails, x, use_reentrant=False, context_fn=lambda: (Swallows(), Swallows()))


def test_the_reentrant_mode_refuses_what_it_cannot_do(x):
    y = checkpoint(torch.sin, x, use_reentrant=True)
    with pytest.raises(
        RuntimeError, match=r"^When use_reentrant=True, torch.utils.checkpoint is incompatible"
    ):
        torch.autograd.grad(y.sum(), x)
    y = checkpoint(lambda a: a.detach() * 2, x, use_reentrant=True)
    with pytest.raises(
        RuntimeError, match=r"^none of output has requires_grad=True, this checkpoint\(\) is not neces"
    ):
        y.sum().backward()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        checkpoint(torch.sin, x.detach(), use_reentrant=True)


def test_a_run_that_failed_is_run_afresh(x):
    """The failure of one backward pass is none of the next."""
    runs = []

    def function(a):
        runs.append(1)
        if len(runs) == 2:
            raise ConnectionError("once")
        return a.sin().exp()

    y = checkpoint(function, x, use_reentrant=False).sum()
    with pytest.raises(ConnectionError):
        y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, (x.sin().exp() * x.cos()).detach())
