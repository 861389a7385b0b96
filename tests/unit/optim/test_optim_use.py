"""memopt.optim's optimizers as programs use them: learning rates as tensors, closures, hooks, schedulers, what changes
between two steps, and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from optim_pairs import MOMENTS, PAIRS, bits, both, distance, give_gradients, parameters, same_bits
from torch.multiprocessing.reductions import StorageWeakRef

import memopt.optim


# ---- learning rates as tensors, closures, hooks, schedulers ---------------------------------------------------------
@pytest.mark.parametrize("kind", PAIRS)
def test_lr_may_be_a_tensor(kind):
    rate = torch.tensor(0.05)
    new, old, ours, theirs = both(kind, lr=rate.clone(), stock={"lr": rate})
    for number in range(4):
        for optimizer in (new, old):
            optimizer.param_groups[0]["lr"].mul_(0.5)
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
    assert distance(ours, theirs) < 1e-6
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        PAIRS[kind][0](ours, lr=torch.ones(2))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    ],
)
def test_schedulers(kind, schedule):
    options = {"momentum": 0.9} if kind == "sgd" else {}
    new, old, ours, theirs = both(kind, **options)
    schedules = [schedule(new), schedule(old)]
    for number in range(10):
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
        for each in schedules:
            each.step()
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", PAIRS)
def test_closures_and_hooks(kind):
    new, old, ours, theirs = both(kind)
    seen = []
    for optimizer, params in ((new, ours), (old, theirs)):
        log = []
        optimizer.register_step_pre_hook(lambda o, args, kwargs, log=log: log.append("before"))
        optimizer.register_step_post_hook(lambda o, args, kwargs, log=log: log.append("after"))

        def closure(optimizer=optimizer, params=params, log=log):
            log.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in params)
            loss.backward()
            return loss

        log.append(optimizer.step(closure).item())
        log.append(optimizer.step(closure=closure).item())
        seen.append(log)
    assert seen[0] == pytest.approx(seen[1])
    assert seen[0][:3] == ["before", True, "after"]
    assert distance(ours, theirs) < 1e-6
    assert new.step() is None


# ---- what may change between two steps ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", PAIRS)
def test_whatever_changes_between_steps_is_noticed(kind):
    """Groups added, parameters exchanged, states replaced, memory moved, options changed: beside torch after
    each."""
    options = {"momentum": 0.9} if kind == "sgd" else {}
    new, old, ours, theirs = both(kind, **options)

    def move(_, params):
        for p in params:
            p.data = p.data.clone()

    def replace_states(optimizer, params):
        for p in params:
            state = optimizer.state.get(p, {})
            for name in set(state) & set(MOMENTS):
                state[name] = state[name] * 0.5

    def move_states(optimizer, params):
        """The tensors stay, their memory does not."""
        for p in params:
            for value in optimizer.state.get(p, {}).values():
                value.data = value.data.clone()

    def set_states(optimizer, params):
        for p in params:
            for value in optimizer.state.get(p, {}).values():
                value.set_(value.detach().clone())

    def replace_dicts(optimizer, params):
        for p in params:
            if p in optimizer.state:
                optimizer.state[p] = dict(optimizer.state[p])

    def add(optimizer, params):
        params.append(torch.nn.Parameter(torch.ones(3)))
        optimizer.add_param_group({"params": params[-1:], "lr": 0.5})

    def exchange(optimizer, params):
        params[0] = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(4))

    def reset(optimizer, params):
        optimizer.state.clear()

    def option(optimizer, params):
        optimizer.param_groups[0]["weight_decay"] = 0.5

    unchanged, twice = [lambda *_: None], [add, move_states]
    states = [move_states, replace_states, set_states, replace_dicts]
    for number, change in enumerate([*unchanged, move, *states, *twice, exchange, reset, option, *twice]):
        change(new, ours)
        change(old, theirs)
        give_gradients(ours, theirs, number=number)
        new.step()
        old.step()
        assert distance(ours, theirs) < 1e-6, change
        give_gradients(ours, theirs, number=100 + number)
        new.step()
        old.step()
        assert distance(ours, theirs) < 1e-6, change


def test_a_step_makes_no_plan_as_long_as_nothing_changes():
    optimizer = memopt.optim.AdamW(parameters())
    for number in range(3):
        give_gradients(optimizer.param_groups[0]["params"], number=number)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            plan = optimizer._plan
    assert optimizer._plan is plan


def test_an_optimizer_and_its_plan_die_with_their_last_name():
    params = parameters()
    optimizer = memopt.optim.AdamW(params)
    give_gradients(params, number=0)
    params[0].holder = optimizer  # a cycle through a parameter
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(params[0])
    del optimizer, params
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_states_former_memory_is_not_kept():
    params = parameters(shapes=[(64,), (1, 8)])
    optimizer = memopt.optim.AdamW(params)
    give_gradients(params, number=0)
    optimizer.step()
    states = [value for p in params for value in optimizer.state[p].values()]
    gone = [StorageWeakRef(value.untyped_storage()) for value in states]
    for value in states:
        value.data = value.data.clone()
    optimizer.step()
    assert all(ref.expired() for ref in gone)
    gone = [weakref.ref(value) for value in states]
    del states, value
    optimizer.state.clear()
    optimizer.step()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_gradients_are_not_kept_after_a_step():
    params = parameters()
    optimizer = memopt.optim.AdamW(params)
    give_gradients(params, number=0)
    gone = [weakref.ref(p.grad) for p in params]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(params)


def test_any_number_of_threads_gives_the_same_bits():
    shapes = [(300_001,), (7,), (512, 513), (4096,)]
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            params = parameters(shapes=shapes)
            optimizer = memopt.optim.AdamW(params, state_bits=8)
            for number in range(3):
                give_gradients(params, number=number)
                optimizer.step()
            found.append(bits(params))
    finally:
        torch.set_num_threads(before)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


# ---- what is refused -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.5)},
        {"weight_decay": -1.0},
        {"fused": True, "foreach": True},
        {"lr": torch.tensor(0.1), "foreach": True},
    ],
)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_what_torch_refuses_is_refused_in_its_words(kind, options):
    said = []
    for cls in PAIRS[kind]:
        with pytest.raises((ValueError, RuntimeError)) as error:
            cls(parameters(), **options)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"momentum": -1.0}, {"nesterov": True}, {"fused": True, "foreach": True}]
)
def test_what_torchs_sgd_refuses_is_refused_in_its_words(options):
    said = []
    for cls in PAIRS["sgd"]:
        with pytest.raises((ValueError, RuntimeError)) as error:
            cls(parameters(), **options)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", PAIRS)
def test_what_memopt_refuses(kind):
    cls = PAIRS[kind][0]
    with pytest.raises(ValueError, match=r"use torch\.optim\.\w+ for differentiable=True"):
        cls(parameters(), differentiable=True)
    if kind != "sgd":
        with pytest.raises(ValueError, match=r"Invalid state_bits value: 5 \(4, 8 or 32\)"):
            cls(parameters(), state_bits=5)
        with pytest.raises(ValueError, match="amsgrad=True keeps a maximum of second moments"):
            cls(parameters(), state_bits=8, amsgrad=True)
    optimizer = cls(parameters())
    with pytest.raises(ValueError, match="differentiable"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([])


def test_they_are_torchs_classes():
    for new, old in PAIRS.values():
        assert issubclass(new, old) and new.__name__ == old.__name__
        assert new(parameters())._step_supports_amp_scaling
    assert sorted(memopt.optim.__all__) == ["Adam", "AdamW", "Muon", "SGD"]
    with pytest.raises(AttributeError, match="RMSprop"):
        memopt.optim.RMSprop  # noqa: B018


def test_one_step_at_a_time():
    """A second thread, and a parameter whose gradient's getter steps again: refused, and no step is lost or
    doubled."""
    params = parameters(shapes=[(400_000,)])
    optimizer, refused, done = memopt.optim.AdamW(params), [], []
    give_gradients(params, number=0)
    optimizer.step()

    def many():
        for _ in range(20):
            try:
                done.append(optimizer.step())
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert optimizer.state[params[0]]["step"] == 1 + len(done)
    assert set(refused) <= {"this optimizer's step() is already running: run one step at a time"}

    class Greedy(torch.Tensor):
        asked = 0

        @property
        def grad(self):
            Greedy.asked += 1
            if Greedy.asked == 3:
                with pytest.raises(RuntimeError, match="is already running"):
                    greedy.step()
            return torch.ones(2)

    first = torch.nn.Parameter(torch.ones(3))
    first.grad = torch.ones(3)
    greedy = memopt.optim.SGD([first, torch.ones(2).as_subclass(Greedy).requires_grad_()], lr=0.5)
    greedy.step()
    assert Greedy.asked >= 3 and torch.equal(first, torch.full((3,), 0.5))
