"""memopt.compress.pack_inputs(): fewer bits, and back, within the bound that is stated."""

from __future__ import annotations

import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from memopt.compress import pack_inputs
from memopt.compress._input_packing import PackedTensor

KINDS = [torch.uint8, torch.int16, torch.float16, torch.bfloat16]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@settings(max_examples=60, deadline=None)
@given(
    values=arrays.arrays(
        np.float64,
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
        elements=st.floats(-60_000, 60_000),
    ),
    source=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
)
@example(values=np.array([1e-320, 0.0]), source=torch.float64, kind=torch.uint8)
@example(values=np.array([-60000.0, 60000.0]), source=torch.float32, kind=torch.int16)
def test_what_comes_back_is_within_the_bound_that_is_measured_and_promised(values, source, kind):
    tensor = torch.from_numpy(values).to(source)
    given_to_it = tensor.clone()
    packed = pack_inputs(tensor, kind)
    assert torch.equal(tensor, given_to_it)
    if tensor.element_size() <= kind.itemsize:
        assert packed.batch is tensor and packed.unpack() is tensor
        return
    back = packed.unpack()
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and packed.batch.values.dtype == kind
    if not tensor.numel():
        return
    error = float((back.double() - tensor.double()).abs().max())
    assert error <= packed.max_error == packed.batch.max_error <= error * 1.000001
    low, high = (float(one) for one in tensor.double().aminmax())
    largest = max(-low, high)
    rounding = 16 * torch.finfo(source).eps * largest + 1e-300  # of a dozen operations
    promised = {
        torch.uint8: (high - low) / 510 + rounding + 16 * 2.0**-24 * largest * (source != torch.float64),
        torch.int16: (high - low) / 131070 + rounding + 16 * 2.0**-24 * largest * (source != torch.float64),
        torch.float16: max(largest / 2048, 3e-8),
        torch.bfloat16: largest / 256 + 1e-38,
    }[kind]
    assert error <= promised


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16])
def test_bytes_and_bytes_divided_by_255_come_back_exactly(source):
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3)
    for tensor in (pixels.to(source), pixels.to(source).div(255), pixels[:7].to(source).div(255)):
        packed = pack_inputs(tensor)
        assert packed.max_error == 0.0 and torch.equal(packed.unpack(), tensor)
        assert torch.equal(packed.batch.values, pixels[: len(tensor)])


def test_whole_numbers_come_back_exactly_from_int16():
    tensor = torch.arange(-32768, 32768).float()
    packed = pack_inputs(tensor, torch.int16)
    assert packed.max_error == 0.0 and torch.equal(packed.unpack(), tensor)
    assert torch.equal(packed.batch.values, tensor.short())


def test_one_value_and_extreme_ranges_come_back():
    for tensor in (torch.full((5,), 0.1), torch.tensor([-3e38, 3e38]), torch.tensor([1e-40, 0.0])):
        packed = pack_inputs(tensor)
        assert packed.unpack().isfinite().all()
        span = float(tensor.double().max() - tensor.double().min())
        assert packed.max_error <= span / 510 + 1e-6 * float(tensor.abs().max())


def test_large_tensors_are_packed_part_by_part():
    from memopt.compress._input_packing import _PART

    torch.manual_seed(0)
    tensor = torch.randn(_PART + 5).requires_grad_(False)[::2][: _PART // 2 + 1]
    whole = torch.cat([tensor] * 3)
    packed = pack_inputs(whole)
    step = float(whole.max() - whole.min()) / 255
    plain = ((whole.double() - float(whole.min())) / step).round().to(torch.uint8)
    assert int((packed.batch.values.int() - plain.int()).abs().max()) <= 1
    assert packed.max_error <= step / 2 * 1.001


def test_a_batch_keeps_its_structure_and_what_is_no_floating_point_number():
    image, label = torch.rand(2, 3, 8, 8), torch.tensor([1, 2])
    batch = {
        "pixels": image,
        "same": image,
        "label": label,
        "names": ["a", "b"],
        "pair": (label, image.half()),
    }
    packed = pack_inputs(batch)
    assert isinstance(packed.batch["pixels"], PackedTensor) and packed.batch["same"] is packed.batch["pixels"]
    assert packed.batch["label"] is label and packed.batch["names"] == ["a", "b"]
    back = packed.unpack()
    assert list(back) == list(batch) and back["pair"][0] is label and back["pair"][1].dtype == torch.float16
    assert packed.report.changed == ("['pixels']", "['same']", "['pair'][1]")


def test_bytes_are_storages_and_not_elements():
    """A tensor that is used twice, and one that is a row of many, expanded."""
    image, row = torch.rand(100), torch.rand(1, 50).expand(10, 50)
    report = pack_inputs([image, image, row]).report
    assert report.before.memory_bytes == 400 + 200 and report.after.memory_bytes == 100 + 500
    file = io.BytesIO()
    torch.save([image, image, row], file)
    assert report.before.disk_bytes == len(file.getvalue())
    assert sum(t.numel() * 4 for t in (image, image, row)) == 2800


def test_it_is_pickled_and_saved():
    packed = pack_inputs({"x": torch.rand(10)}, torch.int16)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(packed)), torch.load(file, weights_only=False)):
        assert torch.equal(other.unpack()["x"], packed.unpack()["x"])
        assert other.report == packed.report


def test_what_would_change_too_much_stays():
    batch = {"fine": torch.linspace(0, 1, 100), "coarse": torch.linspace(0, 1000, 100)}
    packed = pack_inputs(batch, max_error=0.01)
    assert packed.report.changed == ("['fine']",) and "max_error=0.01" in packed.report.skipped["['coarse']"]
    assert packed.unpack()["coarse"] is batch["coarse"] and packed.max_error <= 0.01
    assert pack_inputs(batch, max_error=0.0).report.saved_bytes == 0


@pytest.mark.parametrize(
    ("batch", "arguments", "kind", "words"),
    [
        (torch.rand(3), {"dtype": torch.int8}, TypeError, "dtype=torch.int8"),
        (torch.rand(3), {"dtype": "uint8"}, TypeError, "dtype='uint8'"),
        (torch.rand(3), {"max_error": -1.0}, ValueError, "max_error"),
        (torch.rand(3), {"max_error": math.nan}, ValueError, "max_error"),
        (torch.rand(3), {"max_error": True}, ValueError, "max_error"),
        (torch.rand(3), {"max_error": math.inf}, ValueError, "max_error"),
        ([1, "two"], {}, TypeError, "no tensor"),
        (None, {}, TypeError, "no tensor"),
        ([torch.rand(3), torch.rand(3, requires_grad=True)], {}, ValueError, r"\[1\] requires a gradient"),
        (nn.Parameter(torch.rand(3)), {}, ValueError, "requires a gradient"),
        ([torch.rand(3), torch.tensor([1.0, math.nan])], {}, ValueError, "infinite or NaN"),
        (torch.tensor([1.0, math.inf]), {"dtype": torch.float16}, ValueError, "infinite or NaN"),
        (torch.tensor([1.0, 1e6]), {"dtype": torch.float16}, ValueError, "largest value is 1e"),
        (torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), {}, ValueError, "too large"),
        (torch.rand(3, device="meta"), {}, ValueError, "meta"),
        (torch.rand(3, 3).to_sparse(), {}, ValueError, "only plain tensors"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(batch, arguments, kind, words):
    with pytest.raises(kind, match=words):
        pack_inputs(batch, **arguments)


def test_a_tensor_that_fails_after_others_leaves_the_batch_alone():
    first = torch.rand(3)
    batch = [first, torch.tensor([math.nan])]
    with pytest.raises(ValueError, match="NaN"):
        pack_inputs(batch)
    assert batch[0] is first
