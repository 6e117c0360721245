"""Whole networks in one native call: a training step, or a validation, of hosts with their seeds.

A call takes all layers of one network after the other, so that what stands between layers stays in
the caches. The records are those of chain.h, images.h, sgd.h, train.h and validate.h (proof.py).
"""

import ctypes
from typing import TypeVar

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from esper_soa.nets.data.images import ImageBank
from esper_soa.nets.engines.cpu.library import kernels
from esper_soa.nets.sgd import UpdateRule

Record = TypeVar("Record", bound=ctypes.Structure)
Held = dict[str, np.ndarray | Tensor]  # what a record points to, by field
POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
NUMBER = ctypes.c_double
# flags of a seed, as in blend.h
THROUGH, DETACHED, FROZEN, MEASURED, MULTIPLIED, GATED = (1 << bit for bit in range(6))


def all_of(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class CropsRecord(ctypes.Structure):
    """crops of images.h."""

    _fields_ = [
        *all_of(INTEGER, "size line colour env_stride"),
        *all_of(POINTER, "bytes first values"),
    ]


class NativeNetworks(ctypes.Structure):
    """networks of chain.h."""

    _fields_ = [
        *all_of(INTEGER, "blocks slots classes size"),
        *all_of(POINTER, "channels kernels pooled before after gate_at gate_hidden"),
        *all_of(INTEGER, "blueprints parts"),
        *all_of(POINTER, "programs"),
        *all_of(INTEGER, "width statistics_width"),
        *all_of(POINTER, "seed_width params momentum statistics seed_params seed_momentum"),
        *all_of(POINTER, "seed_kind seed_flags alpha"),
        *all_of(NUMBER, "norm_momentum eps"),
    ]


class Sgd(ctypes.Structure):
    """sgd of sgd.h."""

    _fields_ = all_of(NUMBER, "max_norm eps rate momentum decay")


class Training(ctypes.Structure):
    """training of train.h."""

    _fields_ = [
        ("nets", NativeNetworks),
        *all_of(INTEGER, "count batch accumulate"),
        ("envs", POINTER),
        ("images", CropsRecord),
        ("labels", POINTER),
        *all_of(POINTER, "host seed loss correct l2 health ratio vanishing exploding measured"),
        *all_of(NUMBER, "vanishing_norm exploding_norm tiny"),
    ]


class Validation(ctypes.Structure):
    """validation of validate.h."""

    _fields_ = [
        ("nets", NativeNetworks),
        *all_of(INTEGER, "count images"),
        ("envs", POINTER),
        ("shared", INTEGER),
        ("images_of", CropsRecord),
        ("labels", POINTER),
        *all_of(INTEGER, "codes ablated"),
        *all_of(POINTER, "code loss correct counted"),
    ]


def point(record: Record, fields: Held) -> Record:
    """The record, with pointers to what it holds from here on, by field."""
    for name, values in fields.items():
        place = values.data_ptr() if isinstance(values, Tensor) else values.ctypes.data
        setattr(record, name, place)
    record.held = fields  # type: ignore[attr-defined]
    return record


def crops_record(bank: ImageBank, first: Tensor) -> CropsRecord:
    """Record of images that begin at bytes `first` of a bank; its tensors must outlive it."""
    lines = bank.lines
    env_stride = bank.values.stride(0) if bank.values.dim() == 3 else 0
    record = CropsRecord(line=lines.stride(1), colour=lines.stride(2), env_stride=env_stride)
    return point(record, {"bytes": lines, "first": first, "values": bank.values})


def sgd_of(rule: UpdateRule, num_nets: int) -> np.ndarray:
    """Records of so many networks, float64 [N, 5]."""
    records = np.empty((num_nets, len(Sgd._fields_)))
    for column, value in enumerate(rule[: len(Sgd._fields_)]):
        records[:, column] = value[:, 0].numpy() if isinstance(value, Tensor) else value
    return records


def call(kernel: str, record: ctypes.Structure) -> None:
    """Run a kernel on its record, other threads meanwhile; a profiler sees native::`kernel`."""
    with record_function(f"native::{kernel}"):
        if kernels().functions[kernel](ctypes.byref(record)):
            raise MemoryError(f"no memory for the scratch of {kernel}")
