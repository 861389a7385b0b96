"""A finding of memopt.doctor() about one topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """A finding of the doctor: the topic, its state, a text, and a remedy if something should be done.

    state: 'ok'; 'absent' (not here, and memopt works without it); 'broken' (somebody should do something).
    """

    topic: str
    state: State
    text: str
    mend: str = ""
