"""memopt.estimate(): how a model crosses to another process, what fake tensors say of it, and what the simulated device
does, each against sums that are done here."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memopt
from memopt._estimate import model as model_estimate
from memopt._estimate import serialization
from memopt._estimate.interpreters import NoInterpreter
from memopt._runtime.process import ChildFailed

MIB, GIB = 1 << 20, 1 << 30
FAKE, SIMULATED = "fake tensors", "simulated device"
WIDTH, ROWS = 256, 64


@pytest.fixture
def cuda_python(request):
    return request.config.getoption("--sim-python")


def chain(layers=4, **more):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, **more) for _ in range(layers)])


def fake(*arguments, **more):
    return memopt.estimate(*arguments, method=FAKE, **more)


def middle(found):
    """Of the range, what was counted."""
    low, high = found.peak
    return (low + high - (17 << 20)) // 2


def about(size):
    """Ends of a range are rounded down, each."""
    return pytest.approx(size, abs=2)


# ---- crossing ---------------------------------------------------------------------------------------------------


def crossed(thing):
    return serialization.loads(serialization.dumps(thing), "cpu")


def test_parameters_cross_as_shapes_and_stay_what_they_are():
    model = chain()
    model[3].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    content = serialization.dumps(model)
    assert len(content) < 8 << 10 < 4 * WIDTH * WIDTH
    made = serialization.loads(content, "cpu")
    assert made[3].weight is made[0].weight and isinstance(made[0].weight, nn.Parameter)
    assert [p.shape for p in made.parameters()] == [p.shape for p in model.parameters()]
    assert not made[1].weight.requires_grad and made[2].weight.requires_grad


def test_views_share_their_memory_on_the_other_side():
    base = torch.empty(6, 4)
    one, two, turned = crossed((base[2:4], base[:, 1], base.t()))
    assert one.untyped_storage()._cdata == two.untyped_storage()._cdata == turned.untyped_storage()._cdata
    assert one.storage_offset() == 8 and two.stride() == (4,) and turned.shape == (4, 6)
    assert one.untyped_storage().nbytes() == 96


def test_whole_numbers_cross_with_their_values_and_floats_do_not():
    ids, mask, few = torch.arange(1000).view(10, 100), torch.tensor([True, False]), torch.tensor([2.5, -1.0])
    made = crossed((ids, ids[3], mask, few, torch.zeros(0, dtype=torch.int64)))
    assert torch.equal(made[0], ids) and torch.equal(made[1], ids[3])
    assert torch.equal(made[2], mask) and torch.equal(made[3], few) and made[4].shape == (0,)
    assert len(serialization.dumps(torch.full((1000, 1000), 7.0))) < 1 << 10


def test_an_optimizer_keeps_its_parameters():
    model = chain(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    other, made = crossed((model, optimizer))
    assert made.param_groups[0]["params"][1] is other[1].weight and made.param_groups[0]["lr"] == 0.5
    assert made.state[other[0].weight]["exp_avg"].shape == (WIDTH, WIDTH)


def test_what_cannot_cross_is_said():
    for thing, said in (
        (torch.eye(3).to_sparse(), "sparse"),
        (threading.Lock(), "lock"),
    ):
        with pytest.raises(serialization.NotSerializable, match=said):
            serialization.dumps(thing)


def test_without_cloudpickle_what_is_in_main_is_named_with_the_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    try:
        plain = importlib.reload(serialization)
        assert not plain.BY_VALUE

        def build():
            return 1

        build.__module__, build.__qualname__ = "__main__", "build"
        with pytest.raises(plain.NotSerializable, match=r"build is defined in __main__.*memopt\[estimate\]"):
            plain.dumps(build)
        assert len(plain.loads(plain.dumps(chain()), "cpu")) == 4
    finally:
        monkeypatch.undo()
        importlib.reload(serialization)


# ---- fake tensors -----------------------------------------------------------------------------------------------


def test_the_forward_alone_is_the_parameters_the_sample_and_two_layers():
    found = fake(chain(), torch.ones(ROWS, WIDTH), train=False)
    assert middle(found) == about(4 * (4 * WIDTH * WIDTH + 3 * ROWS * WIDTH))
    assert found.by_category["parameters"] == 4 * 4 * WIDTH * WIDTH
    assert found.method == FAKE and "the less accurate method" in str(found) and "not measured" in str(found)


def test_a_step_of_adam_has_its_states_and_all_activations():
    found = fake(chain(8), torch.ones(ROWS, WIDTH), optimizer=torch.optim.AdamW)
    weight, layer = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    assert found.steps == 3
    assert found.by_category["parameters"] == 8 * weight
    assert 3 * 8 * weight <= found.by_category["optimizer"] <= 3 * 8 * weight + 16 * 512
    # Most is there in a step, which goes over all at once: parameters, gradients, two states, a square root.
    assert 40 * weight <= middle(found) <= 40 * weight + 3 * layer + 16 * 512


def test_a_model_of_any_size_takes_no_memory_here():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(8)])
    found = fake(model, torch.ones(1, 1 << 16), optimizer=torch.optim.AdamW)
    assert found.by_category["parameters"] == 8 * (4 << 32) and found.peak[0] > 400 * GIB
    assert not found.fits("b200")


def test_attention_and_dropout_keep_what_cuda_keeps():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 1024, 64))

        def forward(self, x):
            q = x * self.weight
            return functional.dropout(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1), 0.1)

    found = fake(Attention(), torch.ones(2, 4, 1024, 64))
    one = 2 * 4 * 1024 * 64
    # With the scores, 2 * 4 * 1024 * 1024 of them, it would be more than 32 MiB by far.
    assert middle(found) < 12 * 4 * one < 32 * MIB


def test_what_the_backward_pass_runs_again_is_what_was_run():
    class Attention(nn.Module):
        def forward(self, x):
            return functional.scaled_dot_product_attention(x, x, x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.attention = nn.Parameter(torch.ones(64)), Attention()

        def forward(self, x):
            x = x * self.weight
            for _ in range(2):
                x = checkpoint(self.attention, x, use_reentrant=False)
            return x

    assert fake(Checkpointed(), torch.ones(2, 4, 64, 64), optimizer=torch.optim.SGD).steps == 3


def test_lines_are_the_users():
    def forward(x):
        return (x * weight).square().sum()

    weight = torch.ones(1 << 20, requires_grad=True)
    found = fake(forward, torch.ones(1 << 20), optimizer=torch.optim.SGD)
    names = {line["name"].rsplit("/", 1)[-1] for line in found.by_line}
    first = forward.__code__.co_firstlineno + 1
    assert f"test_model_estimate.py:{first}" in names
    assert not any("estimate(" in line["text"] for line in found.by_line)


def build():
    return chain(), torch.ones(ROWS, WIDTH), torch.optim.Adam


def build_for_itself():
    model, sample, optimizer = build()
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        model(sample).sum().backward()
        steps.step()
        steps.zero_grad()


def test_the_same_training_in_any_form_takes_the_same():
    model, sample, optimizer = build()
    expected = fake(model, sample, optimizer=optimizer)
    instance = optimizer(model.parameters(), lr=0.1)

    def train():
        for _ in range(3):
            model(sample).sum().backward()
            instance.step()
            instance.zero_grad()

    forms = [
        fake(train),
        fake(model, (sample,), optimizer=instance),
        fake(model, {"input": sample}, optimizer=functools.partial(optimizer, lr=0.1)),
        fake(lambda x: model(x).sum(), sample, optimizer=optimizer),
        fake(model, sample, optimizer=optimizer, loss=torch.sum),
        fake(build),
        fake(build_for_itself),
        fake(f"{__name__}:build"),
    ]
    for form in forms:
        assert form.peak == pytest.approx(expected.peak, rel=0.15), form
        for category in ("parameters", "optimizer"):
            assert form.by_category.get(category) == expected.by_category.get(category), form


def test_nothing_here_is_changed():
    model = chain().eval()
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    random = torch.get_rng_state()
    fake(model, torch.ones(ROWS, WIDTH), optimizer=optimizer)
    assert [p is q for p, (q, _) in zip(model.parameters(), parameters, strict=True)] == [True] * 4
    assert all(torch.equal(p, before) and p.grad is None for p, before in parameters)
    assert not model.training and not optimizer.state
    assert torch.equal(random, torch.get_rng_state())


THREADS = """\
import os, sys, torch, memopt

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return grad, None

def refused():
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 3 << 8

def estimate():
    model = torch.nn.Linear(64, 64, bias=False)
    return memopt.estimate(model, torch.ones(8, 64), optimizer=torch.optim.SGD, method="fake tensors").peak_bytes

before = estimate()
assert not refused()
Nested.apply(torch.ones(1, requires_grad=True), 100).sum().backward()  # nested over 60 times: in a thread of their own
assert refused()
assert estimate() == before
"""


def test_a_process_whose_backward_passes_have_started_threads():
    subprocess.run([sys.executable, "-c", THREADS], check=True)


def test_what_compiling_has_left_in_this_process_is_not_counted():
    """Fake tensors of other modes, of symbolic shapes at that."""
    expected = middle(fake(chain(), torch.ones(ROWS, WIDTH), optimizer=torch.optim.SGD))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    left = mode.from_tensor(
        torch.ones(64, 1 << 16),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC]),
    )
    assert not isinstance(left.untyped_storage().nbytes(), int)
    assert middle(fake(chain(), torch.ones(ROWS, WIDTH), optimizer=torch.optim.SGD)) == expected


def test_code_that_asks_for_cuda_gets_it():
    def train(x):
        x = x.cuda().to("cuda:0").to(device=torch.device("cuda"))
        weight = torch.ones(WIDTH, device="cuda", requires_grad=True)
        return (x * weight).sum()

    assert middle(fake(train, torch.ones(ROWS, WIDTH))) > 4 * ROWS * WIDTH


def test_fits_and_the_largest_batch():
    found = fake(chain(), torch.ones(ROWS, WIDTH), optimizer=torch.optim.SGD, card="1GiB")
    assert found.verdict == "fits" and found.fits("24GiB") and found.fits(1 << 40)
    best = found.max_batch_size("1GiB")
    limit = memopt._estimate.cards.card("1GiB")
    for count, fits in ((best, True), (best + 1, False)):
        again = fake(chain(), torch.ones(count, WIDTH), optimizer=torch.optim.SGD)
        assert again.fits(limit) is fits, count
    assert "<table>" in found._repr_html_() and "fake tensors" in found._repr_html_()
    tight = fake(chain(), torch.ones(best + best // 20, WIDTH), optimizer=torch.optim.SGD, card="1GiB")
    assert tight.verdict == "unsure" and "UNSURE" in str(tight)


def test_batches_of_a_sample_are_resized_by_its_first_dimension():
    sample = {"ids": torch.arange(6).view(3, 2), "x": torch.ones(3, 5), "mask": torch.ones(2, 2), "n": 3}
    assert model_estimate.batch_of(sample) == 3 and model_estimate.batch_of((7, "a")) is None
    made = model_estimate.resized(sample, 3, 5)
    assert made["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert made["x"].shape == (5, 5) and made["x"].is_meta and made["mask"] is sample["mask"]


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        ((3,), {}, "not int"),
        ((nn.Linear(2, 2),), {}, "pass sample="),
        (("build",), {}, "name of a function"),
        ((build,), {"amp": "int4"}, "amp='int4'"),
        ((build,), {"method": "guess"}, "method='guess'"),
        ((build,), {"steps": 0}, "steps=0"),
        ((build,), {"backend": "jemalloc"}, "backend='jemalloc'"),
        ((build,), {"card": "rtx4091"}, "did you mean rtx4090"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(arguments, more, said):
    with pytest.raises((ValueError, TypeError), match=said):
        memopt.estimate(*arguments, **more)


def test_a_training_that_fails_is_said_with_its_own_lines():
    def fails(x):
        return x @ torch.ones(3, 3)

    with pytest.raises(ChildFailed, match=r"(?s)does not run on fake tensors.*in fails"):
        fake(fails, torch.ones(2, 2))
    with pytest.raises(ChildFailed, match="must return"):
        fake(lambda: nn.Linear(2, 2))
    with pytest.raises(ChildFailed, match="requires a gradient: pass train=False"):
        fake(lambda x: x * 2, torch.ones(2))
    with pytest.raises(ChildFailed, match="No module named 'nothing'"):
        fake("nothing:build")


def test_a_training_that_ends_its_process_does_not_end_this_one():
    with pytest.raises(ChildFailed, match="SIGKILL"):
        fake(lambda x: os.kill(os.getpid(), signal.SIGKILL), torch.ones(2))
    with pytest.raises(ChildFailed, match="took more than 0 s"):
        fake(lambda x: threading.Event().wait(), torch.ones(2), seconds=0.1)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_without_a_cuda_build_it_is_fake_tensors_that_answer_and_say_why():
    found = memopt.estimate(chain(), torch.ones(ROWS, WIDTH))
    assert found.method == FAKE and any("CPU build of torch" in text for text in found.unmodelled)
    with pytest.raises(NoInterpreter, match="CPU build of torch"):
        memopt.estimate(chain(), torch.ones(ROWS, WIDTH), method=SIMULATED)


def test_a_python_that_cannot_do_it_is_named():
    for python in ("/nothing/python", "false", "true", "echo"):
        with pytest.raises(NoInterpreter, match=python):
            memopt.estimate(chain(), torch.ones(ROWS, WIDTH), python=python)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's code")
def test_a_python_whose_torch_is_a_cpu_build_is_named():
    with pytest.raises(NoInterpreter, match="python.*CPU build of torch"):
        memopt.estimate(chain(), torch.ones(ROWS, WIDTH), python=sys.executable)


# ---- the simulated device ---------------------------------------------------------------------------------------


def test_both_ways_agree_and_what_cannot_cross_goes_the_other(cuda_python, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])\n"
        "    def forward(self, x):\n"
        "        return self.layers(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_models")
    model, sample = module.Net(), torch.ones(512, 1024)
    simulated = memopt.estimate(
        model, sample, optimizer=torch.optim.AdamW, python=cuda_python, quick=True, card="24GiB"
    )
    assert simulated.method == SIMULATED and simulated.verdict == "fits" and simulated.fits("16GiB")
    faked = fake(model, sample, optimizer=torch.optim.AdamW)
    assert faked.peak[0] <= simulated.peak_bytes[0] <= faked.peak[1]
    assert simulated.by_category["parameters"] == faked.by_category["parameters"] == 32 * MIB
    assert simulated.by_category["optimizer"] == pytest.approx(faked.by_category["optimizer"], rel=0.01)
    locked = types.MethodType(lambda self, x: model(x), threading.Lock())
    found = memopt.estimate(locked, sample, python=cuda_python, quick=True)
    assert found.method == FAKE and any("lock" in text for text in found.unmodelled)
