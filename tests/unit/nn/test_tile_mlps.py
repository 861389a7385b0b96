"""memopt.nn.tile_mlps beside the plain model: results, gradients, bytes; what it leaves alone."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
import memopt.chain
import memopt.nn
from memopt._checkpoint.stages.costs import CpuBytes
from memopt.nn._tile_mlps import takes_single_rows

SEED = int(os.environ.get("MEMOPT_SEED") or random.randrange(1 << 30))
WIDTH = 16


class Gated(nn.Module):
    """An MLP as Llama has it."""

    def __init__(self, width: int = WIDTH, inner: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias) for _ in range(2))
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Chunked(nn.Module):
    """Both halves of one layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.gelu(a) * b)


class Mixing(nn.Module):
    """Each row by the mean of those before it: no MLP, though it has its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y.cumsum(-2) / torch.arange(1, y.shape[-2] + 1)[:, None])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "sequential": plain_mlp,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(inplace=True), nn.Linear(64, WIDTH)),
    "gated": Gated,
    "with biases": lambda: Gated(bias=True),
    "chunked": Chunked,
}


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


def pair(
    mlp: Callable[[], nn.Module], **options: int
) -> tuple[nn.Module, nn.Module, memopt.nn._tile_mlps.TiledMLPs]:
    torch.manual_seed(SEED)
    plain = nn.Sequential(Block(mlp()), Block(mlp()))
    tiled = copy.deepcopy(plain)
    return plain, tiled, memopt.nn.tile_mlps(tiled, **options)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    (
        out.to(torch.promote_types(out.dtype, torch.float32))
        * torch.linspace(-1, 1, out.numel()).view_as(out)
    ).sum().backward()
    assert x.grad is not None
    found = [out.detach(), x.grad]
    for p in model.parameters():
        if p.requires_grad:
            assert p.grad is not None
            found.append(p.grad)
        else:
            assert p.grad is None
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 33), (64,), (2, 3, 9)])
def test_results_and_gradients_are_those_of_the_plain_model(kind: str, shape: tuple[int, ...]) -> None:
    print(f"MEMOPT_SEED={SEED}")
    chance = random.Random(SEED)
    if len(shape) != 2:  # attention takes a batch of sequences
        plain, tiled = (copy.deepcopy(one) for one in [KINDS[kind]()] * 2)
        handle = memopt.nn.tile_mlps(tiled, rows=chance.randrange(1, 40))
    else:
        plain, tiled, handle = pair(KINDS[kind], rows=chance.randrange(1, 160))
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        p.requires_grad_(frozen := chance.random() < 0.8)
        q.requires_grad_(frozen)
    x = torch.randn(*shape, WIDTH, dtype=torch.float64)
    for mine, other in zip(gradients(tiled.double(), x), gradients(plain.double(), x), strict=True):
        torch.testing.assert_close(mine, other)
    assert len(handle.ran) == len(handle.forwards)
    assert handle.remove() is tiled and not any("forward" in m.__dict__ for m in tiled.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_are_no_further_from_exact_ones_than_the_plain_models(dtype: torch.dtype) -> None:
    plain, tiled, _ = pair(Gated, rows=8)
    x = torch.randn(4, 64, WIDTH)
    exact = gradients(copy.deepcopy(plain).double(), x.double())
    mine, other = (gradients(model.to(dtype), x.to(dtype)) for model in (tiled, plain))
    for a, b, true in zip(mine, other, exact, strict=True):
        assert (a - true).norm() <= 1.2 * (b - true).norm() + 1e-3 * true.norm()


def test_under_autocast_and_with_a_call_of_few_rows_in_it() -> None:
    plain, tiled, handle = pair(Gated)
    x = torch.randn(2, 64, WIDTH)
    found = []
    for model in (tiled, plain):
        with torch.autocast("cpu", torch.bfloat16):
            (model(x).float().square().mean() + model(x[:1, :4]).float().mean()).backward()
        found.append([p.grad for p in model.parameters()])
    for mine, other in zip(*found, strict=True):
        assert mine is not None and other is not None and mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.01)
    assert len(handle.ran) == 2


def test_it_holds_a_tile_of_what_an_mlp_makes() -> None:
    rows, inner = 4096, 512
    x = torch.randn(rows, WIDTH, requires_grad=True)

    def most(**options: int) -> int:
        mlp = Gated(inner=inner)
        if options:
            memopt.nn.tile_mlps(mlp, **options)
        watch = CpuBytes()
        watch.start()
        try:
            before, _ = watch.restart()
            mlp(x).sum().backward()
            return watch.now_and_peak()[1] - before
        finally:
            watch.stop()

    whole, tiled = most(), most(rows=256)
    assert whole > 4 * rows * inner * 4 and tiled < whole / 8


def test_what_mixes_rows_is_left_alone_though_it_looks_like_one() -> None:
    plain, tiled, handle = pair(Mixing, rows=8)
    assert [*handle.forwards] == ["0.mlp", "1.mlp"]
    x = torch.randn(2, 64, WIDTH)
    for mine, other in zip(gradients(tiled, x), gradients(plain, x), strict=True):
        assert torch.equal(mine, other)
    assert handle.ran == []


@pytest.mark.parametrize(
    ("function", "apart"),
    [
        (lambda x: x * 2 + 1, True),
        (lambda x: F.softplus(x)[..., :3], True),
        (lambda x: F.layer_norm(x, (WIDTH,)), True),
        (lambda x: x.reshape(-1, WIDTH).view(1, -1, WIDTH), True),
        (lambda x: x - x.mean(-2, keepdim=True), False),
        (lambda x: F.layer_norm(x, x.shape[-2:]), False),
        (lambda x: x.flip(-2), False),
        (lambda x: x[:, :4], False),
        (lambda x: x.roll(1, -2), False),
        (lambda x: x + torch.arange(x.shape[-2])[:, None], False),
        (lambda x: (x @ x.transpose(-1, -2)) @ x, False),
        (lambda x: F.dropout(x, 0.5), False),
        (lambda x: x.mul_(2), False),
        (lambda x: x.reshape(-1, x.shape[-2]), False),
        (lambda x: torch.ones_like(x), False),
        (lambda x: (x, x), False),
    ],
)
def test_what_takes_each_row_by_itself(function: Callable[[Tensor], Tensor], apart: bool) -> None:
    x = torch.randn(1, 7, WIDTH)
    before = x.clone()
    assert takes_single_rows(function, x) == apart and torch.equal(x, before)


def test_a_dropout_in_training_hooks_on_parts_and_few_rows_leave_it_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.Linear(64, WIDTH))
    handle = memopt.nn.tile_mlps(model, rows=8)
    x = torch.randn(32, WIDTH)
    model(x)
    assert handle.ran == []
    seen: list[int] = []
    hook = model[0].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    model.eval()(x)
    assert seen == [32] and handle.ran == []
    hook.remove()
    model(x[:8])
    assert handle.ran == []
    model(x)
    assert handle.ran == [""]


def test_buffers_are_changed_once_a_call() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, WIDTH))
    handle = memopt.nn.tile_mlps(model, rows=8)
    model(torch.randn(32, WIDTH)).sum().backward()
    assert handle.ran == [] and model[1].num_batches_tracked == 1


def test_hooks_of_the_mlp_itself_run_once() -> None:
    model = Gated()
    memopt.nn.tile_mlps(model, rows=8)
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    model(torch.randn(32, WIDTH)).sum().backward()
    assert seen == [32]


def test_a_parameter_changed_before_the_backward_pass_is_told() -> None:
    model = Gated()
    memopt.nn.tile_mlps(model, rows=8)
    loss = model(torch.randn(32, WIDTH)).sum()
    with torch.no_grad():
        model.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Ends(Block):
    """Another layer needs what the MLP makes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


@pytest.mark.parametrize(
    ("way", "block", "runs"),
    [
        ("torch's", Block, 2),
        ("torch's", Ends, 3),
        ("memopt's", Block, 2),
        ("memopt's", Ends, 3),
        ("planned", Block, 2),
    ],
)
def test_in_a_checkpointed_block_it_runs_once_more_unless_its_result_is_needed(
    way: str, block: type[Block], runs: int
) -> None:
    torch.manual_seed(SEED)
    model, rows = block(Gated()), []
    plain = copy.deepcopy(model)
    forward = Gated.forward

    def noted(mlp: Gated, x: Tensor) -> Tensor:
        if mlp is model.mlp:
            rows.append(len(x.flatten(0, -2)))
        return forward(mlp, x)

    x = torch.randn(2, 100, WIDTH)
    for found in (plain, model):
        found.zero_grad()
    expected = gradients(plain, x)
    Gated.forward = noted  # type: ignore[method-assign]
    try:
        memopt.nn.tile_mlps(model)
        if way == "planned":
            sample = x.clone().requires_grad_()
            with pytest.raises(memopt.chain.InfeasibleBudget) as error:
                memopt.auto_checkpoint(model, sample, memory_budget=1)
            memopt.auto_checkpoint(model, sample, memory_budget=error.value.least_budget)
            run = model
        else:
            checkpoint = torch.utils.checkpoint.checkpoint if way == "torch's" else memopt.checkpoint
            run = Recomputed(model, checkpoint)
        gradients(run, x)  # which sees that it takes single rows
        model.zero_grad()
        rows.clear()
        found = gradients(run, x)
    finally:
        Gated.forward = forward  # type: ignore[method-assign]
    assert sum(rows) == runs * 200
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Recomputed(nn.Module):
    def __init__(self, model: nn.Module, checkpoint: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.checkpoint = model, checkpoint

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(self.model, x, use_reentrant=False)


def test_only_what_needs_a_gradient_gets_one_and_the_graph_serves_twice() -> None:
    torch.manual_seed(SEED)
    mlp = nn.Sequential(Gated())
    memopt.nn.tile_mlps(mlp)
    x = torch.randn(100, WIDTH)
    out = mlp(x)
    weights = [*mlp.parameters()]
    first = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    for p, one in zip(weights, first, strict=True):
        torch.testing.assert_close(p.grad, 2 * one)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    mlp.requires_grad_(False)
    given = x.clone().requires_grad_()
    mlp(given).sum().backward()
    expected = x.clone().requires_grad_()
    mlp[0].down(F.silu(mlp[0].gate(expected)) * mlp[0].up(expected)).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)
    with torch.no_grad():
        assert mlp(x).grad_fn is None


def test_recomputed_planned_and_stepped_in_backward() -> None:
    """With torch's checkpoint, with a schedule, and with gradients that leave as they come."""
    plain, tiled, handle = pair(lambda: Gated().double(), rows=16)
    plain, tiled, x = plain.double(), tiled.double(), torch.randn(2, 64, WIDTH, dtype=torch.float64)
    expected = gradients(plain, x)
    memopt.auto_checkpoint(tiled, x, memory_budget="1GiB")
    for mine, other in zip(gradients(tiled, x), expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert len(handle.ran) == 2
    memopt.undo_checkpoint(tiled)
    handle.remove()

    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    again = nn.Sequential(*copy.deepcopy(plain))
    optimizer.step()
    memopt.nn.tile_mlps(again, rows=16)
    stepping = memopt.optim.SGD(again.parameters(), 0.1, step_in_backward=True)
    for p in again.parameters():
        p.grad = None
    out = torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    stepping.step()
    for p, q in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("out", [1, 4, 12])
def test_tiles_have_as_many_rows_as_the_input_is_wide_whatever_comes_out(out: int) -> None:
    plain = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, out)).double()
    tiled, x = copy.deepcopy(plain), torch.randn(33, 5, dtype=torch.float64)
    handle = memopt.nn.tile_mlps(tiled)
    for mine, other in zip(gradients(tiled, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(mine, other)
    assert handle.ran == [""]


def test_a_schedule_has_mlps_in_tiles_as_its_stages() -> None:
    """Not their layers, which run once for each tile; and within a budget that no MLP of all rows is within."""
    mlps = (
        nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(4)
    )
    plain = nn.Sequential(*mlps).double()
    tiled, x = copy.deepcopy(plain), torch.randn(2, 128, WIDTH, dtype=torch.float64)
    expected = gradients(plain, x)
    memopt.nn.tile_mlps(tiled, rows=8)
    least = []
    for model in (copy.deepcopy(plain), tiled):
        with pytest.raises(memopt.chain.InfeasibleBudget) as raised:
            memopt.auto_checkpoint(model, x, memory_budget=1, loss=lambda out: out.square().mean())
        least.append(raised.value.least_budget)
    assert least[1] < 0.7 * least[0]
    memopt.auto_checkpoint(tiled, x, memory_budget=least[1], loss=lambda out: out.square().mean())
    assert len(tiled.plan.chain.stages) == 5 and tiled.plan.check().within
    for mine, other in zip(gradients(tiled, x), expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    ("model", "rows", "said"), [(Attention(), None, "no module of 2 to 4"), (Gated(), 0, "rows=0")]
)
def test_wrong_calls(model: nn.Module, rows: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        memopt.nn.tile_mlps(model, rows=rows)
    assert not any("forward" in one.__dict__ for one in model.modules())


def test_a_model_in_tiles_is_refused() -> None:
    model = Gated()
    handle = memopt.nn.tile_mlps(model)
    with pytest.raises(ValueError, match="runs in tiles already"):
        memopt.nn.tile_mlps(nn.Sequential(model))
    memopt.nn.tile_mlps(handle.remove())
