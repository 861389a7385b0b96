"""Streams of other libraries through memopt.data, unchanged, and positions kept by torchdata's StatefulDataLoader."""

from __future__ import annotations

import json

import pytest
from environment_python import run_there
from test_folder_stream import CELL

RESUMED = """
import itertools, json, os, pickle, sys
from pathlib import Path
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
import memopt.data
from memopt.data import watch

folder = Path(sys.argv[1])
exec(sys.argv[2])
for n in range(3):
    (folder / f"{n}.txt").write_text("".join(f"{n} {line}\\n" for line in range(90)))

def loader(workers):
    stream = LineStream(folder, block=64, seed=1)
    return StatefulDataLoader(stream, batch_size=4, num_workers=workers)

found = {}
for workers in (0, 2):
    whole = [line for batch in loader(workers) for line in batch]
    resumed = []
    for count in (0, 1, 7, len(whole) // 4):
        first = loader(workers)
        begun = [line for batch in itertools.islice(iter(watch(first)), count) for line in batch]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        again = loader(workers)
        again.load_state_dict(state)
        resumed.append(begun + [line for batch in watch(again) for line in batch] == whole)
    found[workers] = [len(whole), len(set(whole)), resumed]
print(json.dumps(found))
"""


@pytest.mark.sampled("other libraries")
def test_a_folder_goes_on_where_torchdatas_loader_left_it(tmp_path):
    told = json.loads(run_there("data", RESUMED, str(tmp_path), CELL))
    assert told == {workers: [270, 270, [True] * 4] for workers in ("0", "2")}


HUGGING_FACE = """
import json, sys
import torch
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from memopt.data import SharedList, cached, tune, watch

rows = Dataset.from_dict({"n": list(range(60)), "text": [f"row {n}" for n in range(60)]})
streamed = rows.to_iterable_dataset(num_shards=4)
made = []

def work(text):
    made.append(text)
    return torch.tensor([len(text)])

work = cached(work, sys.argv[1], ignore="made")
mapped = streamed.map(lambda row: {"n": row["n"], "length": work(row["text"])})

def loader(workers):
    return StatefulDataLoader(mapped, batch_size=5, num_workers=workers)

plain = [batch["n"].tolist() for batch in loader(0)]
twice = [batch["n"].tolist() for batch in watch(loader(0))]
split = sorted(n for batch in watch(loader(2)) for n in batch["n"].tolist())
tuned = tune(loader(0), memory_budget="4GiB", workers=[0], seconds=1, batches=10)
kept = tuned.loader()
tuned_gives = [batch["n"].tolist() for batch in kept]
first = loader(0)
begun = [batch["n"].tolist() for batch, _ in zip(watch(first), range(4))]
state = first.state_dict()
again = loader(0)
again.load_state_dict(state)
resumed = begun[:4] + [batch["n"].tolist() for batch in again]
print(json.dumps({
    "unchanged": plain == twice,
    "divided": split == list(range(60)),
    "resumed": resumed[-3:] == plain[-3:],
    "made once": sorted(made) == sorted(set(made)) and len(made) == 60,
    "measured": tuned.trials[0].complete,
    "class": type(kept).__name__,
    "tuned": tuned_gives == plain,
    "a list of it": SharedList(streamed)[7],
}))
"""


@pytest.mark.sampled("other libraries")
def test_a_hugging_face_stream_goes_through_everything_unchanged(tmp_path):
    told = json.loads(run_there("data", HUGGING_FACE, str(tmp_path)).splitlines()[-1])
    assert told.pop("class") == "StatefulDataLoader" and told.pop("a list of it") == {"n": 7, "text": "row 7"}
    assert all(told.values()), told
