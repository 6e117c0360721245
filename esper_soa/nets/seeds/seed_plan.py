"""The role of every running seed in a pass: active seeds, decoded once and grouped by equal work.
Kernels of whole networks read the arrays, layers of n networks at once the groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.system.transfers import staged
from esper_soa.vocabulary import Blend, Stage

THROUGH = 0  # of SeedPlan.blend: the straight-through pass, behind a host that does not notice


class SeedPlan(NamedTuple):
    """Arrays [N, S] on the host; where `running` is false the others mean nothing."""

    running: np.ndarray  # bool, takes part in the pass
    blueprint: np.ndarray  # int64
    blend: np.ndarray  # int64: Blend, or THROUGH
    detached: np.ndarray  # bool, the seed's input is cut off from the host's graph
    frozen: np.ndarray  # bool, its weights stay
    measured: np.ndarray  # bool, gradient statistics are taken (TRAINING and BLENDING)


def seed_plan(seeds: ActiveSeeds, running: np.ndarray, detached_stages: Sequence[int]) -> SeedPlan:
    """The seeds of a pass: `seeds.running` in training, in validation `seeds.visible`, with an
    alpha above 0. detached_stages: those cut off from their host's graph.
    """
    through = seeds.stage == Stage.TRAINING
    blend = np.where(through, THROUGH, seeds.blend)
    measured = (through | (seeds.stage == Stage.BLENDING)) & ~seeds.frozen
    detached = np.isin(seeds.stage, detached_stages)
    return SeedPlan(
        running, seeds.blueprint, blend, detached=detached, frozen=seeds.frozen, measured=measured
    )


class Group(NamedTuple):
    """Seeds of one slot that run alike, of some networks of a chunk."""

    slot: int
    blueprint: int
    blend: int  # Blend, or THROUGH
    detached: bool
    frozen: bool
    measured: bool
    nets: Tensor | None  # int64 [m], positions within the chunk; None = every network of the chunk
    rows: Tensor  # int64 [m], env numbers


def groups_of(plan: SeedPlan, envs: np.ndarray) -> list[Group]:
    """The running seeds of a chunk of envs, slot by slot, with their numbers on the host."""
    groups = []
    part = SeedPlan(*(facts[envs] for facts in plan))
    code = part.blueprint * (Blend.GATE + 1) + part.blend
    for flag in (part.detached, part.frozen, part.measured):
        code = code * 2 + flag
    for slot in range(code.shape[1]):
        for value in np.unique(code[part.running[:, slot], slot]):
            nets = np.flatnonzero(part.running[:, slot] & (code[:, slot] == value))
            kind = [facts[nets[0], slot].item() for facts in part[1:]]
            places = None if nets.size == envs.size else staged(nets)
            groups.append(Group._make((slot, *kind, places, staged(envs[nets]))))
    return groups
