"""Wrong calls: each error names what was given and what to write instead, in a short line, before anything changed."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import memopt
from memopt.__main__ import main


def stack():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def given(tmp_path):
    model = stack()
    return {
        "memopt": memopt,
        "torch": torch,
        "nn": nn,
        "amp": memopt.amp,
        "chain": memopt.chain,
        "compress": memopt.compress,
        "cuda": memopt.cuda,
        "data": memopt.data,
        "deploy": memopt.deploy,
        "optim": memopt.optim,
        "auto": memopt.auto_checkpoint,
        "backward": memopt.backward,
        "fit": memopt.fit,
        "find": memopt.find_batch_size,
        "estimate": memopt.estimate,
        "head": memopt.nn.linear_cross_entropy,
        "DataLoader": DataLoader,
        "model": model,
        "x": torch.ones(8, 16),
        "classes": torch.zeros(8, dtype=torch.long),
        "weight": torch.ones(4, 16),
        "adam": torch.optim.AdamW(model.parameters()),
        "step": lambda x: model(x).sum(),
        "size": lambda n: None,
        "loss": lambda out: out.sum(),
        "folder": tmp_path,
    }


# A call; what its error names of it; what it says to write instead.
CALLS = """
auto(x, model, memory_budget="1GiB")                         | model is a Tensor         | expected a torch.nn.Module
auto(model, x)                                               | memory_budget             | missing 1 required
auto(model, x, memory_budget="much")                         | memory_budget: 'much'     | such as '8GiB'
auto(model, x, memory_budget=-1)                             | memory_budget: -1         | 0 or more bytes
auto(model, x, memory_budget=[1])                            | memory_budget: a list     | give an int (bytes)
auto(model, x, memory_budget=1024)                           | memory_budget is 1024     | raise memory_budget to
auto(model, x, memory_budget=1.5)                            | memory_budget=1.5         | at most 1; give bytes
auto(model, x, memory_budget="1GiB", optimizer=list)         | result is a list          | a function of parameters
auto(model, x, memory_budget="1GiB", optimizer="Adam")       | optimizer: 'Adam'         | write bytes
auto(model, x, memory_budget="1GiB", loss="mean")            | loss is 'mean'            | give a function
auto(model, x, memory_budget="1GiB", loss=lambda out: out)   | shape (8, 16)             | have it return one number
auto(model, x, memory_budget="1GiB", slots=0)                | slots=0                   | expected 1 to
auto(model, x, memory_budget="1GiB", to="/no/such")          | to='/no/such'             | give "cpu", "8bit", or a
auto(model, x, memory_budget="1GiB", to="cpu")               | to="cpu"                  | give "8bit", or the path
memopt.checkpoint(3, x)                                      | function is 3             | give a function
memopt.checkpoint_sequential(model, 9, x)                    | segments=9                | expected 1 to 3
memopt.checkpoint_sequential(model, None, x)                 | segments is None          | give the number of segments
memopt.offload_activations(model)                            | a Sequential is not       | give an int (bytes)
memopt.offload_activations("a lot")                          | min_size: 'a lot'         | such as '8GiB'
memopt.offload_activations(host_memory=-1)                   | host_memory: -1           | 0 or more bytes
memopt.offload_activations(to="gpu")                         | 'gpu'                     | a directory on a disk
memopt.offload_activations(to="8bit", in_flight=1)           | to="8bit" makes none      | leave them out
memopt.offload_layers(x)                                     | model is a Tensor         | torch.nn.Module
memopt.offload_layers(model, layers=["nope"])                | 'nope'                    | model.named_modules() lists
memopt.offload_layers(model, to="/no/such") | to='/no/such' | expected 'cpu', or a directory
memopt.offload_layers(model, memory_budget=2.0)              | memory_budget=2.0         | at most 1
memopt.offload_layers(model, device="tpu")                   | tpu                       | Expected one of
estimate(model)                                              | needs a sample            | pass sample=
estimate(3)                                                  | not int                   | takes a module or a function
estimate(model, x, card="rtx9999")                           | 'rtx9999'                 | write a size, as '24GiB'
estimate(model, x, card=5)                                   | 5 B                       | a size such as '24GiB'
estimate(model, x, backend="jemalloc") | backend='jemalloc' | 'native', 'expandable', 'pool'
estimate(model, x, method="guess")                           | method='guess'            | "fake tensors"
estimate(model, x, steps=0)                                  | steps=0                   | 1 or more
estimate(model, x, amp="fp8")                                | amp='fp8'                 | 'bf16', 'bfloat16', 'fp16'
estimate(model, x, optimizer="AdamW")                        | optimizer is 'AdamW'      | torch.optim.AdamW
estimate(model, x, loss="mean")                              | loss is 'mean'            | give a function
fit(x, adam, model, memory_budget="1GiB")                    | model is a Tensor         | expected a torch.nn.Module
fit(stack(), adam, x, memory_budget="1GiB")                  | not one of Sequential's   | give the model that this
fit(model, torch.optim.SGD, x, memory_budget="1GiB") | the class SGD | give the torch.optim.Optimizer
fit(model, [adam], x, memory_budget="1GiB")                  | a list of 1               | give one optimizer
fit(model, adam, x, memory_budget="1GiB")                    | has no .loss              | give loss=
fit(model, adam, x, memory_budget="1GiB", loss="mean")       | loss is 'mean'            | give a function
fit(model, adam, x, memory_budget="some", loss=loss)         | memory_budget: 'some'     | such as '8GiB'
memopt.auto_checkpoint(model, x, memory_budget="1GiB", host_memory="lots") | host_memory: 'lots' | such as '8GiB'
fit(model, adam, x, memory_budget="1GiB", loss=loss, host_memory="lots") | host_memory: 'lots' | such as '8GiB'
fit(model, adam, x, memory_budget="1GiB", loss=loss, disk="/no/such") | disk: creating a | directory that exists
fit(model, adam, x, memory_budget="1GiB", loss=loss, disk=3) | disk is 3 | give the path of a directory
fit(model, adam, x, memory_budget="1GiB", loss=loss, allow=["6bit"]) | '6bit'            | '8bit', '4bit', 'factored'
fit(model, adam, x, memory_budget="1GiB", loss=loss, allow="8bit")   | allow='8bit'      | expected a collection of
fit(model, adam, x, memory_budget="1GiB", loss=loss, allow=["8bit"], exact=True) | exact=True | leave one of the two
fit(model, adam, x, memory_budget="1GiB", loss=loss, effective_batch=3) | effective_batch=3 | give a sample of
backward(step, x)                                            | 'model'                   | missing 1 required
backward(x, step, model=model)                               | fn is a Tensor            | the batch comes after it
backward(step, model=model)                                  | no tensor                 | pass the batch after fn
backward(step, x, model="model")                             | model is 'model'          | expected a torch.nn.Module
backward(step, x, model=[])                                  | model=                    | names no module
backward(step, x, model=model, reduction="median")           | reduction='median'        | expected 'mean', 'sum'
backward(step, x, model=model, micro_batch_size=0)           | micro_batch_size=0        | at least 1 sample
backward(step, x, model=model, batch_dim=5)                  | dimension 5               | in batch_dim=
find(model, x)                                               | start is a Tensor         | give a number of samples
find(3)                                                      | fn is 3                   | give a function
find(size, 0)                                                | start is 0                | 1 or more
find(size, maximum=0)                                        | maximum is 0              | 1 or more
find(size, headroom=2)                                       | headroom=2                | write 0.05
find(size, memory_budget="lots")                             | memory_budget: 'lots'     | such as '8GiB'
find(size, memory_budget=2.0)                                | memory_budget=2.0         | at most 1
find(size, multiple_of=64, maximum=32)                       | multiple of 64            | maximum=32
find(model, card="24GiB")                                    | card=                     | pass sample=
memopt.BatchSize(0)                                          | size=0                    | 1 <= minimum <= size
memopt.BatchSize(8, maximum=4)                               | maximum=4                 | size <= maximum
memopt.BatchSize("8")                                        | size is '8'               | give a number of samples
memopt.compare_models([])                                    | nothing to compare        | give models
memopt.compare_models({"one": model}, x, sort="beauty")      | sort='beauty'             | 'peak', 'time', 'flops'
memopt.compare_models({"one": model}, x, time="guessed")     | time='guessed'            | "measured", "estimated"
memopt.compare_steps({})                                     | nothing to compare        | give variants
memopt.compare_steps({"one": 3})                             | variant 'one'             | a function that builds a step
memopt.compare_steps({"one": stack}, steps=1)                | steps=1                   | at least 3
memopt.live_tensors(-1)                                      | top=-1                    | 0 or more
memopt.profile("cpu", max_events=0).__enter__()              | max_events=0              | at least one event
memopt.to_dtype_(model, "bf16")                              | dtype='bf16'              | use torch.bfloat16
memopt.to_dtype_(model, torch.int8)                          | dtype=torch.int8          | use torch.bfloat16
memopt.to_dtype_(3, torch.bfloat16)                          | not int                   | expected a module, a tensor
memopt.to_dtype_(x * 1e30, torch.float16)                    | float16's largest         | take torch.bfloat16
memopt.to_dtype_(model, torch.bfloat16, keep=7)              | keep is 7                 | give names, modules
memopt.enable(backend="jemalloc")                            | backend='jemalloc'        | 'native', 'pool'
memopt.enable(memory_budget="some")                          | memory_budget: 'some'     | such as '8GiB'
memopt.enable(on_oom="explode")                              | on_oom='explode'          | 'report', 'raise'
cuda.allocator(memory_budget="x")                            | memory_budget: 'x'        | such as '8GiB'
cuda.allocator(slack=-1)                                     | slack=-1                  | such as 0.02
cuda.CudaPool("some", device="cpu")                          | size: 'some'              | such as '8GiB'
cuda.trim(keep="some")                                       | keep: 'some'              | such as '8GiB'
amp.GradScaler("cpu", min_scale=4, max_scale=2)              | max_scale=2               | at least min_scale, 4
amp.clip_grad_norm_(model.parameters(), "one")               | max_norm='one'            | give numbers
optim.AdamW(model.parameters(), lr=-1)                       | -1                        | Invalid learning rate
optim.AdamW(model.parameters(), state_bits=16)               | state_bits value: 16      | 4, 8 or 32
optim.AdamW(model.parameters(), state_bits=8, amsgrad=True)  | amsgrad=True              | use state_bits=32
optim.AdamW(model.parameters(), offload_states="/no/such")   | offload_states='/no/such' | a directory that exists
optim.Muon([nn.Parameter(torch.ones(3))])                    | [3]                       | memopt.optim.AdamW
head(x, torch.ones(16, 4), classes)                          | hidden of shape (8, 16)   | expected (..., 4)
head(x, weight, classes[1:])                                 | target of shape (7,)      | expected (8,)
head(x, weight, classes, reduction="max")                    | reduction 'max'           | 'mean', 'sum' or 'none'
head(x, weight, classes, chunk_bytes=0)                      | chunk_bytes 0             | at least 1 byte
head(x, weight, classes, chunk_bytes="few")                  | chunk_bytes: 'few'        | such as '8GiB'
memopt.nn.fuse_loss_head(model)                              | Sequential                | linear_cross_entropy()
memopt.nn.tile_mlps(model, rows=0)                           | rows=0                    | 1 or more
memopt.nn.tile_mlps(nn.Conv2d(3, 3, 3))                      | Conv2d has no             | call the function
compress.prune_(model, 50, "2:4")                                   | amount=50                 | amount=0.5
compress.prune_(model, 0.5, "magic")                         | method='magic'            | 'structured', '2:4'
compress.prune_(model, 0.5, layers=["nope"], method="2:4")                 | 'nope'                    | layers
compress.prune_(model, 0.5, "structured")                    | structured                | give it a sample=
compress.prune_(model, 0.5, "2:4", evaluate=3)                      | evaluate=3                | expected a function
compress.quantize_(model, "int3")                            | method='int3'             | 'int8_weight_only', 'int4'
compress.quantize_(x)                                        | model is a Tensor         | expected a torch.nn.Module
compress.sparsify_(model, "csc")                             | layout='csc'              | 'coo', 'csr', '2:4'
compress.sparsify_(model, index_dtype=torch.int16)           | torch.int16               | torch.int32 or torch.int64
compress.tie_(model, [("0.weight", "nope")])                 | 'nope'                    | no parameter or module
compress.tie_(model, "0.weight")                             | pairs='0.weight'          | a list of (name, name)
compress.tie_(model)                                         | no two matrices           | name pairs=
compress.pack_inputs(x, torch.float32)                       | dtype=torch.float32       | torch.uint8, torch.int16
compress.pack_inputs(x, max_error=-1)                        | max_error=-1              | 0 or more
compress.DistillationLoss(temperature=0)                     | temperature=0             | above zero
compress.DistillationLoss(hard_weight=1.5)                   | hard_weight=1.5           | between 0 and 1
data.SharedList([lambda: 1])                                 | item 0                    | pickle=True
data.SharedStrings([1])                                      | item 0 is 1               | use SharedList
data.SharedDict([1])                                         | element 0                 | a pair (key, value)
data.cached(len)                                             | data.cached               | needs dir=
data.cached(3, folder)                                       | a int                     | cache the function that
data.cached(len, folder, max_size="big")                     | max_size: 'big'           | such as '8GiB'
data.MmapDataset("/no/such.mm")                              | '/no/such.mm'             | No such file
data.MmapWriter("/no/such/x.mm")                             | /no/such/x.mm             | there is no folder
data.Prefetcher(3)                                           | loader is 3               | give a DataLoader
data.Prefetcher([x], depth=0)                                | depth=0                   | at least 1 batch
data.tune([1, 2, 3])                                         | a list                    | give the DataLoader itself
data.tune(DataLoader([1]), seconds=0)                        | seconds=0                 | more than 0
data.tune(DataLoader([1]), workers=[-1])                     | workers=[-1]              | 0 or more
data.tune(DataLoader([1]), "lots")                           | memory_budget: 'lots'     | such as '8GiB'
data.watch([1], interval=-1)                                 | interval=-1               | 0 or more
deploy.export(x, model)                                      | model is a Tensor         | torch.nn.Module
deploy.export(model, x, folder / "model.xyz")                | model.xyz                 | pass format=
deploy.export(model, x, folder / "model.pt2", "tflite")      | format='tflite'           | 'pt2', 'onnx', 'torchscript'
deploy.export(model, x, "/no/such/model.pt2")                | model.pt2                 | there is no folder
chain.solve(3, "1GiB")                                       | chain is 3                | memopt.chain.Chain
chain.Chain((), input_bytes=1)                               | not 0                     | 1 to 4096 stages
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in CALLS.strip().splitlines()]
COMMANDS = """
estimate                                          | SCRIPT is missing       | memopt estimate [options] SCRIPT
estimate nosuch.py                                | 'nosuch.py'             | there is no script
estimate --gpu rtx9999 train.py                   | 'rtx9999'               | write a size, as '24GiB'
estimate --gpu 0 train.py                         | memory is 0             | such as '24GiB'
estimate --steps few train.py                     | 'few'                   | --steps
fit train.py                                      | the card                | --gpu
fit --gpu 24GiB nosuch.py                         | 'nosuch.py'             | there is no script
fit --gpu 24GiB --allow 6bit train.py             | '6bit'                  | 8bit, 4bit, factored, bf16
fit --gpu 24GiB --exact --allow 8bit train.py     | --allow                 | not allowed with argument --exact
fit --gpu 24GiB --host-memory lots train.py       | --host-memory: 'lots'   | such as '8GiB'
fit --gpu 24GiB --disk /no/such train.py          | --disk: creating        | give a directory that exists
run                                               | memopt run              | name a script
run nosuch.py                                     | nosuch.py               | there is no such script
run --fit nosuch.json train.py                    | nosuch.json             | No such file
run --fit train.py train.py                       | --fit: train.py         | memopt fit -o
run --sim lots train.py                           | --sim: 'lots'           | write a size
run -o /no/such/x.mopt train.py                   | /no/such/x.mopt         | no such folder
report nosuch.mopt                                | nosuch.mopt             | No such file
report train.py                                   | train.py                | recording
diff train.py                                     | required: B             | A B
diff nosuch.mopt train.py                         | nosuch.mopt             | No such file
replay nosuch.mopt                                | nosuch.mopt             | No such file
doctor --frob                                     | --frob                  | usage: memopt
frobnicate                                        | 'frobnicate'            | 'estimate', 'fit'
"""


def brief(said, *wanted):
    """Whether an error is a line that has these words."""
    return all(one in said for one in wanted) and len(said) < 420 and "\n" not in said.strip()


@pytest.mark.parametrize(("call", "names", "remedy"), ROWS, ids=[row[0] for row in ROWS])
def test_a_wrong_call_is_told_what_to_write_instead(call, names, remedy, tmp_path):
    room = {**given(tmp_path), "stack": stack}
    before = {name: value.clone() for name, value in room["model"].state_dict().items()}
    with warnings.catch_warnings(), pytest.raises((ValueError, TypeError, OSError, RuntimeError)) as error:
        warnings.simplefilter("ignore")
        eval(call, room)
    assert brief(str(error.value), names, remedy), str(error.value)
    after = room["model"].state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert type(room["model"]) is nn.Sequential and "forward" not in vars(room["model"])


@pytest.mark.parametrize(
    ("line", "names", "remedy"),
    [[part.strip() for part in one.split("|")] for one in COMMANDS.strip().splitlines()],
)
def test_a_wrong_command_is_told_what_to_write_instead(line, names, remedy, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("x = 1\n")
    try:
        status = main(line.split())
    except SystemExit as end:  # argparse's
        status = end.code
    out, err = capfd.readouterr()
    assert status == 2 and out == ""
    usage, _, said = err.rpartition("error: ") if "error: " in err else ("", "", err)
    assert names in said and "Traceback" not in err, err
    assert remedy.replace("'", "") in (usage + said).replace("'", ""), err  # CPython 3.13.5 quotes no choices
    assert len(said) < 420 and re.fullmatch(r"[^\n]+\n", said), err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
