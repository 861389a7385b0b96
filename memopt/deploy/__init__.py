"""Export of a trained model to a file that runs without the program that trained it."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt.deploy._export_report import Export
    from memopt.deploy._exporting import export

__all__ = ["Export", "export"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {"Export": "memopt.deploy._export_report", "export": "memopt.deploy._exporting"},
)
