"""What would have made a request fit, and how many bytes each would save."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from memopt import _C
from memopt.oom import eight_bit_states
from memopt.oom.fragmentation import Fragmentation
from memopt.owners.census import Census
from memopt.owners.live import LiveTensors


@dataclass(frozen=True)
class Fix:
    text: str
    saves: int

    def __str__(self) -> str:
        return f"{self.text} (-{_C.format_size(self.saves)})"


@dataclass(frozen=True)
class Situation:
    """What the fixes are chosen by. `available`: what was free, in the cache or on the device, and allowed;
    `capacity`: the most bytes of tensors that can be live here; `phase`: of the step."""

    device: str
    asked: int
    available: int
    capacity: int
    phase: str
    categories: dict[str, int]
    fragmentation: Fragmentation
    live: LiveTensors
    census: Census
    pool: bool  # memopt's allocator is in use

    @property
    def lacking(self) -> int:
        """Bytes that were too few, if all that was free could have been used."""
        return max(0, self.asked - self.available)


def fixes(now: Situation, most: int = 3) -> list[Fix]:
    """Those that suffice first, and of these those that cost nothing; else the largest."""
    found = [*_let_go(now), *_allocator(now), *_batch(now), *_eight_bits(now), *_checkpointing(now)]
    enough = [fix for fix in found if fix.saves >= max(1, now.lacking)]
    rest = sorted((fix for fix in found if 0 < fix.saves < now.lacking), key=lambda fix: -fix.saves)
    return [*enough, *rest][:most]


def _let_go(now: Situation) -> list[Fix]:
    """What is kept where it may outlive its step; of a graph what no other variable's graph needs."""
    found = []
    for group in now.live.groups:
        if group.device != now.device or not group.kept or group.category not in ("activations", "inputs"):
            continue
        if group.nbytes < now.capacity // 100:
            break
        at = f" ({group.where})" if group.where else ""
        if group.nodes:
            found.append(Fix(f"{group.name} without its graph: .item() or .detach(){at}", group.nbytes))
        else:
            found.append(Fix(f"del {group.name}{at}", group.nbytes))
    return found[:1]


def _allocator(now: Situation) -> list[Fix]:
    if not now.fragmentation.fragmented or now.pool:
        return []
    return [
        Fix('memopt.enable(backend="pool"): free pieces are put together', now.fragmentation.free_in_cache)
    ]


def _batch(now: Situation) -> list[Fix]:
    """The batch size is the first dimension that most bytes of activations have."""
    bytes_of: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    for tensor in now.live.tensors:
        if (
            tensor.device == now.device
            and tensor.category in ("activations", "inputs")
            and len(tensor.shape) > 1
        ):
            bytes_of[tensor.shape[0]] += tensor.nbytes
            counts[tensor.shape[0]] += 1
    size = max(bytes_of, key=lambda first: bytes_of[first], default=0)
    if counts[size] < 2:
        return []
    grows = bytes_of[size]
    asked = (
        0 if now.phase == "optimizer step" else now.asked
    )  # a gradient's or a state's size is not the batch's
    left = grows + now.available - (now.asked - asked)
    fitting = math.floor(size * left / (grows + asked)) if grows else 0
    if fitting >= 16:
        fitting -= fitting % 8
    if not 0 < fitting < size:
        return []
    saves = round((grows + asked) * (1 - fitting / size))
    return [Fix(f"batch {fitting} instead of {size}", saves)]


def _eight_bits(now: Situation) -> list[Fix]:
    """Of Adam's moments: those that are there, and those that the first step was about to make."""
    moments = coming = 0
    for one in now.census.held.values():
        if one.device == now.device and one.dtype == "float32" and one.claim.startswith("Adam"):
            if one.claim.endswith(("'s exp_avg", "'s exp_avg_sq")):
                moments += one.nbytes
    for optimizer in now.census.optimizers:
        if type(optimizer).__name__ in ("Adam", "AdamW") and now.phase == "optimizer step":
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if (
                        str(p.device) == now.device
                        and p.dtype is torch.float32
                        and not optimizer.state.get(p)
                    ):
                        coming += 2 * p.nbytes
    saves = eight_bit_states.saved(moments + coming)
    return [Fix("memopt.optim.AdamW(…, state_bits=8)", saves)] if saves else []


def _checkpointing(now: Situation) -> list[Fix]:
    """A chain of n equal blocks can do with 2/sqrt(n) of its activations, whatever they are: every sqrt(n)-th block's
    input, and one such part made again at a time."""
    blocks = max(
        (
            len(module)
            for model in now.census.models
            for module in model.modules()
            if isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList))
        ),
        default=0,
    )
    if blocks < 5 or now.phase == "optimizer step":
        return []
    saves = round(now.categories["activations"] * (1 - 2 / math.sqrt(blocks)))
    budget = _C.format_size(int(0.95 * now.capacity)).replace(" ", "")
    return [Fix(f'memopt.auto_checkpoint(model, batch, memory_budget="{budget}")', saves)] if saves else []
