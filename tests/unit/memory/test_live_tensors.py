"""memopt.live_tensors(): planted holders are named, with their line; the sums are those of the storages."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import memopt
from memopt._memory.live import heap_snapshot
from memopt._memory.live.live_tensors import LiveGroup, LiveTensors

KIB = 1 << 10

CULPRITS = """
import torch
from torch import nn

losses = []
total = 0.0

class Loader:
    def __init__(self):
        self.last = None

    def batch(self):
        self.last = torch.randn(32, 64)  # line: cached batch
        return self.last

def watch(module):
    seen = []
    def hook(module, inputs, output):
        seen.append(output)  # line: hook's closure
    module.register_forward_hook(hook)

class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = torch.zeros(48, 64)  # line: slot

def generator():
    inner = torch.zeros(24, 64)  # line: generator
    yield inner

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
watch(model[1])
loader = Loader()
slotted = Slotted()
running = generator()
next(running)
table = {"a": [torch.zeros(56, 64)]}  # line: table

def step():
    global total
    loss = model(loader.batch()).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss)  # line: growing list
    total += model(torch.zeros(8, 64)).mean()  # line: kept loss
"""


def line(mark: str) -> str:
    lines = enumerate(CULPRITS.splitlines(), 1)
    return f"culprits.py:{next(number for number, text in lines if f'# line: {mark}' in text)}"


@pytest.fixture
def culprits(tmp_path: Path, one_thread: None) -> Iterator[ModuleType]:
    gc.collect()
    file = tmp_path / "culprits.py"
    file.write_text(CULPRITS)
    spec = importlib.util.spec_from_file_location("culprits", file)
    assert spec and spec.loader
    module = sys.modules["culprits"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for _ in range(3):
        module.step()
    yield module
    del sys.modules["culprits"]
    vars(module).clear()
    gc.collect()


def group(found: LiveTensors, name: str, where: str) -> LiveGroup:
    rows = [one for one in found.groups if one.name == name and one.where == where]
    assert len(rows) == 1, "\n".join(map(str, found.groups))
    return rows[0]


def test_planted_culprits_are_named_with_their_line(culprits: ModuleType):
    found = memopt.live_tensors()
    assert group(found, "culprits.loader.last", line("cached batch")).nbytes == 8 * KIB
    held = group(found, "seen[*]", line("hook's closure"))
    assert held.note == "closure of watch.<locals>.hook" and held.count >= 6
    assert group(found, "culprits.losses[*]", line("growing list")).count == 3
    kept = group(found, "culprits.total", line("kept loss"))
    # An addition, a mean, two linear layers (addmm, a transposed weight, two leaves each) and a ReLU, a step.
    assert kept.nodes > 3 * 5 and kept.category == "activations"
    assert group(found, "culprits.slotted.value", line("slot")).nbytes == 12 * KIB
    assert group(found, "inner", line("generator")).note == "in the generator generator"
    assert group(found, "culprits.table['a'][*]"[:-3] + "[0]", line("table")).nbytes == 14 * KIB


def test_parameters_gradients_and_states_are_their_models(culprits: ModuleType):
    sizes = {one.category: one for one in memopt.live_tensors().groups if one.name == "culprits.model"}
    parameters = sum(p.nbytes for p in culprits.model.parameters())
    assert sizes["parameters"].nbytes == sizes["gradients"].nbytes == parameters
    steps = 4 * len(list(culprits.model.parameters()))  # AdamW counts them in a tensor each
    assert sizes["optimizer"].nbytes == 2 * parameters + steps
    names = {one.name for one in memopt.live_tensors().tensors if one.category == "parameters"}
    assert {"culprits.model.0.weight", "culprits.model.2.bias"} <= names


def test_the_locals_of_a_running_function_are_named_and_not_kept():
    tensor = torch.zeros(40, 64)
    rows = [one for one in memopt.live_tensors().tensors if one.name == "tensor"]
    assert [one.nbytes for one in rows] == [10 * KIB] and rows[0].where.startswith("test_live_tensors.py:")
    storage = tensor.untyped_storage()
    count = sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)
    memopt.live_tensors()
    assert (sys.getrefcount(tensor), torch._C._storage_Use_Count(storage._cdata)) == count
    del tensor
    assert torch._C._storage_Use_Count(storage._cdata) == count[1] - 1


def test_a_dict_of_locals_that_the_program_has_stays_whole():
    kept = torch.zeros(16, 64)
    names = locals()
    memopt.live_tensors()
    assert names["kept"] is kept


def test_the_last_exceptions_traceback_is_named(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        activations = torch.zeros(72, 64)
        raise ValueError(len(activations))

    try:
        fails()
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        del error
    rows = [one for one in memopt.live_tensors().tensors if one.name == "activations"]
    assert [one.nbytes for one in rows] == [18 * KIB]
    assert rows[0].note == "in the traceback of an exception, in fails"
    assert rows[0].where.startswith("test_live_tensors.py:")


def test_what_only_a_graph_keeps_is_found_without_unpacking():
    called = []

    def unpack(held: tuple[str, torch.Tensor]) -> torch.Tensor:
        called.append(held)
        return held[1]

    x = torch.zeros(88, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("copy", t.detach().clone()), unpack):
        hooked = x.exp()
    plain = x.sin().cos().sum()
    sizes = {one.name: one for one in memopt.live_tensors().tensors if one.only_in_graph}
    assert hooked.shape == plain.shape + x.shape
    assert sizes["plain"].nbytes == sizes["hooked"].nbytes == 22 * KIB
    assert sizes["plain"].node == "CosBackward0" and sizes["hooked"].node == "ExpBackward0"
    assert not called
    plain.backward()
    assert "plain" not in {one.name for one in memopt.live_tensors().tensors if one.only_in_graph}


def test_memory_counts_once_whatever_looks_at_it():
    base = torch.zeros(104, 64)
    views = [base[1:], base.t(), base.detach()]
    address = base.untyped_storage().data_ptr()
    rows = [one for one in memopt.live_tensors().tensors if one.address == address]
    assert [one.nbytes for one in rows] == [26 * KIB]
    assert rows[0].name in ("base", "views[2]") and len(views) == 3


def test_kinds_without_memory_of_their_own_are_what_they_consist_of():
    sparse = torch.eye(64).to_sparse()
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(1 << 20, 64)
    taken = heap_snapshot.take()
    sizes = [one.nbytes for one in taken.held.values()]
    parts = taken.of(sparse)
    taken.forget()
    assert parts is not None and parts.nbytes == 2 * 64 * 8
    assert fake.nbytes not in sizes


def test_objects_of_the_program_run_no_code_of_theirs():
    class Trap:
        def __init__(self) -> None:
            self.tensor = torch.zeros(120, 64)

        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

        @property
        def __class__(self) -> type:
            raise AssertionError("asked for its class")

    class Row(list):
        def __iter__(self):
            raise AssertionError("iterated")

    trap, row = Trap(), Row([torch.zeros(136, 64)])
    names = {one.name for one in memopt.live_tensors().tensors}
    assert {"trap.tensor", "row[0]"} <= names
    assert type(trap) is Trap and len(row) == 1


def test_the_table_has_so_many_lines_and_is_html_too(culprits: ModuleType):
    found = memopt.live_tensors(top=2)
    assert len(str(found).splitlines()) == 4 and "more groups" in str(found)
    assert found._repr_html_().count("<tr>") == 3
    with pytest.raises(ValueError, match="top=-1"):
        memopt.live_tensors(top=-1)


def test_modules_that_hold_each_other_are_no_trouble():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    object.__setattr__(one, "other", other)
    one.__dict__["me"] = one
    names = {row.name for row in memopt.live_tensors().tensors}
    assert {"one.weight", "other.weight"} <= names
