"""The torch functions and classes that memopt's replace, as torch made them.

memopt's forward to torch's what they do not handle themselves. Where memopt's have been put in torch's place, by hand
or by memopt.patch(), torch's name would lead back to memopt's, for ever. Each is therefore looked up once, when
memopt's module is imported. It is kept on torch's own module, where memopt's finds it when it is imported again
(importlib.reload, a notebook's autoreload).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_KEPT = "__memopt_originals__"


def original(owner: ModuleType, name: str) -> Any:
    """Return torch's own `owner.name`, whatever replaces it now."""
    kept: dict[str, Any] = vars(owner).setdefault(_KEPT, {})
    return kept.setdefault(name, getattr(owner, name))
