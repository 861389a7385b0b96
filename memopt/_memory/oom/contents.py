"""A device's contents when a request failed, as a recording of that moment, for the report page without a recorder."""

from __future__ import annotations

import torch

from memopt._memory.live.device_bytes import AllocatorBlocks
from memopt._memory.live.live_tensors import LiveTensor, any_element
from memopt._memory.recording.recorder import facts
from memopt._memory.recording.recording import COLUMNS, Frame, Recording, Stack


def contents(
    device: str, capacity: int, blocks: AllocatorBlocks, category: torch.Tensor, tensors: list[LiveTensor]
) -> Recording:
    """Return a recording of the allocator's live blocks.

    Each has the line that binds the variable which leads to it, and that variable in the place of a module. `category`:
    of each block, live or not.
    """
    stacks: dict[Stack, int] = {(): 0}
    names: dict[str, int] = {"": 0}
    here = [tensor for tensor in tensors if tensor.device == device]
    at = blocks.containing(torch.tensor([one.address for one in here], dtype=torch.int64, device="cpu"))
    stack, name = torch.zeros_like(blocks.size), torch.zeros_like(blocks.size)
    for one, block in zip(here, at.tolist(), strict=True):
        if block >= 0 and not name[block]:  # the largest tensor in it: they come first
            stack[block] = stacks.setdefault(_stack(one), len(stacks))
            title = f"the graph of {one.name}" if one.only_in_graph and one.name else one.name
            name[block] = names.setdefault(any_element(title), len(names))
    live = blocks.live
    columns = dict.fromkeys(COLUMNS, torch.zeros_like(blocks.size[live]))
    columns |= {"born": columns["born"] - 1, "address": blocks.address[live], "size": blocks.size[live]}
    columns |= {"stack": stack[live], "module": name[live], "category": category[live]}
    return Recording(
        device=device,
        source="what lived when a request failed; by module are the variables that hold it",
        columns=columns,
        times_us=torch.empty(0, dtype=torch.int64, device="cpu"),
        stacks=list(stacks),
        modules=list(names),
        reserved_events=torch.tensor([-1], device="cpu"),
        reserved_bytes=torch.tensor([blocks.reserved], device="cpu"),
        capacity=capacity,
        facts=facts(),
    )


def _stack(tensor: LiveTensor) -> Stack:
    _, _, line = tensor.where.rpartition(":")
    return (Frame(tensor.file, int(line), ""),) if tensor.file else ()
