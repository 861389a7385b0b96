"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what was looked at, how it is, and, if something is to be done, what.

    state: 'ok'; 'absent' (not here, and memopt works without it); 'broken' (somebody should do something)."""

    topic: str
    state: State
    text: str
    mend: str = ""
