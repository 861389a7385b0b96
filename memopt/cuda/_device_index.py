"""Resolution of a device argument to a CUDA device index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt._runtime import torch_version

if TYPE_CHECKING:
    import torch


def device_index(device: torch.device | str | int | None) -> int:
    """Return the ordinal of a device, as torch.cuda takes it; None is the current one.

    It initialises nothing: where CUDA was never used, or cannot be (a forked child), the current device is the first.

    Raises:
        ValueError: It is not a CUDA device.
    """
    if isinstance(device, int):
        return device
    torch_version.require("memopt.cuda")
    import torch

    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"device {device!r} is not a CUDA device")
    if chosen.index is not None:
        return int(chosen.index)
    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
