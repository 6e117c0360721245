"""Subset rows of all envs as one tree of branches of a fixed shape, whichever subsets they need.

A host is a chain: rows whose subsets agree in the slots met so far are computed once. At every slot
a row goes on without the seed, with it, or both; rows that an env does not need are masked. All of
it is made where the env state lies, without a read by the host.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.nets import SubsetRows
from esper_soa.nets.seeds.subsets import EXACT_SLOTS, max_rows


class TreeLevel(NamedTuple):
    """The rows behind a slot."""

    counts: Tensor  # int32 [N], how many each env has
    origins: Tensor  # int32 [N, rows]: 2 * row before the slot + whether the slot's bit is set

    @property
    def rows(self) -> int:
        """Most that an env can have."""
        return self.origins.shape[1]


def codes_of(ablated: Tensor, fossil: Tensor, rows: SubsetRows) -> Tensor:
    """int64 [N, R]: subsets to validate as subsets.subset_codes has them; -1 = no row.

    ablated, fossil: bool [N, S], `fossil` are those of `ablated` that are fossils.
    """
    num_slots = ablated.shape[1]
    device = ablated.device
    bits = 1 << torch.arange(num_slots, device=device)
    full = torch.where(ablated, bits, 0).sum(1, keepdim=True)
    count = ablated.sum(1, keepdim=True)
    exact = [full]
    for _ in range(min(2**num_slots, 2**EXACT_SLOTS) - 1):
        exact.append((exact[-1] - 1) & full)  # the next smaller subset
    every = torch.cat(exact, dim=1)
    every = torch.where(torch.arange(every.shape[1], device=device) < 1 << count, every, -1)
    most = max_rows(num_slots, rows)
    if num_slots <= EXACT_SLOTS:
        return every
    fossil_codes = torch.where(fossil, bits, 0).sum(1, keepdim=True)
    few = _few_codes(ablated, full, fossil_codes, rows=rows)
    few, every = (
        F.pad(codes[:, :most], (0, max(0, most - codes.shape[1])), value=-1)
        for codes in (few, every)
    )
    return torch.where(count <= EXACT_SLOTS, every, few)


def _few_codes(ablated: Tensor, full: Tensor, fossil_codes: Tensor, rows: SubsetRows) -> Tensor:
    """int64 [N, .]: subsets for more than EXACT_SLOTS seeds."""
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=ablated.device)
    needed = [full, torch.where(ablated, full - bits, -1), torch.where(ablated, bits, -1)]
    needed += [torch.zeros_like(full), fossil_codes]
    if rows.pairs:
        places = torch.triu_indices(num_slots, num_slots, 1, device=bits.device)
        pair_ablated = ablated[:, places].all(1)
        pairs = bits[places].sum(0)
        needed.append(torch.where(pair_ablated, pairs, -1))
    needed += [full & code for code in rows.codes]
    codes = torch.cat(needed, dim=1)
    is_repeated = (codes[:, :, None] == codes[:, None, :]).tril(-1).any(-1)
    codes = torch.where(is_repeated, -1, codes)
    return codes.gather(1, (codes < 0).int().argsort(dim=1, stable=True))


def level_rows(num_slots: int, most: int) -> list[int]:
    """Rows behind every slot in execution order, that an env can have; most: at the end."""
    return [min(most, 2 ** (number + 1)) for number in range(num_slots)]


def levels_of(codes: Tensor, order: tuple[int, ...]) -> list[TreeLevel]:
    """The rows behind every slot in execution `order`; codes: int64 [N, R], unequal in an env.

    The last level has a row for every code, in their order.
    """
    levels = list[TreeLevel]()
    mask = 0
    known = codes >= 0
    most = codes.shape[1]
    before = torch.zeros_like(codes)
    for slot, rows in zip(order, level_rows(len(order), most), strict=True):
        mask |= 1 << slot
        prefix = torch.where(known, codes & mask, -1)
        is_equal = (prefix[:, :, None] == prefix[:, None, :]).int()
        first = known & (is_equal.argmax(2) == torch.arange(most, device=codes.device))
        rank = first.cumsum(1) - 1
        place = rank.gather(1, is_equal.argmax(2))
        origins = codes.new_zeros(codes.shape[0], rows + 1)
        child = 2 * before + (codes >> slot & 1)
        origins.scatter_(1, torch.where(first, place, rows), child)
        levels.append(TreeLevel(first.sum(1).int(), origins[:, :rows].int().contiguous()))
        before = place
    return levels
