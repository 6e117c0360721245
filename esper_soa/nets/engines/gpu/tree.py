"""Subset rows of all envs as one tree of branches with a fixed shape, so that every env may need other subsets.

A host is a chain: rows whose subsets agree in the slots met so far are computed once. At every slot a row goes on
without the seed, with it, or both; rows that an env does not need are masked. Called by validation.py.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.nets.config import SubsetRows
from esper_soa.nets.pools import ActiveSeeds
from esper_soa.nets.subsets import max_rows, subset_codes
from esper_soa.vocabulary import Stage


class Level(NamedTuple):
    """The rows behind a slot."""

    rows: int  # most that an env can have
    counts: Tensor  # int32 [N], how many each has
    origins: Tensor  # int32 [N, rows]: 2 * row before the slot + whether the slot's bit is set


def codes_of(active_seeds: ActiveSeeds, rows: SubsetRows) -> np.ndarray:
    """int64 [N, R]: subsets to validate, by bit masks over slot numbers, the full set first; -1 = no row."""
    num_envs, num_slots = active_seeds.stage.shape
    codes = np.full((num_envs, max_rows(num_slots, rows)), -1, dtype=np.int64)
    weight = 1 << np.arange(num_slots)
    fossil = active_seeds.ablated & (active_seeds.stage == Stage.FOSSILIZED)
    patterns, where = np.unique(np.stack([active_seeds.ablated @ weight, fossil @ weight]), axis=1, return_inverse=True)
    for number, (ablated, fossils) in enumerate(patterns.T.tolist()):
        own = subset_codes(*(_members(bits, num_slots) for bits in (ablated, fossils)), rows)
        codes[where.ravel() == number, : len(own)] = own
    return codes


def _members(bits: int, num_slots: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(num_slots) if bits >> slot & 1)


def levels_of(codes: Tensor, order: tuple[int, ...]) -> list[Level]:
    """The rows behind every slot in execution `order`; codes: int64 [N, R], of which no two of an env are equal.

    The last level has a row for every code, in their order.
    """
    levels, mask = list[Level](), 0
    known, most = codes >= 0, codes.shape[1]
    before = torch.zeros_like(codes)
    for number, slot in enumerate(order):
        mask |= 1 << slot
        prefix = torch.where(known, codes & mask, -1)
        alike = (prefix[:, :, None] == prefix[:, None, :]).int()
        first = known & (alike.argmax(2) == torch.arange(most, device=codes.device))
        rank = first.cumsum(1) - 1
        own = rank.gather(1, alike.argmax(2))
        rows = min(most, 2 ** (number + 1))
        origins = codes.new_zeros(codes.shape[0], rows + 1)
        came = 2 * before + (codes >> slot & 1)
        origins.scatter_(1, torch.where(first, own, rows), came)
        levels.append(Level(rows, first.sum(1).int(), origins[:, :rows].int().contiguous()))
        before = own
    return levels
