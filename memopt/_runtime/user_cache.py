"""The user's cache directory, by the XDG base directory specification."""

from __future__ import annotations

import os


def user_cache() -> str | None:
    """Return $XDG_CACHE_HOME, or ~/.cache, as an absolute path that need not exist.

    None for a user without a home directory, such as one whose HOME is empty.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification has a relative one ignored
        return base
    home = (
        os.path.expanduser("~") if os.environ.get("HOME") != "" else ""
    )  # of an empty one it makes the root
    return os.path.join(home, ".cache") if os.path.isabs(home) else None
