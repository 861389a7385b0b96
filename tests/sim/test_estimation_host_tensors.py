"""Parameters that offload_layers moves to the host of an estimate's card: neither they nor their optimizer's states
take the memory of this host."""

from __future__ import annotations

import pytest
from estimation_children import estimate

MIB = 1 << 20
PARAMETERS = 32 * 1024 * 1025 * 4
SCRIPT = """\
import resource, torch, memopt, memopt.optim
from torch import nn

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]).cuda()
before = resident()
handle = memopt.offload_layers(model)
optimizer = {optimizer}
for step in range(3):
    model(torch.ones(4, 1024, device="cuda")).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm > 100:
        print("large")
    optimizer.step()
    optimizer.zero_grad()
    if not step:
        first = resident()
print(first - before, resident() - before, float(norm), norm.device, next(model.parameters()).device)
"""


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("torch.optim.AdamW(model.parameters())", 2.0),
        (
            "torch.optim.AdamW(model.parameters(), foreach=True, amsgrad=True)",
            4.0,
        ),  # and a root for all at once
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
    assert places == ["cpu", "cpu"] and float(norm) == 1.0
    # What a first step loads takes memory; parameters, gradients and states would be 384 MiB at least.
    assert int(first) < 100 * MIB and int(later) - int(first) < 10 * MIB
    assert (2 + states) * PARAMETERS <= found["host_bytes"] <= 1.05 * (2 + states) * PARAMETERS + 16 * MIB
    assert [guess["what"] for guess in found["guesses"]] == [
        "the value of bool []",
        "the value of float32 []",
    ]
