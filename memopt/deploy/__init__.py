"""A trained model as a file that runs without the program that trained it."""

from __future__ import annotations

from memopt.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.deploy.export_report import Export
    from memopt.deploy.exporting import export

__all__ = ["Export", "export"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {"Export": "memopt.deploy.export_report", "export": "memopt.deploy.exporting"},
)
