"""torch's functions and classes that memopt's stand in the place of, as torch made them.

memopt's leave to torch's what they do not do themselves. Where somebody has put memopt's in torch's place, by hand or
by memopt.patch(), torch's name would lead back to memopt's, for ever. So each is looked up once, when the module of
memopt's is imported. It is kept on torch's own module, where memopt's finds it when it is imported again
(importlib.reload, a notebook's autoreload)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_KEPT = "__memopt_originals__"


def original(owner: ModuleType, name: str) -> Any:
    """torch's `owner.name`, whatever stands there by now."""
    kept: dict[str, Any] = vars(owner).setdefault(_KEPT, {})
    return kept.setdefault(name, getattr(owner, name))
