"""Blueprints as the GPU's kernels read them: a table of numbers per slot, made of their parts.

Row 0 of a blueprint is its head, the rows behind it are its parts. slots.py puts the tables on the
device once; the kernels look up the blueprint of every network by its code, so a new blueprint of
known parts needs no kernel.
Imports no Triton: who chooses an engine asks here what the kernels can run.
"""

import numpy as np

from esper_soa.nets.model.blueprints import Architecture, Blueprints, num_codes, seed_table
from esper_soa.nets.model.parts import (
    Conv,
    Depthwise,
    Excite,
    KernelPart,
    SoftNorm,
    Table,
    norm_groups,
)

KINDS = range(5)  # of parts
END, CONV, DEPTH, SOFT_NORM, EXCITE = KINDS
# flags of a part: has a group norm, a ReLU, a hidden bias
FLAGS = [1 << bit for bit in range(3)]
NORMED, RELU, BIASED = FLAGS
FIELDS = ["kind", "inputs", "outputs", "kernel", "groups", "hidden", "flags", "offset"]
FIELDS += ["map", "source", "source_relu"]
# fields of row 0: parts; 1 where the seed is parts(x), not x + parts(x); numbers
HEAD = ["count", "replacing", "parameters"]


def runs(blueprint: Architecture) -> bool:
    """Whether the kernels have all parts of a blueprint."""
    known = all(isinstance(part, KernelPart) for part in blueprint.parts)
    return bool(blueprint.parts) and known


def programs(blueprints: Blueprints, channels: int) -> np.ndarray:
    """int32 [codes, 1 + parts, FIELDS] for slots of C = `channels`; 0: codes that do not run."""
    running = list(filter(runs, blueprints))
    longest = max((len(blueprint.parts) for blueprint in running), default=0)
    table = np.zeros((num_codes(blueprints), 1 + longest, len(FIELDS)), dtype=np.int32)
    for blueprint in running:
        rows = _rows(blueprint, channels)
        numbers = seed_table(blueprint, channels).total
        table[blueprint.code, 0, : len(HEAD)] = len(rows), not blueprint.residual, numbers
        table[blueprint.code, 1 : 1 + len(rows)] = rows
    return table


def largest(programs: np.ndarray, *fields: str) -> int:
    """Largest number, at least 1, that any part has in these of FIELDS."""
    return int(programs[:, 1:, [FIELDS.index(field) for field in fields]].max(initial=1))


def widest(programs: np.ndarray) -> int:
    """Most channels, or hidden units, that any part has."""
    return largest(programs, "inputs", "outputs", "hidden")


def _rows(blueprint: Architecture, channels: int) -> list[tuple[int, ...]]:
    """The parts; each reads the map of the one before it, the first map 0, which is x.

    A part that scales its input needs no map where that is x.
    """
    rows = list[tuple[int, ...]]()
    offset = source = relu = maps = 0
    for part, inputs in blueprint.part_inputs(channels):
        if not isinstance(part, KernelPart):
            raise LookupError(f"blueprint {blueprint.name}: no program for its parts")
        target = 0 if isinstance(part, SoftNorm | Excite) and not rows else maps + 1
        maps = max(maps, target)
        outputs = part.outputs_of(inputs, channels)
        kind, *sizes, flags = _facts(part, outputs, channels)
        rows.append((kind, inputs, outputs, *sizes, flags, offset, target, source, relu))
        offset += Table(part.parameters(inputs, channels)).total
        source = target
        relu = int(flags & RELU > 0)
    return rows


def _facts(part: KernelPart, outputs: int, channels: int) -> tuple[int, int, int, int, int]:
    match part:
        case Conv():
            flags = (NORMED if part.norm else 0) | (RELU if part.relu else 0)
            return CONV, part.kernel, norm_groups(outputs), 0, flags
        case Depthwise():
            return DEPTH, part.kernel, 1, 0, 0
        case SoftNorm():
            return SOFT_NORM, 1, norm_groups(outputs), 0, 0
        case Excite(squeeze):
            return EXCITE, 1, 1, squeeze.hidden.of(channels), BIASED if squeeze.hidden_bias else 0
