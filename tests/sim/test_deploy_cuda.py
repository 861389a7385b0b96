"""memopt.deploy.export of models on a CUDA device, with real numbers: an offloaded one is exported where its parameters
live, and what a file takes on the device is counted there."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt import sim
from memopt.deploy import export

SIM = {"memory": "1GiB"}
SOAK = os.environ.get("MEMOPT_SOAK") == "1"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.register_buffer("scale", torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_an_offloaded_model_is_exported_from_the_host(tmp_path: Path, quiet: None) -> None:
    model = Model().cuda().eval()
    x = torch.randn(3, 16)
    with sim.Compute():
        expected = model(x.cuda()).cpu()
        handle = memopt.offload_layers(model)
        assert not handle.plan.note
        devices = [t.device.type for t in (*model.parameters(), *model.buffers())]
        made = export(model, x.cuda(), tmp_path / "model.pt", measure=False)
    assert made.taken_off == ["offload_layers"] and made.checks[0].difference <= 1e-4
    assert devices == [t.device.type for t in (*model.parameters(), *model.buffers())]
    assert devices == ["cpu"] * 4 + ["cuda"]
    found = torch.jit.load(tmp_path / "model.pt")
    assert {t.device.type for t in (*found.parameters(), *found.buffers())} == {"cpu"}
    assert torch.allclose(found(x), expected.detach(), atol=1e-5)
    with sim.Compute():
        assert torch.equal(handle.remove()(x.cuda()).cpu(), expected)


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_what_a_file_takes_of_the_device_is_counted_by_its_allocator(tmp_path: Path, quiet: None) -> None:
    model = nn.Linear(1024, 1024, bias=False).cuda().eval()
    made = export(model, torch.ones(2, 1024, device="cuda"), tmp_path / "model.pt", verify=False)
    assert made.memory is not None, made.not_measured
    # The weight, and what cuBLAS works in besides the sample and two outputs.
    assert 4 << 20 <= made.memory.live_bytes < (4 << 20) + (16 << 20)
    assert "cuda" in made.memory.where and json.dumps(made.as_dict())


def test_a_sample_elsewhere_than_the_model(tmp_path: Path) -> None:
    model = Model().cuda().eval()
    with pytest.raises(
        ValueError, match="the sample is on cpu but the model is on cuda:0: move the sample there"
    ):
        export(model, torch.ones(2, 16), tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []
