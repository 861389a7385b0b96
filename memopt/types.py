"""Classes that memopt's functions return and take, for type hints and isinstance()."""

from __future__ import annotations

from memopt._runtime.lazy_names import lazy_names

TYPE_CHECKING = False  # type checkers take it for typing's

if TYPE_CHECKING:
    from memopt._batch_size.result import FoundBatchSize, NoBatchSizeFits, Trial
    from memopt._checkpoint.plan import Plan, PlanCheck
    from memopt._compare.model_table import ModelComparison
    from memopt._compare.step_table import MeasuredStep, StepComparison
    from memopt._estimate.cards import Card
    from memopt._estimate.prediction import Estimate
    from memopt._fit.applied import AppliedFit
    from memopt._fit.result import Fit
    from memopt._memory.live.device_bytes import DeviceBytes
    from memopt._memory.live.live_tensors import LiveTensors
    from memopt._memory.recording.recording import Recording
    from memopt._memory.recording.session import Profile
    from memopt._memory.release import Released
    from memopt._microbatch import Agreement
    from memopt._offload.layers import OffloadedLayers
    from memopt._runtime.doctor import Diagnosis
    from memopt._runtime.to_dtype import Converted
    from memopt.chain import Schedule
    from memopt.compress._input_packing import PackedInputs
    from memopt.compress._saved_report import Report
    from memopt.compress._sparsifying import SparseReport
    from memopt.compress._tying import Duplicates
    from memopt.data._tuning.tuning import Tuning
    from memopt.data._tuning.worker_watch import WorkerWatch
    from memopt.deploy._export_report import Export
    from memopt.nn._fuse_loss_head import FusedLossHead

__all__ = [
    "Agreement",
    "AppliedFit",
    "Card",
    "Converted",
    "DeviceBytes",
    "Diagnosis",
    "Duplicates",
    "Estimate",
    "Export",
    "Fit",
    "FoundBatchSize",
    "FusedLossHead",
    "LiveTensors",
    "MeasuredStep",
    "ModelComparison",
    "NoBatchSizeFits",
    "OffloadedLayers",
    "PackedInputs",
    "Plan",
    "PlanCheck",
    "Profile",
    "Recording",
    "Released",
    "Report",
    "Schedule",
    "SparseReport",
    "StepComparison",
    "Trial",
    "Tuning",
    "WorkerWatch",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Agreement": "memopt._microbatch",
        "AppliedFit": "memopt._fit.applied",
        "Card": "memopt._estimate.cards",
        "Converted": "memopt._runtime.to_dtype",
        "DeviceBytes": "memopt._memory.live.device_bytes",
        "Diagnosis": "memopt._runtime.doctor",
        "Duplicates": "memopt.compress._tying",
        "Estimate": "memopt._estimate.prediction",
        "Export": "memopt.deploy._export_report",
        "Fit": "memopt._fit.result",
        "FoundBatchSize": "memopt._batch_size.result",
        "FusedLossHead": "memopt.nn._fuse_loss_head",
        "LiveTensors": "memopt._memory.live.live_tensors",
        "MeasuredStep": "memopt._compare.step_table",
        "ModelComparison": "memopt._compare.model_table",
        "NoBatchSizeFits": "memopt._batch_size.result",
        "OffloadedLayers": "memopt._offload.layers",
        "PackedInputs": "memopt.compress._input_packing",
        "Plan": "memopt._checkpoint.plan",
        "PlanCheck": "memopt._checkpoint.plan",
        "Profile": "memopt._memory.recording.session",
        "Recording": "memopt._memory.recording.recording",
        "Released": "memopt._memory.release",
        "Report": "memopt.compress._saved_report",
        "Schedule": "memopt.chain",
        "SparseReport": "memopt.compress._sparsifying",
        "StepComparison": "memopt._compare.step_table",
        "Trial": "memopt._batch_size.result",
        "Tuning": "memopt.data._tuning.tuning",
        "WorkerWatch": "memopt.data._tuning.worker_watch",
    },
)
