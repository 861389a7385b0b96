"""The user's line behind each block of a recording, as one number for each block."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from memopt._memory.recording.recording import Recording
from memopt._memory.recording.user_code import short_name, source_of, user_frame


class SourceLine(NamedTuple):
    """A source line of the user's.

    name: "train.py:41", or with its whole path where that tells two files apart; "" if no line of a stack is the
    user's.
    """

    name: str
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""


def source_lines(recording: Recording) -> tuple[list[SourceLine], torch.Tensor]:
    """The lines, the first of them "not known", and of each block the index of its own: [blocks]."""
    lines = [SourceLine("")]
    known: dict[tuple[str, int], int] = {}
    of_stack = []
    for stack in recording.stacks:
        frame = user_frame(stack)
        if frame is None:
            of_stack.append(0)
            continue
        at = known.setdefault((frame.file, frame.line), len(lines))
        if at == len(lines):
            lines.append(SourceLine(short_name(frame), *frame, source_of(frame)))
        of_stack.append(at)
    return _told_apart(lines), torch.tensor(of_stack, dtype=torch.int64)[recording.columns["stack"]]


def _told_apart(lines: list[SourceLine]) -> list[SourceLine]:
    files = Counter(line.name for line in lines)
    return [
        line if files[line.name] == 1 else line._replace(name=f"{line.file}:{line.line}") for line in lines
    ]
