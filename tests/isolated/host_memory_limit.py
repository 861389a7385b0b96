"""A step under a limit of address space: micro-batches where they fit, else the least capacity by name.

Says "cut", then "least"."""

from __future__ import annotations

import resource

import torch

import memopt
from memopt._runtime.host_memory import address_space_bytes

MIB = 1 << 20

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 16))
x = torch.randn(8, 512, 64)  # 64 MiB for each activation of the whole
plain = [p.clone() for p in torch.autograd.grad(model(x).square().mean(), list(model.parameters()))]
memopt.backward(lambda a: model(a).square().mean(), x[:1], model=model)  # whatever is made once
model.zero_grad()


def limit(mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + mib * MIB, resource.RLIM_INFINITY))


calls = []


def fn(a: torch.Tensor) -> torch.Tensor:
    calls.append(len(a))
    return model(a).square().mean()


limit(110)
memopt.backward(fn, x, model=model)
for parameter, expected in zip(model.parameters(), plain, strict=True):
    assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm()
assert calls[0] == 8 and min(calls) < 8, calls
print("cut")

model.zero_grad()
limit(4)
try:
    memopt.backward(fn, x, model=model)
except RuntimeError as error:
    assert "even one sample (of 8) does not fit: it needs at least" in str(error), error
    assert "of address space" in str(error)
    assert "DefaultCPUAllocator: can't allocate memory" in str(error)
    print("least")
