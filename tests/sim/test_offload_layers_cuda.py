"""offload_layers on the simulated device, with real numbers: a model whose parameters live on the host trains as the
plain one does, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import sim
from tests.helpers.offloaded_models import Transformer, loss_of, words_of

SIM = {"memory": "1GiB"}
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


def pair(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """The plain model on the device, its offloaded twin, and the twin's handle."""
    torch.manual_seed(0)
    plain = (Transformer() if model is None else model).cuda()
    other = copy.deepcopy(plain)
    return plain, other, memopt.offload_layers(other, **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros(0) if p.grad is None else p.grad.cpu() for p in model.parameters()]


def run(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], seed: int = 1) -> tuple[Any, ...]:
    """A step without an optimizer -> (loss, random state, gradients...)."""
    torch.manual_seed(seed)
    value = loss(model)
    value.backward()
    return value.detach().cpu(), torch.cuda.get_rng_state().clone(), *gradients(model)


def same(
    plain: nn.Module, other: nn.Module, loss: Callable[[nn.Module], torch.Tensor], steps: int = 1
) -> None:
    for seed in range(steps):
        for model in (plain, other):
            model.zero_grad()
        for a, b in zip(run(plain, loss, seed), run(other, loss, seed), strict=True):
            assert torch.equal(a, b)
    at_home(other)


def at_home(model: nn.Module) -> None:
    for p in model.parameters():
        assert type(p) is nn.Parameter
        assert p.device.type == "cpu" and p.is_pinned()
        assert p.grad is None or p.grad.device.type == "cpu"


def next_word(seed: int = 0) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: loss_of(model, words_of(model, seed=seed).cuda())


# ---- training --------------------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "memopt":
        return memopt.optim.AdamW(model.parameters(), lr=1e-2)
    return getattr(torch.optim, kind)(model.parameters(), lr=1e-2, foreach=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "steps"), [("AdamW", 20 if SOAK else 3), ("memopt", 2)])
def test_training_is_the_plain_models(kind: str, steps: int) -> None:
    plain, other, handle = pair()
    optimizers = [optimizer_of(model, kind) for model in (plain, other)]
    counts = []
    for step in range(steps):
        before = handle.bytes_in, handle.bytes_out
        for optimizer in optimizers:
            optimizer.zero_grad()
        a, b = run(plain, next_word(step), step), run(other, next_word(step), step)
        assert all(map(torch.equal, a, b)), step
        counts.append((handle.bytes_in - before[0], handle.bytes_out - before[1]))
        optimizers[1].step()
        if kind == "memopt":  # its kernels on a device are another's test
            with torch.no_grad():
                for p, q in zip(plain.parameters(), other.parameters(), strict=True):
                    p.copy_(q)
        else:
            optimizers[0].step()
    at_home(other)
    assert len(set(counts)) == 1
    if kind == "AdamW":
        assert all(map(torch.equal, (p.cpu() for p in plain.parameters()), other.parameters()))


def test_bytes_copied_are_the_bytes_needed() -> None:
    """In the forward pass all of every layer; in the backward what it saved of all but what is there still; out each
    gradient."""
    _, other, handle = pair(Transformer(blocks=4))
    for _ in range(2):
        before = handle.bytes_in, handle.bytes_out
        run(other, next_word())
        tied = other.head.weight.nbytes  # is copied twice, under two names
        everything = sum(p.nbytes for p in other.parameters()) + tied
        assert handle.bytes_out - before[1] == everything
        # What a backward pass needs of a block: all but what is only added.
        block = sum(p.nbytes for n, p in other.blocks[0].named_parameters() if p.dim() == 2 or "before" in n)
        assert handle.bytes_in - before[0] == everything + 3 * block  # the last of four is still there


def test_gradients_go_where_autograd_takes_them() -> None:
    plain, other, _ = pair()

    def asked(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        wanted = [model.blocks[1].mlp[0].weight, model.head.weight, model.position]
        return [g.cpu() for g in torch.autograd.grad(next_word()(model), wanted)]

    assert all(map(torch.equal, asked(plain), asked(other)))
    assert all(p.grad is None for p in other.parameters())

    def twice(model: nn.Module) -> torch.Tensor:
        value = next_word()(model)
        value.backward(retain_graph=True)
        return value

    same(plain, other, twice)

    def accumulated(model: nn.Module) -> torch.Tensor:
        for seed in range(2):
            next_word(seed)(model).backward()
        nn.utils.clip_grad_norm_([*model.parameters()][:1], 1e-3)
        return next_word(3)(model)

    same(plain, other, accumulated)
    grads = [p.grad for p in other.parameters()]
    for model in (plain, other):
        model.zero_grad(set_to_none=False)
    same_again = [run(model, next_word()) for model in (plain, other)]
    assert all(map(torch.equal, *same_again))
    assert all(p.grad is g for p, g in zip(other.parameters(), grads, strict=True))


def test_a_second_derivative() -> None:
    plain, other, _ = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8, device="cuda")

    def penalty(model: nn.Module) -> torch.Tensor:
        taken = torch.autograd.grad(model(x).square().sum(), [*model.parameters()], create_graph=True)
        return sum(g.square().sum().cpu() for g in taken)

    for a, b in zip(run(plain, penalty), run(other, penalty), strict=True):
        torch.testing.assert_close(a, b)  # three summands' order is not the same


def test_hooks_of_parameters_and_modules_see_what_the_plain_model_shows_them() -> None:
    seen: dict[nn.Module, dict[str, list[torch.Tensor]]] = {}

    def prepare(model: nn.Module) -> None:
        def note(name: str, value: torch.Tensor) -> None:
            seen.setdefault(model, {}).setdefault(name, []).append(value.detach().cpu().clone())

        def doubled(gradient: torch.Tensor) -> torch.Tensor:
            note("gradient", gradient)
            return gradient * 2

        weight, block = model.blocks[1].mlp[0].weight, model.blocks[1]
        weight.register_hook(doubled)
        weight.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad))
        block.mlp[0].register_forward_pre_hook(lambda m, args: note("before", m.weight))
        block.register_forward_hook(lambda m, args, out: note("after", out))
        block.register_full_backward_hook(lambda m, gi, go: note("backward", go[0]))

    torch.manual_seed(0)
    plain = Transformer().cuda()
    other = copy.deepcopy(plain)
    prepare(plain)
    prepare(other)
    memopt.offload_layers(other)
    same(plain, other, next_word())
    assert len(seen[plain]) == 5
    for name, values in seen[plain].items():
        assert len(values) == 1
        assert all(map(torch.equal, values, seen[other][name])), name


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], None]:
    def step(_: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_an_optimizer_that_steps_in_the_backward_pass() -> None:
    plain, other, _ = pair()
    for model in (plain, other):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(stepping(torch.optim.SGD([p], lr=0.1)))
    for seed in range(2):
        a, b = run(plain, next_word(seed), seed), run(other, next_word(seed), seed)
        assert torch.equal(a[0], b[0])
    assert all(map(torch.equal, (p.cpu() for p in plain.parameters()), other.parameters()))


def test_frozen_parameters_visit_and_send_nothing_back() -> None:
    plain, other, handle = pair()
    for model in (plain, other):
        for block in model.blocks[:1]:
            block.requires_grad_(False)
    same(plain, other, next_word())
    assert handle.bytes_out == (
        sum(p.nbytes for p in other.parameters() if p.requires_grad) + other.head.weight.nbytes
    )


class Odd(nn.Module):
    """Calls a layer twice, layers out of order, or not at all; has a running average."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.average = nn.BatchNorm1d(8)
        self.order = [0, 1, 1, 3, 2, 4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in self.order:
            x = self.average(torch.tanh(self.parts[n](x)))
        return x


def test_layers_called_twice_out_of_order_or_not_at_all() -> None:
    plain, other, _ = pair(Odd())
    x = torch.randn(6, 8, device="cuda")
    for order in ([0, 1, 1, 3, 2, 4], [4, 0, 0, 0, 1], [1], [0, 1, 2, 3, 4]):
        plain.order = other.order = order
        same(plain, other, lambda model: model(x).sum())
        assert all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(plain.buffers(), other.buffers(), strict=True)
        )


def test_what_a_layer_did_before_it_raised_can_go_backwards() -> None:
    """As extractors of features do, which leave the model by an exception when they have what they want."""
    plain, other, handle = pair()

    class Stop(Exception):
        pass

    def features(model: nn.Module) -> torch.Tensor:
        found = []

        def stop(_: nn.Module, args: Any, out: torch.Tensor) -> None:
            found.append(out)
            raise Stop

        hook = model.blocks[1].mlp.register_forward_hook(stop)
        with pytest.raises(Stop):
            model(words_of(model).cuda())
        hook.remove()
        return found.pop().square().sum()

    same(plain, other, features, steps=2)
    assert handle._residency.here() == 0
    same(plain, other, next_word())


class Assigns(nn.Linear):
    """A layer whose forward keeps its rows short and, before it is whole, cuts off one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        if not torch.is_grad_enabled():
            self.weight.data, self.bias.data = self.weight.data[:-1], self.bias.data[:-1]
        return super().forward(x)


def test_what_a_forward_assigns_to_data_comes_home() -> None:
    plain, other, _ = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Assigns(8, 8)))
    x = torch.randn(4, 8, device="cuda")
    same(plain, other, lambda model: model(x).square().sum(), steps=2)
    for shape in ((8, 8), (7, 8)):
        assert other[2].weight.shape == shape
        assert all(
            torch.equal(p.cpu(), q) for p, q in zip(plain.parameters(), other.parameters(), strict=True)
        )
        with torch.no_grad():
            assert torch.equal(plain(x), other(x))


class OnTheHost(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.cpu(), self.weight.cpu(), self.bias.cpu()).cuda()


def test_a_parameter_that_a_layer_takes_to_another_device_comes_back_there() -> None:
    plain, other, _ = pair(nn.Sequential(nn.Linear(8, 8), OnTheHost(8, 8)))
    x = torch.randn(4, 8, device="cuda")
    same(plain, other, lambda model: model(x).square().sum())


def test_a_recurrent_model_is_the_plain_one() -> None:
    """It computes with a list of its weights, beside the parameters. (LSTMs' cells have no twin on the CPU.)"""
    with torch.backends.cudnn.flags(enabled=False):
        plain, other, handle = pair(nn.RNN(8, 8, 2, bidirectional=True))
        x = torch.randn(5, 3, 8, device="cuda")
        same(plain, other, lambda model: model(x)[0].square().sum(), steps=2)
        assert handle.remove() is other
        assert all(map(torch.equal, plain(x), other(x)))


# ---- other modes -----------------------------------------------------------------------------------------------------


def test_evaluation_leaves_nothing_on_the_device() -> None:
    plain, other, handle = pair()
    words = words_of(plain).cuda()
    for model in (plain, other):
        model.eval()
    standing = torch.cuda.memory_allocated()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(plain(words).cpu(), other(words).cpu())
        assert torch.cuda.memory_allocated() == standing
    assert handle.bytes_out == 0
    for model in (plain, other):
        model.train()
    same(plain, other, next_word())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_gradient_scaler(dtype: torch.dtype) -> None:
    plain, other, _ = pair(Transformer(tied=False))
    scalers = [torch.amp.GradScaler("cuda", 2.0**10), memopt.amp.GradScaler("cuda", 2.0**10)]
    for scaler in scalers:
        plain.zero_grad()
        other.zero_grad()
        for model in (plain, other):
            torch.manual_seed(1)
            with torch.autocast("cuda", dtype):
                loss = next_word()(model)
            scaler.scale(loss).backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            scaler.unscale_(optimizer)
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            assert [v.item() for v in found.values()] == [0.0]
        assert all(map(torch.equal, gradients(plain), gradients(other)))
        # A gradient that is not finite, on the host: the step is left out.
        other.head.weight.grad[0, 0] = torch.inf
        scaler2 = type(scaler)("cuda", 4.0)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        scaler2.scale(torch.zeros(1, device="cuda"))
        before = [p.detach().clone() for p in other.parameters()]
        scaler2.step(optimizer)
        scaler2.update()
        assert scaler2.get_scale() == 2.0
        assert all(map(torch.equal, before, other.parameters()))


def test_what_autocast_made_of_a_parameter_is_not_kept_either() -> None:
    _, other, _ = pair(Transformer(blocks=4, dropout=0.0))
    words = words_of(other).cuda()

    def held(autocast: bool) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = loss_of(other, words)
        held = torch.cuda.memory_allocated() - before - handle_bytes(other)
        loss.backward()
        return held

    held(True)
    assert held(True) < held(False)  # activations of half the size; casts of the weights would be far more


def handle_bytes(model: nn.Module) -> int:
    return model.__dict__["_call_impl"].residency.here()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpoint", [torch.utils.checkpoint.checkpoint, memopt.checkpoint])
@pytest.mark.parametrize("part", ["block", "mlp"])
def test_checkpointed_layers_and_parts_of_them(checkpoint: Any, reentrant: bool, part: str) -> None:
    class Checkpointed(Transformer):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if part == "block":
                    x = checkpoint(block, x, use_reentrant=reentrant)
                else:
                    own = block.mlp.forward
                    block.mlp.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=reentrant)
                    x = block(x)
                    del block.mlp.forward
            return x

    plain, other, handle = pair(Checkpointed())
    same(plain, other, next_word())
    assert handle._residency.here() == 0


def test_activations_may_leave_too() -> None:
    plain, other, handle = pair()
    leaving = memopt.offload_activations(min_size=1, in_flight=1 << 14)

    def loss(model: nn.Module) -> torch.Tensor:
        if model is plain:
            return next_word()(model)
        with leaving:
            return next_word()(model)

    same(plain, other, loss)
    needed = handle.bytes_in
    assert (
        leaving.last.bytes_out == leaving.last.bytes_in > 0
    )  # of activations: parameters are not among them
    other.zero_grad()
    run(other, next_word())
    assert handle.bytes_in == 2 * needed


# ---- state dicts -----------------------------------------------------------------------------------------------------


def test_a_state_dict_is_the_plain_models() -> None:
    plain, other, _ = pair()
    run(other, next_word())
    a, b = plain.state_dict(), other.state_dict()
    assert list(a) == list(b)
    assert all(torch.equal(a[name].cpu(), b[name].cpu()) and a[name].dtype == b[name].dtype for name in a)
    torch.manual_seed(5)
    new = Transformer().state_dict()
    for assign in (False, True):
        values = {name: value + assign for name, value in new.items()}
        plain.load_state_dict({name: value.cuda() for name, value in values.items()}, assign=assign)
        other.load_state_dict({name: value.clone() for name, value in values.items()}, assign=assign)
        if assign:
            other.scale = other.scale.cuda()
        plain.zero_grad()
        other.zero_grad()
        assert all(map(torch.equal, run(plain, next_word()), run(other, next_word())))


def test_a_copy_of_the_model_is_a_plain_one() -> None:
    _, other, _ = pair()
    twin = copy.deepcopy(other).cuda()
    torch.manual_seed(1)
    a = next_word()(twin).cpu()
    torch.manual_seed(1)
    assert torch.equal(a, next_word()(other).cpu())
    assert all(p.is_cuda for p in twin.parameters())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(other)


def test_remove_brings_the_plain_model_back() -> None:
    plain, other, handle = pair()
    identities = [id(p) for p in other.parameters()]
    kept = set(other.__dict__), {m: set(m.__dict__) for m in plain.modules()}
    run(other, next_word())
    run(plain, next_word())
    waiting = next_word()(other)
    with pytest.raises(RuntimeError, match="still pending"):
        handle.remove()
    del waiting
    assert handle.remove() is other
    assert handle.remove() is other
    assert [id(p) for p in other.parameters()] == identities
    assert all(p.is_cuda and p.grad.is_cuda for p in other.parameters())
    assert set(other.__dict__) | {"_call_impl"} == kept[0]
    assert not any("_call_impl" in m.__dict__ for m in other.modules())
    assert all(map(torch.equal, run(plain, next_word()), run(other, next_word())))
    again = memopt.offload_layers(other)
    same(plain, other, next_word())
    again.remove()
