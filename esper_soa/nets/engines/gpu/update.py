"""The end of a training batch, for hosts and seeds together: three launches, whatever grows.

The kernels stand in kernels/update.py.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
import triton
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.kernels import update
from esper_soa.nets.engines.gpu.kernels.tiles import EXACT, constants, rows
from esper_soa.nets.engines.gpu.kernels.update import Measures, Pool
from esper_soa.nets.engines.gpu.slots import SlotTable
from esper_soa.nets.gradients import EXPLODING_NORM, SMALLEST_NORM, VANISHING_NORM
from esper_soa.nets.model.blueprints import gate_table, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.seeds.pools import row_layout, upload
from esper_soa.nets.sgd import CLIP_EPS, Rules
from esper_soa.state import STATE_FLOAT

TILE_COLUMNS = 512  # columns that a program moves
STEP_REGISTERS = 64  # of a thread; the assembler aims at fewer and spills


class TensorTable(NamedTuple):
    """Parameter tensors of a slot's seeds."""

    # Int32 [codes + 1, tensors, 2]: first column and numbers; the gate's in the last row.
    places: Tensor
    tensors: int
    codes: int


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
    result = upload(np.array(plain, dtype=np.float32), device).repeat(num_nets, 1, 1)
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
    update.sum_kernel[_grid(pools)](
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
    update.step_kernel[_grid(pools)](
        pools, slot_flags, rules, counter, **sizes, **EXACT, maxnreg=STEP_REGISTERS
    )


def measure_(
    pools: tuple[Pool, ...], tables: list[TensorTable], slot_flags: Tensor, measures: Measures
) -> None:
    """Gradient statistics of the seeds that are to be measured."""
    num_nets, num_tiles = pools[0].squares.shape
    known = tuple(tuple(table) for table in tables)
    update.measure_kernel[num_nets, len(tables)](
        pools, known, slot_flags, measures, num_tiles, num_slots=len(tables), tile=TILE_COLUMNS
    )


def _grid(pools: tuple[Pool, ...]) -> tuple[int, int, int]:
    return *pools[0].squares.shape, len(pools)
