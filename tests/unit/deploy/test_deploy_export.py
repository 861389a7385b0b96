"""memopt.deploy.export: the file gives what the live model gives, without what memopt has put on the model; and the
figures are those of the file and of the storages."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import memopt
from memopt.deploy import export
from memopt.deploy._plain_model import plain_model

SOAK = os.environ.get("MEMOPT_SOAK") == "1"
FORMATS = ("torchscript", "pt2")
FIRST = FORMATS if SOAK else FORMATS[:1]  # where the format makes little difference


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


class TiedModel(nn.Module):
    """Embedding and head are one tensor; a buffer shows a part of its storage."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(blocks))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(1, 2, 1000)[:50])

    def forward(self, ids, offset=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out = self.head(x) * self.scale
        return {"logits": out if offset is None else out + offset, "hidden": x}


class Checkpointed(nn.Module):
    """Both kinds of regions, in each way that they can be written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.inner = memopt.checkpoint(use_reentrant=False)(nn.Linear(16, 16))

    @memopt.checkpoint(use_reentrant=False)
    def forward(self, x):
        h = memopt.checkpoint(lambda y: torch.relu(self.norm(self.first(y))), x, use_reentrant=False)
        h = self.inner(h)
        return memopt.checkpoint(torch.tanh, h, use_reentrant=True)


def ids(batch: int = 3) -> torch.Tensor:
    return torch.randint(0, 50, (batch, 7), generator=torch.Generator().manual_seed(batch))


def state_of(model: nn.Module) -> object:
    """All that export() might change."""
    modules = [
        (name, m.training, sorted(m.__dict__), dict(m.__dict__.get("_forward_pre_hooks", {})))
        for name, m in model.named_modules()
    ]
    held = {
        id(t): (t._version, t.data_ptr(), t.detach().clone()) for t in (*model.parameters(), *model.buffers())
    }
    return modules, held, torch.get_rng_state()


def assert_unchanged(before, after) -> None:
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for key, (version, address, values) in before[1].items():
        assert (version, address) == after[1][key][:2] and torch.equal(values, after[1][key][2])
    assert torch.equal(before[2], after[2])


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(*args, **kwargs, measure=False)


def files_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


# ---- what is on the model is not in the file -------------------------------------------------------------------------


def auto_checkpointed() -> nn.Module:
    model = TiedModel()
    with pytest.raises(memopt.chain.InfeasibleBudget) as refused:
        memopt.auto_checkpoint(model, ids(24), memory_budget=1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    model = memopt.auto_checkpoint(model, ids(24), memory_budget=least)
    assert not model.plan.keeps_all
    return model


@pytest.mark.parametrize("format", FORMATS)
def test_an_auto_checkpointed_model_is_exported_plain(format, tmp_path):
    model = auto_checkpointed().eval()
    plain = TiedModel().eval()
    plain.load_state_dict(model.state_dict())
    before = state_of(model)
    made = quietly(model, ids(), tmp_path / "model", format, dynamic_batch=True)
    assert_unchanged(before, state_of(model))
    assert made.taken_off == ["auto_checkpoint"]
    assert [one.difference for one in made.checks] == [0, 0, 0]
    assert [one.sample.split(", ")[-1] for one in made.checks] == ["7]", "7]", "7]"]
    found = load(format, tmp_path / "model")(ids(11))
    with torch.no_grad():
        expected = plain(ids(11))
    assert torch.equal(found["logits"], expected["logits"]) and torch.equal(
        found["hidden"], expected["hidden"]
    )


def load(format: str, path: Path):
    return torch.jit.load(path) if format == "torchscript" else torch.export.load(path).module()


@pytest.mark.parametrize("format", FORMATS)
def test_regions_of_both_kinds_are_calls(format, tmp_path):
    model = Checkpointed().eval()
    x = torch.randn(4, 8)
    before = state_of(model)
    made = quietly(model, x, tmp_path / "model", format, dynamic_batch=True)
    assert_unchanged(before, state_of(model))
    assert made.taken_off == ["checkpoint"] and [one.difference for one in made.checks] == [0, 0, 0]
    names = load(format, tmp_path / "model").state_dict()
    assert {"first.weight", "inner.weight", "norm.running_mean"} <= set(names)


def test_an_offloaded_model_is_exported_where_its_parameters_live(tmp_path):
    model = TiedModel().eval()
    handle = memopt.offload_layers(model, tmp_path)
    before = state_of(model)
    made = quietly(model, ids(), tmp_path / "model.pt")
    assert_unchanged(before, state_of(model))
    assert made.taken_off == ["offload_layers"] and made.checks[0].difference == 0
    model(ids())["logits"].sum().backward()  # it is offloaded still, and trains
    handle.remove()


def test_a_copy_shares_tensors_and_leaves_what_it_was_made_of_alone():
    model = auto_checkpointed()
    plain = plain_model(model)
    assert [id(p) for p in plain.module.parameters()] == [id(p) for p in model.parameters()]
    assert not {id(m) for m in plain.module.modules()} & {id(m) for m in model.modules()}
    assert plain.module.head.weight is plain.module.embedding.weight
    assert all("forward" not in m.__dict__ for m in plain.module.modules())
    assert not hasattr(plain.module, "plan") and hasattr(model, "plan")


def test_wrappers_of_torch_come_off():
    inside = TiedModel().eval()
    compiled = torch.compile(inside, backend="eager")
    assert plain_model(compiled).taken_off == ["OptimizedModule"]
    outside = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"))
    plain = plain_model(outside)
    assert type(plain.module[0]) is nn.Linear and plain.taken_off == ["OptimizedModule"]
    parallel = nn.DataParallel(inside)
    assert type(plain_model(parallel).module) is TiedModel


def test_one_rank_of_many_exports_alone(tmp_path, monkeypatch):
    """A broadcast that all other ranks would have to receive."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        model = nn.Sequential(nn.parallel.DistributedDataParallel(inside))
        broadcast = []
        monkeypatch.setattr(dist, "_broadcast_coalesced", lambda *_: broadcast.append(1))
        made = quietly(model, torch.randn(2, 4), tmp_path / "model.pt")
        assert made.checks[0].difference == 0 and broadcast == []
        model(torch.randn(2, 4))  # as before
        assert broadcast
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("format", FIRST)
def test_masks_become_part_of_the_weights(format, tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[2], "weight", 0.5, n=2, dim=0)
    sample = torch.randn(2, 16)
    before = state_of(model)
    made = quietly(model, sample, tmp_path / "model", format)
    assert_unchanged(before, state_of(model))
    assert made.taken_off == ["pruning masks"] and made.checks[0].difference == 0
    stored = load(format, tmp_path / "model").state_dict()
    assert sorted(stored) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(stored["0.weight"], model[0].weight) and int((stored["0.weight"] == 0).sum()) == 256
    assert made.parameters == 4 * (16 * 32 + 32 + 32 * 4 + 4)


# ---- how it is called ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FIRST)
def test_arguments_by_name(format, tmp_path):
    model = TiedModel(1).eval()
    sample = {"ids": ids(), "offset": torch.ones(3, 1, 1)}
    made = quietly(model, sample, tmp_path / "model", format, dynamic_batch=True, samples=[{**sample}])
    assert len(made.checks) == 4 and all(one.difference == 0 for one in made.checks)
    run = load(format, tmp_path / "model")
    found = run(ids=ids(5), offset=torch.zeros(5, 1, 1))["logits"]
    with torch.no_grad():
        assert torch.equal(found, model(ids(5))["logits"])


def test_a_dynamic_batch_from_a_sample_of_one(tmp_path):
    made = quietly(TiedModel(1).eval(), ids(1), tmp_path / "model.pt2", dynamic_batch=True)
    assert [one.sample.split("[")[1] for one in made.checks] == ["1, 7]", "2, 7]"]
    assert torch.export.load(made.path).module()(ids(9))["logits"].shape == (9, 7, 50)


def test_the_models_own_mode_goes_by_module(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train()
    model[0].eval()
    sample = torch.randn(2, 4)
    before = state_of(model)
    quietly(model, sample, tmp_path / "model.pt")
    assert_unchanged(before, state_of(model))
    assert [m.training for m in model.modules()] == [True, False, True]


def test_the_deprecation_is_seen_at_the_line_that_asked_and_in_the_report(tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = export(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "model.pt", measure=False)
    deprecated = [one for one in said if issubclass(one.category, DeprecationWarning)]
    assert any("torch.jit.trace" in str(one.message) for one in deprecated)
    assert {one.filename for one in deprecated} == {__file__}
    assert "torch.jit.trace" in str(made) and "torch.jit.trace" in made._repr_html_()


def test_without_a_path_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = quietly(nn.Linear(2, 2), torch.ones(1, 2), format="torchscript")
    assert made.path is None and made.size > 0 and files_of(tmp_path) == []
    assert torch.is_tensor(made.program(torch.ones(1, 2)))
    assert "not saved" in str(made)


class Counting(nn.Module):
    """Its buffer counts the calls, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor([3.0]))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


@pytest.mark.parametrize("format", FIRST)
def test_a_model_that_counts_its_calls_begins_where_it_was(format, tmp_path):
    model = Counting()
    before = state_of(model)[1]
    made = quietly(model, torch.ones(2, 2), tmp_path / "model", format, samples=[torch.ones(2, 2)] * 2)
    assert [one.difference for one in made.checks] == [0, 0, 0]
    assert float(model.calls) == 3 and state_of(model)[1].keys() == before.keys()
    run = load(format, tmp_path / "model")
    assert [float(run(torch.ones(2, 2))[0, 0]) for _ in range(2)] == [4, 5]


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ],
)
def test_weights_that_are_made_at_each_call(norm, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU()).eval()
    made = quietly(model, torch.randn(2, 8), tmp_path / "model.pt")
    assert made.checks[0].difference == 0
    model(torch.randn(2, 8)).sum().backward()  # what it is made of is still there
    assert any(p.grad is not None for p in model.parameters())


def test_within_inference_mode(tmp_path):
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        made = quietly(model, torch.ones(1, 4), tmp_path / "model.pt")
    assert made.checks[0].difference == 0


# ---- the figures -----------------------------------------------------------------------------------------------------


def counted(model: nn.Module) -> tuple[int, int]:
    """Bytes of storages by address, and what their tensors' elements would take."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(),)}
    beside = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.buffers()}
    return sum(held.values()), sum(size for place, size in beside.items() if place not in held)


def test_bytes_are_those_of_storages_and_of_the_file(tmp_path):
    model = TiedModel(2).eval()
    wide = torch.randn(32, 64)
    model.blocks[0].norm.weight = nn.Parameter(wide[0, :32])  # a view: it keeps all of it alive
    made = quietly(model, ids(), tmp_path / "model.pt")
    assert (made.parameters, made.buffers) == counted(model)
    elements = sum(p.numel() * p.element_size() for p in model.parameters())
    assert made.parameters == elements + wide.nbytes - 128 and made.buffers == 4000
    assert made.size == os.path.getsize(tmp_path / "model.pt") and made.files == [
        (tmp_path / "model.pt", made.size)
    ]


@pytest.mark.parametrize("ending", ["pt", "pt2"] if SOAK else ["pt"])
def test_inferences_memory_is_measured_in_a_process_of_its_own(ending, tmp_path):
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = export(model, torch.randn(2, 2048), tmp_path / f"model.{ending}")
    weights, memory = 2 * 2048 * 2048 * 4, made.memory
    assert memory is not None, made.not_measured
    # Beside the weights there are a sample, two outputs, and what a kernel of this processor works in.
    assert weights <= memory.live_bytes < 2 * weights and made.peak_bytes == memory.live_bytes
    assert memory.resident_bytes < weights + (256 << 20) and memory.imports_bytes > 0 and memory.seconds > 0
    if (
        SOAK
    ):  # each weight has been read, so its page is resident, unless the kernel takes others' away meanwhile
        assert weights <= memory.resident_bytes and memory.live_bytes <= memory.resident_bytes
    assert weights <= made.size_bytes < weights + (1 << 20)


def test_a_file_that_runs_in_no_other_process_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = export(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "model.pt")
    assert made.memory is None and made.peak_bytes is None and "ended with status 1" in made.not_measured
    assert "not measured" in str(made) and made.path.exists()


def test_gradients_and_training_go_on(tmp_path):
    model = auto_checkpointed().train()
    twin = copy.deepcopy(plain_model(model).module)
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.eval()
    for m in twin.modules():
        m.training = not isinstance(m, nn.Dropout)
    model(ids())["logits"].sum().backward()
    first = [p.grad.clone() for p in model.parameters()]
    quietly(model, ids(), tmp_path / "model.pt")
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))
    model(ids())["logits"].sum().backward()
    twin(ids())["logits"].sum().backward()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad * 2)
