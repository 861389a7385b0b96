"""memopt.nn.linear_cross_entropy and fuse_loss_head on the simulated device, with real numbers: values, bytes, host
waits, offloaded weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt import sim

SIM = {"memory": "1GiB"}


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients_are_those_of_the_cpu(dtype, reduction):
    torch.manual_seed(0)
    host = [torch.randn(40, 8).to(dtype).requires_grad_(), torch.randn(70, 8).to(dtype).requires_grad_()]
    device = [tensor.detach().cuda().requires_grad_() for tensor in host]
    target = torch.randint(70, (40,))
    target[:5] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 20.0, "chunk_bytes": 5000}
    losses = []
    for (hidden, weight), labels in ((host, target), (device, target.cuda())):
        loss = memopt.nn.linear_cross_entropy(hidden, weight, labels, **options)
        loss.sum().backward()
        losses.append(loss.detach().cpu())
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(losses[0], losses[1], atol=bound, rtol=bound)
    for mine, theirs in zip(device, host, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, atol=bound, rtol=bound)


def test_no_more_than_a_chunk_and_the_gradients_are_allocated():
    hidden = torch.randn(512, 16, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4096, 16, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(4096, (512,)).cuda()
    torch.cuda.reset_peak_memory_stats()
    before, chunk = torch.cuda.memory_allocated(), 1 << 20
    memopt.nn.linear_cross_entropy(hidden, weight, target, softcap=30.0, chunk_bytes=chunk).backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= chunk + weight.nbytes + hidden.nbytes + 64 * 1024


@pytest.mark.parametrize("ignored", [False, True])
def test_the_host_waits_once(ignored, monkeypatch):
    hidden = torch.randn(64, 8, device="cuda", requires_grad=True)
    weight = torch.randn(90, 8, device="cuda", requires_grad=True)
    target = torch.randint(90, (64,))
    target[: 9 * ignored] = -100
    target, reads = target.cuda(), []
    read = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: reads.append(0) or read(tensor))
    with Reads() as others:
        memopt.nn.linear_cross_entropy(hidden, weight, target, chunk_bytes=5000).backward()
    assert len(reads) == 1 and others.count == 1


class Reads(TorchDispatchMode):
    """Counts the operations that a host waits for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        out = func(*args, **(kwargs or {}))
        self.count += name == "_to_copy" and out.device.type == "cpu"
        return out


def test_a_weight_that_is_offloaded_is_refused_with_the_remedy():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50)).cuda()
    handle = memopt.offload_layers(model)
    x = torch.randn(4, 8, device="cuda")
    with pytest.raises(ValueError, match=r"offload_layers has its parameters"):
        memopt.nn.linear_cross_entropy(x, model[1].weight, torch.zeros(4, dtype=torch.int64, device="cuda"))
    handle.remove()


class Model(nn.Module):
    """A language model with what fuse_loss_head asks of one."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.lm_head = (
            nn.Embedding(70, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 70, bias=False),
        )
        if tied:
            self.lm_head.weight = self.embedding.weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens, labels=None):
        logits = self.lm_head(self.layer(self.embedding(tokens)).relu())
        return F.cross_entropy(logits.float().view(-1, 70), labels.view(-1))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("first", ["offloaded", "fused"])
def test_a_fused_head_under_offload_layers(tied, dtype, first):
    tokens = torch.randint(70, (4, 9))
    labels = tokens.clone()
    labels[:, :3] = -100
    tokens, labels = tokens.cuda(), labels.cuda()
    found = []
    for offloaded in (False, True):
        model = Model(tied).cuda()
        undo = []
        if offloaded:
            steps = [memopt.offload_layers, lambda model: memopt.nn.fuse_loss_head(model, chunk_bytes=2000)]
            undo = [step(model) for step in (steps if first == "offloaded" else steps[::-1])]
        for _ in range(2):  # the second pass prefetches
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = model(tokens, labels)
            (loss * 3).backward()
        found.append([loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters())])
        del loss
        for handle in undo:
            handle.remove()
    bound = {None: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    for plain, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, atol=bound, rtol=bound)
