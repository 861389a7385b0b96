"""A child of estimates that runs nothing: it answers by a formula, which the tests know too.

Its script is a JSON file: bytes `fixed`, `each` (of one of a batch), `masks` (where all of them are selected); `kept`,
the allocator's share beyond the tensors, by backend; `option`, the script's option for its batch, if it has one;
`batch`, that of its own; `techniques`, what each saves that meets something in it; `slow`, those with which it takes no
step in its time; `host` and `disk`, bytes of the host's memory and of a disk that they take; `moved`, bytes that a step
moves on the card, by technique, "" for those without any; `data`, the most that there are; `each_rank`, bytes more of
each rank after the first; `loaders`, DataLoaders that it makes; `evaluates`: where it runs out; `ends`: how it ends by
itself; `early`: what lives before it trains; `workspace`: bytes of a workspace, if asked for."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from memopt._estimate import script_process
from memopt._estimate.request import Request

MIB = 1 << 20


def allocated(script: dict, batch: int, fraction: float) -> int:
    return (
        script["fixed"]
        + script["each"] * min(batch, script.get("data", batch))
        + int(script["masks"] * fraction)
    )


def held(script: dict, batch: int, fraction: float, workspace: int, backend: str) -> int:
    return int(allocated(script, batch, fraction) * script["kept"][backend]) + workspace


def estimate(asked: Request, _path: str) -> int:
    request = asdict(asked)
    path, *arguments = request["argv"]
    script = json.loads(Path(path).read_text())
    with open(path + ".requests", "a") as log:
        log.write(json.dumps(request) + "\n")
    print("the script's own words")
    batch = request["batch_size"] or script["batch"]
    option = script.get("option")
    for name, value in itertools.pairwise(arguments):
        if name == option:
            batch = int(value)
    status, stopped, error = 0, "steps", None
    ends = script.get("ends")
    if arguments and not option:
        print(f"error: unrecognized arguments: {' '.join(arguments)}", file=sys.stderr)
        status, stopped = 2, "exit"
    elif ends == "raise" or (ends == "raise where none is selected" and request["fraction"] == 0):
        status, stopped, error = 1, "error", f"ZeroDivisionError: division by zero at {path}:3"
    elif ends == "exit":
        status, stopped = 3, "exit"
    elif ends == "abort":
        print("terminate called", file=sys.stderr, flush=True)
        os.abort()
    elif ends == "silent":
        os._exit(0)
    elif ends == "leave a process":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(path + ".left").write_text(str(left.pid))
    elif ends == "hang":
        time.sleep(600)

    room = request["memory"] - request["context"]
    met = {name.partition(":")[0]: ["AdamW"] for name in request["techniques"]}
    met = {name: of for name, of in met.items() if name in script.get("techniques", {})}
    saved = sum(script["techniques"][name] for name in met)
    if set(met) & set(script.get("slow", ())):  # its time is over before it takes a step
        met["stuck"] = []
    saved -= script.get("each_rank", 0) * request["rank"]
    peak = allocated(script, batch, request["fraction"]) - saved
    peak += script.get("workspace", 0) if request["cudnn_workspace"] else 0
    reserved = (
        held(script, batch, request["fraction"], request["cudnn_workspace"], request["backend"]) - saved
    )
    fits = peak <= room
    moved = sum(size for name, size in script.get("moved", {}).items() if name in ("", *met))
    answer = {
        "peak_allocated": min(peak, room),
        "peak_reserved": min(reserved, room),
        "device_peak": min(reserved, room) + request["context"],
        "retries": int(fits and reserved > room),
        "oom": None
        if fits
        else {
            "file": path,
            "line": 7,
            "text": "loss.backward()",
            "asked": 4 * MIB,
            "allocated": room - MIB,
            "evaluates": script.get("evaluates", False),
        },
        "by_category": {"parameters": 30 * MIB, "optimizer": 60 * MIB, "activations": peak - 90 * MIB},
        "by_line": [
            {"name": "train.py:5", "bytes": peak, "blocks": 2, "category": "activations", "text": "y = f(x)"}
        ],
        "by_module": [{"name": "", "bytes": 1, "blocks": 1, "category": "other"}],
        "cudnn": True,
        "techniques": met,
        "before_training": script.get("early"),
        **{f"{one}_bytes": sum(script.get(one, {}).get(name, 0) for name in met) for one in ("host", "disk")},
        "guesses": [{"kind": "shape", "what": "nonzero", "where": "train.py:9", "count": 2}]
        if script["masks"]
        else [],
        "step": [{"operators": [["fp32", 0, moved]]}] if request["timed"] and moved else None,
        "steps": 0 if status or "stuck" in met else request["steps"],
        "stopped": stopped,
        "exit_status": status,
        "loaders_of_batch_size": script.get("loaders", 1) if request["batch_size"] else None,
        "error": error,
        "seconds": 0.5,
        "versions": {"torch": "2.13.0"},
        "simulated": {name: request[name] for name in ("compute_capability", "context")},
    }
    Path(request["answer"]).write_text(json.dumps(answer))
    if ends == "hang at exit":
        time.sleep(20)
        Path(path + ".late").touch()
    return status


if __name__ == "__main__":
    script_process.prepare = lambda: None
    script_process.estimate = estimate
    sys.exit(script_process.main([]))
