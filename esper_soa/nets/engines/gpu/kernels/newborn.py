"""Newborn seeds: fresh rows where the env state says so, by the streams of system/streams.py.

The integers are torch's to the bit, and the sums are rounded one by one, so rows equal those of
pools.claim_. Launched by newborn.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.system import streams
from esper_soa.vocabulary import Blend

WEYL = tl.constexpr(streams._signed(streams._WEYL))
MIX_A = tl.constexpr(streams._signed(streams._MIX_A))
MIX_B = tl.constexpr(streams._signed(streams._MIX_B))
MULTIPLY = tl.constexpr(Blend.MULTIPLY)


class NewSeeds(NamedTuple):
    """What the env state says of N networks with S slots, and the streams of an env-step."""

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
        own = fold(tl.load(new_seeds.keys + env), tl.full((1,), slot, tl.int64))
        gate = column >= seed_init.gate_at
        key = fold(own, gate.to(tl.int64))
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
