"""Values where a script reads them, on a blank device: known as far as labels, masks and lengths go, guessed beyond."""

import gc
import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt._estimate import values as estimation_values
from memopt._estimate.host_reads import Guesses
from memopt._estimate.values import Values

SIM = {"memory": "40GiB", "blank": True}
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


@pytest.fixture(scope="module")
def mode():
    made = Values(Guesses())
    estimation_values.install(made)
    return made


@pytest.fixture
def values(mode):
    """The mode, with nothing guessed yet and the whole of an unknown mask taken to hold."""
    mode.guesses._counts.clear()
    mode.guesses.fraction = 1.0
    with mode:
        yield mode


def kinds(values) -> list[str]:
    return [guess["kind"] for guess in values.guesses.rows()]


def test_what_comes_from_the_host_is_known_on_the_device(values):
    lengths = torch.tensor([3, 5, 2]).cuda()
    padding = torch.arange(5, device="cuda")[None] >= lengths[:, None]
    assert lengths.max().item() == 5 and bool((lengths > 1).all())
    x = torch.randn(3, 5, 7, device="cuda")
    assert x[~padding].shape == (10, 7)
    assert torch.where(padding)[0].tolist() == [0, 0, 2, 2, 2]
    assert x.masked_select(padding[..., None]).shape == (35,)
    assert lengths.repeat_interleave(lengths).tolist() == [3, 3, 3, 5, 5, 5, 5, 5, 2, 2]
    assert torch.bincount(lengths).cpu().tolist() == [0, 0, 1, 1, 0, 1]
    found, inverse = torch.unique(lengths, return_inverse=True)
    assert found.tolist() == [2, 3, 5] and inverse.tolist() == [1, 2, 0]
    order = torch.empty_like(lengths).scatter_(0, lengths.argsort(), torch.arange(3, device="cuda"))
    assert order.tolist() == [1, 2, 0]
    assert (lengths + 0.5).sum().item() == 11.5
    lengths[0] = 9
    lengths += 1
    assert lengths.cpu().numpy().tolist() == [10, 6, 3]
    assert kinds(values) == []


def test_what_the_model_decides_is_guessed_and_named_by_its_line(values):
    x = nn.Linear(64, 64).cuda()(torch.randn(32, 64, device="cuda"))
    assert x.mean().item() == 1.0
    assert not (x.mean() > 0)
    assert x.argmax(1)[0].item() == 0
    assert x[x > 0].shape == (2048,) and len((x.amax(1) > 0).nonzero()) == 32
    assert (x.argmax(1) == 3).sum().item() == 32
    assert (x > 0).any() and x.cpu()[0, 0] == 1.0
    rows = values.guesses.rows()
    assert sorted(set(kinds(values))) == ["copy", "shape", "test", "value"]
    assert kinds(values) == sorted(kinds(values), key=["shape", "test", "value", "copy"].index)
    first = test_what_the_model_decides_is_guessed_and_named_by_its_line.__code__.co_firstlineno
    wheres = {guess["where"] for guess in rows}
    assert {f"{__file__}:{first + 2}", f"{__file__}:{first + 5}"} <= wheres
    assert all(where.startswith(__file__) for where in wheres)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_loss_head_leaves_out_ignored_rows_that_are_known(values, fraction):
    values.guesses.fraction = fraction
    hidden = torch.randn(64, 8, device="cuda", requires_grad=True)
    weight = torch.randn(90, 8, device="cuda", requires_grad=True)
    labels = torch.arange(64)
    labels[:24] = -100
    # From the host; of values that nobody knows, of which no row is left out and none is wrong.
    for target, kept in ((labels.cuda(), 40), ((hidden.detach() @ weight.detach().t()).argmax(1), 64)):
        loss = memopt.nn.linear_cross_entropy(hidden, weight, target, reduction="none")
        assert loss.grad_fn.next_functions[0][0].head.target.shape == (kept,)
        loss.sum().backward()
    assert kinds(values) == ["value"]


@pytest.mark.parametrize(("fraction", "rows"), [(0.0, 0), (0.25, 16), (1.0, 64)])
def test_an_unknown_mask_holds_in_the_part_that_is_asked_for(values, fraction, rows):
    values.guesses.fraction = fraction
    x = torch.randn(64, 2048, device="cuda")
    mask = x.sum(1) > 0
    assert x[mask].shape == (rows, 2048)
    assert mask.sum().item() == rows
    assert bool(mask.any()) == (fraction > 0) and bool(mask.all()) == (fraction == 1)
    assert values.guesses.hang_on_fraction


def test_numbers_are_finite(values):
    x = torch.randn(4096, 1024, device="cuda")
    assert torch.isfinite(x).all() and not torch.isnan(x).any() and not torch.isinf(x).any()
    assert torch.isfinite(x.mean()) and not (x != x).any() and not (x.abs() == float("inf")).any()
    assert kinds(values) == []
    known = torch.tensor([1.0, float("inf"), float("nan")]).cuda()
    assert known.isfinite().tolist() == [True, False, False]


def test_arguments_that_are_not_known_are_valid(values):
    x = nn.Linear(64, 64).cuda()(torch.randn(32, 64, device="cuda"))
    torch.normal(x, x.exp())
    assert torch.multinomial(x.softmax(1), 2).shape == (32, 2)
    torch._check_tensor_all(x < 3)
    for made in (torch.distributions.Normal(x, x.exp()), torch.distributions.Categorical(logits=x)):
        made.log_prob(made.sample())
    with pytest.raises(ValueError, match="invalid values"):
        torch.distributions.Categorical(logits=x[0]).log_prob(torch.tensor(64).cuda())
    with pytest.raises(ValueError, match="invalid values"):
        torch.distributions.Normal(torch.zeros(2).cuda(), torch.tensor([1.0, -1.0]).cuda())


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_what_is_known_is_known_without_gradients_too(values, without_gradients):
    with without_gradients():
        labels = torch.tensor([[3, 5], [2, 2]]).to("cuda")
        mask = torch.tensor([True, False]).to(device="cuda", dtype=torch.long).reshape(1, 2)
        assert labels.max().item() == 5 and labels[mask.bool().flatten()].tolist() == [[3, 5]]
        one_hot = nn.functional.one_hot(labels, 6).permute(0, 2, 1).float()
        assert one_hot.shape == (2, 6, 2)
    assert kinds(values) == []


def test_an_assert_statement_holds_of_what_is_not_known(values):
    x = nn.Linear(64, 64).cuda()(torch.randn(32, 64, device="cuda"))
    line = test_an_assert_statement_holds_of_what_is_not_known.__code__.co_firstlineno
    values.guesses.asserts |= {(__file__, line + 5): True, (__file__, line + 6): False}
    try:
        assert x.max() < 3 and (x[0] < 3).all()
        assert not (x < -9).any()
        assert not (x.max() < 3)
    finally:
        values.guesses.asserts.clear()
    assert set(kinds(values)) == {"test"}


def test_a_scaler_steps_and_keeps_its_scale(values):
    model = nn.Linear(128, 128).cuda()
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 128, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536.0
    assert optimizer.state[model.weight]["step"] == 2
    assert kinds(values) == []


def test_a_backward_pass_makes_gradients_unknown_that_were_zeroed(values):
    weight = torch.ones(8, device="cuda", requires_grad=True)
    weight.grad = torch.zeros(8, device="cuda")
    assert weight.grad.sum().item() == 0.0 and kinds(values) == []
    (weight * torch.randn(8, 4096, device="cuda").sum(1)).sum().backward()
    assert weight.grad.sum().item() == 1.0 and kinds(values) == ["value"]


def test_what_is_recomputed_sees_the_same_masks(values):
    layer, tokens = nn.Linear(256, 256).cuda(), torch.tensor([[5, 0, 7], [0, 0, 3]]).cuda()

    def chosen(x):
        return layer(x)[tokens != 0].relu().sum()

    for reentrant in (False, True):
        x = torch.randn(2, 3, 256, device="cuda", requires_grad=True)
        checkpoint(chosen, x, use_reentrant=reentrant).backward()
        assert x.grad is not None
    assert kinds(values) == []


def test_random_numbers_on_the_device_leave_the_hosts_alone(values):
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    mask = torch.rand(1000, device="cuda") < 0.15
    assert torch.randperm(10, device="cuda").sum().item() == 45
    rows = len(mask.nonzero())
    assert 90 < rows < 220  # seven standard deviations
    assert torch.rand(4).tolist() == expected
    assert all("drawn on the host" in guess["what"] for guess in values.guesses.rows())


def test_twins_go_with_their_tensors(values):
    gc.collect()
    before = len(values.shadows._shadows), values.shadows._bytes
    for _ in range(20):
        kept = [torch.arange(1000, device="cuda") + n for n in range(5)]
        assert kept[3][0].item() == 3
    del kept
    gc.collect()
    assert (len(values.shadows._shadows), values.shadows._bytes) == before


def test_twins_that_would_take_too_much_are_not_kept(values):
    large = torch.zeros((1 << 22) + 1, dtype=torch.int64, device="cuda")
    assert values.shadows.get(large) is None
    assert large[0].item() == 0 and kinds(values) == ["value"]


def test_a_compiler_goes_on_compiling(values):
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(len(example_inputs))
        return graph.forward

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).cuda()
    torch.compile(model, backend=backend)(torch.randn(4, 16, device="cuda"))
    assert len(compiled) == 1


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.recompute = recompute

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)


def train(make_optimizer, recompute: bool) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 128), *[Block(recompute) for _ in range(3)]).cuda()
    head = nn.Linear(128, 1000).cuda()
    optimizer = make_optimizer([*model.parameters(), *head.parameters()])
    for step in range(3):
        tokens = torch.randint(0, 1000, (8, 64 + 16 * step)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(head(model(tokens)).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "loop": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "adafactor": torch.optim.Adafactor,
}
SOME = [("fused", True), ("foreach", False), ("loop", False)]
ALL = [(name, recompute) for name in OPTIMIZERS for recompute in (False, True)]


@pytest.mark.parametrize(("name", "recompute"), ALL if SOAK else SOME)
def test_a_script_allocates_with_the_mode_what_it_allocates_without(mode, name, recompute):
    make_optimizer = OPTIMIZERS[name]
    train(make_optimizer, recompute)  # what libraries take once
    plain = train(make_optimizer, recompute)
    with mode:
        watched = train(make_optimizer, recompute)
    assert watched == plain


def infer(model, x) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        for _ in range(2):
            model(x).softmax(-1).reshape(-1).topk(3)
    return torch.cuda.max_memory_allocated()


def test_inference_allocates_with_the_mode_what_it_allocates_without(mode):
    layers = [
        nn.Embedding(1000, 128),
        Block(False),
        nn.Unflatten(1, (8, 8)),
        nn.Flatten(1, 2),
        nn.Linear(128, 1000),
    ]
    model, x = nn.Sequential(*layers).cuda().eval(), torch.randint(0, 1000, (16, 64)).cuda()
    infer(model, x)  # what libraries take once
    plain = infer(model, x)
    with mode:
        watched = infer(model, x)
    assert watched == plain
