"""Parameters of a model on the CPU in pages of a file: read ahead before their layer runs, and given back to the system
when others want their place.

Nothing is copied: what the model computes with is the file's pages. The system writes changed ones back and reads them
again, by itself; here it is only told which will be wanted (MADV_WILLNEED) and which not (MADV_DONTNEED: of a shared
mapping it drops no value)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from memopt._offload.device_carrier import beside
from memopt._offload.host_parameters import HostBlock
from memopt._runtime.host_memory import resident_bytes


class MappedCopy:
    """A parameter's pages."""

    __slots__ = ("host",)

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    @property
    def nbytes(self) -> int:
        return int(self.host.nbytes)

    @property
    def storage(self) -> int:
        return int(self.host.untyped_storage()._cdata)

    def holds(self, host: torch.Tensor) -> bool:
        return host is self.host

    def tensor(self) -> torch.Tensor:
        return self.host.detach()


class PageCarrier:
    """blocks: the pages, by the address of the parameter's values in them. typical: a layer's bytes, of which two are
    kept in memory where there is no budget. budget: of the process's memory."""

    device, copies = torch.device("cpu"), False

    def __init__(self, blocks: dict[int, HostBlock], typical: int, budget: int | None) -> None:
        self.blocks, self.typical, self.budget = blocks, typical, budget

    def travels(self, parameter: torch.Tensor) -> bool:
        return parameter.data_ptr() in self.blocks

    def fetch(self, parameters: Sequence[torch.Tensor]) -> Sequence[MappedCopy]:
        for parameter in parameters:
            self.blocks[parameter.data_ptr()].advise(parameter, mmap.MADV_WILLNEED)
        return [MappedCopy(parameter) for parameter in parameters]

    def stand_in(self, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return parameter

    def drop(self, copy: MappedCopy) -> None:
        block = self.blocks.get(copy.host.data_ptr())
        if block is not None:
            block.advise(copy.host, mmap.MADV_DONTNEED)

    def settle(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def allowance(self, wanted: int) -> int:
        if self.budget is not None:
            return max(self.budget - resident_bytes() - wanted, 0)
        return beside(self.typical) + max(self.typical - wanted, 0)

    def passed(self, grad_mode: bool) -> None:
        """Release the pages that an optimizer has changed."""
        for block in {id(block): block for block in self.blocks.values()}.values():
            block.advise_all(mmap.MADV_DONTNEED)
