"""memopt.patch() and what traces: torch's names, compilers, and code that was not written for memopt."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
from memopt import checkpoint

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts")


@pytest.fixture
def importer():
    """A module that has imported torch's function under a name of its own."""
    module = types.ModuleType("somebody_elses_module")
    module.remember, module.other = torchs.checkpoint, 1
    sys.modules[module.__name__] = module
    yield module
    memopt.disable()
    del sys.modules[module.__name__]


def test_torchs_names_are_memopts_wherever_they_were_imported_to_until_disabled(importer):
    before = {name: getattr(torchs, name) for name in NAMES}
    for _ in range(2):
        memopt.patch()
        memopt.patch()
        for name in NAMES:
            assert getattr(torchs, name) is getattr(memopt, name) is not before[name]
        assert importer.remember is memopt.checkpoint and importer.other == 1
        later = types.ModuleType("torch.imported_later")
        later.checkpoint = torchs.checkpoint
        sys.modules[later.__name__] = later
        try:
            memopt.disable()
        finally:
            del sys.modules[later.__name__]
        assert {name: getattr(torchs, name) for name in NAMES} == before
        assert importer.remember is later.checkpoint is before["checkpoint"]
        assert memopt.checkpoint is checkpoint is not before["checkpoint"]  # who took it from memopt keeps it


def test_code_that_was_not_written_for_memopt_works(importer):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    memopt.patch()
    x = torch.randn(3, 4, requires_grad=True)
    layer = torch.nn.Linear(4, 4)
    for wrapped in (checkpoint_wrapper(layer), lambda a: importer.remember(layer, a, use_reentrant=True)):
        x.grad = None
        wrapped(x).sin().sum().backward()
        got, x.grad = x.grad, None
        layer(x).sin().sum().backward()
        assert torch.equal(got, x.grad)


def test_what_somebody_else_put_there_stays(importer):
    def other():
        pass

    before = torchs.checkpoint_sequential
    memopt.patch()
    torchs.checkpoint_sequential = other
    try:
        memopt.disable()
        assert torchs.checkpoint_sequential is other
    finally:
        torchs.checkpoint_sequential = before


def test_a_tracer_sees_the_function_as_torchs_own_would_show_it():
    """make_fx records the region's operations, and none of ours."""

    def function(x):
        return checkpoint(lambda a: a.sin().cos(), x, use_reentrant=False)

    traced = make_fx(function)(torch.randn(3))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.cos.default,
    ]


def test_a_compiled_function_has_the_region_in_one_graph():
    """Patched or not. In a process of its own: what the compiler remembers of names would outlive the test."""
    code = """
import torch, memopt
graphs = []
def backend(graph, inputs):
    graphs.append(graph.code)
    return graph.forward
def function(x):
    return memopt.checkpoint(lambda a: a.sin().cos(), x.exp(), use_reentrant=False).tan()
x = torch.randn(3, requires_grad=True)
for patched in (False, True):
    if patched:
        memopt.patch()
        torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
    got, x.grad = x.grad, None
    function(x).sum().backward()
    assert torch.equal(got, x.grad)
    x.grad = None
assert len(graphs) == 2 and all("tag_activation_checkpoint" in code for code in graphs), graphs
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
