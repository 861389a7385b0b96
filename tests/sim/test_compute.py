"""Real numbers under Compute: losses of training on the simulated device equal the CPU's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
import memopt.sim

SIM = {"memory": "2GiB"}


@pytest.fixture(autouse=True, scope="module")
def ops_with_a_cpu_twin():
    torch.backends.cudnn.enabled = False
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


class Mixed(nn.Module):
    """Convolution, batch norm, attention, embedding and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        x = torch.relu(self.norm(self.image(images))).flatten(2).transpose(1, 2) + self.embed(tokens)
        x = checkpoint(self.layer, x, use_reentrant=False) if checkpointed else self.layer(x)
        return self.head(x.mean(1))


def train_perceptron(device: str, amp: bool) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
    inputs, targets = torch.randn(256, 32), torch.randint(0, 10, (256,))
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, enabled=amp, init_scale=2.0**10)
    losses = []
    for _ in range(20):
        with torch.autocast(device, dtype=torch.float16, enabled=amp):
            loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, scaler.get_scale()


def train_mixed(device: str, checkpointed: bool, amp: bool) -> list[float]:
    torch.manual_seed(1)
    model, images = Mixed(), torch.randn(16, 3, 8, 8)
    tokens, targets = torch.randint(0, 50, (16, 64)), torch.randint(0, 10, (16,))
    model, images = model.to(device), images.to(device)
    tokens, targets = tokens.to(device), targets.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=amp)
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        with torch.autocast(device, torch.float16, enabled=amp):
            loss = nn.functional.cross_entropy(model(images, tokens, checkpointed).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worst(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_a_perceptron_in_single_precision_has_the_cpus_losses():
    expected, _ = train_perceptron("cpu", amp=False)
    with memopt.sim.Compute():
        got, _ = train_perceptron("cuda", amp=False)
    assert worst(expected, got) == 0.0
    assert got[-1] < got[0] / 2  # it learned
    assert torch.cuda.max_memory_allocated() > 0


def test_a_perceptron_under_autocast_and_a_scaler_stays_close_to_the_cpu():
    expected, expected_scale = train_perceptron("cpu", amp=True)
    with memopt.sim.Compute():
        got, scale = train_perceptron("cuda", amp=True)
    assert worst(expected, got) < 5e-3
    assert scale == expected_scale


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_mixed_network_in_single_precision_has_the_cpus_losses(checkpointed):
    expected = train_mixed("cpu", checkpointed, amp=False)
    with memopt.sim.Compute():
        got = train_mixed("cuda", checkpointed, amp=False)
    assert worst(expected, got) == 0.0


def test_a_mixed_network_under_autocast_stays_close_to_the_cpu():
    expected = train_mixed("cpu", False, amp=True)
    with memopt.sim.Compute():
        got = train_mixed("cuda", False, amp=True)
    assert worst(expected, got) < 5e-3


def test_shapes_that_depend_on_values_are_right():
    host = torch.tensor([3.0, 0.0, -1.0, 0.0, 2.0])
    with memopt.sim.Compute():
        x = host.cuda()
        assert torch.equal(x.nonzero().cpu(), host.nonzero())
        assert torch.equal(x[x > 0].cpu(), host[host > 0])
        assert torch.equal(x.unique().cpu(), host.unique())
        assert x.sum().item() == 4.0
        assert bool(torch.isfinite(x).all())


def test_what_is_no_tensor_is_the_cpus_answer():
    host = torch.randn(64)
    other = host + (torch.arange(64) == 63)
    with memopt.sim.Compute():
        one, same, another = host.cuda(), host.cuda(), other.cuda()
        for question in (torch.equal, torch.allclose):
            # Computed on the device each, so that memory that was freed holds the answers before.
            assert [question(one * 2, x * 2) for x in (same, another, same, another)] == [True, False] * 2
        assert not one.equal(one / 0.0)
        assert (one != one).any().item() is False
        assert one.is_set_to(one)
        assert not one.is_set_to(same)


def test_planning_a_checkpointed_model_leaves_its_statistics():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    with memopt.sim.Compute():
        model, sample = model.cuda(), torch.randn(8, 3, 8, 8).cuda()
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        memopt.auto_checkpoint(model, sample, memory_budget="1GiB")
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), before[name]), name


def test_outside_of_compute_nothing_is_computed():
    x = torch.zeros(10, device="cuda") + 1
    assert x.cpu().sum() != 10
