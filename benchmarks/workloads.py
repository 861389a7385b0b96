"""The training loops of memopt/_gpu_check/workloads.py, which are in the wheel for `memopt gpu-check`.

Import it after memopt.sim.activate(): it needs torch.
"""

from memopt._gpu_check.workloads import WORKLOADS, Loop

__all__ = ["WORKLOADS", "Loop"]
