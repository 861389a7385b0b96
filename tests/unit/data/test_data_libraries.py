"""memopt.data beside the libraries of its formats: safetensors and it read what the other has written; Arrow's files
are rows; zstandard's entries come back as they were."""

from __future__ import annotations

import json

import pytest
from environment_python import run_there

BOTH_WAYS = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from memopt.data import MmapDataset, MmapWriter

folder = Path(sys.argv[1])
torch.manual_seed(0)
dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16]
dtypes += [torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
rows = {str(d).split(".")[1]: (torch.randn(7, 3, 5) * 3).to(d) for d in dtypes}
same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

with MmapWriter(folder / "ours.safetensors", {"of": "a test"}) as writer:
    writer.extend({name: value[:4] for name, value in rows.items()})
    for i in range(4, 7):
        writer.append({name: value[i] for name, value in rows.items()})
theirs = load_file(folder / "ours.safetensors")
save_file(rows, folder / "theirs.safetensors")
ours = MmapDataset(folder / "theirs.safetensors")
print(json.dumps({
    "they read ours": {name: same(theirs[name], value) for name, value in rows.items()},
    "we read theirs": {name: same(torch.stack([ours[i][name] for i in range(7)]), rows[name]) for name in rows},
}))
"""


@pytest.mark.sampled("other libraries")
def test_safetensors_reads_what_is_written_and_its_files_are_read(tmp_path):
    told = json.loads(run_there("data", BOTH_WAYS, str(tmp_path)))
    for found in told.values():
        assert len(found) == 12 and all(found.values()), told


COMPRESSED = """
import json, sys
from pathlib import Path
import torch
from memopt.data import cached

calls = 0

def make(n):
    global calls
    calls += 1
    return {"even": torch.arange(n) // 1000, "odd": torch.rand(n, generator=torch.Generator().manual_seed(n))}

kept = cached(make, sys.argv[1])
first, again = kept(200_000), kept(200_000)
size = sum(f.stat().st_size for f in Path(sys.argv[1]).rglob("*") if f.is_file())
print(json.dumps({
    "calls": calls,
    "equal": all(torch.equal(first[name], again[name]) for name in first),
    "size": size,
    "raw": sum(value.nbytes for value in first.values()),
}))
"""


@pytest.mark.sampled("other libraries")
def test_an_entry_that_compresses_well_is_smaller_and_comes_back_equal(tmp_path):
    told = json.loads(run_there("data", COMPRESSED, str(tmp_path)))
    assert told["calls"] == 1 and told["equal"]
    assert 200_000 * 4 < told["size"] < told["raw"] // 2  # what is random stays as it is


ARROW = """
import json, sys
import pyarrow as pa, torch
from memopt.data import MmapDataset

numbers = torch.arange(100, dtype=torch.int32)
table = pa.table({"x": pa.array(numbers.numpy()), "y": pa.array([float(i) / 2 for i in range(100)])})
with pa.OSFile(sys.argv[1], "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
    writer.write_table(table)
rows = MmapDataset(sys.argv[1])
print(json.dumps([len(rows), int(rows[7]["x"]), float(rows[99]["y"]), rows[[5, 3]]["x"].tolist()]))
"""


@pytest.mark.sampled("other libraries")
def test_an_arrow_file_is_rows(tmp_path):
    assert json.loads(run_there("data", ARROW, str(tmp_path / "rows.arrow"))) == [100, 7, 49.5, [5, 3]]
