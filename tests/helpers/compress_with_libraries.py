"""memopt.compress with torchao and Torch-Pruning: started by test_compress_techniques.py where those are installed."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch_pruning
import torchao.quantization as ao
from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

sys.path.insert(0, str(Path(__file__).parent))

from compress_state import FailsAt, Residual, differences, kept, perceptron
from hypothesis import given, settings
from hypothesis import strategies as st

import memopt
from memopt.compress import _quantizing, duplicates, prune_, quantize_

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = {
    "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(set_inductor_config=False),
    "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "int4": lambda: PrototypeInt4WeightOnlyConfig(group_size=128, set_inductor_config=False),
}


def file_of(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


# ---- quantize_


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_model_is_the_librarys(method, dtype):
    torch.manual_seed(0)
    model = perceptron(128, 256, 32, dtype=dtype)
    expected = copy.deepcopy(model)
    ao.quantize_(expected, CONFIGS[method]())
    report = quantize_(model, method)
    x = torch.randn(4, 128, dtype=dtype)
    assert torch.equal(model(x), expected(x))
    assert type(model[0].weight) is type(expected[0].weight)
    assert list(report.changed) == ["0", "2"] and report.saved_bytes > 0
    assert report.after.disk_bytes == len(file_of(model.state_dict())) == len(file_of(expected.state_dict()))


def inner_bytes(model: nn.Module) -> int:
    """By hand: the tensors within torchao's."""
    total = 0
    for p in model.parameters():
        names = p.__tensor_flatten__()[0] if hasattr(p, "__tensor_flatten__") else []
        total += sum(getattr(p, name).untyped_storage().nbytes() for name in names) or p.nbytes
    return total


@pytest.mark.parametrize("method", CONFIGS)
def test_bytes_of_quantised_weights_are_those_of_the_tensors_within(method):
    """By elements a quantised weight is as large as it was: it shows the type that it computes in."""
    model = perceptron(128, 256, 32)
    by_elements = sum(p.numel() * p.element_size() for p in model.parameters())
    report = quantize_(model, method)
    assert report.before.memory_bytes == by_elements
    assert report.after.memory_bytes == inner_bytes(model) < by_elements
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == by_elements


def test_a_small_layer_may_grow_and_the_report_says_so():
    model = perceptron(2, 64, bias=False, dtype=torch.bfloat16)
    report = quantize_(model, "int8_weight_only")
    assert (
        report.saved_bytes == 64 * (2 * 2 - 2 - 4 - 1) and report.saved_on_disk_bytes < 0
    )  # values, scales, zero points
    assert "saved -192 B" in str(report)


def test_a_config_is_handed_on():
    torch.manual_seed(0)
    model = perceptron(64, 64)
    expected = copy.deepcopy(model)
    config = ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32), set_inductor_config=False)
    ao.quantize_(expected, config)
    quantize_(model, config)
    x = torch.randn(3, 64)
    assert torch.equal(model(x), expected(x))


def test_what_torchao_leaves_alone_is_not_said_to_be_changed():
    config = PrototypeInt4WeightOnlyConfig(group_size=64, set_inductor_config=False)
    model = perceptron(128, 32, 16)
    weight = model[2].weight
    report = quantize_(model, config)
    assert report.changed == ("0",) and "torchao leaves it" in report.skipped["2"]
    assert model[2].weight is weight and weight.requires_grad
    model = perceptron(32, 32)
    before = kept(model)
    with pytest.raises(ValueError, match="torchao leaves all layers"):
        quantize_(model, config)
    assert not differences(before, model)


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(2, 40), min_size=2, max_size=4),
    method=st.sampled_from(["int8_weight_only", "int8_dynamic"]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_small_perceptron_is_quantised_as_the_library_does(widths, method, bias, seed):
    torch.manual_seed(seed)
    model = perceptron(*widths, bias=bias)
    expected = copy.deepcopy(model)
    ao.quantize_(expected, CONFIGS[method]())
    report = quantize_(model, method)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert type(ours) is type(theirs), name
        for part in ours.__tensor_flatten__()[0] if hasattr(ours, "__tensor_flatten__") else []:
            assert torch.equal(getattr(ours, part), getattr(theirs, part))
    assert report.after.memory_bytes == inner_bytes(model) == report.before.memory_bytes - report.saved_bytes


@pytest.mark.parametrize("method", CONFIGS)
def test_a_quantised_model_is_pickled_copied_saved_and_loaded(method):
    model = perceptron(128, 256, 32)
    quantize_(model, method)
    x = torch.randn(3, 128)
    expected = model(x)
    # torchao's tensors hold members of enums, which early versions of Python 3.11 pickle by getattr.
    with torch.serialization.safe_globals([getattr]):
        state = torch.load(io.BytesIO(file_of(model.state_dict())))
    plain, twin = perceptron(128, 256, 32), perceptron(128, 256, 32)
    plain.load_state_dict(state, assign=True)
    quantize_(twin, method)
    twin.load_state_dict(state)
    whole = torch.load(io.BytesIO(file_of(model)), weights_only=False)
    for other in (plain, twin, whole, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)


def test_tied_layers_stay_tied_and_what_stays_beside_is_named():
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[2].weight
    quantize_(model, "int8_weight_only")
    assert model[1].weight is model[2].weight
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    report = quantize_(model, "int8_weight_only")
    assert report.saved_bytes < 0 and any("0.weight was tied to" in note for note in report.notes)


def test_int4_asks_what_the_devices_of_the_weights_can(monkeypatch):
    asked = []

    def capability(device=None):
        asked.append(device)
        return (7, 5) if device == torch.device("cuda", 1) else (9, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    with pytest.raises(NotImplementedError, match=r"cuda:1, of compute capability 7\.5"):
        _quantizing._config("int4", 128, {first, second}, "quantize_")
    assert asked == [first, second]
    assert type(_quantizing._config("int4", 128, {first}, "quantize_")) is ao.Int4WeightOnlyConfig


def test_layers_that_do_not_fit_int4_stay_and_are_named():
    model = perceptron(128, 96, 10)
    report = quantize_(model, "int4")
    assert report.changed == ("0",) and "group_size=32 would do" in report.skipped["2"]
    model = perceptron(128, 32, 10)
    assert "multiple of 16" in quantize_(model, "int4", group_size=32).skipped["2"]
    model = perceptron(128, 32, 10)
    for layers, words in (
        (["0", "2"], "'2' cannot be quantised"),
        (model, "'2' cannot be quantised"),
        ("2", "no layer can be quantised"),
    ):
        before = kept(model)
        with pytest.raises(ValueError, match=words):
            quantize_(model, "int4", layers=layers, group_size=32)
        assert not differences(before, model)


@pytest.mark.parametrize("method", CONFIGS)
def test_quantisation_that_fails_at_the_nth_layer_leaves_all_as_it_was(method, monkeypatch):
    for nth in range(10):
        model = perceptron(128, 128, 128, 128)
        model[0].weight.grad = torch.ones(128, 128)
        before = kept(model)
        with monkeypatch.context() as patched:
            failing = FailsAt(ao.quantize_, nth)
            patched.setattr(ao, "quantize_", failing)
            try:
                quantize_(model, method)
            except (RuntimeError, NotImplementedError) as error:
                assert "the library failed" in str(error)
                assert not differences(before, model)
            else:
                assert nth == failing.calls == 4  # a trial and three layers
                return
    raise AssertionError("it never succeeded")


def test_an_evaluation_that_fails_afterwards_takes_the_quantisation_back():
    model = perceptron(64, 64, 64)
    before, calls = kept(model), []

    def evaluate(m: nn.Module) -> float:
        calls.append(type(m[0].weight).__name__)
        return 1.0 / (2 - len(calls))

    with pytest.raises(ZeroDivisionError):
        quantize_(model, "int8_dynamic", evaluate=evaluate)
    assert calls == ["Parameter", "Int8Tensor"] and not differences(before, model)


def test_a_type_without_kernels_is_refused_before_anything_changes():
    model = perceptron(128, 64, dtype=torch.float64)
    before = kept(model)
    with pytest.raises(NotImplementedError, match="cpu has no kernels for it in float64"):
        quantize_(model, "int4")
    assert not differences(before, model)


def compiled() -> nn.Module:
    """As module.compile() leaves it, without the compiler that it loads."""
    model = perceptron(64, 64)
    model._compiled_call_impl = model._call_impl
    return model


def test_models_that_cannot_be_quantised_are_refused_and_unchanged(tmp_path):
    quantised = perceptron(64, 64)
    quantize_(quantised)
    masked = perceptron(64, 64)
    nn.utils.prune.l1_unstructured(masked[0], "weight", 0.5)
    cases = [
        (quantised, {}, ValueError, "Int8Tensor"),
        (torch.ao.quantization.quantize_dynamic(perceptron(8, 8)), {}, ValueError, "already quantised"),
        (masked, {}, ValueError, "prune.remove"),
        (perceptron(64, 64).to("meta"), {}, ValueError, "meta"),
        (nn.Sequential(nn.ReLU()), {}, ValueError, "has no linear layer"),
        (nn.Sequential(nn.Conv2d(3, 3, 3)), {"layers": "0"}, ValueError, "not a linear layer"),
        (perceptron(64, 64), {"layers": "5"}, ValueError, "no module '5'"),
        (perceptron(64, 64), {"method": "int3"}, ValueError, "int3"),
        (perceptron(64, 64), {"method": 8}, TypeError, "neither"),
        (perceptron(64, 64), {"method": None}, TypeError, "neither"),
        (perceptron(64, 64), {"group_size": 32}, ValueError, "int4"),
        (perceptron(64, 64), {"method": "int4", "group_size": 33}, ValueError, "group_size=33"),
        (perceptron(64, 64), {"method": "int4", "group_size": True}, TypeError, "group_size=True"),
        (compiled(), {}, ValueError, "compiled"),
        (torch.ones(3), {}, TypeError, "Module"),
    ]
    for model, arguments, kind, words in cases:
        before = kept(model) if isinstance(model, nn.Sequential) and "dynamic" not in str(model) else None
        with pytest.raises(kind, match=words):
            quantize_(model, **arguments)
        assert before is None or not differences(before, model)


def test_memopts_wrappers_are_refused_with_what_to_do_first(tmp_path):
    x = torch.randn(256, 64)
    offloaded, planned = perceptron(64, 64, 64), perceptron(64, 64, 64, 64, 64)
    handle = memopt.offload_layers(offloaded, to=str(tmp_path))
    memopt.auto_checkpoint(planned, x, memory_budget=planned_budget(planned, x))
    for model, words in ((offloaded, "remove"), (planned, "undo_checkpoint")):
        before = kept(model)
        with pytest.raises(ValueError, match=words):
            quantize_(model)
        with pytest.raises(ValueError, match=words):
            prune_(model, 0.5, "structured", sample=x)
        assert not differences(before, model)
    handle.remove()
    memopt.undo_checkpoint(planned)
    quantize_(offloaded)
    quantize_(planned)


def planned_budget(model: nn.Module, x: torch.Tensor) -> int:
    """A little more than the least, so that the plan recomputes."""
    try:
        memopt.auto_checkpoint(copy.deepcopy(model), x, memory_budget=1)
    except memopt.chain.InfeasibleBudget as error:
        return int(error.least_budget * 1.02)
    raise AssertionError("a byte was enough")


def test_a_checkpointed_function_around_the_model_trains_what_is_left():
    model = perceptron(64, 64, 64)
    quantize_(model, "int8_weight_only", layers="2")
    x = torch.randn(4, 64, requires_grad=True)
    memopt.checkpoint(model, x, use_reentrant=False).sum().backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(got, model[0].weight.grad) and x.grad is not None


RSS = """
import gc, os, sys, torch, memopt
from torch import nn

def resident():
    gc.collect()
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

if os.fork() == 0:  # what torchao says when it is imported
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
    import torchao.quantization
    os._exit(0)
os.wait()
small = nn.Sequential(nn.Linear(64, 64))
memopt.compress.quantize_(small, "int8_weight_only")  # what is loaded at first use is none of the model's
model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)])
before = resident()
report = memopt.compress.quantize_(model, "int8_weight_only")
print(before - resident(), report.saved_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_falls_by_what_is_reported_and_torchao_says_no_more_than_by_itself(tmp_path):
    heard = tmp_path / "torchao's own"
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }  # freed is given back
    done = subprocess.run(
        [sys.executable, "-c", RSS, str(heard)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    fell, saved = map(int, done.stdout.split())
    assert saved == 8 * 2048 * (2048 * 3 - 4 - 1)  # a byte for four, but a scale and a zero point a row
    assert abs(fell - saved) < saved / 5, (fell, saved)
    assert words(done.stderr) == words(heard.read_text())


def words(log: str) -> list[str]:
    """Without the times and process numbers of torch's log."""
    return [line.partition("]")[2] if line.startswith("W") else line for line in log.splitlines()]


# ---- prune_, structured


def forward(model: nn.Module, *shape: int) -> torch.Tensor:
    return model.eval()(torch.ones(shape))


def test_structured_pruning_shrinks_as_the_library_does():
    torch.manual_seed(0)
    model = Residual()
    expected = copy.deepcopy(model)
    x = torch.randn(2, 3, 16, 16)
    torch_pruning.pruner.BasePruner(
        expected,
        x,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[expected.head],
        in_channel_groups={},
        out_channel_groups={},
    ).step()
    model.train()
    report = prune_(model, 0.5, "structured", sample=x)
    assert model.training and model.drop.training
    assert [tuple(p.shape) for p in model.parameters()] == [tuple(p.shape) for p in expected.parameters()]
    assert torch.equal(model.eval()(x), expected.eval()(x))
    assert sorted(report.changed) == ["first", "head", "norm", "second", "third"]
    by_hand = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers()])
    assert report.after.memory_bytes == by_hand and report.saved_bytes > 0
    assert report.after.disk_bytes == len(file_of(model.state_dict()))


def test_bytes_of_structured_pruning_are_storages_and_not_elements():
    """Pruning a weight that views a larger storage frees nothing while others use that storage."""
    model = perceptron(8, 8, 8, bias=False)
    flat = torch.randn(10_000)
    model[0].weight = nn.Parameter(flat[:64].view(8, 8))
    model[2].weight = nn.Parameter(flat[64:128].view(8, 8))
    model.register_buffer("rest", flat[128:])
    report = prune_(model, 0.5, "structured", sample=torch.ones(1, 8))
    assert report.before.memory_bytes == 40_000
    assert report.after.memory_bytes == 40_000 + 2 * 4 * 8 * 4 and report.saved_bytes == -256


@settings(max_examples=12, deadline=None)
@given(
    widths=st.lists(st.integers(2, 24), min_size=3, max_size=5),
    amount=st.floats(0.05, 0.95),
    seed=st.integers(0, 1000),
)
def test_any_perceptron_keeps_its_inputs_and_outputs_or_is_left_alone(widths, amount, seed):
    torch.manual_seed(seed)
    model = perceptron(*widths)
    before = kept(model)
    x = torch.randn(3, widths[0])
    try:
        report = prune_(model, amount, "structured", sample=x)
    except ValueError as error:
        assert "nothing can be removed" in str(error)
        assert not differences(before, model)
        return
    assert model[0].in_features == widths[0] and model[-1].out_features == widths[-1]
    assert model(x).shape == (3, widths[-1])
    assert report.saved_bytes > 0 and model.training
    for module in model:
        if isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features)


def test_frozen_parameters_gradients_and_modes_are_kept():
    model = Residual()
    model.first.weight.requires_grad_(False)
    model.norm.eval()
    model.third.weight.grad = torch.ones_like(model.third.weight)
    prune_(model, 0.5, "structured", sample=torch.ones(2, 3, 8, 8))
    assert not model.first.weight.requires_grad and model.second.weight.requires_grad
    assert not model.norm.training and model.drop.training
    assert model.third.weight.grad.shape == model.third.weight.shape


def test_random_state_and_buffers_are_not_touched():
    model = Residual()
    mean = model.norm.running_mean.clone()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prune_(model, 0.5, "structured", sample=torch.ones(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.norm.running_mean, mean[:8]) and int(model.norm.num_batches_tracked) == 0


def test_a_forward_that_counts_its_calls_counts_none_of_these():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.b(self.a(x))

    model = Counting()
    prune_(model, 0.5, "structured", sample=torch.ones(1, 8))
    assert float(model.calls) == 0
    before = kept(model)
    with pytest.raises(ValueError, match="nothing can be removed"):
        prune_(model, 0.5, "structured", sample=torch.ones(1, 8), layers="b")
    assert not differences(before, model)


def test_samples_are_an_argument_a_tuple_or_keywords():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.c((self.a(x) + self.b(y)).relu())}

    x = torch.ones(1, 4)
    for sample in ((x, x), [x, x], {"x": x, "y": x}):
        model = Two()
        prune_(model, 0.5, "structured", sample=sample)
        assert model.a.out_features == model.b.out_features == model.c.in_features == 8


def test_a_batch_of_one_is_not_taken_for_a_list_of_arguments():
    model = perceptron(8, 16, 4)
    prune_(model, 0.5, "structured", sample=torch.ones(1, 8))
    assert model[0].out_features == 8


def test_transformers_keep_their_heads():
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
        nn.Linear(32, 5),
    )
    report = prune_(model, 0.5, "structured", sample=torch.ones(2, 7, 8))
    assert model[1].layers[0].linear1.out_features == 32 and report.saved_bytes > 0
    assert model(torch.ones(2, 7, 8)).shape == (2, 7, 5)


def test_named_layers_alone_lose_outputs():
    model = perceptron(8, 16, 16, 16, 4)
    report = prune_(model, 0.5, "structured", sample=torch.ones(1, 8), layers="2")
    assert [m.out_features for m in model if isinstance(m, nn.Linear)] == [16, 8, 16, 4]
    assert sorted(report.changed) == ["2", "4"]


def test_ties_stay_or_it_is_refused():
    model = perceptron(8, 16, 8, 16, 8)
    model[4].weight = model[0].weight
    before = kept(model)
    try:
        prune_(model, 0.5, "structured", sample=torch.ones(1, 8))
    except ValueError as error:
        assert "one parameter" in str(error) and not differences(before, model)
    else:
        assert model[4].weight is model[0].weight


def test_a_library_that_fails_at_the_nth_group_leaves_all_as_it_was(monkeypatch):
    group = torch_pruning.dependency.Group
    for nth in range(12):
        model = Residual()
        model.first.weight.requires_grad_(False)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = kept(model)
        with monkeypatch.context() as patched:
            patched.setattr(group, "prune", FailsAt(group.prune, nth))
            try:
                prune_(model, 0.5, "structured", sample=torch.ones(2, 3, 8, 8))
            except RuntimeError as error:
                assert "the library failed" in str(error)
                assert not differences(before, model)
            else:
                assert nth == 2  # the residual's group, and the third convolution's
                return
    raise AssertionError("it never succeeded")


def test_a_recurrent_model_is_as_it_was_after_an_evaluation_that_fails():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.head = nn.Linear(16, 32), nn.LSTM(32, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.first(x))[0])

    torch.manual_seed(0)
    model, x, calls = Recurrent(), torch.randn(5, 2, 16), []
    expected, before = model(x), kept(model)

    def evaluate(m: Recurrent) -> float:
        calls.append(m.first.out_features)
        return 1.0 / (2 - len(calls))

    with pytest.raises(ZeroDivisionError):
        prune_(model, 0.5, "structured", sample=x, layers="first", evaluate=evaluate)
    assert calls == [32, 16] and not differences(before, model)
    assert torch.equal(model(x), expected)


def test_one_that_fails_within_a_group_too(monkeypatch):
    pruner = torch_pruning.pruner.function.BasePruningFunc
    for nth in range(40):
        model = Residual()
        before = kept(model)
        with monkeypatch.context() as patched:
            patched.setattr(
                pruner, "_prune_parameter_and_grad", FailsAt(pruner._prune_parameter_and_grad, nth)
            )
            try:
                prune_(model, 0.5, "structured", sample=torch.ones(2, 3, 8, 8))
            except RuntimeError as error:
                assert "the library failed" in str(error)
                assert not differences(before, model)
            else:
                assert nth > 6
                return
    raise AssertionError("it never succeeded")


def test_models_that_cannot_lose_channels_are_refused_and_unchanged():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).detach()

    class Shaped(nn.Module):  # its forward knows the width
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) + torch.ones(8))

    masked = perceptron(8, 8, 8)
    nn.utils.prune.l1_unstructured(masked[0], "weight", 0.5)
    x = torch.ones(2, 8)
    cases = [
        (Detached(), x, ValueError, "no output of the model has a graph"),
        (Shaped(), x, RuntimeError, "size of tensor"),
        (masked, x, ValueError, "prune.remove"),
        (perceptron(8, 8, 8).to("meta"), x.to("meta"), ValueError, "meta"),
        (perceptron(8, 8), x, ValueError, "its channels are the model's output"),
        (nn.Sequential(nn.ReLU()), x, ValueError, "has no layer"),
        (perceptron(8, 8, 8), torch.ones(2, 9), RuntimeError, "shapes cannot be multiplied"),
        (perceptron(8, 8, 8), None, ValueError, "give it a sample"),
    ]
    for model, sample, kind, words in cases:
        before = kept(model)
        with pytest.raises(kind, match=words):
            prune_(model, 0.5, "structured", sample=sample)
        assert not differences(before, model), words
    quantised = perceptron(64, 64, 64)
    quantize_(quantised, layers="0")
    with pytest.raises(ValueError, match="Int8Tensor"):
        prune_(quantised, 0.5, "structured", sample=torch.ones(1, 64))


def test_nothing_keeps_the_model_afterwards():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3))
    prune_(model, 0.5, "structured", sample=torch.ones(1, 3, 8, 8))
    gone = weakref.ref(model[1])
    del model
    gc.collect()
    assert gone() is None


def test_what_is_pruned_is_quantised_trained_and_loaded():
    model = Residual()
    prune_(model, 0.5, "structured", sample=torch.ones(2, 3, 8, 8))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    other = pickle.loads(pickle.dumps(model))
    other.load_state_dict(model.state_dict())
    assert torch.equal(forward(model, 2, 3, 8, 8), forward(other, 2, 3, 8, 8))
    assert not duplicates(model).tied
    quantize_(model, "int8_weight_only")
    forward(model, 2, 3, 8, 8)
