"""The subsets of blended seeds that are validated, and how alpha rows part at slots on the way: a
tree, as a host is a chain, of which what lies before the first slot that differs is computed once.
Envs whose ablated slots agree are validated together.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from esper_soa.config.nets import DEFAULT_ROWS, SubsetRows
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.system.threads import chunks
from esper_soa.vocabulary import Stage

EXACT_SLOTS = 4  # up to this many ablated seeds every subset is evaluated


@lru_cache(maxsize=4096)
def subset_codes(
    ablated: tuple[int, ...], fossils: tuple[int, ...], rows: SubsetRows = DEFAULT_ROWS
) -> tuple[int, ...]:
    """Subsets to evaluate, as bit masks over slot numbers; the first has every ablated seed on.

    Up to EXACT_SLOTS seeds these are all 2^n; beyond, the full set, each leave-one-out, each alone,
    none, the fossils alone, and what `rows` asks for: n (n - 1) / 2 pairs, and its codes.
    """
    full = sum(1 << slot for slot in ablated)
    if len(ablated) <= EXACT_SLOTS:
        return tuple(code for code in range(full, -1, -1) if code & full == code)
    fossil_code = sum(1 << slot for slot in fossils)
    single_codes = [1 << slot for slot in ablated]
    codes = [full, *(full - code for code in single_codes), *single_codes, 0, fossil_code]
    if rows.pairs:
        codes += [1 << first | 1 << second for first, second in combinations(ablated, 2)]
    codes += [code & full for code in rows.codes]
    return tuple(dict.fromkeys(codes))


def max_rows(num_slots: int, rows: SubsetRows = DEFAULT_ROWS) -> int:
    """Most subset rows that an env with `num_slots` slots can need."""
    if num_slots <= EXACT_SLOTS:
        return 2**num_slots
    pairs = num_slots * (num_slots - 1) // 2 if rows.pairs else 0
    return min(2**num_slots, max(2**EXACT_SLOTS, 2 * num_slots + 3 + pairs + len(rows.codes)))


class Branch(NamedTuple):
    """The way of alpha rows at a slot: rows `off` pass by the seed, rows `on` take it in."""

    off: tuple[int, ...]  # rows before the slot that continue without the seed
    on: tuple[int, ...]  # rows before the slot that continue with it; both may name the same row


@lru_cache(maxsize=4096)
def branch_plan(
    order: tuple[int, ...], codes: tuple[int, ...]
) -> tuple[dict[int, Branch], tuple[int, ...]]:
    """Branches by slot for ablated slots in execution `order`, and the final row of every code."""
    prefixes = [0]
    plan = {}
    mask = 0
    for slot in order:
        bit = 1 << slot
        mask |= bit
        masked_codes = {code & mask for code in codes}
        off = tuple(row for row, prefix in enumerate(prefixes) if prefix in masked_codes)
        on = tuple(row for row, prefix in enumerate(prefixes) if prefix | bit in masked_codes)
        plan[slot] = Branch(off, on)
        prefixes = [prefixes[row] for row in off] + [prefixes[row] | bit for row in on]
    return plan, tuple(prefixes.index(code) for code in codes)


class Job(NamedTuple):
    """Some envs that are validated under the same subset rows."""

    envs: np.ndarray
    codes: tuple[int, ...]
    plan: dict[int, Branch]
    final_rows: tuple[int, ...]

    @property
    def ablated(self) -> int:
        """Bit mask of the slots in which the codes differ."""
        return sum(1 << slot for slot in self.plan)


def jobs_of(seeds: ActiveSeeds, order: Sequence[int], rows: SubsetRows, size: int) -> list[Job]:
    """Every env in one job of at most `size`, the most work first, so that workers end together;
    order: all slots as the forward pass meets them.
    """
    num_slots = seeds.stage.shape[1]
    weight = 1 << np.arange(num_slots)
    ablated_bits = seeds.ablated @ weight
    fossil_bits = (seeds.ablated & (seeds.stage == Stage.FOSSILIZED)) @ weight
    patterns = ablated_bits << num_slots | fossil_bits
    jobs = []
    for pattern in np.unique(patterns):
        equal = np.flatnonzero(patterns == pattern)
        slots = _members(int(ablated_bits[equal[0]]), num_slots)
        codes = subset_codes(slots, _members(int(fossil_bits[equal[0]]), num_slots), rows)
        plan, final_rows = branch_plan(tuple(slot for slot in order if slot in slots), codes)
        pieces = chunks(equal.size, size)
        jobs += [Job(equal[piece], codes, plan, final_rows=final_rows) for piece in pieces]
    return sorted(jobs, key=lambda job: -len(job.codes) * job.envs.size)


def _members(bits: int, num_slots: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(num_slots) if bits >> slot & 1)
