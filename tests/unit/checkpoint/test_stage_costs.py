"""Measured costs of a stage, where they are known by hand."""

from __future__ import annotations

import gc

import torch
from torch import nn

import memopt
from memopt._checkpoint.stages.costs import Meter, bytes_of, stage_bytes, stage_moments, tensors_in
from memopt._checkpoint.stages.measure import ChainMeasurement
from memopt._checkpoint.stages.model_chain import ModelChain

ROWS, WIDTH = 32, 16
UNIT = ROWS * WIDTH * 4


def measure(function: nn.Module):
    standing = [*function.parameters(), *function.buffers()]
    x = torch.randn(ROWS, WIDTH)
    return stage_bytes(
        function,
        lambda: ((x.clone().requires_grad_(),), {}),
        lambda args, kwargs: tensors_in(args),
        standing,
        [p for p in standing if p.requires_grad],
        torch.device("cpu"),
    )


def test_bytes_of_storages_are_counted_once() -> None:
    x = torch.zeros(10)
    assert bytes_of([x, x[2:], x.view(5, 2)]) == 40
    assert bytes_of([x, torch.zeros(3)], beside=[x[1:]]) == 12


def test_the_meter_counts_births_and_deaths() -> None:
    x = torch.zeros(100)
    with Meter() as meter:
        y = torch.zeros(50)
        z = y[:3]
        y = x + 1
        assert (meter.live, meter.peak) == (600, 600)
        del z
        assert (meter.live, meter.peak) == (400, 600)
        meter.ignore([y])
        assert meter.live == 0
        y.untyped_storage().resize_(800)
        del y
    gc.collect()
    assert meter.live == 0


def test_a_stage_that_saves_its_output() -> None:
    found = measure(nn.Tanh())
    assert (found.saved, found.output, found.input_grad) == (UNIT, UNIT, UNIT)
    assert (found.forward_overhead, found.backward_overhead, found.parameter_grad) == (0, 0, 0)
    assert found.saved_count == 1


def test_a_stage_that_saves_its_input_saves_nothing_of_its_own() -> None:
    found = measure(nn.Linear(WIDTH, 2 * WIDTH))
    assert (found.saved, found.output) == (2 * UNIT, 2 * UNIT)
    assert found.parameter_grad == (WIDTH * 2 * WIDTH + 2 * WIDTH) * 4


def test_a_view_of_the_input_holds_the_input() -> None:
    assert measure(nn.Identity()).output == UNIT
    assert measure(nn.Identity()).saved == UNIT


def test_what_lives_only_while_the_stage_runs_is_overhead() -> None:
    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh((x + 1) + (x + 2))  # both sums and their sum, before tanh; nobody saves them

    found = measure(Passing())
    assert (found.saved, found.forward_overhead) == (UNIT, 2 * UNIT)


def test_gradients_and_times() -> None:
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    count = measure(stage).saved_count
    moments = stage_moments(
        stage,
        lambda: ((x.clone().requires_grad_(),), {}),
        list(stage.parameters()),
        count,
        torch.device("cpu"),
    )
    assert len(moments) == 4 and all(ended > begun for begun, ended in moments)


def test_what_a_backward_pass_saves_for_a_graph_of_its_own_goes_with_that() -> None:
    rows, width = 2048, 16
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)) for _ in range(3))
    )
    memopt.nn.tile_mlps(model)
    chain = ModelChain(model, (torch.randn(rows, width),), {})
    found = ChainMeasurement(chain, lambda out: out.square().mean(), keeps_output=False)
    assert len(found.stage_bytes) == 4
    whole = 4 * rows * 256  # bytes of the wide result of all rows
    assert all(size.backward_overhead < whole / 4 for size in found.stage_bytes[:3])
