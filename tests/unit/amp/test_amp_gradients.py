"""memopt._C.Gradients: which tensors it takes and which it leaves, what a pass does, what it refuses and keeps."""

from __future__ import annotations

import gc
import math
import sys
import weakref

import pytest
import torch

from memopt import _C

CPU = -1
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def scalar(x: float = 0.0) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


# ---- what it takes ---------------------------------------------------------------------------------------------------


def test_plain_tensors_are_taken_in_their_order():
    given = [torch.randn(3), torch.randn(()), torch.randn(0), torch.randn(4, 5).t(), torch.randn(9)[1:]]
    read = _C.Gradients(given)
    assert read.devices == (CPU,) and read.others == [] and read.dtypes == {torch.float32}
    assert all(a is b for a, b in zip(read.tensors(CPU), given, strict=True))
    assert read.tensors(0) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_type_of_gradient_is_known(dtype: torch.dtype):
    assert _C.Gradients([torch.ones(2, dtype=dtype)]).dtypes == {dtype}


class Sub(torch.Tensor):
    pass


OTHERS = {
    "gaps": lambda: torch.randn(4, 2)[:, 0],
    "expanded": lambda: torch.randn(()).expand(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "integer": lambda: torch.ones(3, dtype=torch.int32),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "meta": lambda: torch.ones(3, device="meta"),
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "none": lambda: None,
    "no tensor": lambda: 3,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_not_plain_is_left_to_torch(make):
    other, plain = make(), torch.ones(2)
    read = _C.Gradients([other, plain])
    assert read.others[0] is other and len(read.others) == 1
    assert read.tensors(CPU) == [plain]


def test_of_parameters_the_gradients_are_read_and_those_without_are_passed_over():
    with_grad, without = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    plain, left = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with_grad.grad, plain.grad = torch.randn(2), torch.randn(3)
    left.grad = torch.zeros(()).expand(3)
    read = _C.Gradients([with_grad, without, plain, left, "a word"], of_parameters=True)
    assert [g is h for g, h in zip(read.tensors(CPU), [with_grad.grad, plain.grad], strict=True)] == [
        True,
        True,
    ]
    assert read.others[0] is left and read.others[1:] == ["a word"]


def test_memory_that_begins_where_anothers_does_is_taken_once():
    shared, nothing = torch.full((4,), 8.0), torch.ones(0)
    read = _C.Gradients([shared, shared[:2], shared[1:], shared, nothing, nothing])
    assert len(read.tensors(CPU)) == 4
    assert [tuple(t.shape) for t in read.others] == [(2,), (4,)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_any_number_and_any_iterable(count: int):
    made = [torch.ones(1) for _ in range(count)]
    for given in (made, tuple(made), iter(made)):
        assert len(_C.Gradients(given).tensors(CPU)) == count
    assert _C.Gradients(made).devices == ((CPU,) if count else ())


def test_a_list_that_changes_while_it_is_read():
    """The gradient of the first is asked for by Python code, which empties the list."""
    given: list = []

    class Emptying(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            given.clear()
            return function(*args, **(kwargs or {}))

    for _ in range(50):
        p = torch.nn.Parameter(torch.ones(1))
        p.grad = torch.ones(1)
        given.append(p)
    with Emptying():
        read = _C.Gradients(given, of_parameters=True)
    assert len(read.tensors(CPU)) == 1


# ---- what a pass does ------------------------------------------------------------------------------------------------


def test_a_pass_checks_scales_and_measures():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([4.0], dtype=torch.float64)
    read = _C.Gradients([a, b])
    found, norm, clip, factor = scalar(), scalar(), scalar(), scalar()
    read.run(CPU, False, scalar(0.5), found, norm, clip, factor, 1.0)
    assert found == 0 and norm == 2.5 and a.tolist() == [3.0, 0.0]
    assert clip.item() == pytest.approx(1 / (2.5 + 1e-6)) and factor.item() == pytest.approx(
        0.5 * clip.item()
    )
    read.run(CPU, norm=norm, maximum=True)
    assert norm == 4
    read.run(CPU, store=True, inv_scale=scalar(0.5), found_inf=found)
    assert a.tolist() == [1.5, 0.0] and b.tolist() == [2.0] and found == 0
    read.multiply(CPU, scalar(2.0))
    assert a.tolist() == [3.0, 0.0] and b.tolist() == [4.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found(bad: float, dtype: torch.dtype):
    grad, found = torch.ones(70, dtype=dtype), scalar()
    grad[69] = bad
    _C.Gradients([torch.ones(3), grad]).run(CPU, found_inf=found)
    assert found == 1
    _C.Gradients([torch.ones(3)]).run(CPU, found_inf=found)
    assert found == 1  # never cleared


def test_a_pending_negation_cancels_out():
    memory = torch.tensor([1.0, -3.0])
    negated = torch._neg_view(memory)
    norm = scalar()
    _C.Gradients([negated]).run(CPU, store=True, inv_scale=scalar(2.0), norm=norm)
    assert negated.tolist() == [-2.0, 6.0] and norm.item() == pytest.approx(math.sqrt(40))


def test_nothing_has_the_norm_zero():
    norm, clip = scalar(5.0), scalar(5.0)
    _C.Gradients([]).run(CPU, norm=norm, clip=clip, max_norm=1.0)
    assert norm == 0 and clip == 1


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2), torch.zeros((), dtype=torch.float64), torch.zeros((), device="meta"), 1.0, "x"],
    ids=["two", "fp64", "meta", "number", "word"],
)
@pytest.mark.parametrize("name", ["inv_scale", "found_inf", "norm", "clip", "factor"])
def test_a_scalar_of_another_kind_is_refused_by_name(name: str, wrong: object):
    grad = torch.full((2,), 2.0)
    others = {"inv_scale": scalar(3.0)} if name != "inv_scale" else {}
    with pytest.raises(ValueError, match=f"{name}: expected a tensor of a single float32 on the CPU"):
        _C.Gradients([grad]).run(CPU, store=True, **others, **{name: wrong})
    assert grad.tolist() == [2.0, 2.0]


def test_a_scalar_on_another_device_is_refused():
    with pytest.raises(ValueError, match="found_inf: expected a tensor of a single float32 on CUDA device 0"):
        _C.Gradients([]).run(0, found_inf=scalar())
    with pytest.raises(ValueError, match="clip: expected a tensor of a single float32, not None"):
        _C.Gradients([]).multiply(CPU, None)


@pytest.mark.parametrize("arguments", [(), (3,), ([], 1, 2), (None,)])
def test_arguments_of_another_kind_are_refused(arguments: tuple):
    with pytest.raises(TypeError):
        _C.Gradients(*arguments)


def test_it_cannot_be_changed():
    read = _C.Gradients([])
    for name in ("others", "devices", "new"):
        with pytest.raises(AttributeError):
            setattr(read, name, 1)
    with pytest.raises(TypeError):
        _C.Gradients.run = None


# ---- what it keeps ---------------------------------------------------------------------------------------------------


def test_tensors_live_as_long_as_it_does():
    tensor, other = torch.ones(2), torch.ones(4)[::2]
    gone = weakref.ref(tensor), weakref.ref(other)
    read = _C.Gradients([tensor, other])
    del tensor, other
    gc.collect()
    assert gone[0]() is not None and gone[1]() is not None
    del read
    assert gone[0]() is None and gone[1]() is None


def test_a_cycle_through_it_is_collected():
    class Holder(torch.nn.Parameter):
        pass

    holder = Holder(torch.ones(1))
    holder.read = _C.Gradients([holder])  # among the others
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_ten_thousand_leave_nothing():
    given = [torch.ones(3), torch.ones(4)[::2], torch.ones((), dtype=torch.float64)]
    found = scalar()

    def repeat(times: int) -> None:
        for _ in range(times):
            read = _C.Gradients(given)
            read.run(CPU, found_inf=found)
            read.tensors(CPU), read.others, read.devices, read.dtypes
            for wrong in ((read.run, (CPU, True, 3)), (_C.Gradients, (3,)), (read.multiply, (CPU, None))):
                with pytest.raises((ValueError, TypeError)):
                    wrong[0](*wrong[1])

    repeat(300)
    gc.collect()
    references = [sys.getrefcount(t) for t in given]
    blocks, engines = sys.getallocatedblocks(), _C.host_blocks()
    repeat(3000)
    gc.collect()
    assert [sys.getrefcount(t) for t in given] == references
    assert sys.getallocatedblocks() - blocks < 500 and _C.host_blocks() == engines


def test_a_reading_that_fails_at_the_nth_tensor_leaves_nothing():

    class Failing(torch.overrides.TorchFunctionMode):
        def __init__(self, after: int):
            super().__init__()
            self.left = after

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.left -= 1
            if self.left < 0:
                raise MemoryError("planted")
            return function(*args, **(kwargs or {}))

    given = []
    for _ in range(20):
        p = torch.nn.Parameter(torch.ones(1))
        p.grad = torch.ones(1)
        given.append(p)
    engines = _C.host_blocks()
    for after in range(20):
        with Failing(after), pytest.raises(MemoryError):
            _C.Gradients(given, of_parameters=True)
    assert _C.host_blocks() == engines
