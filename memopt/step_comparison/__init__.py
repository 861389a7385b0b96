"""Ways of doing the same training step, side by side: what each of them saves, and what it costs."""

from memopt.step_comparison.comparing import compare_steps
from memopt.step_comparison.measuring import MeasuredStep
from memopt.step_comparison.step_table import StepComparison

__all__ = ["MeasuredStep", "StepComparison", "compare_steps"]
