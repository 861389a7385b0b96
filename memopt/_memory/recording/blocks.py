"""Blocks from events: a birth and the next death at its address belong to one block."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BlockEvents(NamedTuple):
    """The events of blocks, one entry for each block, in the order of their births.

    `event`: the block's birth if that is recorded, else its death.
    """

    born: torch.Tensor
    died: torch.Tensor
    event: torch.Tensor


def pair(is_birth: torch.Tensor, address: torch.Tensor) -> BlockEvents:
    """Pair the events, one birth or death each in order, into blocks.

    A death without a birth ends a block that was there before (or since the last death there, where recording paused).
    A birth at an address where a block lives ends that block.
    """
    count = len(address)
    places, order = torch.sort(address, stable=True)
    birth = is_birth[order]
    follows = torch.zeros(count, dtype=torch.bool)  # the one before it is of the same address
    follows[1:] = places[1:] == places[:-1]
    leads = torch.zeros(count, dtype=torch.bool)
    leads[:-1] = follows[1:]
    after = torch.full((count,), count, dtype=torch.int64)
    after[:-1] = torch.where(leads[:-1], order[1:], count)
    before = torch.full((count,), -1, dtype=torch.int64)
    before[1:] = torch.where(follows[1:], order[:-1], -1)
    previous_birth = torch.zeros(count, dtype=torch.bool)
    previous_birth[1:] = follows[1:] & birth[:-1]
    orphan = ~birth & ~previous_birth
    born = torch.cat((order[birth], before[orphan]))
    died = torch.cat((after[birth], order[orphan]))
    event = torch.cat((order[birth], order[orphan]))
    in_time = torch.argsort(born, stable=True)
    return BlockEvents(born[in_time], died[in_time], event[in_time])
