"""Blueprints as the kernels read them: a program of parts for every slot.

chain.h turns a program into layers, so a new blueprint of known parts needs no C.
"""

import ctypes

import numpy as np

from esper_soa.nets.model.blueprints import Architecture, Blueprints
from esper_soa.nets.model.parts import Conv, Depthwise, Excite, KernelPart, SoftNorm, norm_groups

END, SEED, RELU, DEPTH, NORMED, SQUEEZED = 0, *range(2, 7)  # kinds of layers, as in chain.h
LINEAR, BIASED, KEPT, REPLACING = (1 << bit for bit in range(4))  # of a part, as in chain.h
DEPTH_SIDE = 3  # of the depthwise kernel that parts.c has
FIELDS = ("kind", "outputs", "kernel", "groups", "hidden", "flags")


class NativePart(ctypes.Structure):
    """seed_part of chain.h."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


Row = tuple[int, int, int, int, int, int]  # FIELDS


def runs(blueprint: Architecture) -> bool:
    """Whether the kernels have all parts of a blueprint."""
    sides = [part.kernel for part in blueprint.parts if isinstance(part, Depthwise)]
    return (
        bool(blueprint.parts)
        and all(isinstance(part, KernelPart) for part in blueprint.parts)
        and all(side == DEPTH_SIDE for side in sides)
    )


def programs(blueprints: Blueprints, channels: list[int]) -> np.ndarray:
    """int64 [S, P, parts, FIELDS] for slots of `channels`; every program ends with a row of END.

    That of a blueprint which does not run is nothing else.
    """
    longest = 1 + max(len(blueprint.parts) for blueprint in blueprints)
    table = np.zeros((len(channels), len(blueprints), longest, len(FIELDS)), dtype=np.int64)
    for slot, width in enumerate(channels):
        for place, blueprint in enumerate(blueprints):
            if runs(blueprint):
                table[slot, place, : len(blueprint.parts)] = _rows(blueprint, width)
    return table


def _rows(blueprint: Architecture, channels: int) -> list[Row]:
    is_single = len(blueprint.parts) == 1 and isinstance(blueprint.parts[0], SoftNorm | Excite)
    # such a part can give what it adds to x by itself
    differing = is_single and not blueprint.residual
    keep_flag = 0 if differing else KEPT
    flags = 0 if blueprint.residual or differing else REPLACING
    return [
        _row(part, inputs, channels, keep_flag=keep_flag, flags=flags)
        for part, inputs in blueprint.part_inputs(channels)
        if isinstance(part, KernelPart)
    ]


def _row(part: KernelPart, inputs: int, channels: int, keep_flag: int, flags: int) -> Row:
    outputs = part.outputs_of(inputs, channels)
    match part:
        case Conv():
            flags |= 0 if part.relu else LINEAR
            return SEED if part.norm else RELU, outputs, part.kernel, norm_groups(outputs), 0, flags
        case Depthwise():
            return DEPTH, outputs, part.kernel, 1, 0, flags
        case SoftNorm():
            return NORMED, outputs, 1, norm_groups(outputs), 0, flags | LINEAR | keep_flag
        case Excite(squeeze):
            flags |= keep_flag | (BIASED if squeeze.hidden_bias else 0)
            return SQUEEZED, outputs, 1, 1, squeeze.hidden.of(channels), flags
