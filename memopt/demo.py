"""The demo's models and data, for notebooks and experiments: small enough for a CPU, and without downloads."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt._demo.tasks import (
        GPT,
        VOCABULARY,
        Block,
        Task,
        digits,
        get_task,
        make_cnn,
        standard_library_text,
    )

__all__ = ["GPT", "VOCABULARY", "Block", "Task", "digits", "get_task", "make_cnn", "standard_library_text"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "GPT": "memopt._demo.tasks",
        "VOCABULARY": "memopt._demo.tasks",
        "Block": "memopt._demo.tasks",
        "Task": "memopt._demo.tasks",
        "digits": "memopt._demo.tasks",
        "get_task": "memopt._demo.tasks",
        "make_cnn": "memopt._demo.tasks",
        "standard_library_text": "memopt._demo.tasks",
    },
    torch_for="memopt.demo",
)
