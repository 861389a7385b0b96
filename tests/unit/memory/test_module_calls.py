"""Records of the running module, taken at nn.Module._call_impl: the same as torch's global hooks say, and nothing of
torch is any different for it, torch.compile included."""

from __future__ import annotations

import gc
import inspect
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

from memopt import _C
from memopt._memory.recording.torch_hooks import ModuleCalls


class Noted:
    """The calls that are noted, and what was heard."""

    def __init__(self):
        self.entered: list[nn.Module] = []
        self.left: list[tuple] = []
        self.told: list[int] = []
        self.calls = ModuleCalls(self.entered.append, lambda *what: self.left.append(what))

    def name(self) -> str:
        return self.calls.names[_C.module_running()]


@pytest.fixture
def noted():
    made = Noted()
    made.calls.start()
    yield made
    made.calls.stop()
    assert _C.module_running() == 0


class Probe(nn.Module):
    """Calls what it is given where its forward runs."""

    def __init__(self, *inner: nn.Module, look=lambda: None):
        super().__init__()
        self.inner, self.look = nn.ModuleList(inner), look

    def forward(self, x):
        self.look()
        for module in self.inner:
            x = module(x)
            self.look()
        return x


class Own(Probe):
    """A __call__ of its own, as wrappers have."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Direct(Probe):
    def __call__(self, x):
        return super().__call__(x)


class Fails(Probe):
    def __init__(self, error, look):
        super().__init__(look=look)
        self.error = error

    def forward(self, x):
        super().forward(x)
        raise self.error


class Catches(Probe):
    def forward(self, x):
        try:
            super().forward(x)
        except ValueError:
            self.look()
        return x


class Recomputes(Probe):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_the_running_module_is_the_one_that_torchs_hooks_say(noted):
    stack, seen = [], []
    hooks = [
        nn_module.register_module_forward_pre_hook(lambda module, _: stack.append(module)),
        nn_module.register_module_forward_hook(lambda *_: stack.pop() and None, always_call=True),
    ]

    def look():
        known = noted.calls._known
        index = known[id(stack[-1])][1] if stack else 0
        seen.append((noted.calls.names[index], noted.name()))

    try:
        shared = Probe(look=look)
        graph = torch.fx.Graph()
        graph.output(graph.call_module("0", (graph.placeholder("x"),)))
        traced = torch.fx.GraphModule(nn.Sequential(Probe(look=look)), graph)
        model = Probe(
            shared,
            Own(shared, look=look),
            Direct(Probe(look=look), look=look),
            Catches(Fails(ValueError("planned"), look), look=look),
            traced,
            nn.Sequential(Recomputes(Probe(nn.Linear(4, 4), look=look), look=look)),
            look=look,
        )
        alone = Own(shared, look=look)
        for _ in range(2):
            look()
            model(torch.ones(2, 4)).sum().backward()
            look()
            alone(torch.ones(2, 4))
    finally:
        for hook in hooks:
            hook.remove()
    assert [wanted for wanted, _ in seen] == [found for _, found in seen]
    names = {found for _, found in seen}
    assert {"Probe.inner.0", "Probe.inner.1", "Probe.inner.2.inner.0", "Probe.inner.4.0"} <= names
    # A backward pass runs what it makes again outside of the model.
    assert [left[0] for left in noted.left if left[0] in (model, alone)] == [model, alone, model, alone]


@pytest.mark.parametrize("error", [ValueError("planned"), KeyboardInterrupt(), StopIteration(3)])
def test_an_exception_passes_as_it_is_and_nothing_runs_after_it(noted, error):
    seen = []
    module = Probe(Fails(error, lambda: seen.append(noted.name())))
    with pytest.raises(type(error)) as caught:
        module(torch.ones(1))
    assert caught.value is error
    lines = [frame.name for frame in caught.traceback]
    assert lines.count("_call_impl") == 2 and _C.module_running() == 0
    assert seen == ["Probe.inner.0"] and [left[0] for left in noted.left] == [module]


def test_arguments_and_results_are_passed_as_they_are(noted):
    class Takes(nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    module, tensor = Takes(), torch.ones(1)
    args, kwargs = module(1, tensor, [2], name=tensor, other=None)
    assert args == (1, tensor, [2]) and kwargs == {"name": tensor, "other": None}
    assert noted.left == [(module, args, kwargs)]
    assert module() == ((), {})


def test_each_thread_has_its_own(noted):
    inside, go = threading.Event(), threading.Event()
    seen = []

    def wait():
        seen.append(noted.name())
        inside.set()
        assert go.wait(600)
        seen.append(noted.name())

    thread = threading.Thread(target=lambda: Probe(look=wait)(torch.ones(1)))
    thread.start()
    assert inside.wait(600)
    seen.append(noted.name())
    go.set()
    thread.join()
    assert seen == ["Probe", "", "Probe"]


def test_a_module_that_is_gone_leaves_its_place_to_another(noted):
    for _ in range(3000):  # addresses are used again, and the table grows and shrinks
        Probe()(torch.ones(1))
        noted.entered.clear()
        noted.left.clear()
    gc.collect()
    assert noted.calls.names[-1] == "Probe#3000.inner" and not noted.calls._known
    kept = [Probe() for _ in range(600)]
    for n, module in enumerate(kept):
        module.look = lambda n=n: seen.append((n, noted.name()))
    seen: list = []
    for module in kept:
        module(torch.ones(1))
    first = dict(seen)
    del kept[::2]
    seen.clear()
    for module in kept:
        module(torch.ones(1))
    assert len(set(first.values())) == 600 and seen == [(n, first[n]) for n in range(1, 600, 2)]


def test_the_table_of_modules_keeps_none_alive(noted):
    module = Probe()
    module(torch.ones(1))
    noted.left.clear()
    noted.entered.clear()
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_who_wants_to_hear_hears_each_change(noted):
    module = Probe(Probe(), Probe())
    module(torch.ones(1))
    noted.calls.tell(noted.told.append)
    module(torch.ones(1))
    assert noted.told == [1, 3, 1, 5, 1, 0]  # 2 and 4 are lists
    noted.told.clear()
    noted.calls.tell(noted.told.append, as_text=True)
    with pytest.raises(ValueError, match="planned"):
        Fails(ValueError("planned"), lambda: None)(torch.ones(1))
    assert noted.told == ["7", "0"]


def test_a_listener_that_fails_is_heard_unless_the_program_failed_first(noted, monkeypatch):
    def fails(*_):
        raise OSError("listener")

    module, unraisable = Probe(), []
    monkeypatch.setattr("sys.unraisablehook", lambda what: unraisable.append(str(what.exc_value)))
    noted.calls._left = fails
    with pytest.raises(OSError, match="listener"):
        module(torch.ones(1))
    with pytest.raises(ValueError, match="planned"):
        Fails(ValueError("planned"), lambda: None)(torch.ones(1))
    assert unraisable == ["listener"]
    noted.calls._entered = fails
    with pytest.raises(OSError, match="listener"):
        module(torch.ones(1))
    assert _C.module_running() == 0


def test_stopping_and_starting_within_a_forward_pass_is_fine():
    first, second = Noted(), Noted()

    def switch():
        first.calls.stop()
        assert _C.module_running() == 0
        second.calls.start()

    names = []
    first.calls.start()
    model = Probe(Probe(look=switch), Probe(look=lambda: names.append(second.name())))
    model(torch.ones(1))
    assert _C.module_running() == 0
    model.inner[1](torch.ones(1))
    second.calls.stop()
    assert names == ["Probe", "Probe"] and first.left == []
    assert [left[0] for left in second.left] == [model.inner[1], model.inner[1]]


def test_only_one_notes_and_stopping_twice_is_once(noted):
    other = Noted()
    with pytest.raises(RuntimeError, match="already being recorded"):
        other.calls.start()
    other.calls.stop()
    Probe()(torch.ones(1))
    assert len(noted.left) == 1
    noted.calls.stop()
    noted.calls.stop()
    Probe()(torch.ones(1))
    assert len(noted.left) == 1


def test_torch_sees_the_same_functions_as_ever(noted):
    module = Probe()
    module(torch.ones(1))
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert inspect.isfunction(nn.Module._call_impl) and module._call_impl.__func__ is nn.Module._call_impl
    assert not nn_module._global_forward_hooks and not nn_module._global_forward_pre_hooks
    assert "__call__" not in vars(module) and set(vars(module)) == set(vars(Probe()))
    plain = nn.Linear(3, 3)
    assert pickle.loads(pickle.dumps(plain.__call__)).__self__.weight.equal(plain.weight)
    assert pickle.loads(pickle.dumps(plain))(torch.ones(3)).equal(plain(torch.ones(3)))


def test_jit_and_fx_work_and_are_noted(noted):
    x = torch.ones(2, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    wanted = model(x)
    for made in (torch.jit.trace(model, x), torch.jit.script(model), torch.fx.symbolic_trace(model)):
        noted.left.clear()
        assert made(x).equal(wanted)
        assert [left[0] for left in noted.left] == [made]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Called(Block):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("block", [Block, Called])
@pytest.mark.parametrize("hook", [False, True])
def test_torch_compile_makes_the_same_graphs_and_never_again(block, hook):
    from torch._dynamo.testing import CompileCounterWithBackend

    def model():
        torch._dynamo.reset()
        torch.manual_seed(0)
        made = nn.Sequential(Block(), block(), nn.Linear(8, 2))
        if hook:
            made[0].register_forward_hook(lambda module, _, out: out + 1)
        return made, CompileCounterWithBackend("eager")

    x, counts = torch.ones(3, 8), []
    for noting in (False, True):
        during, counter = model()
        wanted, noted = during(x), Noted()
        if noting:
            noted.calls.start()
            noted.calls.tell(lambda n, told=noted.told: told.append(n))  # a frame to be traced
        try:
            compiled = torch.compile(during, backend=counter, fullgraph=True)
            assert compiled(x).equal(wanted)
            counts.append((counter.frame_count, counter.op_count))
            in_place, counter = model()
            in_place.compile(backend=counter, fullgraph=True)
            assert in_place(x).equal(wanted)
            assert bool(noted.left) == noting and bool(noted.told) == noting
        finally:
            noted.calls.stop()
        assert in_place(x).equal(wanted)
        if not noting:
            noted.calls.start()  # now, and what was compiled before stays
        assert in_place(x).equal(wanted)
        noted.calls.stop()
        assert in_place(x).equal(wanted)
        counts.append((counter.frame_count, counter.op_count))
    assert counts[:2] == counts[2:]
