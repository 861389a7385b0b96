"""Results of public functions: text, HTML, plain values, the names that attributes had, and old pickles."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt import types
from memopt._batch_size.result import Trial
from memopt._runtime.results import Result


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))


def batch(size):
    return torch.ones(size, 64)


def planned():
    return memopt.auto_checkpoint(model(), batch(256), memory_budget="1GiB").plan


def profiled():
    with memopt.profile("cpu") as found:
        model()(batch(64)).sum().backward()
    return found


def watched():
    found = memopt.data.watch([batch(2)])
    return found if list(found) else None


def fitted():
    inner = model()
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    return memopt.fit(inner, optimizer, batch(64), loss=lambda out: out.sum(), memory_budget="1GiB")


def chain():
    stage = memopt.chain.Stage(saved_bytes=30, output_bytes=10, forward_seconds=1.0, backward_seconds=2.0)
    return memopt.chain.solve(memopt.chain.Chain((stage,) * 3, input_bytes=10), "1KiB")


RESULTS = {
    "Converted": lambda: memopt.to_dtype_(model(), torch.bfloat16),
    "Diagnosis": memopt.doctor,
    "Duplicates": lambda: memopt.compress.duplicates(model()),
    "Fit": fitted,
    "FoundBatchSize": lambda: memopt.find_batch_size(
        lambda size: batch(size), maximum=4, memory_budget="1GiB"
    ),
    "LiveTensors": memopt.live_tensors,
    "ModelComparison": lambda: memopt.compare_models({"one": model()}, batch(2), time=None),
    "OffloadedLayers": lambda: memopt.offload_layers(model(), device="cpu"),
    "PackedInputs": lambda: memopt.compress.pack_inputs(batch(8)),
    "Plan": planned,
    "PlanCheck": lambda: planned().check(),
    "Profile": profiled,
    "Released": memopt.release,
    "Report": lambda: memopt.compress.prune_(model(), 0.5, "l1_unstructured"),
    "Schedule": chain,
    "SparseReport": lambda: memopt.compress.sparsify_(model()),
    "StepComparison": lambda: memopt.compare_steps({"one": lambda: lambda: float(batch(8).sum())}, steps=3),
    "Tuning": lambda: memopt.data.tune(
        torch.utils.data.DataLoader(list(range(64))), seconds=0.01, workers=[0]
    ),
    "WorkerWatch": watched,
}


def sizes_of(value, name=""):
    """Every number in the values, with the innermost name that it is under."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from sizes_of(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from sizes_of(one, name)
    else:
        yield name, value


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_text_html_and_plain_values(name):
    found = RESULTS[name]()
    assert isinstance(found, getattr(types, name)) and isinstance(found, Result)
    text, page = str(found), found._repr_html_()
    assert (
        text
        and " object at 0x" not in text + repr(found)
        and "<script" not in page
        and page.strip()[0] == "<"
    )
    told = json.loads(json.dumps(found.as_dict()))
    assert isinstance(told, dict) and told and " object at 0x" not in json.dumps(told)
    assert all(
        isinstance(value, int | None) and not isinstance(value, bool)
        for key, value in sizes_of(told)
        if key.endswith("_bytes")
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018


def test_every_public_result_is_one():
    handles = {"AppliedFit", "FusedLossHead", "OffloadedLayers"}
    others = {"Agreement", "NoBatchSizeFits", "Recording"}  # a protocol, an error, columns
    for name in set(types.__all__) - others - (handles - {"OffloadedLayers"}):
        assert issubclass(getattr(types, name), Result), name


def test_a_name_without_bytes_is_still_read_with_a_warning():
    trial = Trial(4, True, 2, peak_bytes=10, held_bytes=20, seconds=0.1)
    with pytest.warns(DeprecationWarning, match="Trial.peak is now named peak_bytes") as said:
        assert trial.peak == 10
    assert said[0].filename == __file__
    report = memopt.to_dtype_(model(), torch.bfloat16)
    with pytest.warns(DeprecationWarning, match="freed_bytes"):
        assert report.freed == report.freed_bytes > 0  # a property


def test_a_pickle_of_the_earlier_names_is_read():
    trial = Trial(4, True, 2, peak_bytes=10, held_bytes=20, seconds=0.1)
    assert pickle.loads(pickle.dumps(trial)) == copy.deepcopy(trial) == trial
    state = {name.removesuffix("_bytes"): value for name, value in vars(trial).items()}
    earlier = object.__new__(Trial)
    earlier.__setstate__(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert earlier == trial and earlier.peak_bytes == 10
