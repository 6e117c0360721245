"""Newborn seeds of all networks in one launch, without a read or an upload by the host.

Called with the env state where it lies; rows are those of pools.claim_. The kernel stands in
kernels/newborn.py.
"""

import torch
import triton
import triton.language as tl
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.kernels.newborn import NewSeeds, SeedInit, newborn_kernel
from esper_soa.nets.engines.gpu.kernels.tiles import EXACT
from esper_soa.nets.model.blueprints import gate_table, num_codes, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.parts import Table
from esper_soa.nets.seeds.pools import SlotSeeds, row_layout

TILE_COLUMNS = 512  # columns


def seed_inits(weights: TensorDict, shape: HostShape) -> tuple[SeedInit, ...]:
    """Initialisation of the seeds of every slot, on the device of the weights."""
    return tuple(_seed_init(weights, shape, slot) for slot in range(len(shape.slots)))


def begin_(seed_inits: tuple[SeedInit, ...], seeds: SlotSeeds, keys: Tensor) -> None:
    """Initialise the rows of newborn seeds and clear the momentum that must start afresh.

    keys: int64 [N], streams of this env-step; every slot takes a sub-stream of its own.
    """
    given = seeds.newborn, seeds.fresh_momentum, seeds.blueprint, seeds.blend
    states = [one.contiguous() for one in given]
    new_seeds = NewSeeds._make((*states, keys, tl.constexpr(len(seed_inits))))
    tiles = triton.cdiv(max(seed_init.width.value for seed_init in seed_inits), TILE_COLUMNS)
    grid = keys.shape[0], tiles, len(seed_inits)
    newborn_kernel[grid](
        seed_inits, new_seeds, num_slots=len(seed_inits), tile=TILE_COLUMNS, **EXACT
    )


def _seed_init(weights: TensorDict, shape: HostShape, slot: int) -> SeedInit:
    spec = shape.slots[slot]
    layout = row_layout(shape, slot)
    pool = weights["seeds", spec.name]
    width = sum(layout)
    facts = torch.zeros(3, num_codes(shape.blueprints), width)
    gate = gate_table(spec.channels)
    for one in shape.blueprints:
        if program.runs(one):
            table = seed_table(one, spec.channels)
            facts[:, one.code, : table.total] = _columns(table)
            facts[:, one.code, layout.seed :] = _columns(gate)
    facts[2, :, layout.seed :] = 0  # a gate begins alike with every blend
    bound, value, initial_cleared = facts.to(pool["params"].device)
    numbers = tl.constexpr(width), tl.constexpr(layout.seed)
    return SeedInit(
        pool["params"], pool["momentum"], bound, value, initial_cleared.byte(), *numbers
    )


def _columns(table: Table) -> Tensor:
    """float32 [3, total]: bound, value and whether it is cleared, of every number of a row."""
    each = [(one.bound, one.value, float(one.cleared)) for one in table.parameters]
    return torch.tensor(each).repeat_interleave(torch.tensor(table.sizes), dim=0).T
