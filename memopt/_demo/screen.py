"""The demo's answer on the screen."""

from __future__ import annotations

import textwrap

from memopt import _C
from memopt._demo.results import LOSS_SHARE, DemoResult, TaskResult
from memopt._runtime.table import ResultTable

_WIDTH = 100
_HEADS = ("", "peak memory", "predicted", "budget kept", "a step", "final loss")
_NEXT = """\
next:  python -m memopt estimate --gpu 24GiB train.py    will your script fit a card? (no GPU needed)
       python -m memopt run train.py                     your script as it is, and where its memory went
       memopt.auto_checkpoint(model, batch, memory_budget="8GiB", optimizer=optimizer)
                                                         what this demo did, in your script
       python -m memopt doctor                           what works on this machine"""


def text(result: DemoResult, page: str | None) -> str:
    rows = [_rows(task) for task in result.tasks]
    heads, *cells = ResultTable([row for of_task in rows for row in of_task], _HEADS).lines()
    lines = [f"memopt demo: trained on {result.device} (torch {result.torch}), in half the memory", "", heads]
    for task, of_task in zip(result.tasks, rows, strict=True):
        lines += [f"  {task.about}", *cells[: len(of_task)]]
        del cells[: len(of_task)]
    lines += ["", *_words(result), ""]
    wrong = result.wrong()
    if wrong:
        lines += ["NOT AS IT MUST BE:", *(f"  {line}" for line in wrong)]
    else:
        lines += [
            f"every budget kept ({result.seconds:.0f} s)",
            "losses differ because the optimizer states have 8 bits: here by less than "
            f"{LOSS_SHARE:.0%} of what plain training gained",
        ]
    if page:
        lines.append(f"what lived in memory when, and whose it was: {page}")
    return "\n".join([*lines, "", _NEXT])


def _rows(task: TaskResult) -> list[tuple[str, ...]]:
    size, plain, within = _C.format_size, task.plain, task.within
    first = ("  plain", size(plain["peak"]), "", "", _time(plain["seconds"]), f"{plain['loss']:.4f}")
    label = f"  within {size(task.budget)}"
    if "infeasible" in within:
        return [first, (label, "", "", "no", "", "")]
    peaks = size(within["peak"]), size(within["predicted"])
    kept = "yes" if task.kept else "NO"
    ratio, more = within["peak"] / plain["peak"], within["loss"] - plain["loss"]
    return [
        first,
        (label, *peaks, kept, _time(within["seconds"]), f"{within['loss']:.4f}"),
        ("", f"x {ratio:.2f}", "", "", f"{task.slower:+.0%}", f"{more:+.4f}"),
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _words(result: DemoResult) -> list[str]:
    """Further results, folded."""
    size = _C.format_size
    told = []
    planned = [task for task in result.tasks if "plan" in task.within]
    if planned:
        slower = ", ".join(f"{task.name} {task.slower_predicted:+.0%}" for task in planned)
        told.append(
            "how: memopt.auto_checkpoint's schedule (it predicted the time of forward and backward: "
            f"{slower}), AdamW's states in 8 bits, memopt's GradScaler, prefetched batches; memory is the most that "
            "lived at once in any step, each training in a process of its own"
        )
    device = result.simulated
    if "difference" in device:
        same = "bit for bit" if device["difference"] == 0 else f"within {device['difference']:.1g}"
        told.append(
            f"on a simulated GPU with {size(device['capacity'])}, under memopt's allocator: plain training: "
            f'"{device["plain"]}"; within {size(device["budget"])}: {len(device["losses"])} steps, the losses are the '
            f"CPU's {same}; it held {size(device['held'])} at the most"
        )
    elif "missing" in device:
        told.append(f"no simulated GPU: {device['missing']}")
    replays = [
        f"{size(replay['held'])} for the {size(replay['live'])} of {name}"
        for name, replay in result.replays.items()
    ]
    if replays:
        told.append(
            f"given the requests of these trainings, memopt's allocator holds {', '.join(replays)} (it takes memory in "
            "pieces of 2 MiB)"
        )
    if result.load > 2 * result.cores:
        told.append(
            f"this machine is busy (a load of {result.load:.1f} on {result.cores} cores): times mean little here"
        )
    told += result.notes
    return [
        line
        for words in told
        for line in textwrap.wrap(
            words, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    ]
