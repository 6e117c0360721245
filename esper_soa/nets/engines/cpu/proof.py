"""Verification of the native kernels before a run uses them.

Its records are to be as ctypes lays them out, its numbers those of torch: tiny hosts with each kind
of seed are trained and validated by both, in some milliseconds, once per process. Tests prove other
networks.
"""

import ctypes
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.nets.data.batches import Draw
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.engine import Engine, EngineChoice, NetsConfig
from esper_soa.nets.engines.cpu import program, records
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.cpu.library import kernels
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.seeds import pools
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint, Stage

RECORDS: dict[str, type[ctypes.Structure]] = {
    "crops": records.CropsRecord,
    "sgd": records.Sgd,
    "networks": records.NativeNetworks,
    "seed_part": program.NativePart,
    "training": records.Training,
    "validation": records.Validation,
}
NAME = "native"  # in compute.engine
CPU = torch.device("cpu")
# of the largest number; kernels and torch differ by about 1e-6, a wrong kernel by about 1
ROUNDING = 1e-3
PROOF_SIZES = (4, 8)  # channels of the first block, for the kernels of either width in kernels.h
BATCH = 3
KINDS = np.array(CNN_BLUEPRINTS)[:, None]  # a network with each
# All others are added to the host and see its graph.
BLENDS = {Blueprint.DEPTHWISE: Blend.MULTIPLY, Blueprint.BOTTLENECK: Blend.GATE}
DETACHED_SEED = Blueprint.CONV_SMALL  # learns behind the host, cut off from it


class _Field(ctypes.Structure):
    """field of records.c."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("record", "name")),
        *((name, ctypes.c_int64) for name in ("at", "size")),
    ]


def choose_native(
    device: torch.device, exact: Engine, dtype: torch.dtype = torch.float32, obstacle: str = ""
) -> EngineChoice:
    """Whether the kernels compute for networks in `dtype` on `device`, else torch, and why.

    exact: the engine that they are proven against. obstacle: why the networks of this run cannot be
    left to them, where that is so. Kernels that are proven are taken without a timing: what a run
    computes must not depend on how busy the machine was.
    """
    if device.type != "cpu" or dtype != torch.float32:
        on = f"{dtype} on {device.type}"
        return EngineChoice(
            False, f"plain torch (native kernels are for float32 on a CPU, not {on})"
        )
    try:
        if obstacle:
            raise NativeError(obstacle)
        prove(exact)  # type: ignore[arg-type]
    except NativeError as error:
        return EngineChoice(
            False, f"plain torch, slower: no native kernels, {error}", fallback=True
        )
    return EngineChoice(True, f"native, {kernels().words}", sha256=kernels().sha256, name=NAME)


@cache
def prove(exact: Engine) -> None:
    """Raise NativeError unless the library's records are ours and its networks those of `exact`."""
    compare_records(RECORDS)
    for name, error in (pair for size in PROOF_SIZES for pair in differences(size, exact)):
        if not error <= ROUNDING:
            raise NativeError(
                f"{kernels().functions._name} computes {name} of a small network otherwise than "
                f"torch, by {error:.1e} (delete it to have it built again, by another compiler "
                "where this one fails)"
            )


def compare_records(records: dict[str, type[ctypes.Structure]]) -> None:
    """Raise NativeError unless all records of the library have the fields of `records` in place."""
    functions = kernels().functions
    compiled_fields = functions.record_fields
    compiled_fields.argtypes = [ctypes.POINTER(ctypes.POINTER(_Field))]
    compiled_fields.restype = ctypes.c_int64
    fields = ctypes.POINTER(_Field)()
    count = compiled_fields(ctypes.byref(fields))
    expected = {
        (one.record.decode(), one.name.decode()): (one.at, one.size) for one in fields[:count]
    }
    for record, kind in records.items():
        places = {(record, ""): (0, ctypes.sizeof(kind))}
        for name, *_ in kind._fields_:
            field = getattr(kind, name)
            places[record, name] = field.offset, field.size
        for place, bytes_ in places.items():
            if expected.pop(place, None) != bytes_:
                where = ".".join(place)
                raise NativeError(
                    f"{functions._name} has another record {where}: {bytes_} bytes expected"
                )
    for place in expected:
        raise NativeError(f"{functions._name} has the unknown record {'.'.join(place)}")


def differences(channels: int, exact: Engine, seed: int = 1) -> Iterator[tuple[str, float]]:
    """Largest relative difference of the engines' results, by name."""
    actual = results(CpuEngine(EngineChoice(True, "")), channels, torch.float32, seed)
    for name, expected in results(exact, channels, torch.float64, seed).items():
        scale = float(expected.abs().max().clamp(min=1e-6))
        yield name, float((actual[name] - expected).abs().max()) / scale


def results(engine: Engine, channels: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Weights after a step, what it gave, and validation on own images and on shared ones."""
    count = len(KINDS)
    task = TaskConfig(base_channels=channels, num_blocks=2, num_pools=2, max_grad_norm=0.05)
    task.weight_decay = 0.01
    shape = host_shape(task, sort_slots(task, ["r0c1"]))
    nets = NetsConfig(shape, task, (Stage.TRAINING,), count, BATCH)
    g = torch.Generator().manual_seed(seed)
    weights = pools.allocate(shape, count, CPU, torch.float32)
    for rows in weights.flatten_keys(".").values():
        rows.copy_(0.5 * torch.randn(rows.shape, generator=g))
    weights["host", "statistics"].abs_().add_(0.5)
    weights = weights.to(dtype)
    stage = np.where(KINDS == DETACHED_SEED, Stage.TRAINING, Stage.BLENDING)
    blend = np.array([[BLENDS.get(kind, Blend.ADD)] for kind in CNN_BLUEPRINTS])
    mask = np.ones_like(KINDS, dtype=bool)
    visible = stage != Stage.TRAINING
    seeds = pools.ActiveSeeds(mask, stage, KINDS, blend, ~mask, visible, visible, ~mask, ~mask)
    images = synthetic(16, 16, CPU)
    order = torch.randint(16, (count, BATCH), generator=g)
    feed = images.training(Draw(order, torch.arange(count), 0, BATCH, True), dtype)
    alpha = torch.full(KINDS.shape, 0.6, dtype=torch.float64)
    trained = engine.train_(nets, weights, alpha, seeds, feed, 1)
    outputs = dict(weights.flatten_keys(".").items()) | {
        "loss": trained.loss,
        "accuracy": trained.accuracy,
        "gradients": trained.gradients.l2,
    }
    for name, order_used in (("own ", order), ("shared ", order[0])):
        validation = engine.validate(
            nets, weights, alpha, seeds, images.validation(order_used, dtype)
        )
        outputs |= {
            f"{name}validation loss": validation.loss,
            f"{name}validation": validation.accuracy,
        }
    return outputs
