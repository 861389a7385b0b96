"""memopt.deploy.export with the field's libraries: ONNX files that onnxruntime runs, models that torchao has quantised
and Torch-Pruning has cut, models of timm."""

from __future__ import annotations

import json
import os

import pytest
from environment_python import run_there

SOAK = os.environ.get("MEMOPT_SOAK") == "1"

BEGINNING = """
import json, os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
import memopt
from torch import nn

folder = Path(sys.argv[1])
told = {}
torch.manual_seed(0)

def storages(model):
    "Bytes by address, of the parts of which torchao's tensors are made, too."
    held = {}
    for tensor in (*model.parameters(), *model.buffers()):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else None
        for part in [tensor] if names is None else [getattr(tensor, name) for name in names]:
            held[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(held.values())

def tell(name, made, model):
    told[name] = made.as_dict() | {
        "counted": storages(model),
        "on disk": sum(os.path.getsize(path) for path, _ in made.files),
        "elements": sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())),
    }
"""

BOTH = (
    BEGINNING
    + """
from memopt.deploy import export
from memopt.deploy import _formats
import onnxruntime

LONG = sys.argv[2] == "long"

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, scale=None):
        x = memopt.checkpoint(lambda y: self.norm(y), self.embedding(ids), use_reentrant=False)
        out = self.head(x)
        return {"logits": out if scale is None else out * scale, "hidden": x}

model = Tied().eval()
ids = torch.randint(0, 100, (4, 9))
if LONG:
    tell("inline", export(model, ids, folder / "inline.onnx"), model)
_formats.INLINE = 0
made = export(model, {"ids": ids, "scale": torch.tensor(2.0)}, folder / "apart.onnx", measure=False)
tell("apart", made, model)
first = [path.name for path, _ in made.files]
with torch.no_grad():
    model.head.weight.mul_(2)
tell("again", export(model, ids, folder / "apart.onnx", dynamic_batch=True, measure=False), model)
told["folder"] = sorted(name for name in os.listdir(folder) if name.startswith("apart")), first
session = onnxruntime.InferenceSession(folder / "apart.onnx")
other = torch.randint(0, 100, (6, 9))
found = session.run(None, {session.get_inputs()[0].name: other.numpy()})
with torch.no_grad():
    told["right"] = bool(torch.allclose(torch.from_numpy(found[0]), model(other)["logits"], atol=1e-4))
told["axis"] = session.get_inputs()[0].shape[0]

class Apart(nn.Module):
    def forward(self, a, b, more):
        return a - 2 * b + 3 * more["p"] - 5 * more["q"]

one, two, three, four = (torch.randn(2, 3) for _ in range(4))
given = {"b": one, "a": two, "more": {"q": three, "p": four}}
turned = {"more": {"p": one, "q": two}, "a": three, "b": four}
tell("turned", export(Apart(), given, folder / "turned.onnx", samples=[turned], measure=False), Apart())

from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

def fresh():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()

x = torch.randn(4, 256)
kinds = {"weights": Int8WeightOnlyConfig(), "dynamic": Int8DynamicActivationInt8WeightConfig()}
for name in kinds if LONG else ["weights"]:
    model = fresh()
    quantize_(model, kinds[name])
    tell(name, export(model, x, folder / f"{name}.pt2", dynamic_batch=True, measure=LONG), model)
if LONG:
    before = sorted(os.listdir(folder))
    try:
        export(model, x, folder / "dynamic.onnx", measure=False)
    except RuntimeError as error:
        told["refused"] = str(error), before == sorted(os.listdir(folder))
    model = fresh()
    quantize_(model, kinds["weights"])
    tell("weights onnx", export(model, x, folder / "weights.onnx", measure=False), model)
    import torch_pruning as cut
    model = fresh()
    graph = cut.DependencyGraph().build_dependency(model, example_inputs=x)
    graph.get_pruning_group(model[0], cut.prune_linear_out_channels, idxs=list(range(128))).prune()
    tell("cut", export(model, x, folder / "cut.pt2", dynamic_batch=True, measure=False), model)
print(json.dumps(told))
"""
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("exported"))
    return json.loads(run_there("techniques", BOTH, folder, "long" if SOAK else "short").splitlines()[-1])


@pytest.mark.sampled("other libraries")
def test_onnx_files_run_in_onnxruntime(told):
    for name in ("apart", "again", *(["inline"] if SOAK else [])):
        found = told[name]
        assert found["size_bytes"] == found["on disk"] == sum(size for _, size in found["files"])
        assert found["parameters_bytes"] + found["buffers_bytes"] == found["counted"]
        assert all(one["difference"] <= 1e-4 for one in found["checks"])
    assert [one["sample"] for one in told["again"]["checks"]] == ["the sample, [4, 9]", "[5, 9]", "[1, 9]"]
    assert len(told["apart"]["files"]) == 2
    there, first = told["folder"]
    assert len(there) == 2 and first[1] not in there  # the weights of the first export are gone
    assert told["right"] and told["axis"] == "batch"
    assert [one["difference"] <= 1e-6 for one in told["turned"]["checks"]] == [True, True]
    if SOAK:
        memory = told["inline"]["memory"]
        assert len(told["inline"]["files"]) == 1
        assert (
            memory["live_bytes"] is None and memory["resident_bytes"] > 0 and "onnxruntime" in memory["where"]
        )


@pytest.mark.sampled("other libraries")
def test_quantized_and_pruned_models(told):
    for name in ("weights", *(["dynamic", "weights onnx", "cut"] if SOAK else [])):
        found = told[name]
        assert (
            found["size_bytes"] == found["on disk"]
            and found["parameters_bytes"] + found["buffers_bytes"] == found["counted"]
        )
        assert all(one["difference"] <= one["tolerance"] for one in found["checks"])
    # A quantised tensor looks like float32: by its elements it would take four times as much.
    for name in ("weights", *(["dynamic"] if SOAK else [])):
        assert told[name]["counted"] < 0.3 * told[name]["elements"] and len(told[name]["checks"]) == 3
        assert told[name]["size_bytes"] < 0.4 * told[name]["elements"]
    if SOAK:
        assert told["weights"]["counted"] <= told["weights"]["memory"]["live_bytes"]
        text, unchanged = told["refused"]
        assert unchanged and "onnx cannot be made from a Sequential" in text and "'pt2'" in text
        assert told["cut"]["counted"] < 4 * 0.8 * (2 * 256 * 512)


TIMM = (
    "import memopt.sim; memopt.sim.activate()"
    + BEGINNING
    + """
import timm
from memopt.deploy import export

for name in sys.argv[2:]:
    model = timm.create_model(name).eval()
    size = model.default_cfg["input_size"]
    for ending in ("pt2", "onnx"):
        made = export(model, torch.randn(2, *size), folder / f"{name}.{ending}", dynamic_batch=True)
        tell(f"{name}.{ending}", made, model)
print(json.dumps(told))
"""
)


@pytest.mark.skipif(not SOAK, reason="the long form")
@pytest.mark.parametrize(
    "name", ["mobilenetv3_small_100", "efficientnet_b0", "resnet18", "vit_tiny_patch16_224"]
)
def test_models_of_timm(name, tmp_path):
    told = json.loads(run_there("notebook", TIMM, str(tmp_path), name).splitlines()[-1])
    assert len(told) == 2
    for found in told.values():
        assert (
            found["size_bytes"] == found["on disk"]
            and found["parameters_bytes"] + found["buffers_bytes"] == found["counted"]
        )
        assert len(found["checks"]) == 3 and all(one["difference"] <= 1e-4 for one in found["checks"])
        assert found["counted"] <= (found["memory"]["live_bytes"] or found["memory"]["resident_bytes"])
