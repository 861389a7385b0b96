"""Parameters that offload_layers moves to the host of an estimate's card: neither they nor their optimizer's states
take the memory of this host."""

from __future__ import annotations

import pytest
from estimation_children import estimate

from memopt.optim._disk_states import AREA

MIB = 1 << 20
PARAMETERS = 32 * 1024 * 1025 * 4
SCRIPT = """\
import re, torch, memopt, memopt.optim
from torch import nn

def resident():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]).cuda()
before = resident()
handle = memopt.offload_layers(model)
optimizer = {optimizer}
for step in range(3):
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm > 100 or not torch.isfinite(norm) or not torch.isfinite(model[0].weight.grad).all():
        print("large")
    total = torch.zeros(())
    for p in model.parameters():
        total += p.grad.square().sum()
    total.sqrt_().unsqueeze_(0)
    seen = 1.0 / total.item(), total.shape, norm.cuda().item()
    optimizer.step()
    optimizer.zero_grad()
    if not step:
        first = resident()
print("large" if seen != (1.0, (1,), 1.0) else "as guessed")
print(first - before, resident() - before, float(norm), norm.device, next(model.parameters()).device)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("torch.optim.AdamW(model.parameters())", 2.0),
        # Three, and a root of one for all parameters at once.
        ("torch.optim.AdamW(model.parameters(), foreach=True, amsgrad=True)", 4.0),
        ("torch.optim.AdamW(model.parameters(), fused=True)", 2.0),
        ("torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)", 1.0),
        ("memopt.optim.AdamW(model.parameters())", 2.0),
        ("memopt.optim.AdamW(model.parameters(), state_bits=8)", 0.5),
    ],
)
def test_the_host_needs_no_memory_for_them(tmp_path, optimizer, states):
    found = estimate(tmp_path, SCRIPT.format(optimizer=optimizer))
    assert found["exit_status"] == 0, found["complained"]
    first, later, norm, *places = found["printed"].splitlines()[-1].split()
    assert places == ["cpu", "cpu"] and float(norm) == 1.0 and "large" not in found["printed"]
    # What a first step loads takes memory; parameters, gradients and states would be 384 MiB at least.
    assert int(first) < 100 * MIB and int(later) - int(first) < 10 * MIB
    assert (2 + states) * PARAMETERS <= found["host_bytes"] <= 1.05 * (2 + states) * PARAMETERS + 16 * MIB
    assert {guess["what"] for guess in found["guesses"]} == {
        "the value of bool []",
        "the value of float32 []",
        "the value of float32 [1]",
    }


def test_a_scaler_and_steps_in_the_backward_pass_take_none_either(tmp_path):
    scaled = SCRIPT.replace("for step", 'scaler = torch.amp.GradScaler("cuda")\nfor step').replace(
        '    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()\n',
        '    scaler.scale(model(torch.ones(4, 1024, device="cuda")).square().mean()).backward()\n'
        "    scaler.unscale_(optimizer)\n",
    )
    scaled = scaled.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    found = estimate(tmp_path, scaled.format(optimizer="torch.optim.AdamW(model.parameters())"))
    assert found["exit_status"] == 0, found["complained"]
    assert found["host_bytes"] >= 4 * PARAMETERS  # it was stepped: no gradient was infinite
    first, later = map(int, found["printed"].splitlines()[-1].split()[:2])
    assert first < 100 * MIB and later - first < 10 * MIB
    in_backward = """\
import re, torch, memopt, memopt.optim
from torch import nn

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]).cuda()
memopt.offload_layers(model)
optimizer = memopt.optim.AdamW(model.parameters(), step_in_backward=True)
before = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
for _ in range(3):
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) - before)
"""
    found = estimate(tmp_path, in_backward)
    assert found["exit_status"] == 0, found["complained"]
    assert int(found["printed"].splitlines()[-1]) << 10 < 100 * MIB
    assert found["host_bytes"] >= 3 * PARAMETERS


def test_states_on_a_disk_take_neither_the_disk_nor_the_host(tmp_path):
    """Of 256 MiB: what is pinned for their way is two areas, and the directory is that of another machine."""
    script = """\
import re, torch, memopt.optim
from torch import nn

def resident():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]).cuda()
optimizer = memopt.optim.AdamW(model.parameters(), offload_states="/no/such/disk")
before = resident()
for _ in range(3):
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(optimizer.memory())
optimizer.load_state_dict(optimizer.state_dict())
print(resident() - before)
torch.save(optimizer.state_dict(), "saved.pt")
"""
    found = estimate(tmp_path, script, timed=True, rates_of="rtx3090")
    assert found["exit_status"] == 0, found["complained"]
    assert f"'disk': {{'states': {2 * PARAMETERS}}}" in found["printed"]
    assert 2 * PARAMETERS <= found["disk_bytes"] <= 2.1 * PARAMETERS
    assert 2 * AREA <= found["host_bytes"] <= 2 * AREA + MIB
    assert sum(segment["disk_bytes"] for segment in found["step"]) == 4 * PARAMETERS
    assert int(found["printed"].splitlines()[-1]) < 100 * MIB
