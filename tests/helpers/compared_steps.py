"""Variants that another process can import: for test_compare_steps.py."""

import torch


def grows_by_32_mib():
    kept = torch.ones(8 << 20)

    def step() -> float:
        return float(kept[0])

    return step
