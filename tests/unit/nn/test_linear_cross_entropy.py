"""memopt.nn.linear_cross_entropy beside torch's plain head in float64: random combinations, and its uses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.nn import linear_cross_entropy

# Of the largest gradient, and of the loss: a few units in the last place.
BOUND = {torch.float64: 1e-12, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def plain(hidden, weight, target, bias=None, softcap=None, **options):
    logits = F.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if target.dim() > 1:
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
        return loss.view(target.shape) if options.get("reduction") == "none" else loss
    return F.cross_entropy(logits, target, **options)


def near(got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    scale = max(1.0, expected.detach().nan_to_num().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(got.double(), expected.double(), atol=bound * scale, rtol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(150))
def test_loss_and_gradients_are_those_of_the_plain_head(seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice(list(BOUND))
    shape = choose.choice([(0,), (1,), (7,), (40,), (3, 11)])
    features, classes = choose.choice([1, 8, 19]), choose.choice([1, 5, 64, 1300])
    tensors = [torch.randn(*shape, features), torch.randn(classes, features) / features**0.5]
    tensors += [torch.randn(classes)] if choose.random() < 0.5 else []
    ours = [t.to(dtype).requires_grad_(choose.random() < 0.8) for t in tensors]
    oracle = [t.detach().double().requires_grad_(t.requires_grad) for t in ours]
    target = torch.randint(classes, shape)
    ignored = choose.choice([-100, 0, classes])
    target[torch.rand(shape) < choose.choice([0, 0.4, 1])] = ignored
    options = {
        "reduction": choose.choice(["mean", "sum", "none"]),
        "ignore_index": ignored,
        "label_smoothing": choose.choice([0.0, 0.1, 1.0]),
        "softcap": choose.choice([None, 2.0, 30.0]),
    }
    chunk = choose.choice([1, 500, "5KiB", "64MiB"])
    expected = plain(oracle[0], oracle[1], target, *oracle[2:], **options)
    got = linear_cross_entropy(ours[0], ours[1], target, *ours[2:], **options, chunk_bytes=chunk)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near(got, expected, BOUND[dtype])
    assert got.requires_grad == expected.requires_grad
    if not got.requires_grad:
        return
    factor = torch.rand_like(expected)
    expected.backward(factor)
    got.backward(factor.to(got.dtype))
    for mine, theirs in zip(ours, oracle, strict=True):
        assert mine.grad is None or mine.grad.dtype == dtype
        if theirs.grad is None:
            assert mine.grad is None
        else:
            near(mine.grad, theirs.grad, BOUND[dtype])


def head(dtype=torch.float32, rows=48, features=16, classes=300):
    torch.manual_seed(0)
    hidden = torch.randn(rows, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / features**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (rows,))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    hidden, weight, target = head(torch.float64, rows=6, features=3, classes=7)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    target[2] = -100

    def loss(*tensors):
        return linear_cross_entropy(
            *tensors[:2],
            target,
            tensors[2],
            reduction=reduction,
            label_smoothing=0.2,
            softcap=3.0,
            chunk_bytes=100,
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_gradient_of_the_weight_does_not_depend_on_the_chunks(dtype):
    hidden, weight, target = head(dtype, rows=512, classes=200)
    oracle = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    plain(*oracle, target).backward()
    plain(hidden, weight, target).backward()
    errors = []
    for chunk in (None, 400 * 4, 400 * 64, 400 * 256, "64MiB"):
        if chunk is not None:
            weight.grad = None
            linear_cross_entropy(hidden, weight, target, chunk_bytes=chunk).backward()
        errors.append((weight.grad.double() - oracle[1].grad).norm().item())
    assert max(errors[1:]) <= 1.02 * errors[0]  # first the plain head's


def peak(run) -> int:
    """Return the most bytes alive at once beside those that are alive now."""
    with memopt.profile("cpu") as before:
        pass
    with memopt.profile("cpu") as profile:
        run()
    return profile.peak_bytes - before.peak_bytes


def workspace(hidden, weight, rows, classes) -> int:
    """Return the bytes that torch's products of such chunks allocate beside their results."""
    x, w = hidden.detach(), weight.detach()
    logits, block = x.new_empty(rows, len(w)), x.new_empty(len(x), classes)
    d_hidden, d_weight = torch.empty_like(x), torch.empty_like(w)

    def products():
        torch.mm(x[:rows], w.t(), out=logits)
        torch.mm(logits, w, out=d_hidden[:rows])
        torch.mm(x, w.t()[:, :classes], out=block)
        torch.mm(block.t(), x, out=d_weight[:classes])

    return peak(products)


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_chunk_and_the_gradients_are_alive(dtype, rows):
    hidden, weight, target = head(dtype, rows=1000, features=8, classes=4000)
    chunk = rows * 4000 * weight.element_size()
    small = 32 * 1000 + workspace(hidden, weight, rows, 4 * rows)  # a few numbers a row

    def step():
        linear_cross_entropy(hidden, weight, target, chunk_bytes=chunk).backward()

    assert peak(step) <= chunk + weight.nbytes + hidden.nbytes + small
    hidden.requires_grad_(False)
    weight.requires_grad_(False)
    assert peak(lambda: linear_cross_entropy(hidden, weight, target, chunk_bytes=chunk)) <= chunk + small


def test_autocast_keeps_no_copy_of_the_weight():
    hidden, weight, target = head(rows=8)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        linear_cross_entropy(hidden, weight, target, reduction="none")
    large = [tensor for tensor in kept if tensor.numel() >= weight.numel()]
    assert [tensor.data_ptr() for tensor in large] == [weight.data_ptr()]


def test_a_16_bit_bias_is_summed_in_float32():
    hidden, weight, target = head(torch.bfloat16, rows=4096, features=4, classes=8)
    bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, target, bias, reduction="sum", chunk_bytes=4096).backward()
    exact = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    plain(hidden.detach().double(), weight.detach().double(), target, exact, reduction="sum").backward()
    # Rows' rounding errors are independent: 4096 ** 0.5 of half a unit in the last place of a gradient below 1.
    assert (bias.grad - exact.grad).abs().max() <= 64 * 2**-9 + 2**-8 * exact.grad.abs().max()


def test_ignored_rows_are_not_multiplied():
    hidden, weight, target = head()
    with torch.no_grad():
        hidden[::2] = float("nan")
    target[::2] = -100
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward()
    near(loss, plain(hidden[1::2], weight, target[1::2]), 1e-6)
    assert hidden.grad[::2].eq(0).all() and weight.grad.isfinite().all()


def test_what_is_frozen_costs_no_product(monkeypatch):
    hidden, weight, target = head()
    calls = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: calls.append(0) or product(*a, **k))
    linear_cross_entropy(hidden.detach(), weight.detach(), target)
    linear_cross_entropy(hidden.detach(), weight, target)  # addmm_ for the weight
    assert len(calls) == 2
    linear_cross_entropy(hidden, weight.detach(), target)
    assert len(calls) == 4
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad
    with torch.inference_mode():
        linear_cross_entropy(hidden, weight, target)
    assert len(calls) == 6


class Model(nn.Module):
    """A tied head."""

    def __init__(self, run=lambda function, *inputs: function(*inputs)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.run = nn.Embedding(50, 8), nn.Linear(8, 8), run

    def loss(self, tokens, target):
        hidden = self.layer(self.embedding(tokens)).relu()
        return linear_cross_entropy(hidden, self.embedding.weight, target, chunk_bytes=1000)

    def forward(self, tokens, target):
        return self.run(self.loss, tokens, target)

    def plain(self, tokens, target):
        return plain(self.layer(self.embedding(tokens)).relu(), self.embedding.weight, target)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def batch():
    torch.manual_seed(1)
    tokens, target = torch.randint(50, (4, 9)), torch.randint(50, (4, 9))
    target[0, :4] = -100
    return tokens, target


@pytest.mark.parametrize(
    "run",
    [
        lambda function, *inputs: function(*inputs),
        lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False),
        lambda function, *inputs: memopt.checkpoint(function, *inputs, use_reentrant=False),
    ],
    ids=["plain", "torch's checkpoint", "memopt's checkpoint"],
)
def test_tied_weights_under_checkpointing(run):
    model, inputs = Model(run), batch()
    for mine, theirs in zip(
        gradients(model, model(*inputs)), gradients(model, model.plain(*inputs)), strict=True
    ):
        near(mine, theirs, 1e-6)


@pytest.mark.filterwarnings("ignore")
def test_torch_compile():
    model, inputs = Model(), batch()
    expected = gradients(model, model(*inputs))
    compiled = torch.compile(model, backend="aot_eager")
    for mine, theirs in zip(gradients(model, compiled(*inputs)), expected, strict=True):
        near(mine, theirs, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, memopt.amp.GradScaler])
def test_autocast_and_the_scalers(dtype, scaler):
    model, inputs = Model(), batch()
    expected = gradients(model, model.plain(*inputs))
    scale = scaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = model(*inputs)
    assert loss.dtype == torch.float32
    scale.scale(loss).backward()
    scale.unscale_(optimizer)
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        near(parameter.grad, theirs, BOUND[dtype])
    scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == 2.0**12


def test_float16_gradients_take_the_scale_before_they_are_rounded():
    hidden, weight, target = head(torch.float16, rows=256, classes=5000)
    oracle = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    plain(*oracle, target).backward()
    (linear_cross_entropy(hidden, weight, target, chunk_bytes="100KiB") * 2.0**12).backward()
    error = (weight.grad.double() / 2**12 - oracle[1].grad).norm() / oracle[1].grad.norm()
    assert error < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(dtype):
    hidden, weight, target = head(dtype)
    loss = linear_cross_entropy(hidden, weight, target, chunk_bytes=2000)
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    for mine, theirs in zip(torch.autograd.grad(loss * 3, (hidden, weight)), kept, strict=True):
        near(mine, theirs, BOUND[dtype])


@pytest.mark.parametrize("ignored", [False, True])
def test_an_estimate_on_fake_tensors_runs_it(ignored):
    tokens, target = batch()
    target = target if ignored else tokens
    estimate = memopt.estimate(Model(), (tokens, target), method="fake tensors", quick=True)
    assert estimate.peak_bytes and not estimate.error, estimate


def test_a_second_derivative_is_refused():
    hidden, weight, target = head()
    loss = linear_cross_entropy(hidden, weight, target)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


class Subclass(torch.Tensor):
    """A tensor whose operations are its own, as a DTensor's."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_of = data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": [1.0]}, TypeError, "hidden: expected a tensor"),
        ({"hidden": torch.ones(48, 16, dtype=torch.int64)}, TypeError, "hidden of torch.int64"),
        ({"hidden": torch.ones(48, 15)}, ValueError, "the weight's features"),
        ({"hidden": torch.ones(48, 16).bfloat16()}, TypeError, "expected one type"),
        ({"weight": torch.ones(16)}, ValueError, "expected \\(classes, features\\)"),
        ({"weight": torch.ones(300, 16).to_sparse()}, TypeError, "to_dense"),
        ({"weight": torch.ones(300, 16, device="meta")}, ValueError, "offload_layers"),
        ({"target": torch.zeros(48)}, TypeError, "convert it with .long"),
        ({"target": torch.zeros(47, dtype=torch.int64)}, ValueError, "target of shape"),
        ({"target": torch.full((48,), 300)}, ValueError, "expected 0 to 299"),
        ({"target": torch.full((48,), -1)}, ValueError, "48 of classes from -1"),
        ({"weight": Subclass(torch.ones(300, 16))}, TypeError, "weight is a Subclass"),
        ({"bias": torch.zeros(299)}, ValueError, "a number a class"),
        ({"reduction": "average"}, ValueError, "reduction 'average'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index 1.5"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing 1.5"),
        ({"softcap": -1.0}, ValueError, "softcap -1.0"),
        ({"softcap": float("nan")}, ValueError, "softcap nan"),
        ({"chunk_bytes": 0}, ValueError, "at least 1 byte"),
        ({"chunk_bytes": "lots"}, ValueError, "lots"),
    ],
)
def test_bad_input_is_named(change, error, words):
    hidden, weight, target = head()
    with pytest.raises(error, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **change})
