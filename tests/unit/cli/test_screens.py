"""Screens of the commands on a terminal of 60, 80 and 120 columns, and where there is none: tests/screens/*.txt.

`pytest --record-screens tests/unit/cli/test_screens.py` writes the files anew: read what has changed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import made_recordings
import pytest
from processes import ROOT

from memopt._estimate import cards, fit, prediction
from memopt._estimate.advice import Advice
from memopt._memory.live.device_bytes import DeviceBytes
from memopt._memory.live.live_tensors import LiveGroup
from memopt._memory.oom.fixes import Fix, Situation
from memopt._memory.oom.location import Location
from memopt._memory.oom.report import Fragmentation, OomReport
from memopt._memory.oom.trials import TriedFixes
from memopt._memory.recording import summary
from memopt._run import parent
from memopt._run.plan import Plan
from memopt._run.run_child import RunRequest
from memopt._runtime.doctor import Diagnosis, Finding
from memopt._runtime.host_memory import Limit
from memopt._runtime.table import line_width, with_command

SCREENS = ROOT / "tests/screens"
MIB = 1 << 20
SCRIPT = "/home/someone/experiments/language-models/train.py"


def doctor(folder: Path) -> str:
    torch = "/home/someone/.venv/lib/python3.11/site-packages/torch/lib"
    library = "libcuda.so.1: cannot open shared object file: No such file or directory"
    return str(
        Diagnosis(
            [
                Finding("memopt", "ok", "0.1.0, built with gcc 12.2.0, assertions: level 0"),
                Finding("torch", "ok", "2.13.0+cpu, CPU build"),
                Finding(
                    "cuda driver", "absent", f"the CUDA driver cannot be opened ({library}): no NVIDIA driver"
                ),
                Finding(
                    "allocator",
                    "absent",
                    "torch uses its own",
                    "change_current_allocator(memopt.cuda.allocator())",
                ),
                Finding(
                    "cpu kernels", "broken", "MEMOPT_ISA=sse: not an instruction set", "unset MEMOPT_ISA"
                ),
                Finding(
                    "simulated device",
                    "absent",
                    f"{torch} is a CPU build of torch (it has no libc10_cuda.so)",
                    "install torch's CUDA build: `pip install --no-deps 'torch===2.13.0'`",
                ),
            ]
        )
    )


def run(folder: Path) -> str:
    return _run(folder, made_recordings.training(4, layers=5), 1, "a-folder/memopt-train.4711.mopt")


def killed(folder: Path) -> str:
    return _run(folder, None, -signal.SIGTERM, "")


def _run(folder: Path, recording, status: int, path: str) -> str:
    if recording is not None:
        told = summary.text(recording, width=line_width(sys.__stderr__)).splitlines()
        told += with_command(
            f"recorded in {path}", f"python -m memopt report {path}", line_width(sys.__stderr__)
        )
        (folder / "summary.txt").write_text("\n".join(told))
    else:
        (folder / "progress.json").write_text('{"steps": 1, "seconds": 2.5, "allocated": 1048576}')
    samples = [parent.Sample(float(n), {1: (300 + 9 * n) * MIB}) for n in range(40)]
    curve = parent.MemoryCurve(1, samples=samples, names={1: "python"}, peak=651 * MIB)
    request = RunRequest(["train.py"], False, str(folder))
    end = parent._End(request, 4711, status, 22.13, curve, Limit(None, "unknown", None), False)
    return parent._said(end, quiet=False)


def out_of_memory(folder: Path) -> str:
    parts = {
        "context": 450,
        "activations": 116,
        "optimizer": 64,
        "parameters": 32,
        "other": 16,
        "cache": 14,
        "free": 8,
    }
    group = LiveGroup(
        108 * MIB,
        9,
        "cuda:0",
        "activations",
        "the running forward",
        "",
        "train.py:9",
        "",
        27,
        True,
        False,
        True,
    )
    kept = LiveGroup(4 * MIB, 1, "cuda:0", "inputs", "kept[0]", "", "train.py:13", "", 0, False, True, False)
    untried = [
        "a batch smaller than 2048, which changes the training",
        "memopt.auto_checkpoint",
        "memopt.offload_activations",
    ]
    fixes = [
        Fix(
            'memopt.enable(backend="pool") + kept[*] kept on the host, or not at all (train.py:13)', 241 * MIB
        ),
        Fix("memopt.optim.AdamW(…, state_bits=8)", 230 * MIB, "other results: states of 8 bits"),
    ]
    report = OomReport(
        device=0,
        asked=16 * MIB,
        location=Location("train.py:9", "loss = (model(x) - x).square().mean()", "forward"),
        bytes=DeviceBytes(
            "cuda:0", 700 * MIB, {name: size * MIB for name, size in parts.items()}, "the driver"
        ),
        fragmentation=Fragmentation(
            False, 8 * MIB, 14 * MIB, 8 * MIB, 30, "train.py:9", "a replay of the recorded history"
        ),
        lines=[
            ("train.py:9", 108 * MIB),
            ("train.py:11", 64 * MIB),
            ("train.py:4", 32 * MIB),
            ("train.py:8", 8 * MIB),
        ],
        holders=[group, kept],
        nodes=[],
        situation=Situation("cuda:0", 16 * MIB, 250 * MIB, "forward", False, False, False, untried=untried),
        limit=None,
        seconds=0.1,
        complete=True,
        contents=made_recordings.training(1),
        tried=TriedFixes(fixes),
    )
    return str(report)


def _estimate() -> prediction.Estimate:
    lines = [
        {
            "name": "train.py:9",
            "bytes": 148 * MIB,
            "text": "loss = (model(x) - x).square().mean()",
            "by_category": {"activations": 140 * MIB, "other": 8 * MIB},
        },
        {
            "name": "train.py:11",
            "bytes": 64 * MIB,
            "text": "optimizer.step()",
            "by_category": {"optimizer": 64 * MIB},
        },
        {
            "name": "a/path/that/is/rather/long/model.py:4",
            "bytes": 32 * MIB,
            "text": "model = nn.Sequential(*[nn.Linear(512, 2048)])",
            "by_category": {"parameters": 32 * MIB},
        },
    ]
    return prediction.Estimate(
        "train.py --batch 64",
        prediction.SIMULATED,
        allocated_bytes=(300 * MIB, 300 * MIB),
        reserved_bytes=(350 * MIB, 350 * MIB),
        context_bytes=450 * MIB,
        card=cards.card("700MiB"),
        verdict="does not fit",
        oom={
            "file": SCRIPT,
            "line": 9,
            "text": "loss = (model(x) - x).square().mean()",
            "asked": 16 * MIB,
            "allocated": 228 * MIB,
        },
        by_category={
            "activations": 168 * MIB,
            "optimizer": 64 * MIB,
            "parameters": 32 * MIB,
            "inputs": 36 * MIB,
        },
        by_line=lines,
        by_module=[
            {
                "name": "Sequential.0.0",
                "bytes": 24 * MIB,
                "by_category": {"activations": 16 * MIB, "other": 8 * MIB},
            }
        ],
        covered=["1 step before it ran out of memory"],
        backends=[
            prediction.Backend("native", 350 * MIB, False),
            prediction.Backend("pool", 320 * MIB, False),
        ],
        advice=[
            Advice("memopt.nn.tile_mlps(model)", 192 * MIB, "the same up to rounding"),
            Advice("a card of 7.63 GiB, as rtx4060", 300 * MIB, ""),
        ],
        guesses=[{"what": "a value that decides a branch", "where": f"{SCRIPT}:14", "count": 3}],
        steps=4,
        versions={
            "memopt": "0.1.0",
            "torch": "2.13.0+cu130",
            "cuda": "13.0",
            "cudnn": "92000",
            "python": "3.11.7",
        },
    )


def estimate(folder: Path) -> str:
    return str(_estimate())


def planned(folder: Path) -> str:
    card = cards.card("700MiB")
    plan = Plan(
        SCRIPT,
        "0" * 64,
        ["--batch", "64"],
        "2.13.0",
        card.usable_bytes,
        216 * MIB,
        techniques=["checkpoint:214958080"],
    )
    rows = [
        fit.Row(["checkpoint:214958080"], 216 * MIB, 666 * MIB, 0.01, "bit-equal", True),
        fit.Row(
            ["checkpoint:214958080", "fused"], 220 * MIB, 700 * MIB, 0.01, "bit-equal", False, at_least=True
        ),
        fit.Row(["offload activations"], 236 * MIB, 720 * MIB, 0.02, "bit-equal", False),
    ]
    call = 'memopt.auto_checkpoint(model, sample, memory_budget="205MiB", optimizer=optimizer, keeps_output=False)'
    found = fit.Fit(
        _estimate(),
        card,
        plan,
        rows,
        [call],
        {"offload activations": 80 * MIB},
        {"fused": 0},
        host_bytes=48 * MIB,
        runs=8,
        seconds=32.4,
    )
    command = "python -m memopt run --fit train.fit.json train.py --batch 64"
    return "\n".join([str(found), *with_command("planned in train.fit.json", command, line_width())])


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[Path], str]], str]:
    """All screens of a command in one text."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch", "64"])
    monkeypatch.chdir(tmp_path)

    def made(say: Callable[[Path], str]) -> str:
        parts = []
        for columns in ("60", "80", "120"):
            monkeypatch.setenv("COLUMNS", columns)
            parts.append(f"---- {columns} columns\n{say(tmp_path)}\n")
        monkeypatch.delenv("COLUMNS")

        def none(*_: object) -> None:
            raise OSError("no terminal")

        monkeypatch.setattr(os, "get_terminal_size", none)
        return "".join([*parts, f"---- no terminal\n{say(tmp_path)}\n"])

    return made


@pytest.mark.parametrize(
    "say", [doctor, run, killed, out_of_memory, estimate, planned], ids=lambda say: say.__name__
)
def test_the_screens_are_the_recorded_ones(say, screens, pytestconfig):
    told, file = screens(say), SCREENS / f"{say.__name__}.txt"
    if pytestconfig.getoption("--record-screens"):
        file.write_text(told)
    assert told == file.read_text()
    parts = told.split("---- ")[1:]
    for part, width in zip(parts, (60, 80, 118, 118), strict=True):
        for line in part.splitlines()[1:]:
            # What is pasted is whole: a path, a command.
            assert len(line) <= width or any(one in line for one in ("/", "`", "python -m memopt ")), line
