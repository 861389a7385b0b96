"""offload_layers without a GPU: what a layer is, what is refused, and a model on the CPU whose parameters are the pages
of a file."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt._offload import host_parameters
from memopt._offload.layer_residency import PrefetchOrder
from memopt._offload.model_layers import find_layers
from memopt.chain import InfeasibleBudget
from tests.helpers.offloaded_models import Block, Transformer, loss_of, words_of

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- layers ----------------------------------------------------------------------------------------------------------


def names(model: nn.Module, layers: object = None) -> list[str]:
    return [layer.name for layer in find_layers(model, layers)]


def test_blocks_are_layers_and_so_is_what_is_around_them() -> None:
    model = Transformer(blocks=3)
    assert names(model) == ["", "embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    own = find_layers(model)[0]
    assert [slot.name for slot in own.slots] == ["position"] and not own.whole


def test_every_parameter_is_in_a_layer() -> None:
    encoder_decoder = nn.Transformer(16, 2, 3, 2, 32, batch_first=True)
    nested = nn.Sequential(
        nn.Sequential(Block(8), Block(8)), nn.Sequential(*(Block(8) for _ in range(4))), nn.Linear(8, 8)
    )
    alone = nn.Linear(3, 3)
    for model in (Transformer(), encoder_decoder, nested, alone, nn.LSTM(4, 4)):
        found = {id(p) for layer in find_layers(model) for p in layer.parameters()}
        assert found == {id(p) for p in model.parameters()}
    assert names(alone) == [""]
    assert names(encoder_decoder)[:4] == [
        "encoder.layers.0",
        "encoder.layers.1",
        "encoder.layers.2",
        "encoder.norm",
    ]
    assert names(nested) == ["0.0", "0.1", "1.0", "1.1", "1.2", "1.3", "2"]


def test_layers_may_be_named() -> None:
    model = Transformer(blocks=3)
    assert names(model, ["blocks"]) == ["", "embedding", "blocks", "norm", "head"]
    assert names(model, model.blocks) == names(model)
    assert "blocks.1.mlp" in names(model, [model.blocks[1].mlp])
    assert names(model, [model]) == [""]
    for wrong, message in ((["nothing"], "'nothing'"), ([nn.Linear(1, 1)], "not a module of the model")):
        with pytest.raises(ValueError, match=message):
            find_layers(model, wrong)
    with pytest.raises(ValueError, match="within 'blocks'"):
        find_layers(model, ["blocks", "blocks.1"])


def test_an_order_is_learned_and_mended() -> None:
    order: PrefetchOrder[str] = PrefetchOrder("abcd")

    def predicted(calls: str) -> list[str]:
        order.begin()
        found = []
        for call in calls:
            order.saw(call)
            found.append("".join(order.ahead())[:1])
        return found

    assert predicted("abcd") == ["b", "c", "d", ""]
    assert predicted("abdc") == ["b", "c", "", "d"]
    assert predicted("abdc") == ["b", "d", "c", ""]
    assert predicted("aabd")[0] == "b"
    assert predicted("aabd") == ["a", "b", "d", ""]
    assert predicted("bd") == ["d", ""]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_offloaded_is_refused_before_anything_changes(tmp_path: Path) -> None:
    class Subclass(torch.Tensor):
        pass

    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    compiled = nn.Linear(2, 2)
    compiled.compile()
    sparse, odd, shared = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    odd.weight = nn.Parameter(torch.eye(2).as_subclass(Subclass))
    shared[0].weight.data = shared[1].weight.data
    cases = [
        (parametrized, "parametrizations"),
        (compiled, "compiled"),
        (torch.compile(nn.Linear(2, 2)), "compiled"),
        (sparse, "sparse"),
        (odd, "Subclass"),
        (shared, "share memory"),
        (nn.LazyLinear(2), "no shape yet"),
        (nn.Linear(2, 2, device="meta"), "meta"),
        (nn.DataParallel(nn.Linear(2, 2)), "offload the module inside"),
        (torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (nn.ReLU(), "no parameters"),
    ]
    for model, message in cases:
        whole = nn.Sequential(model)
        before = [
            p.data_ptr() if p.layout is torch.strided and not hasattr(p, "materialize") else 0
            for p in whole.parameters()
        ]
        with pytest.raises(ValueError, match=message):
            memopt.offload_layers(whole, tmp_path)
        assert before == [
            p.data_ptr() if p.layout is torch.strided and not hasattr(p, "materialize") else 0
            for p in whole.parameters()
        ]
        assert not any("_call_impl" in module.__dict__ for module in whole.modules())
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        memopt.offload_layers([nn.Linear(2, 2)], tmp_path)
    model = nn.Linear(2, 2)
    for where in ("gpu", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="a directory"):
            memopt.offload_layers(model, where)
    with pytest.raises(ValueError, match="largest layer"):
        memopt.offload_layers(model, tmp_path, memory_budget=3)
    with pytest.raises(ValueError, match="at most 1"):
        memopt.offload_layers(model, tmp_path, memory_budget=1.5)
    handle = memopt.offload_layers(model, tmp_path)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(ValueError, match="already offloaded"):
            memopt.offload_layers(again, tmp_path)
    handle.remove()


def test_what_does_not_go_with_a_plan_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
    x = torch.randn(256, 32)
    standing = sum(p.nbytes for p in model.parameters()) * 2 + x.nbytes
    budget = standing + 8 * x.nbytes  # of the 12 outputs that a plain step keeps
    memopt.auto_checkpoint(model, x, memory_budget=budget)
    assert not model.plan.keeps_all
    with pytest.raises(ValueError, match=r"undo_checkpoint\(model\), then offload_layers"):
        memopt.offload_layers(model, tmp_path)
    assert not any("_call_impl" in module.__dict__ for module in model.modules())
    memopt.undo_checkpoint(model)
    handle = memopt.offload_layers(model, tmp_path)
    for other in (nn.Sequential(model), model[0]):
        with pytest.raises(ValueError, match="give both the same one"):
            memopt.auto_checkpoint(other, x, memory_budget=budget)
        assert not hasattr(other, "plan")
    memopt.auto_checkpoint(model, x, memory_budget=budget)
    with pytest.raises(RuntimeError, match=r"undo_checkpoint\(model\) before"):
        handle.remove()
    assert not model.plan.keeps_all
    model(x).sum().backward()
    memopt.undo_checkpoint(model)
    assert handle.remove() is model
    assert all(module.__dict__.keys().isdisjoint({"_call_impl", "forward"}) for module in model.modules())
    model(x).sum().backward()


def test_on_the_cpu_pinned_memory_is_no_gain_and_that_is_said() -> None:
    model = nn.Linear(2, 2)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the model would compute on it")
    with pytest.warns(UserWarning, match="nothing is offloaded"):
        handle = memopt.offload_layers(model)
    assert "nothing is offloaded" in str(handle.plan) and handle.plan.bytes_offloaded == 0
    assert handle.remove() is model


# ---- pages of a file -------------------------------------------------------------------------------------------------


def pair(tmp_path: Path, **options: object) -> tuple[Transformer, Transformer, object]:
    torch.manual_seed(0)
    plain = Transformer(blocks=3)
    other = copy.deepcopy(plain)
    return plain, other, memopt.offload_layers(other, tmp_path, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model, words_of(model, seed=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, torch.get_rng_state(), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("budget", [None, "64GiB"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, memopt.optim.AdamW])
def test_training_in_a_file_is_the_plain_models(tmp_path: Path, optimizer: type, budget: object) -> None:
    plain, other, handle = pair(tmp_path, memory_budget=budget)
    assert list(tmp_path.iterdir()) == []  # it has no name
    results = [train(model, optimizer(model.parameters(), lr=1e-2), 20) for model in (plain, other)]
    assert all(map(torch.equal, *results))
    assert list(other.state_dict()) == list(plain.state_dict())
    assert str(tmp_path) in str(handle.plan)
    torch.save(other.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert all(map(torch.equal, loaded.values(), plain.state_dict().values()))
    handle.remove()
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_checkpointing_accumulation_and_evaluation_in_a_file(tmp_path: Path) -> None:
    plain, other, handle = pair(tmp_path)
    for model in (plain, other):
        model.body = lambda x, model=model: [
            x := memopt.checkpoint(block, x, use_reentrant=False) for block in model.blocks
        ][-1]
        for seed in range(2):
            torch.manual_seed(seed)
            loss_of(model, words_of(model, seed=seed)).backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), other.parameters(), strict=True)
    )
    for model in (plain, other):
        model.eval()
    with torch.no_grad():
        assert torch.equal(plain(words_of(plain)), other(words_of(other)))
    del plain.body, other.body
    handle.remove()


MEMORY = """
    import gc, mmap, sys, torch, memopt
    from torch import nn
    from memopt._runtime.host_memory import resident_bytes
    torch.set_num_threads(1)
    width, blocks, MIB = 1024, 16, 1 << 20
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))  # 4 MiB each
    x = torch.randn(2, width)
    model(x).sum().backward()
    model.zero_grad()
    gc.collect()
    before = resident_bytes()
    handle = memopt.offload_layers(model, sys.argv[1])
    most = []
    for layer in model:
        layer.register_forward_hook(lambda *_: most.append(resident_bytes()))
        layer.register_full_backward_hook(lambda *_: most.append(resident_bytes()))
    gc.collect()
    model.requires_grad_(False)
    for _ in range(2):
        x.requires_grad_(True)
        model(x).sum().backward()
    print((before - max(most)) / MIB)
"""


def test_a_models_memory_falls_to_that_of_two_layers(tmp_path: Path) -> None:
    """16 layers of 4 MiB: all but two, and some, are not in memory, in the forward pass as in the backward."""
    root = Path(__file__).resolve().parents[3]
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) > 48, out.stdout


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_that_names_it_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Transformer()
    state = copy.deepcopy(model.state_dict())
    places = [p.data_ptr() for p in model.parameters()]
    blocks = len(find_layers(model)) - 1  # the head's only parameter is the embedding's
    allocate = os.posix_fallocate
    for failing in range(blocks):
        calls: list[int] = []

        def full(fd: int, offset: int, size: int, failing: int = failing, calls: list = calls) -> None:
            calls.append(size)
            if len(calls) > failing:
                raise OSError(28, "No space left on device")
            allocate(fd, offset, size)

        monkeypatch.setattr(host_parameters.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left.*room for") as caught:
            memopt.offload_layers(model, tmp_path)
        assert caught.value.filename == str(tmp_path)
        assert [p.data_ptr() for p in model.parameters()] == places
        assert not any("_call_impl" in module.__dict__ for module in model.modules())
    monkeypatch.undo()
    assert all(map(torch.equal, state.values(), model.state_dict().values()))
    assert list(tmp_path.iterdir()) == []


KILLED = """
    import os, signal, sys, torch, memopt
    from tests.helpers.offloaded_models import Transformer, loss_of, words_of
    torch.manual_seed(0)
    model = Transformer()
    handle = memopt.offload_layers(model, sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, words_of(model)).backward()
    optimizer.step()
    torch.save(model.state_dict(), sys.argv[1] + "/checkpoint.pt")
    model.blocks[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(words_of(model))
"""


def test_a_killed_process_leaves_its_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.returncode == -9, out.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    Transformer().load_state_dict(torch.load(tmp_path / "checkpoint.pt"))


def test_an_exception_in_a_layer_leaves_the_model_whole(tmp_path: Path) -> None:
    plain, other, handle = pair(tmp_path)
    for kind in (ZeroDivisionError, KeyboardInterrupt):
        stop = other.blocks[1].mlp.register_forward_hook(lambda *_, kind=kind: (_ for _ in ()).throw(kind()))
        with pytest.raises(kind):
            other(words_of(other))
        stop.remove()
    assert all(type(p) is nn.Parameter for p in other.parameters())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, other)]
    results = [
        train(model, optimizer, 2) for model, optimizer in zip((plain, other), optimizers, strict=True)
    ]
    assert all(map(torch.equal, *results))
    del results
    gc.collect()
    handle.remove()


def test_a_plan_on_the_cpu_counts_the_pages_of_the_layers_in_memory_at_once(tmp_path: Path) -> None:
    def least(model: nn.Module) -> int:
        with pytest.raises(InfeasibleBudget) as raised:
            memopt.auto_checkpoint(model, words, memory_budget=1)
        return raised.value.least_budget

    torch.manual_seed(0)
    model = Transformer(6, 64)
    words = words_of(model, 30)
    plain = copy.deepcopy(model)
    alone = least(model)
    handle = memopt.offload_layers(model, tmp_path)
    budget = least(model)
    pages = handle.plan.bytes_offloaded - handle.plan.bytes_at_once
    assert budget <= alone - 0.9 * pages
    memopt.auto_checkpoint(model, words, memory_budget=budget)
    for seed in range(3):
        for one in (plain, model):
            torch.manual_seed(seed)
            one.zero_grad()
            one(words).sum().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert not model.plan.keeps_all and model.plan.check().within
    memopt.undo_checkpoint(model)
    handle.remove()
