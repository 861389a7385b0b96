"""memopt.compress on the simulated device, with real numbers: values and bytes of what lives there, a teacher that
visits from the host, and what is refused where a device has no kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from compress_state import differences, kept, perceptron
from torch.nn import functional as F

import memopt
from memopt import sim
from memopt.compress import DistillationLoss, duplicates, pack_inputs, prune_, tie_

SIM = {"memory": "1GiB"}


@pytest.fixture(autouse=True)
def computed() -> Iterator[None]:
    torch.set_num_threads(1)
    with sim.Compute():
        yield


def test_two_of_each_four_are_the_same_as_on_the_host_and_bytes_are_the_devices():
    torch.manual_seed(0)
    host = perceptron(16, 32, 8)
    model = copy.deepcopy(host).cuda()
    prune_(host, method="2:4")
    report = prune_(model, method="2:4")
    assert report.before.memory_bytes == sum(p.nbytes for p in model.parameters()) and report.saved_bytes == 0
    for ours, theirs in zip(model.parameters(), host.parameters(), strict=True):
        assert ours.is_cuda and torch.equal(ours.cpu(), theirs)


def test_offloaded_layers_are_pruned_at_home_and_visit_with_the_new_values():
    torch.manual_seed(0)
    model = perceptron(16, 32, 32, 8).cuda()
    plain = copy.deepcopy(model)
    prune_(plain, method="2:4")
    handle = memopt.offload_layers(model)
    x = torch.randn(4, 16).cuda()
    model(x)  # copies are on the device
    prune_(model, method="2:4")
    assert torch.equal(model(x).cpu(), plain(x).cpu())
    with pytest.raises(ValueError, match=r"\.remove\(\) its handle"):
        tie_(model, [("2.weight", "2.bias")])
    handle.remove()


def test_layers_are_tied_on_the_device():
    model = perceptron(8, 8, 8).cuda()
    assert tie_(model, [("0", "2")]).saved_bytes == 8 * 8 * 4 + 8 * 4 and model[0].weight is model[2].weight
    assert duplicates(model).tied == (("0.weight", "2.weight"), ("0.bias", "2.bias"))


def test_a_teacher_on_the_host_visits_the_device():
    torch.manual_seed(0)
    teacher = perceptron(8, 16, 16, 4).cuda()
    student = perceptron(8, 4).cuda()
    x, target = torch.randn(3, 8).cuda(), torch.tensor([0, 1, 2]).cuda()
    expected = DistillationLoss(copy.deepcopy(teacher), teacher_dtype=None)(student(x), target, inputs=x)
    distil = DistillationLoss(teacher, teacher_dtype=None, offload="cpu")
    assert not any(p.is_cuda for p in teacher.parameters())
    loss = distil(student(x), target, inputs=x)
    assert torch.equal(loss.cpu(), expected.cpu())
    loss.backward()
    assert F.mse_loss(student[0].weight.grad, torch.zeros_like(student[0].weight.grad)) > 0
    distil.remove()


def test_few_bits_travel_and_are_unpacked_on_the_device():
    batch = {"x": torch.arange(256).float().div(255), "y": torch.arange(3)}
    back = pack_inputs(batch).unpack("cuda")
    assert back["x"].is_cuda and back["y"].is_cuda
    assert torch.equal(back["x"].cpu(), batch["x"])


def test_sparse_kernels_that_the_device_lacks_are_refused_before_anything_changes():
    from memopt.compress import sparsify_

    model = perceptron(64, 64, dtype=torch.float16).cuda()
    prune_(model, method="2:4")
    before = kept(model)
    with pytest.raises(NotImplementedError, match="has no kernels for 2:4"):
        sparsify_(model, "2:4")
    assert not differences(before, model)
