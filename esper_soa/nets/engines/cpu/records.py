"""Whole networks in one native call: a training step, or a validation, of many hosts with their
seeds.

A call takes all layers of one network after the other, so that what stands between layers stays in
the caches. The records are those of chain.h, sgd.h, train.h and validate.h, with which proof.py
compares them.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from esper_soa.nets.engines.cpu.calls import call
from esper_soa.nets.engines.cpu.images import Crops
from esper_soa.nets.sgd import Rule

POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
# what a seed is, as in blend.h
THROUGH, DETACHED, FROZEN, MEASURED, MULTIPLIED, GATED = (1 << bit for bit in range(6))


class Networks(ctypes.Structure):
    """networks of chain.h; `held` is what it points to."""

    held: tuple[object, ...]

    _fields_ = [
        *((name, INTEGER) for name in ("blocks", "slots", "classes", "size")),
        *(
            (name, POINTER)
            for name in (
                "channels",
                "kernels",
                "pooled",
                "before",
                "after",
                "gate_at",
                "gate_hidden",
            )
        ),
        *((name, INTEGER) for name in ("blueprints", "parts")),
        ("programs", POINTER),
        *((name, INTEGER) for name in ("width", "statistics_width")),
        ("seed_width", POINTER),
        *(
            (name, POINTER)
            for name in ("params", "momentum", "statistics", "seed_params", "seed_momentum")
        ),
        *((name, POINTER) for name in ("seed_kind", "seed_flags", "alpha")),
        *((name, ctypes.c_double) for name in ("norm_momentum", "eps")),
    ]


class Sgd(ctypes.Structure):
    """sgd of sgd.h."""

    _fields_ = [
        (name, ctypes.c_double) for name in ("max_norm", "eps", "rate", "momentum", "decay")
    ]


class Training(ctypes.Structure):
    """training of train.h."""

    _fields_ = [
        ("nets", Networks),
        *((name, INTEGER) for name in ("count", "batch", "accumulate")),
        ("envs", POINTER),
        ("images", Crops),
        ("labels", POINTER),
        *((name, Sgd) for name in ("host", "seed")),
        *((name, POINTER) for name in ("loss", "correct")),
        *(
            (name, POINTER)
            for name in ("l2", "health", "ratio", "vanishing", "exploding", "measured")
        ),
        *((name, ctypes.c_double) for name in ("vanishing_norm", "exploding_norm", "tiny")),
    ]


class Validation(ctypes.Structure):
    """validation of validate.h."""

    _fields_ = [
        ("nets", Networks),
        *((name, INTEGER) for name in ("count", "images")),
        ("envs", POINTER),
        ("shared", INTEGER),
        ("images_of", Crops),
        ("labels", POINTER),
        *((name, INTEGER) for name in ("codes", "ablated")),
        *((name, POINTER) for name in ("code", "loss", "correct", "counted")),
    ]


class Seeds(NamedTuple):
    """The seeds of N networks with S slots, int64 [N, S]."""

    kind: np.ndarray  # 1 + place of the blueprint among the programs; 0 = no seed runs
    flags: np.ndarray  # THROUGH and so on


class Layout(NamedTuple):
    """Where things stand in N networks with S slots."""

    classes: int
    size: int  # of images, in pixels along a side
    # int64 [5, blocks]: channels, pixels along a side of the kernel, pooled, slots before the pool
    # and behind it, or -1
    blocks: np.ndarray
    # Int64 [2, S]: where a gate begins in a seed's row, and the units of its hidden layer.
    gates: np.ndarray
    programs: np.ndarray  # int64 [S, P, parts, 6], of all blueprints in all slots; see program.py


class Pools(NamedTuple):
    """Rows of parameters of N networks; the kernels change them in place."""

    params: Tensor  # [N, P]
    momentum: Tensor
    statistics: Tensor
    seed_params: Sequence[Tensor]  # by slot: [N, width]
    seed_momentum: Sequence[Tensor]


def networks(
    layout: Layout, pools: Pools, seeds: Seeds, alpha: Tensor, norm: tuple[float, float]
) -> Networks:
    """N networks as the kernels see them; alpha: float32 [N, S]; norm: momentum and eps."""
    places = [np.array([pool.data_ptr() for pool in group], dtype=np.int64) for group in pools[3:]]
    widths = np.array([pool.shape[1] for pool in pools.seed_params], dtype=np.int64)
    record = Networks(
        blocks=layout.blocks.shape[1],
        slots=layout.gates.shape[1],
        classes=layout.classes,
        size=layout.size,
        width=pools.params.shape[1],
        statistics_width=pools.statistics.shape[1],
        norm_momentum=norm[0],
        eps=norm[1],
        blueprints=layout.programs.shape[1],
        parts=layout.programs.shape[2],
    )
    record.held = (layout, pools, seeds, alpha, places, widths)
    for name, row in zip(
        ("channels", "kernels", "pooled", "before", "after"), layout.blocks, strict=True
    ):
        setattr(record, name, row.ctypes.data)
    record.gate_at, record.gate_hidden = (row.ctypes.data for row in layout.gates)
    record.programs = layout.programs.ctypes.data
    record.seed_width = widths.ctypes.data
    record.params = pools.params.data_ptr()
    record.momentum = pools.momentum.data_ptr()
    record.statistics = pools.statistics.data_ptr()
    record.alpha = alpha.data_ptr()
    record.seed_params, record.seed_momentum = (place.ctypes.data for place in places)
    record.seed_kind = seeds.kind.ctypes.data
    record.seed_flags = seeds.flags.ctypes.data
    return record


def sgd_of(rule: Rule) -> Sgd:
    """The record of a rule whose rate is a number."""
    return Sgd(rule.max_norm, rule.eps, rule.lr, rule.momentum, rule.weight_decay)


def train_(record: Training) -> None:
    """One training step of the networks of the record, in place."""
    call("train_networks", record)


def validate(record: Validation) -> None:
    """Validation of the networks of the record."""
    call("validate_networks", record)
