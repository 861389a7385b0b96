"""memopt.find_batch_size: the largest size that fits, found with few tries, and everything as it was."""

from __future__ import annotations

import copy
import random
import weakref

import numpy
import pytest
import torch
from torch import nn

import memopt
from memopt._batch_size.find_batch_size import Bracket
from memopt.batch_sizes import NoBatchSizeFits

# ---- where to look next: numbers alone -------------------------------------------------------------------------------


def search(start: int, least: int, most: int, room: int, taken, left=None) -> tuple[int | None, int]:
    """Runs a bracket against a function of the size; the answer, and the tries."""
    bracket, tries = Bracket(start, least, most, room), 0
    tried: set[int] = set()
    while (size := bracket.next()) is not None:
        assert least <= size <= most and size not in tried
        tried.add(size)
        tries += 1
        if taken(size) <= room:
            bracket.fits(size, taken(size), left)
        else:
            bracket.fails(size)
        assert tries < 200
    assert bracket.best is None or bracket.best in tried  # the answer was tried itself
    return bracket.best, tries


@pytest.mark.parametrize("seed", range(200))
def test_the_bracket_ends_at_the_largest_that_fits(seed: int):
    chance = random.Random(seed)
    least, most = chance.choice([1, 1, 3]), chance.choice([5, 100, 1 << 20])
    answer = min(most, int(2 ** chance.uniform(0, 21)))
    room = 10**9
    shape = chance.choice(["line", "steps", "flat, then a cliff", "square"])
    fixed = chance.randrange(room)

    def taken(n: int) -> int:
        if shape == "line":
            return fixed + (room - fixed) * n // answer if n <= answer else room + n
        if shape == "steps":
            return fixed + (room - fixed) * (n // 16) // max(1, answer // 16) if n <= answer else room + n
        if shape == "square":
            return fixed + (room - fixed) * n * n // answer**2 if n <= answer else room + n
        return fixed if n <= answer else room + n

    left = chance.choice([None, 0, fixed])
    found, tries = search(2 ** chance.randrange(12), least, most, room, taken, left)
    assert found == (answer if answer >= least else None)
    # Doubling up, or halving down, and then at most three tries a halving of the gap.
    assert tries <= 21 + 3 * 21, (shape, tries)
    if shape == "line" and fixed < room // 2 and answer >= 64:
        assert tries <= 16, tries


# ---- on the CPU, within a budget of live bytes -----------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(64, 32, bias=False)
        self.out.weight = nn.Parameter(self.embed.weight.detach().t().contiguous())
        self.again = self.embed  # tied
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(self.drop(torch.relu(self.norm(self.again(x)))))


def bits(thing: object) -> object:
    """Everything of it by value, tensors as bytes with their addresses."""
    if isinstance(thing, torch.Tensor):
        values = thing.detach().contiguous().reshape(-1).view(torch.uint8)
        return (tuple(thing.shape), thing.dtype, thing.data_ptr(), bytes(values.numpy()))
    if isinstance(thing, dict):
        return {
            str(key) if not isinstance(key, torch.Tensor) else id(key): bits(value)
            for key, value in thing.items()
        }
    if isinstance(thing, list | tuple):
        return [bits(value) for value in thing]
    return thing if isinstance(thing, int | float | str | bool | type(None)) else repr(thing)


def everything(model, optimizer, scaler, scheduler) -> object:
    return copy.deepcopy(
        [
            bits(dict(model.named_parameters())),
            bits(dict(model.named_buffers())),
            [bits(p.grad) for p in model.parameters()],
            [module.training for module in model.modules()],
            bits(dict(optimizer.state)),
            bits(optimizer.param_groups),
            {name: bits(value) for name, value in vars(scaler).items() if name != "_per_optimizer_states"},
            len(scaler._per_optimizer_states),
            repr(scheduler.state_dict()),
            torch.get_rng_state().tolist(),
            random.getstate(),
            repr(numpy.random.get_state()),
        ]
    )


OPTIMIZERS = {
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "memopt AdamW": lambda p: memopt.optim.AdamW(p, lr=0.01),
    "memopt 8 bits": lambda p: memopt.optim.AdamW(p, lr=0.01, state_bits=8),
}


def training(make, warm: int, grads: bool):
    torch.manual_seed(1)
    model = Tied()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(n: int) -> None:
        model.train()
        numpy.random.rand(), random.random()
        loss = model(torch.randn(n, 32)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()

    for _ in range(warm):
        step(8)
    if grads:
        model(torch.randn(4, 32)).sum().backward()
        model.out.weight.grad = None
    model.drop.eval()
    return model, optimizer, scaler, scheduler, step


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_everything_is_afterwards_as_it_was(make, warm: int, grads: bool):
    model, optimizer, scaler, scheduler, step = training(make, warm, grads)
    views = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = everything(model, optimizer, scaler, scheduler)
    found = memopt.find_batch_size(
        step, 64, maximum=200, model=model, optimizer=optimizer, scaler=scaler, stateful=[scheduler],
        memory_budget="1MiB",
    )  # fmt: skip
    assert found.batch_size > 0 and len(found.tried) > 1
    after = everything(model, optimizer, scaler, scheduler)
    # The step dropped the gradients that were there: their values are back, in other memory.
    for gradient, kept in zip([p.grad for p in model.parameters()], views, strict=True):
        assert (gradient is None) == (kept is None)
        assert gradient is None or torch.equal(gradient, kept)
    del before[2], after[2]
    assert after == before
    step(8)  # and training goes on
    expected = training(make, warm, grads)
    expected[-1](8)
    for here, there in zip(model.parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_try_that_fails_anywhere_leaves_nothing(where: str):
    model, optimizer, scaler, scheduler, _ = training(OPTIMIZERS["torch AdamW"], 2, False)
    before = everything(model, optimizer, scaler, scheduler)
    held: list[weakref.ref[torch.Tensor]] = []

    def step(n: int) -> None:
        x = torch.randn(n, 32)
        held.append(weakref.ref(x))
        hidden = model(x)
        if where == "forward" and n > 11:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        hidden.square().mean().backward()
        if where == "backward" and n > 11:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        with torch.no_grad():
            model.embed.weight.mul_(2)
            if where == "step" and n > 11:
                raise MemoryError
        optimizer.step()
        optimizer.zero_grad()
        if n > 1:
            assert all(ref() is None for ref in held[:-2]), "an earlier try's tensors live on"

    found = memopt.find_batch_size(step, model=model, optimizer=optimizer, memory_budget="64MiB", headroom=0)
    assert int(found) == 11 and found.stopped.startswith("12 does not fit")
    assert everything(model, optimizer, scaler, scheduler) == before
    assert all(ref() is None for ref in held[:-1])


def test_an_error_of_the_steps_own_is_raised_and_all_is_put_back():
    model, optimizer, scaler, scheduler, step = training(OPTIMIZERS["torch SGD"], 1, True)
    before = everything(model, optimizer, scaler, scheduler)
    before[2] = [grad[3] if grad else None for grad in before[2]]

    def faulty(n: int) -> None:
        step(n)
        if n > 8:
            raise KeyError("faulty")

    with pytest.raises(KeyError, match="faulty"):
        memopt.find_batch_size(
            faulty,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            stateful=[scheduler],
            memory_budget="64MiB",
        )
    after = everything(model, optimizer, scaler, scheduler)
    after[2] = [grad[3] if grad else None for grad in after[2]]
    assert after == before


def live_at(n: int) -> int:
    """The bytes that the step below holds at its peak beside what stays: three batches of n x 1000 floats."""
    return 3 * 4000 * n


def three_batches(n: int) -> None:
    x = torch.ones(n, 1000)
    y = x + 1
    z = y + 1
    del x, y, z


def standing() -> int:
    """Bytes of the tensors that this process has already."""
    return memopt.find_batch_size(three_batches, maximum=1, memory_budget="1GiB").peak_bytes - live_at(1)


@pytest.mark.parametrize(("start", "room"), [(1, 3_333_333), (7, 1_000_000), (512, 3_333_333)])
def test_the_size_is_the_largest_within_the_budget(start: int, room: int):
    here = standing()
    found = memopt.find_batch_size(three_batches, start, memory_budget=here + room, headroom=0)
    assert found.batch_size == room // live_at(1)
    assert found.peak_bytes <= here + room < found.peak_bytes + live_at(1)
    tried = {trial.batch_size: trial for trial in found.tried}
    assert tried[found.batch_size].fits and tried[found.batch_size].steps == 2
    assert not tried[found.batch_size + 1].fits and tried[found.batch_size + 1].why
    assert found.samples == sum(trial.batch_size * trial.steps for trial in found.tried)
    assert "does not fit" in str(found) and f"<td>{found.batch_size}</td>" in found._repr_html_()
    near = memopt.find_batch_size(three_batches, start, memory_budget=here + room, headroom=0, within=0.1)
    assert 0.9 * found.batch_size <= near.batch_size <= found.batch_size and len(near.tried) <= len(
        found.tried
    )
    half = memopt.find_batch_size(
        three_batches, start, memory_budget=2 * (here + room), headroom=0.5, within=0
    )
    assert half.batch_size == found.batch_size and half.room_bytes == here + room


def test_bounds_and_multiples():
    found = memopt.find_batch_size(three_batches, maximum=100, multiple_of=8, memory_budget="64MiB")
    assert found.batch_size == 96 and found.stopped == "the maximum, below 104"
    assert all(trial.batch_size % 8 == 0 for trial in found.tried)
    with pytest.raises(NoBatchSizeFits, match="a step with 16 takes at least") as caught:
        memopt.find_batch_size(three_batches, 64, minimum=10, multiple_of=8, memory_budget=150_000)
    assert caught.value.tried[-1].batch_size == 16 and caught.value.least > 150_000


def test_not_even_one_fits():
    with pytest.raises(
        NoBatchSizeFits, match=r"no batch size fits on cpu: a step with 1 takes at least .* bytes\)"
    ):
        memopt.find_batch_size(three_batches, memory_budget=10_000)


def test_a_size_too_small_for_the_step_itself_below_one_too_large():
    norm = nn.BatchNorm1d(1000)
    with pytest.raises(NoBatchSizeFits) as caught:
        memopt.find_batch_size(
            lambda n: norm(torch.ones(n, 1000)).sum(), model=norm, memory_budget=standing() + 6000, headroom=0
        )
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_step_that_ignores_its_size_is_refused():
    with pytest.raises(ValueError, match="requests the same"):
        memopt.find_batch_size(lambda n: three_batches(3), memory_budget="64MiB")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"start": 0}, "start is 0"),
        ({"headroom": 1.0}, "headroom"),
        ({"within": -0.1}, "within"),
        ({"maximum": 7, "multiple_of": 8}, "no multiple of 8"),
        ({"device": "meta"}, "CUDA devices and on the CPU"),
        ({"memory_budget": "much"}, "much"),
    ],
)
def test_arguments_are_checked_first(named: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        memopt.find_batch_size(lambda n: pytest.fail("it ran"), **named)
    with pytest.raises(TypeError, match="give a function"):
        memopt.find_batch_size(3)
    with pytest.raises(TypeError, match="neither state_dict"):
        memopt.find_batch_size(three_batches, stateful=[object()])
    with pytest.raises(ValueError, match="lazy module"):
        memopt.find_batch_size(three_batches, model=nn.LazyLinear(3))


def test_recompilations_are_told():
    step = torch.compile(lambda n: torch.ones(n, 10) + 1, backend="eager", dynamic=False)
    found = memopt.find_batch_size(step, maximum=4, memory_budget="64MiB")
    assert any("torch.compile compiled 2 times" in note for note in found.notes)
    torch.compiler.reset()


def test_a_card_that_is_not_here():
    model = nn.Linear(64, 64)
    before = bits(dict(model.named_parameters()))
    found = memopt.find_batch_size(
        model, 512, maximum=512, sample=torch.zeros(2, 64), card="1GiB", optimizer=torch.optim.SGD, steps=1
    )
    assert (
        found.batch_size == 512 and found.tried[0].peak_bytes > 512 * 64 * 4 and found.total_bytes == 1 << 30
    )
    assert "memopt.estimate" in str(found) and bits(dict(model.named_parameters())) == before
    with pytest.raises(ValueError, match="whose first dimension"):
        memopt.find_batch_size(model, card="1GiB")
    with pytest.raises(ValueError, match="is used with card="):
        memopt.find_batch_size(three_batches, sample=torch.zeros(2))


def test_a_model_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch):
    class DistributedDataParallel(nn.Linear):
        pass

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="before it is wrapped"):
        memopt.find_batch_size(three_batches, model=DistributedDataParallel(2, 2))
