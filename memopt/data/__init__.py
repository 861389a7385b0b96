"""What feeds the model: containers that worker processes share instead of copying."""

from __future__ import annotations

from memopt.data.shared_list import SharedList
from memopt.data.shared_strings import SharedStrings

__all__ = ["SharedList", "SharedStrings"]
