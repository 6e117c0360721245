"""Whole networks in one native call: a training step, or a validation, of hosts with their seeds.

A call takes all layers of one network after the other, so that what stands between layers stays in
the caches. The records are those of chain.h, images.h, sgd.h, train.h and validate.h (proof.py).
"""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from esper_soa.nets.data.images import ImageBank
from esper_soa.nets.engines.cpu.library import kernels
from esper_soa.nets.engines.cpu.operations import MODULE, OPERATION
from esper_soa.nets.sgd import SECOND_DECAY, UpdateRule


class Numbers(NamedTuple):
    """Numbers of one format, one after the other, to which a pointer of a record leads."""

    dtypes: frozenset[object]  # of torch and numpy
    # names of its sizes: fields of the record, whole numbers, or what `point` is told
    shape: tuple[str, ...]


class PointingRecord(ctypes.Structure):
    """A record of C whose pointers lead to numbers that are checked."""

    POINTERS: Mapping[str, Numbers]


Record = TypeVar("Record", bound=PointingRecord)
Held = dict[str, np.ndarray | Tensor]  # what a record points to, by field
POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
NUMBER = ctypes.c_double
BYTES = frozenset({torch.uint8, torch.bool})
WHOLE = frozenset({torch.int64, np.dtype(np.int64)})
SINGLE = frozenset({torch.float32})
DOUBLE = frozenset({torch.float64, np.dtype(np.float64)})
# flags of a seed, as in blend.h
THROUGH, DETACHED, FROZEN, MEASURED, MULTIPLIED, GATED = (1 << bit for bit in range(6))


def all_of(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


def lead_to(dtypes: frozenset[object], shapes: Mapping[str, str]) -> dict[str, Numbers]:
    """Numbers by the fields of a record that point to them; shapes: the fields of each shape."""
    return {
        name: Numbers(dtypes, tuple(shape.split()))
        for shape, names in shapes.items()
        for name in names.split()
    }


class CropsRecord(PointingRecord):
    """crops of images.h."""

    _fields_ = [
        *all_of(INTEGER, "size colours line colour env_stride"),
        *all_of(POINTER, "bytes first values"),
    ]
    POINTERS = {
        **lead_to(BYTES, {"bytes_of_bank": "bytes"}),
        **lead_to(WHOLE, {"crops": "first"}),
        **lead_to(SINGLE, {"banks colours 256": "values"}),
    }


class NativeNetworks(PointingRecord):
    """networks of chain.h."""

    _fields_ = [
        *all_of(INTEGER, "operations slots classes size colours"),
        *all_of(POINTER, "program gate_at gate_hidden"),
        *all_of(INTEGER, "blueprints parts"),
        *all_of(POINTER, "programs modules"),
        ("longest", INTEGER),
        *all_of(INTEGER, "width statistics_width"),
        *all_of(POINTER, "seed_width params momentum statistics seed_params seed_momentum"),
        *all_of(POINTER, "seed_kind seed_flags alpha"),
        ("eps", NUMBER),
    ]
    POINTERS = {
        **lead_to(frozenset({OPERATION}), {"lines": "program"}),
        **lead_to(frozenset({MODULE}), {"slots blueprints": "modules"}),
        **lead_to(
            WHOLE,
            {
                "slots": "gate_at gate_hidden seed_width seed_params seed_momentum",
                "slots blueprints parts 6": "programs",
                "rows slots": "seed_kind seed_flags",
            },
        ),
        **lead_to(
            SINGLE,
            {
                "rows width": "params",
                "rows state": "momentum",
                "rows statistics_width": "statistics",
                "rows slots": "alpha",
            },
        ),
    }


class Sgd(ctypes.Structure):
    """sgd of sgd.h."""

    _fields_ = all_of(NUMBER, "max_norm eps rate momentum decay second_decay")


class Training(PointingRecord):
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
    POINTERS = {
        **lead_to(WHOLE, {"count": "envs correct", "count accumulate batch": "labels"}),
        **lead_to(SINGLE, {"count": "loss"}),
        **lead_to(DOUBLE, {"rows 6": "host seed", "rows slots": "l2 health ratio"}),
        **lead_to(BYTES, {"rows slots": "vanishing exploding measured"}),
    }


class Validation(PointingRecord):
    """validation of validate.h."""

    _fields_ = [
        ("nets", NativeNetworks),
        *all_of(INTEGER, "count images"),
        ("envs", POINTER),
        ("shared", INTEGER),
        ("images_of", CropsRecord),
        ("labels", POINTER),
        *all_of(INTEGER, "codes ablated"),
        *all_of(POINTER, "code loss correct counted answers"),
    ]
    POINTERS = {
        **lead_to(WHOLE, {"count": "envs counted", "orders images": "labels", "codes": "code"}),
        **lead_to(WHOLE, {"count codes": "correct"}),
        **lead_to(BYTES, {"count images": "answers"}),
        **lead_to(DOUBLE, {"count": "loss"}),
    }


def address(name: str, values: np.ndarray | Tensor, dtypes: frozenset[object], count: int) -> int:
    """Where the `count` numbers of `values` begin; TypeError unless native code may take them as
    such: of one of `dtypes`, on the CPU, one after the other.
    """
    if isinstance(values, Tensor):
        fits = values.is_cpu and values.is_contiguous() and values.numel() == count
        place = values.data_ptr()
    else:
        fits = values.flags.c_contiguous and values.size == count
        place = values.ctypes.data
    if not fits or values.dtype not in dtypes:
        given = f"{values.dtype} {list(values.shape)}"
        formats = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} is {given}, not {count} of {formats} in a row on the CPU")
    return place


def point(record: Record, fields: Held, **sizes: int) -> Record:
    """The record, with pointers to what it holds from here on, by field.

    sizes: by the names in its POINTERS. TypeError where the fields hold anything else.
    """
    for name, values in fields.items():
        dtypes, shape = record.POINTERS[name]
        count = 1
        for part in shape:
            count *= sizes[part] if part in sizes else _size(record, part)
        setattr(record, name, address(name, values, dtypes, count=count))
    record.held = fields  # type: ignore[attr-defined]
    return record


def _size(record: PointingRecord, part: str) -> int:
    return int(part) if part.isdigit() else int(getattr(record, part))


def crops_record(bank: ImageBank, first: Tensor, crops: int) -> CropsRecord:
    """Record of images that begin at so many bytes `first` of a bank, whose tensors must outlive
    it.
    """
    lines = bank.lines
    env_stride = bank.values.stride(0) if bank.values.dim() == 3 else 0
    colours = lines.shape[2]
    record = CropsRecord(colours=colours, line=lines.stride(1), colour=lines.stride(2))
    record.env_stride = env_stride
    held: Held = {"bytes": lines, "first": first, "values": bank.values}
    banks = bank.values.numel() // (colours * 256)
    return point(record, held, bytes_of_bank=lines.numel(), crops=crops, banks=banks)


def sgd_of(rule: UpdateRule, num_nets: int) -> np.ndarray:
    """Records of so many networks, float64 [N, 6]."""
    *values, optimizer = rule
    records = np.empty((num_nets, len(values) + 1))
    for column, value in enumerate(values):
        records[:, column] = value[:, 0].numpy() if isinstance(value, Tensor) else value
    records[:, -1] = SECOND_DECAY if optimizer == "adamw" else 0.0
    return records


def call(kernel: str, record: ctypes.Structure) -> None:
    """Run a kernel on its record, other threads meanwhile; a profiler sees native::`kernel`."""
    with record_function(f"native::{kernel}"):
        if kernels().functions[kernel](ctypes.byref(record)):
            raise MemoryError(f"no memory for the scratch of {kernel}")
