"""Newborn seeds of all networks in one launch, without a read or an upload by the host: fresh rows
where the env state says so, by the streams of system/streams.py.

The integers are torch's to the bit, and the sums are rounded one by one, so rows equal those of
pools.claim_.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.kernels.tiles import EXACT, constants
from esper_soa.nets.model.blueprints import gate_table, num_codes, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.parts import Table
from esper_soa.nets.seeds.pools import SlotSeeds, row_layout
from esper_soa.system import streams
from esper_soa.vocabulary import Blend

TILE_COLUMNS = 512  # columns
WEYL = tl.constexpr(streams._signed(streams._WEYL))
MIX_A = tl.constexpr(streams._signed(streams._MIX_A))
MIX_B = tl.constexpr(streams._signed(streams._MIX_B))
MULTIPLY = tl.constexpr(Blend.MULTIPLY)


class NewSeeds(NamedTuple):
    """Newborn seeds of N networks with S slots by the env state, and the streams of an env-step."""

    newborn: Tensor  # bool [N, S]
    fresh_momentum: Tensor  # bool [N, S]
    blueprint: Tensor  # int64 [N, S]
    blend: Tensor  # int64 [N, S]
    keys: Tensor  # int64 [N]
    num_slots: tl.constexpr


class SeedInit(NamedTuple):
    """Rows of a slot and how its seeds begin: at value + bound * U(-1, 1), by column."""

    params: Tensor  # float32 [N, width]
    momentum: Tensor
    bound: Tensor  # float32 [codes, width]; beyond a seed's columns 0, but for the gate's
    value: Tensor
    # Uint8 [codes, width]: at 0 instead, in a seed that is germinated with MULTIPLY.
    cleared: Tensor
    width: tl.constexpr
    gate_at: tl.constexpr


def seed_inits(weights: TensorDict, shape: HostShape) -> tuple[SeedInit, ...]:
    """Initialisation of the seeds of every slot, on the device of the weights."""
    return tuple(seed_init_of(weights, shape, slot) for slot in range(len(shape.slots)))


def begin_(seed_inits: tuple[SeedInit, ...], seeds: SlotSeeds, keys: Tensor) -> None:
    """Initialise the rows of newborn seeds and clear the momentum that must start afresh.

    keys: int64 [N], streams of this env-step; every slot takes a sub-stream of its own.
    """
    new_seeds = NewSeeds(
        seeds.newborn.contiguous(),
        seeds.fresh_momentum.contiguous(),
        seeds.blueprint.contiguous(),
        blend=seeds.blend.contiguous(),
        keys=keys,
        num_slots=tl.constexpr(len(seed_inits)),
    )
    tiles = triton.cdiv(max(seed_init.width.value for seed_init in seed_inits), TILE_COLUMNS)
    grid = keys.shape[0], tiles, len(seed_inits)
    newborn_kernel[grid](
        seed_inits, new_seeds, num_slots=len(seed_inits), tile=TILE_COLUMNS, **EXACT
    )


def seed_init_of(weights: TensorDict, shape: HostShape, slot: int) -> SeedInit:
    spec = shape.slots[slot]
    layout = row_layout(shape, slot)
    pool = weights["seeds", spec.name]
    width = sum(layout)
    facts = torch.zeros(3, num_codes(shape.blueprints), width)
    gate = gate_table(spec.channels)
    for blueprint in filter(program.runs, shape.blueprints):
        table = seed_table(blueprint, spec.channels)
        facts[:, blueprint.code, : table.total] = _columns(table)
        facts[:, blueprint.code, layout.seed :] = _columns(gate)
    facts[2, :, layout.seed :] = 0  # a gate begins alike with every blend
    bound, value, cleared = facts.to(pool["params"].device)
    return SeedInit(
        pool["params"],
        pool["momentum"],
        bound,
        value=value,
        cleared=cleared.byte(),
        **constants(width=width, gate_at=layout.seed),
    )


def _columns(table: Table) -> Tensor:
    """float32 [3, total]: bound, value and whether it is cleared, of every number of a row."""
    facts = [(tensor.bound, tensor.value, float(tensor.cleared)) for tensor in table.parameters]
    return torch.tensor(facts).repeat_interleave(torch.tensor(table.sizes), dim=0).T


@triton.jit
def shifted_right(value, places: tl.constexpr):
    """Logical right shift of int64 bit patterns."""
    return (value >> places) & ((1 << (64 - places)) - 1)


@triton.jit
def fold(key, coordinate):
    """streams.fold of int64 numbers: SplitMix64 (Steele, Lea and Flood 2014)."""
    value = key + (coordinate + 1) * WEYL
    value = (value ^ shifted_right(value, 30)) * MIX_A
    value = (value ^ shifted_right(value, 27)) * MIX_B
    return value ^ shifted_right(value, 31)


@triton.jit
def newborn_kernel(seed_inits, new_seeds, num_slots: tl.constexpr, tile: tl.constexpr):
    """Fresh rows and momentum where they are due. Grid (N, tiles of the widest row, S)."""
    env = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    for slot in tl.static_range(num_slots):
        if tl.program_id(2) == slot:
            begin(seed_inits[slot], new_seeds, env, column, slot)


@triton.jit
def begin(seed_init, new_seeds, env, column, slot: tl.constexpr):
    """The columns [tile] of one row."""
    place = env * new_seeds.num_slots + slot
    inside = column < seed_init.width
    target = env * seed_init.width + column
    if tl.load(new_seeds.newborn + place) != 0:
        code = tl.load(new_seeds.blueprint + place)
        blend = tl.load(new_seeds.blend + place)
        slot_key = fold(tl.load(new_seeds.keys + env), tl.full((1,), slot, tl.int64))
        gate = column >= seed_init.gate_at
        key = fold(slot_key, gate.to(tl.int64))
        counter = tl.where(gate, column - seed_init.gate_at, column).to(tl.int64)
        draw = shifted_right(fold(key, counter), 40).to(tl.float32) * (1.0 / (1 << 24))
        at = code * seed_init.width + column
        bound = tl.load(seed_init.bound + at, mask=inside, other=0.0)
        values = tl.load(seed_init.value + at, mask=inside, other=0.0) + bound * (2.0 * draw - 1.0)
        cleared_mask = tl.load(seed_init.cleared + at, mask=inside, other=0)
        values = tl.where((cleared_mask != 0) & (blend == MULTIPLY), 0.0, values)
        tl.store(seed_init.params + target, values, mask=inside)
    if tl.load(new_seeds.fresh_momentum + place) != 0:
        tl.store(seed_init.momentum + target, tl.zeros_like(column).to(tl.float32), mask=inside)
