"""Tunable settings of a DataLoader, and a loader that differs in nothing else."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Settings(NamedTuple):
    """DataLoader's arguments of these names. Without workers prefetch_factor is None and persistent_workers False, as
    DataLoader has them."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Settings:
        return cls(loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.persistent_workers)

    def with_workers(self, num_workers: int) -> Settings:
        """DataLoader's own 2 batches ahead where there were no workers so far."""
        ahead = self.prefetch_factor or 2
        return self._replace(
            num_workers=num_workers,
            prefetch_factor=ahead if num_workers else None,
            persistent_workers=self.persistent_workers and num_workers > 0,
        )

    @property
    def outstanding(self) -> int:
        """Batches that are being made or lie ready at any time."""
        return self.num_workers * (self.prefetch_factor or 0)

    def __str__(self) -> str:
        named = {name: value for name, value in self._asdict().items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in named.items())


def with_settings(loader: DataLoader[Any], settings: Settings) -> DataLoader[Any]:
    """A loader of the same class over the same dataset, sampler, generator and the rest, the objects themselves."""
    made = copy.copy(loader)
    # Past DataLoader's __setattr__, which refuses some of these: it guards a loader that is in use, and this is none.
    state: dict[str, Any] = made.__dict__
    state.update(settings._asdict())
    state.update(_iterator=None, _IterableDataset_len_called=None)
    if not settings.num_workers:
        state["timeout"] = 0  # of waiting for workers; iterating without any refuses one
    return made
