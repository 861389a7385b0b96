"""Stages that are one to the solver: which they are, what they cost together, and what is done with each."""

from __future__ import annotations

import torch
from torch import nn

from memopt._checkpoint.stages.costs import StageBytes, stage_bytes, tensors_in
from memopt._checkpoint.stages.measure import expand, group, group_bytes, passing

ROWS, WIDTH = 64, 32


def measure(function: nn.Module, x: torch.Tensor) -> StageBytes:
    return stage_bytes(
        function,
        lambda: ((x.detach().clone().requires_grad_(),), {}),
        lambda args, kwargs: tensors_in(args),
        list(function.parameters()),
        list(function.parameters()),
        torch.device("cpu"),
    )


def costs(modules: list[nn.Module]) -> list[StageBytes]:
    x = torch.randn(ROWS, WIDTH)
    found = []
    for module in modules:
        found.append(measure(module, x))
        x = module(x).detach()
    return found


def test_what_nobody_saves_only_passes() -> None:
    linear = nn.Linear(WIDTH, WIDTH)  # saves its input
    relu, tanh = nn.ReLU(), nn.Tanh()  # save their output
    groups = group(costs([linear, relu, linear, linear, tanh, relu, linear]))
    assert groups == [range(2), range(2, 3), range(3, 5), range(5, 6), range(6, 7)]
    assert passing(groups) == {1, 4}


def test_a_group_costs_what_its_stages_cost_as_one_module() -> None:
    for modules in (
        [nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU()],
        [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
        [nn.Linear(WIDTH, WIDTH), nn.Flatten(), nn.Sigmoid()],
    ):
        parts = costs(modules)
        (members,) = group(parts)
        one = measure(nn.Sequential(*modules), torch.randn(ROWS, WIDTH))
        together = group_bytes(parts[members.start : members.stop])
        assert (together.saved, together.output, together.input_grad) == (
            one.saved,
            one.output,
            one.input_grad,
        )
        assert together.parameter_grad == one.parameter_grad
        assert (together.saves_input, together.saves_output) == (one.saves_input, one.saves_output)
        assert one.forward_overhead <= together.forward_overhead <= one.forward_overhead + one.output
        assert one.backward_overhead <= together.backward_overhead <= one.backward_overhead + one.output


def test_operations_on_groups_are_operations_on_stages() -> None:
    groups = [range(2), range(2, 3)]
    assert expand([("fck", 0), ("fall", 1), ("fall", 2), ("bwd", 2), ("bwd", 1)], groups) == [
        ("fck", 0), ("fnone", 1), ("fall", 2), ("fall", 3), ("bwd", 3), ("bwd", 2),
    ]  # fmt: skip
    assert expand([("fall", 0), ("drop_input", 0), ("drop_saved", 0), ("fnone", 0), ("bwd", 0)], groups) == [
        ("fall", 0), ("fall", 1), ("drop_input", 0), ("drop_saved", 0), ("drop_saved", 1), ("fnone", 0), ("fnone", 1),
        ("bwd", 1), ("bwd", 0),
    ]  # fmt: skip
