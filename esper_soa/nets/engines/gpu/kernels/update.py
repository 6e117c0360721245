"""The end of a training batch for hosts and seeds: gradients are summed, measured, clipped, taken,
in three launches, whatever grows.

Rows of parameters are told by a `Pool` each; a program takes a tile of a row. Seeds that do not
learn, and columns that are no parameters of the seed in residence, stay as they are.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.kernels import seed
from esper_soa.nets.engines.gpu.kernels.tiles import (
    ENDED,
    EXACT,
    Rows,
    constants,
    rows,
    start_of,
)
from esper_soa.nets.engines.gpu.slots import SlotTable
from esper_soa.nets.gradients import EXPLODING_NORM, SMALLEST_NORM, VANISHING_NORM
from esper_soa.nets.model.blueprints import gate_table, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.seeds.pools import row_layout, upload
from esper_soa.nets.sgd import CLIP_EPS, Rules
from esper_soa.state import STATE_FLOAT

TILE_COLUMNS = 512  # columns that a program moves
STEP_REGISTERS = 64  # of a thread; the assembler aims at fewer and spills
# Places of the numbers of a rule.
MAX_NORM = tl.constexpr(0)  # 0 for no limit
RATE = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
DECAY = tl.constexpr(3)
NUMBERS = tl.constexpr(4)


class Pool(NamedTuple):
    """Rows of n networks: hosts, or the seeds of a slot."""

    params: Rows
    momentum: Rows
    partials: Tensor  # float32 [n, splits, width]
    gradient: Tensor  # float32 [n, width]
    squares: Tensor  # float64 [n, tiles], sums of squares of the gradient
    programs: Tensor  # int32 [codes, 1 + parts, FIELDS]; of the hosts' pool not read
    width: tl.constexpr
    splits: tl.constexpr
    slot: tl.constexpr  # -1: of the hosts
    rule: tl.constexpr  # place of their rule in those of an env
    num_slots: tl.constexpr
    parts: tl.constexpr
    gate_at: tl.constexpr


class TensorTable(NamedTuple):
    """Parameter tensors of a slot's seeds."""

    # Int32 [codes + 1, tensors, 2]: first column and numbers; the gate's in the last row.
    places: Tensor
    tensors: int
    codes: int


class Measures(NamedTuple):
    """Gradient statistics [n, S] and their limits; see nets/gradients.py."""

    l2: Tensor  # float64
    health: Tensor
    ratio: Tensor
    vanishing: Tensor  # uint8
    exploding: Tensor
    measured: Tensor
    host_root: tl.constexpr  # root of the numbers of a host's row
    least: tl.constexpr  # norms below it vanish
    most: tl.constexpr  # norms that are not below it explode
    tiny: tl.constexpr


def tensor_table(shape: HostShape, slot: int, device: torch.device) -> TensorTable:
    """The table of one slot."""
    channels = shape.slots[slot].channels
    lists = {
        blueprint.code: seed_table(blueprint, channels).sizes
        for blueprint in filter(program.runs, shape.blueprints)
    }
    codes = 1 + max(lists, default=0)
    entries = [(code, sizes, 0) for code, sizes in lists.items()]
    entries.append((-1, gate_table(channels).sizes, row_layout(shape, slot).seed))
    longest = max(len(sizes) for _, sizes, _ in entries)
    table = np.zeros((codes + 1, longest, 2), dtype=np.int32)
    for row, sizes, start in entries:
        table[row, : len(sizes), 0] = start + np.array([0, *itertools.accumulate(sizes)][:-1])
        table[row, : len(sizes), 1] = sizes
    return TensorTable(torch.from_numpy(table).to(device), table.shape[1], codes)


def pools_of(
    weights: TensorDict, shape: HostShape, tables: list[SlotTable], partials: list[Tensor]
) -> tuple[Pool, ...]:
    """Pools of hosts and slots, with room for gradients; partials: [n, splits, width] of each."""
    stores = [weights["host"], *(weights["seeds", spec.name] for spec in shape.slots)]
    tiles = triton.cdiv(max(store["params"].shape[1] for store in stores), TILE_COLUMNS)
    pools = []
    for number, (store, part) in enumerate(zip(stores, partials, strict=True), start=-1):
        table = tables[max(number, 0)] if tables else None
        gradient = torch.empty_like(store["params"])
        squares = torch.empty(gradient.shape[0], tiles, dtype=STATE_FLOAT, device=gradient.device)
        none = torch.zeros(1, dtype=torch.int32, device=gradient.device)
        sizes = constants(
            width=gradient.shape[1],
            splits=part.shape[1],
            slot=number,
            rule=int(number >= 0),
            num_slots=len(tables),
            parts=0 if table is None else table.parts,
            gate_at=0 if table is None else table.gate_at,
        )
        pool = Pool(
            rows(store["params"]),
            rows(store["momentum"]),
            part,
            gradient=gradient,
            squares=squares,
            programs=none if table is None else table.programs,
            **sizes,
        )
        pools.append(pool)
    return tuple(pools)


def rule_numbers(rules: Rules, num_nets: int, device: torch.device) -> Tensor:
    """The rules of every env, float32 [N, 2, NUMBERS], as step_ takes them."""
    numbers = [(rule.max_norm, rule.lr, rule.momentum, rule.weight_decay) for rule in rules]
    plain = [[0.0 if isinstance(value, Tensor) else value for value in row] for row in numbers]
    (table,) = upload([np.array(plain, dtype=np.float32)], device)
    result = table.repeat(num_nets, 1, 1)
    for place, row in enumerate(numbers):
        for number, value in enumerate(row):
            if isinstance(value, Tensor):
                result[:, place, number] = value[:, 0]
    return result


def measures_of(gradients: dict[str, Tensor], shape: HostShape) -> Measures:
    """The statistics that measure_ writes, by name; it sees those that are flags as uint8."""
    fields = [gradients[name] for name in Measures._fields[:6]]
    limits = constants(
        host_root=math.sqrt(shape.parameters.total),
        least=VANISHING_NORM,
        most=EXPLODING_NORM,
        tiny=SMALLEST_NORM,
    )
    return Measures(
        *(field.view(torch.uint8) if field.dtype == torch.bool else field for field in fields),
        **limits,
    )


def sum_(
    pools: tuple[Pool, ...], slot_flags: Tensor, accumulate: bool = False, share: float = 1.0
) -> None:
    """Gradients of all rows from their partials, times `share`, added to those there or not."""
    sum_kernel[_grid(pools)](
        pools,
        slot_flags,
        num_pools=len(pools),
        tile=TILE_COLUMNS,
        accumulate=accumulate,
        share=share,
    )


def step_(pools: tuple[Pool, ...], slot_flags: Tensor, rules: Tensor, counter: Tensor) -> None:
    """One step of SGD of all rows that learn, by rule_numbers; counts the batch."""
    sizes = {"eps": CLIP_EPS, "num_pools": len(pools), "tile": TILE_COLUMNS}
    step_kernel[_grid(pools)](
        pools, slot_flags, rules, counter, **sizes, **EXACT, maxnreg=STEP_REGISTERS
    )


def measure_(
    pools: tuple[Pool, ...], tables: list[TensorTable], slot_flags: Tensor, measures: Measures
) -> None:
    """Gradient statistics of the seeds that are to be measured."""
    num_nets, num_tiles = pools[0].squares.shape
    known = tuple(tuple(table) for table in tables)
    measure_kernel[num_nets, len(tables)](
        pools, known, slot_flags, measures, num_tiles, num_slots=len(tables), tile=TILE_COLUMNS
    )


def _grid(pools: tuple[Pool, ...]) -> tuple[int, int, int]:
    return *pools[0].squares.shape, len(pools)


@triton.jit
def learning(pool, words, env, column):
    """bool [tile]: which columns of a row move."""
    mask = (column < pool.width) & ((tl.load(words + env * pool.num_slots) & ENDED) == 0)
    if pool.slot >= 0:
        word = tl.load(words + env * pool.num_slots + pool.slot)
        row = (word >> seed.CODE_SHIFT).to(tl.int64)
        head = pool.programs + row * ((1 + pool.parts) * seed.FIELDS)
        gate = (column >= pool.gate_at) & ((word & seed.GATED) != 0)
        known = (column < tl.load(head + seed.PARAMETERS)) | gate
        mask = mask & known & ((word & seed.RUNNING) != 0) & ((word & seed.FROZEN) == 0)
    return mask


@triton.jit
def sum_kernel(
    pools,
    words,
    num_pools: tl.constexpr,
    tile: tl.constexpr,
    accumulate: tl.constexpr,
    share: tl.constexpr,
):
    """gradient = sum of partials over the splits, and its squares by tile. Grid (n, tiles, pools).

    accumulate: the gradient that is there is added to; share: the factor of the result.
    """
    env = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    for index in tl.static_range(num_pools):
        if tl.program_id(2) == index:
            sum_tile(pools[index], words, env, part, tile, accumulate, share)


@triton.jit
def sum_tile(
    pool, words, env, part, tile: tl.constexpr, accumulate: tl.constexpr, share: tl.constexpr
):
    """One tile of one row."""
    column = part * tile + tl.arange(0, tile)
    mask = learning(pool, words, env, column)
    result = tl.zeros((tile,), tl.float32)
    if accumulate:
        result = tl.load(pool.gradient + env * pool.width + column, mask=mask, other=0.0)
    for split in range(0, pool.splits):
        partials = pool.partials + (env * pool.splits + split) * pool.width
        result += tl.load(partials + column, mask=mask, other=0.0)
    if share != 1.0:
        result *= share
    tl.store(pool.gradient + env * pool.width + column, result, mask=column < pool.width)
    wide = result.to(tl.float64)
    tl.store(pool.squares + env * tl.num_programs(1) + part, tl.sum(wide * wide, axis=0))


@triton.jit
def row_norm(pool, env, num_tiles, tile: tl.constexpr):
    """float64: norm of a row's gradient."""
    total = tl.zeros((tile,), tl.float64)
    for first in range(0, num_tiles, tile):
        number = first + tl.arange(0, tile)
        squares = pool.squares + env * num_tiles + number
        total += tl.load(squares, mask=number < num_tiles, other=0.0)
    return tl.sqrt(tl.sum(total, axis=0))


@triton.jit
def step_kernel(
    pools, words, rules, counter, eps: tl.constexpr, num_pools: tl.constexpr, tile: tl.constexpr
):
    """Clip rows to their norms, SGD with momentum; count the batch. Grid (n, tiles, pools).

    rules: float32 [n, 2, NUMBERS], how the host of an env moves and how its seeds do, see
    sgd.UpdateRule; eps: what stands beside a norm.
    """
    env = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    for index in tl.static_range(num_pools):
        if tl.program_id(2) == index:
            step_tile(pools[index], words, rules, env, part, eps, tile)
    if (env == 0) & (part == 0) & (tl.program_id(2) == 0):
        tl.store(counter, tl.load(counter) + 1)


@triton.jit
def step_tile(pool, words, rules, env, part, eps: tl.constexpr, tile: tl.constexpr):
    """One tile of one row."""
    rule = rules + (env * 2 + pool.rule) * NUMBERS
    column = part * tile + tl.arange(0, tile)
    mask = learning(pool, words, env, column)
    gradient = tl.load(pool.gradient + env * pool.width + column, mask=mask, other=0.0)
    max_norm = tl.load(rule + MAX_NORM)
    if max_norm > 0:
        norm = row_norm(pool, env, tl.num_programs(1), tile).to(tl.float32)
        factor = max_norm / (norm + eps)
        gradient *= tl.where(factor > 1.0, 1.0, factor)
    place = start_of(pool.params, env) + column
    params = tl.load(place, mask=mask, other=0.0)
    if pool.slot < 0:
        gradient += tl.load(rule + DECAY) * params
    moving = start_of(pool.momentum, env) + column
    momentum = tl.load(rule + MOMENTUM) * tl.load(moving, mask=mask, other=0.0) + gradient
    tl.store(moving, momentum, mask=mask)
    tl.store(place, params - momentum * tl.load(rule + RATE), mask=mask)


@triton.jit
def measure_kernel(
    pools, tables, words, measures, num_tiles, num_slots: tl.constexpr, tile: tl.constexpr
):
    """Statistics of the gradients that sum_kernel left, for seeds to be measured. Grid (n, S).

    pools: the hosts', then the slots'; tables: by slot (int32 [codes + 1, tensors, 2], columns at
    which tensors of a blueprint begin and their numbers, the gate's in the last row; tensors;
    codes).
    """
    env = tl.program_id(0).to(tl.int64)
    for index in tl.static_range(num_slots):
        if tl.program_id(1) == index:
            word = tl.load(words + env * num_slots + index)
            if ((word & seed.RUNNING) != 0) & ((word & seed.MEASURED) != 0):
                host = row_norm(pools[0], env, num_tiles, tile)
                known = env, host, host / measures.host_root
                measure_seed(pools[index + 1], tables[index], word, measures, known, tile)


@triton.jit
def measure_seed(pool, table, word, measures, host, tile: tl.constexpr):
    """Statistics of a seed; host: (network, its gradient's norm, that over its size's root)."""
    count = 0.0
    numbers = 0.0
    vanishing = 0.0
    exploding = 0.0
    total = tl.sum(tl.zeros((1,), tl.float64), axis=0)
    row = (word >> seed.CODE_SHIFT).to(tl.int64)
    for kind in tl.static_range(2):
        pointer = table[0] + (row if kind == 0 else table[2]) * (table[1] * 2)
        for tensor in range(0, table[1]):
            first = tl.load(pointer + 2 * tensor)
            size = tl.load(pointer + 2 * tensor + 1)
            if (size > 0) & ((kind == 0) | ((word & seed.GATED) != 0)):
                squares = tensor_squares(pool, host[0], first, size, tile)
                norm = tl.sqrt(squares)
                total += squares
                count += 1.0
                numbers += size.to(tl.float32)
                vanishing += (norm < measures.least).to(tl.float32)
                exploding += 1.0 - (norm <= measures.most).to(tl.float32)
    store_measures(measures, host, tl.sqrt(total), (count, numbers, vanishing, exploding), pool)


@triton.jit
def tensor_squares(pool, env, first, size, tile: tl.constexpr):
    """float64: sum of squares of one tensor's gradient."""
    result = tl.zeros((tile,), tl.float64)
    for begin in range(0, size, tile):
        column = begin + tl.arange(0, tile)
        place = pool.gradient + env * pool.width + first + column
        values = tl.load(place, mask=column < size, other=0.0)
        result += values.to(tl.float64) * values.to(tl.float64)
    return tl.sum(result, axis=0)


@triton.jit
def store_measures(measures, host, l2, counts, pool):
    """Write norm, health and ratio of a gradient, by the formulas of nets/gradients.py.

    counts: tensors, numbers, vanishing, exploding.
    """
    place = host[0] * pool.num_slots + pool.slot
    finite = (l2 - l2) == 0
    vanishing = (counts[2] / counts[0]).to(tl.float64)
    health = 1.0 - 0.5 * vanishing - 0.8 * (counts[3] / counts[0]).to(tl.float64)
    health = tl.minimum(tl.maximum(health, 0.0), 1.0)
    ratio = (l2 / tl.sqrt(counts[1].to(tl.float64))) / (host[2] + measures.tiny)
    is_meaningful = ((ratio - ratio) == 0) & (l2 >= measures.tiny) & (host[1] >= measures.tiny)
    tl.store(measures.l2 + place, l2)
    tl.store(measures.health + place, tl.where(finite, health, 0.0))
    tl.store(measures.ratio + place, tl.where(is_meaningful, ratio, 0.0))
    tl.store(measures.vanishing + place, (counts[2] > 0).to(tl.uint8))
    tl.store(measures.exploding + place, (counts[3] > 0).to(tl.uint8))
    tl.store(measures.measured + place, (counts[2] >= 0).to(tl.uint8))
